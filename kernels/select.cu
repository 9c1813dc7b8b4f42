// Select on the GPU: one launch, one cluster of CTAs a row. Each CTA finds the norms of its slice's heads and which
// of its pages can matter. What the CTAs must know of each other they write into each other's shared memory: the
// heads' sums; how many pages fall into each of 256 bins, first by the share of their best head, then by score; and
// the few pages of the bin in which the K-th lies. Of these every CTA finds the weakest page that is chosen, and
// writes its own pages that are no weaker. A CTA waits four times as a rule, for as many bytes as it knows will come;
// nothing goes through global memory.
//
// Repeatability: atomics count integers or set bits, and no result depends on their order.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "kernels/select_rank.cuh"

namespace kvd {
namespace {

using namespace select;  // NOLINT(build/namespaces): this file's other parts

// Puts shared memory in order; nothing here waits for num_pages.
__device__ void Initialise(const SelectArgs& args, const Plan& plan, unsigned char* memory, Shared* shared) {
  const int i = static_cast<int>(threadIdx.x);
  if (i == 0) {
#pragma unroll 1
    for (int g = 0; g < args.group; ++g) ptx::BarrierInit(&shared->landed[g], 1);
    ptx::BarrierInit(&shared->states_here, 1);
    ptx::BarrierInit(&shared->counts_here[0], 1);
    ptx::BarrierInit(&shared->counts_here[1], 1);
    ptx::BarrierInit(&shared->contenders_here, 1);
    ptx::BarrierInitFence();
    for (uint64_t& here : shared->counts_here)
      ExpectFromAll(plan.cluster == 1, &here, static_cast<uint32_t>(plan.cluster) * kBins * 4);
    shared->num_listed = 0;
    shared->num_mine = 0;
  }
  if (i < kBins) shared->counts[i] = 0;
  if (i < kMaxGroup) shared->peak[i] = 0;
  auto* chosen = reinterpret_cast<uint32_t*>(memory + plan.at.chosen);
#pragma unroll 1
  for (int w = i; w < plan.slice_pages / 32; w += kThreads) chosen[w] = 0;
  __syncthreads();
}

// The sums of the slice's heads, handed to all CTAs; and which of its pages may be chosen.
__device__ void ReadSlice(const SelectArgs& args, const Plan& plan, const Row& row, Shared* shared) {
  StartCopies(args, row, shared);
  if (threadIdx.x == 0)
    ExpectFromAll(plan.cluster == 1, &shared->states_here, static_cast<uint32_t>(row.num_pieces * args.group) * 8);
  AllowSelectable(args, row);
  if (args.max_candidates > 0) MarkCandidates(args, row);
  ptx::ClusterWait();  // all CTAs run: their memory may be written
  const int num_faults = SpreadStates(args, plan, row, shared);
  if (__any_sync(kAllLanes, num_faults != 0) && args.num_faults != nullptr) {
    const int sum = __reduce_add_sync(kAllLanes, num_faults);
    if (threadIdx.x % 32 == 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(args.num_faults), static_cast<unsigned long long>(sum));
  }
  if (args.rule == CombineRule::kPeak) {
    __syncthreads();
    SlicePeaks(args, plan, row, shared);
    cg::this_cluster().sync();
  }
  WaitForAll(plan.cluster == 1, &shared->states_here, 0);
}

__global__ void __launch_bounds__(kThreads, 2)
    SelectKernel(const __grid_constant__ SelectArgs args, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto* shared = reinterpret_cast<Shared*>(memory);
  const int num_pages = args.num_pages[blockIdx.z];
  Initialise(args, plan, memory, shared);
  ptx::ClusterArrive();
  const Row row = MakeRow(args, plan, num_pages, memory);
  ReadSlice(args, plan, row, shared);
  MergeStates(args, row, shared);
  if (args.max_candidates > 0) {
    __syncthreads();
    RestrictToCandidates(row);
  }
  __syncthreads();
  if (args.rule == CombineRule::kPeak) {
    TakePeaks(args, plan, shared);
    __syncthreads();
  }
  BinTops(args, row, shared);
  __syncthreads();
  const int last_bin =
      LastBinThatMatters(args, ExchangeCounts(plan, row, static_cast<uint32_t>(args.num_select), 0, shared));
  ListPages(plan, row, last_bin, shared);
  __syncthreads();
  const Cut cut = FindCut(args, plan, row, last_bin, shared);
  if (cut.count != 0) {
    SpreadContenders(args, plan, row, cut, last_bin, shared);
    WritePages(args, row, RankContenders(row, cut, shared), shared);
  }
  FinishRow(args, plan, row, cut, *shared);
}

// --- host ------------------------------------------------------------------------------------------

constexpr int kSharedBytes = 227 * 1024;  // what a CTA may have
constexpr int kMaxDevices = 64;

// The longest slice of a row of at most `num_pages` pages.
int LongestSlice(int num_pages, int cluster) {
  int longest = 0;
  for (int shift = kPieceShift; shift <= PieceShiftOf(num_pages); ++shift) {
    const int most = std::min(num_pages, kMaxPieces << shift), piece = 1 << shift;
    const int pieces = (most + piece - 1) / piece;
    longest = std::max(longest, (pieces + cluster - 1) / cluster * piece);
  }
  return longest;
}

Offsets MakeOffsets(int group, const Plan& plan) {
  Offsets at;
  at.states = static_cast<int>((sizeof(Shared) + 127) / 128 * 128);
  at.received = at.states + group * kMaxPieces * 8;
  at.allowed = at.received + 2 * plan.cluster * kBins * 4;
  at.chosen = at.allowed + plan.slice_pages / 8;
  at.bins = at.chosen + plan.slice_pages / 8;
  at.keys = at.bins + plan.slice_pages;
  at.list = at.keys + plan.list_size * 4;
  at.values = (at.list + plan.list_size * 2 + 127) / 128 * 128;
  at.end = at.values + group * plan.resident_pages * 4;
  return at;
}

// Lays out slices for a number of CTAs a row: first a list that is long enough for K of a few thousand or ties of
// many pages, then resident pages, then the rest of the list.
Plan MakePlan(const SelectArgs& args, int cluster) {
  constexpr int kList = 4096;
  Plan plan = {cluster, LongestSlice(static_cast<int>(args.lse_stride), cluster), 0, 0, {}};
  plan.list_size = std::min(kList, plan.slice_pages);
  int room = kSharedBytes - MakeOffsets(args.group, plan).end;
  const int piece = 1 << PieceShiftOf(static_cast<int>(args.lse_stride));
  plan.resident_pages = std::min(room / (4 * args.group) / piece * piece, plan.slice_pages);
  room = kSharedBytes - MakeOffsets(args.group, plan).end;
  plan.list_size = std::min(plan.slice_pages, plan.list_size + room / 6 / 64 * 64);
  plan.at = MakeOffsets(args.group, plan);
  return plan;
}

// Not by LaunchOverlapped: clusters that are placed while score still runs crowd on the SMs that it leaves first.
struct Launch {
  Launch(const SelectArgs& args, const Plan& plan, cudaStream_t stream) {
    const auto clusters = static_cast<unsigned>(plan.cluster);
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {clusters, 1, 1};
    config.gridDim = {clusters, static_cast<unsigned>(args.num_kv_heads), static_cast<unsigned>(args.num_sequences)};
    config.blockDim = kThreads;
    config.dynamicSmemBytes = static_cast<size_t>(plan.at.end);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  cudaLaunchAttribute cluster = {};
  cudaLaunchConfig_t config = {};
};

// How many clusters of 1 to 16 full-sized CTAs the device runs at a time: cuts of its SMs into groups decide that.
struct Device {
  std::atomic<bool> known = false;
  std::atomic<int> clusters[kMaxCluster + 1] = {};
};

cudaError_t ThisDevice(const Device** out) {
  static Device devices[kMaxDevices];
  int id = 0;
  if (const cudaError_t e = cudaGetDevice(&id); e != cudaSuccess) return e;
  if (id >= kMaxDevices) return cudaErrorInvalidDevice;
  Device& device = devices[id];
  *out = &device;
  if (device.known.load(std::memory_order_acquire)) return cudaSuccess;
  if (const cudaError_t e =
          cudaFuncSetAttribute(SelectKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      e != cudaSuccess)
    return e;
  if (const cudaError_t e = cudaFuncSetAttribute(SelectKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      e != cudaSuccess)
    return e;
  SelectArgs args = {};
  args.num_sequences = args.num_kv_heads = args.group = 1;
  args.lse_stride = kMaxPages;
  for (int c = 1; c <= kMaxCluster; ++c) {
    Launch launch(args, MakePlan(args, c), nullptr);
    launch.config.dynamicSmemBytes = kSharedBytes;
    int num = 0;
    if (const cudaError_t e = cudaOccupancyMaxActiveClusters(&num, SelectKernel, &launch.config); e != cudaSuccess)
      return e;
    device.clusters[c].store(num, std::memory_order_relaxed);
  }
  device.known.store(true, std::memory_order_release);
  return cudaSuccess;
}

// The number of CTAs a row that ends first, by what an H200 was seen to take: waves of clusters, each of a fixed
// time, a little per CTA, and a time per value of a slice, half as much again for those that are read twice.
Plan ChoosePlan(const SelectArgs& args, const Device& device) {
  const int64_t rows = static_cast<int64_t>(args.num_sequences) * args.num_kv_heads;
  constexpr double kFixedUs = 10.2, kCtaUs = .15, kValueUs = 1.9e-4, kLargeClusterUs = 1;
  constexpr int kPortableCluster = 8;
  Plan best = {};
  double best_us = 0;
  for (int c = 1; c <= kMaxCluster; ++c) {
    const int clusters = device.clusters[c].load(std::memory_order_relaxed);
    if (clusters == 0) continue;
    const Plan plan = MakePlan(args, c);
    const int an_sm = std::clamp(kSharedBytes / (plan.at.end + 1024), 1, 2);  // CTAs
    const int64_t at_once = int64_t{clusters} * an_sm;
    const double far = double{1} - static_cast<double>(plan.resident_pages) / plan.slice_pages;
    const double slice_us = kValueUs * (1 + .5 * far) * args.group * plan.slice_pages * (rows > clusters ? an_sm : 1);
    const double us = static_cast<double>((rows + at_once - 1) / at_once) *
                      (kFixedUs + kCtaUs * c + slice_us + (c > kPortableCluster ? kLargeClusterUs : 0));
    if (best_us == 0 || us < best_us) best = plan, best_us = us;
  }
  return best;
}

bool IsValid(const SelectArgs& args) {
  constexpr int kMaxGrid = 65535;
  return args.num_sequences >= 0 && args.num_sequences <= kMaxGrid && args.num_kv_heads >= 1 &&
         args.num_kv_heads <= kMaxGrid && args.group >= 1 && args.group <= kMaxGroup &&
         (args.rule == CombineRule::kShare || args.rule == CombineRule::kPeak) && args.n_sink >= 0 &&
         args.n_win >= 0 && args.num_select >= 0 && args.lse_stride >= 4 && args.lse_stride <= kMaxPages &&
         args.lse_stride % 4 == 0 && reinterpret_cast<uintptr_t>(args.lse) % 16 == 0 && args.max_candidates >= 0;
}

}  // namespace

cudaError_t LaunchSelect(const SelectArgs& args, cudaStream_t stream) {
  if (!IsValid(args)) return cudaErrorInvalidValue;
  if (args.num_sequences == 0) return cudaSuccess;
  const Device* device = nullptr;
  if (const cudaError_t e = ThisDevice(&device); e != cudaSuccess) return e;
  const Plan plan = ChoosePlan(args, *device);
  const Launch launch(args, plan, stream);
  return cudaLaunchKernelEx(&launch.config, SelectKernel, args, plan);
}

}  // namespace kvd
