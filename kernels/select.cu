// Select on the GPU. Rows of few pages, and lists of candidates, are one kernel's work (select_few.cuh). Of rows of
// many pages a first kernel scans the values, on all SMs (select_scan.cuh); then a cluster of CTAs a row makes the
// norms of the heads from the pieces' states, and finds which groups of pages can matter: they count how many groups
// fall into each of 256 bins by the share of their best head, look into those that reach the bin of the K-th, count
// their pages by score, and rank the few pages of the bin in which the K-th lies. What the CTAs must know of each other
// they write into each other's shared memory, and wait for as many bytes as they know will come: counts, and those few
// pages; of these every CTA finds the weakest page that is chosen, and writes its own pages that are no weaker.
//
// Repeatability: atomics count integers or set bits, and no result depends on their order.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "kernels/select_few_rank.cuh"
#include "kernels/select_rank.cuh"

namespace kvd {
namespace {

using namespace select;  // NOLINT(build/namespaces): this file's other parts

// Puts shared memory in order; nothing here waits for an earlier kernel.
__device__ void Initialise(const SelectArgs& args, const Plan& plan, unsigned char* memory, Shared* shared) {
  const int i = static_cast<int>(threadIdx.x);
  if (i == 0) {
#pragma unroll 1
    for (int g = 0; g < args.group; ++g) ptx::BarrierInit(&shared->landed[g], 1);
    ptx::BarrierInit(&shared->counts_here[0], 1);
    ptx::BarrierInit(&shared->counts_here[1], 1);
    ptx::BarrierInit(&shared->contenders_here, 1);
    ptx::BarrierInitFence();
    for (uint64_t& here : shared->counts_here)
      ExpectFromAll(plan.cluster == 1, &here, static_cast<uint32_t>(plan.cluster) * kBins * 4);
    shared->num_passing = 0;
    shared->num_listed = 0;
    shared->num_mine = 0;
  }
  if (i < kBins) shared->counts[i] = 0;
  if (i < kMaxGroup) shared->shares[i] = 0;
  auto* chosen = reinterpret_cast<uint32_t*>(memory + plan.at.chosen);
#pragma unroll 1
  for (int w = i; w < plan.slice_pages / 32; w += kThreads) chosen[w] = 0;
  __syncthreads();
}

// Scores the pages that can matter. Returns the bin of the last that do.
__device__ int ScoreSlice(const SelectArgs& args, const Tables& tables, const Plan& plan, const Slice& s,
                          Shared* shared) {
  int last = kLastBin;
  if (args.max_candidates == 0) {
    WaitForCopies(args, plan, s, shared);
    BinGroups(args, plan, s, shared);
    __syncthreads();
    last = LastBinThatMatters(args, ExchangeCounts(plan, s, static_cast<uint32_t>(args.num_select), 0, shared));
    ListPassing(s, last, shared);
    __syncthreads();
  }
  ScorePages(args, tables, plan, s, last, shared);
  __syncthreads();
  return last;
}

__global__ void __launch_bounds__(kThreads, 2)
    SelectKernel(const __grid_constant__ SelectArgs args, const __grid_constant__ Tables tables,
                 const __grid_constant__ Plan plan, const __grid_constant__ Lists lists) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto* shared = reinterpret_cast<Shared*>(memory);
  Initialise(args, plan, memory, shared);
  ptx::ClusterArrive();
  // Parameters come by lines of 64 bytes, a wait each: here they are waited for while the last kernel still runs.
  asm volatile("" ::"r"(args.n_sink), "l"(args.num_pages), "l"(args.pages), "l"(args.log_norm), "l"(tables.best),
               "r"(plan.cluster), "r"(plan.at.end)
               : "memory");
  const float mean = MeanOf(args);
  WaitForPredecessor();
  const Slice s = MakeSlice(args, tables, plan, args.num_pages[blockIdx.z], memory);
  if (args.max_candidates == 0) StartCopies(args, plan, s, shared);
  ptx::ClusterWait();  // all CTAs run: their memory may be written
  FindNorms(args, tables, s, shared);
  __syncthreads();
  if (args.rule == CombineRule::kPeak) {
    TakePeaks(args, tables, s, shared);
    __syncthreads();
  }
  const int last = ScoreSlice(args, tables, plan, s, shared);
  const Cut cut = FindCut(args, tables, plan, s, last, args.max_candidates == 0 ? 1 : 0, shared);
  LetSuccessorStart();
  int32_t* out = OutOf(args, lists, s.row);
  int at = 0, num = 0;
  if (cut.count != 0) {
    SpreadContenders(args, tables, plan, s, cut, last, shared);
    at = RankContenders(s, cut, shared);
    num = WritePages(s, at, out, shared);
  }
  FinishRow(args, lists, s.row, cut.count, shared->weakest, mean, s.rank * kThreads + static_cast<int>(threadIdx.x),
            plan.cluster * kThreads);
  if (lists.candidates != nullptr) SumShares(args, plan, s, lists, out + at, num, shared);
}

// --- host ------------------------------------------------------------------------------------------

constexpr int kSharedBytes = 227 * 1024;  // what a CTA may have

int MaxPieces(int64_t lse_stride) {
  return std::min(kMaxPieces, static_cast<int>((lse_stride + (1 << kPieceShift) - 1) >> kPieceShift));
}

Tables MakeTables(const SelectArgs& args) {
  Tables tables = {MaxPieces(args.lse_stride), 5, nullptr, nullptr};
  // Few groups bound the K-th page badly.
  constexpr int kGroupsAPage = 8;
  if (int64_t{args.num_select} * kGroupsAPage > tables.max_pieces * tables.piece_groups()) tables.group_shift = 7;
  const int64_t states = int64_t{args.num_sequences} * args.num_kv_heads * args.group * tables.max_pieces;
  tables.states = static_cast<State*>(args.scratch);
  tables.best = reinterpret_cast<float*>(tables.states + (states + 15) / 16 * 16);  // bulk copies start there
  return tables;
}

Offsets MakeOffsets(const Plan& plan) {
  Offsets at;
  at.received = static_cast<int>((sizeof(Shared) + 127) / 128 * 128);
  at.chosen = at.received + 2 * plan.cluster * kBins * 4;
  at.bins = at.chosen + plan.slice_pages / 8;
  at.passing = at.bins + plan.slice_groups;
  at.keys = at.passing + plan.slice_groups * 2;
  at.list = at.keys + plan.list_size * 4;
  at.best = (at.list + plan.list_size * 2 + 127) / 128 * 128;
  at.end = at.best + plan.heads * plan.slice_groups * 4;
  return at;
}

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

// Rows of many pages. As many CTAs a row as give each warp one (head, piece), up to 8; fewer where the clusters would
// not all run at once.
Plan MakePlan(const SelectArgs& args, const Tables& tables) {
  constexpr int kList = 8192, kCluster = 8, kCtasAtOnce = 200;  // 2 an SM, less what clusters leave empty
  const auto pages = static_cast<int>(args.lse_stride);
  const int64_t rows = int64_t{args.num_sequences} * args.num_kv_heads;
  const int tasks = tables.max_pieces * args.group;
  Plan plan = {};
  plan.cluster = std::min((tasks + kWarps - 1) / kWarps, kCluster);
  while (plan.cluster > 1 && plan.cluster * rows > kCtasAtOnce) plan.cluster /= 2;
  while (LongestSlice(pages, plan.cluster) > kMaxSlice) plan.cluster *= 2;
  plan.slice_pages = LongestSlice(pages, plan.cluster);
  plan.slice_groups = (tables.max_pieces + plan.cluster - 1) / plan.cluster * tables.piece_groups();
  plan.list_size = std::min(kList, plan.slice_pages);
  plan.heads = args.max_candidates > 0 ? 0 : args.group;
  if (MakeOffsets(plan).end > kSharedBytes) plan.heads = 0;
  plan.at = MakeOffsets(plan);
  return plan;
}

// Rows, or lists, of at most `num` pages: as many CTAs a row as give each about kEach values; fewer where they would
// not all run at once. Nothing for rows that do not fit, and for so many long ones that they would run in turns.
std::optional<FewPlan> MakeFewPlan(const SelectArgs& args, int num, bool listed) {
  constexpr int kCtasAtOnce = 132;
  constexpr int64_t kEach = 4096;
  if (args.rule != CombineRule::kShare || num > kFewPages) return std::nullopt;
  const int64_t rows = int64_t{args.num_sequences} * args.num_kv_heads;
  const int pieces = FewPieces(num), full = std::max(num >> kPieceShift, 1);
  const int most = listed ? kFewThreads * kQuad : kFewSlice;
  FewPlan plan = {};
  int& shift = plan.cluster_shift;
  while (plan.cluster() < kFewCluster && int64_t{full << kPieceShift} * args.group > kEach * plan.cluster()) ++shift;
  while (shift > 0 && plan.cluster() * rows > kCtasAtOnce) --shift;
  for (;; ++shift) {
    plan.most = SliceOf(pieces, shift);
    if (plan.most <= most && plan.most * args.group <= kFewValues) break;
    if (plan.cluster() == kFewCluster) return std::nullopt;
  }
  if (plan.most > kFewSlice / 2 && plan.cluster() * rows > kCtasAtOnce) return std::nullopt;
  plan.guess = SliceOf(full, shift);
  plan.received = static_cast<int>((sizeof(FewShared) + 15) / 16 * 16);
  plan.states = plan.received + (shift == 0 ? 0 : 2 * plan.cluster() * kBins * 4);
  plan.pages = plan.states + args.group * kMaxPieces * static_cast<int>(sizeof(State));
  plan.values = plan.pages + (listed ? plan.most * 4 : 0);
  plan.end = plan.values + plan.most * args.group * 4;
  return plan;
}

bool IsValid(const SelectArgs& args) {
  constexpr int kMaxGrid = 65535;
  return args.num_sequences >= 0 && args.num_sequences <= kMaxGrid && args.num_kv_heads >= 1 &&
         args.num_kv_heads <= kMaxGrid && args.group >= 1 && args.group <= kMaxGroup &&
         (args.rule == CombineRule::kShare || args.rule == CombineRule::kPeak) && args.n_sink >= 0 && args.n_win >= 0 &&
         args.num_select >= 0 && args.lse_stride >= 4 && args.lse_stride <= kMaxPages && args.lse_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(args.lse) % 16 == 0 && args.max_candidates >= 0 && args.scratch != nullptr &&
         reinterpret_cast<uintptr_t>(args.scratch) % 128 == 0;
}

template <class... Parameters>
cudaError_t AllowShared(void (*kernel)(Parameters...)) {
  for (const auto& [attribute, value] : {std::pair(cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
                                         std::pair(cudaFuncAttributeNonPortableClusterSizeAllowed, 1)}) {
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, attribute, value); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

cudaError_t LaunchFew(const SelectArgs& args, const Lists& lists, const FewPlan& plan, bool listed,
                      cudaStream_t stream) {
  constexpr int kLeast = 128;
  const int quads = plan.most > kFewThreads * kQuad ? kFewQuads : 1;
  const int tasks = (plan.most >> kPieceShift) * args.group;
  const int threads = std::clamp(std::max(32 * tasks, plan.most / kQuad / quads), kLeast, kFewThreads);
  const auto kernel = listed       ? SelectFewKernel<1, true>
                      : quads == 1 ? SelectFewKernel<1, false>
                                   : SelectFewKernel<kFewQuads, false>;
  if (const cudaError_t e = AllowShared(kernel); e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(plan.cluster()), static_cast<unsigned>(args.num_kv_heads),
                  static_cast<unsigned>(args.num_sequences));
  return LaunchOverlapped(kernel, grid, static_cast<unsigned>(threads), static_cast<size_t>(plan.end),
                          plan.cluster_shift == 0 ? 0u : static_cast<unsigned>(plan.cluster()), stream, args, lists,
                          plan);
}

cudaError_t LaunchMany(const SelectArgs& args, const Lists& lists, cudaStream_t stream) {
  const Tables tables = MakeTables(args);
  const Plan plan = MakePlan(args, tables);
  const int64_t tasks = int64_t{args.num_sequences} * args.num_kv_heads * args.group * tables.max_pieces;
  if (tasks > INT32_MAX) return cudaErrorInvalidValue;
  const auto ctas = static_cast<unsigned>((tasks + kWarps - 1) / kWarps);
  if (const cudaError_t e = LaunchOverlapped(ScanKernel, ctas, kThreads, 0, 0, stream, args, tables); e != cudaSuccess)
    return e;
  if (const cudaError_t e = AllowShared(SelectKernel); e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(plan.cluster), static_cast<unsigned>(args.num_kv_heads),
                  static_cast<unsigned>(args.num_sequences));
  return LaunchOverlapped(SelectKernel, grid, kThreads, static_cast<size_t>(plan.at.end),
                          static_cast<unsigned>(plan.cluster), stream, args, tables, plan, lists);
}

cudaError_t Launch(const SelectArgs& args, const Lists& lists, cudaStream_t stream) {
  if (!IsValid(args)) return cudaErrorInvalidValue;
  if (args.num_sequences == 0) return cudaSuccess;
  const std::optional<FewPlan> few = MakeFewPlan(args, static_cast<int>(args.lse_stride), false);
  return few.has_value() ? LaunchFew(args, lists, *few, false, stream) : LaunchMany(args, lists, stream);
}

// Where in the scratch the candidates' shares are, behind all that other launches use.
size_t SharesAt(int64_t num_rows, int group, int64_t lse_stride) {
  const size_t pieces = static_cast<size_t>(num_rows * group) * static_cast<size_t>(MaxPieces(lse_stride));
  return (pieces + 15) / 16 * 16 * sizeof(State) + pieces * 32 * kRuns * sizeof(float);
}
Lists MakeLists(const SelectArgs& args, const CandidateOut& out) {
  const int64_t rows = int64_t{args.num_sequences} * args.num_kv_heads;
  auto* shares = reinterpret_cast<uint32_t*>(static_cast<unsigned char*>(args.scratch) +
                                             SharesAt(rows, args.group, args.lse_stride));
  return {out.max_candidates, out.candidates, out.num_candidates, shares,
          reinterpret_cast<float*>(shares + rows * args.group * kMaxCluster)};
}

}  // namespace

size_t SelectGpuScratchBytes(int64_t num_rows, int group, int64_t lse_stride) {
  return SharesAt(num_rows, group, lse_stride) +
         static_cast<size_t>(num_rows * group) * (kMaxCluster * sizeof(uint32_t) + sizeof(float));
}

cudaError_t LaunchSelect(const SelectArgs& args, cudaStream_t stream) { return Launch(args, Lists{}, stream); }

cudaError_t LaunchSelectCandidates(const SelectArgs& args, const CandidateOut& out, cudaStream_t stream) {
  if (args.max_candidates != 0 || out.candidates == nullptr ||
      int64_t{out.max_candidates} < int64_t{args.num_select} + args.n_sink + args.n_win)
    return cudaErrorInvalidValue;
  return Launch(args, MakeLists(args, out), stream);
}

cudaError_t LaunchSelectAmong(const SelectArgs& args, cudaStream_t stream) {
  if (!IsValid(args) || args.max_candidates == 0) return cudaErrorInvalidValue;
  if (args.num_sequences == 0) return cudaSuccess;
  const std::optional<FewPlan> few =
      args.max_candidates > kMostListed ? std::nullopt : MakeFewPlan(args, args.max_candidates, true);
  return few.has_value() ? LaunchFew(args, MakeLists(args, {}), *few, true, stream) : Launch(args, {}, stream);
}

}  // namespace kvd
