// Decode attention on the GPU: one cluster of CTAs a (sequence, KV head), whose units
// (attend_tile.cuh: Units) are dealt to 8 parts of 8 slots each. A CTA has one part, or several in
// turn where there are more rows than the device takes at once: its warps then never run dry
// between them. Each warp streams the units of its slot; the CTA merges a part's warps and sends
// every CTA of the cluster the share of the output that is its to finish. One launch; nothing goes
// through global memory.
//
// Repeatability: which slot and part a unit is of, and the order of every sum, depend on the row's
// units alone. Device code, and the launch. Internal to attend*.cu.

#ifndef LOCKS_KVD_KERNELS_ATTEND_ROW_CUH_
#define LOCKS_KVD_KERNELS_ATTEND_ROW_CUH_

#include <cmath>

#include "kernels/attend_tile.cuh"
#include "kernels/built_geometries.h"
#include "kernels/launch.cuh"

namespace kvd::attend {

constexpr int kWarps = kSlots / kParts;
constexpr int kThreads = 32 * kWarps;
// How many parts a CTA has: with few rows one, since a list is short and a single sequence would
// leave most of the device idle; with more as many as let all CTAs run at once. Clusters of 8 with
// two CTAs an SM leave some places empty.
constexpr int kSomeRows = 31, kManyRows = 64;
constexpr int kEachOfSome = 2, kEachOfMany = 4;

struct Part {
  float max, sum;
};

// What is left of a CTA's shared memory beside the warps' areas. Marked "from all": written by the
// whole cluster.
template <class S, int kEach>
struct Shared {
  static constexpr int kCluster = kParts / kEach;
  alignas(16) float o[kParts][S::kPadded * S::kDim /
                              kCluster];  // from all: sums of this CTA's share of the output
  Part parts[kParts][S::kPadded];         // from all: of every head
  Part warps[kWarps][S::kPadded];
  uint64_t here;  // barrier of what comes from all
};

// Where a warp leaves its sums: in its own area, which is free after its only part, or behind the
// areas.
template <class S, int kEach>
__host__ __device__ constexpr int SumsStride(int group) {
  return kEach == 1 ? static_cast<int>(S::kWarpBytes) : group * S::kHeadStride * 4;
}
template <class S, int kEach>
__host__ __device__ constexpr int SharedAt(int group) {
  return kWarps * static_cast<int>(S::kWarpBytes) +
         (kEach == 1 ? 0 : kWarps * SumsStride<S, kEach>(group));
}
// Where the units' own part begins.
template <class S, int kEach>
__host__ __device__ constexpr int UnitsAt(int group) {
  return SharedAt<S, kEach>(group) + static_cast<int>((sizeof(Shared<S, kEach>) + 15) / 16 * 16);
}
template <class S, int kEach, class Units>
int SharedBytes(const typename Units::Args& all) {
  const int group = Units::Common(all).group;
  return UnitsAt<S, kEach>(group) + Units::SharedBytes(all, SharedAt<S, kEach>(group));
}

// Shared memory of an SM, in bytes, and what of it one CTA can have.
constexpr int kSharedOfAnSm = 228 * 1024, kSharedOfACta = 227 * 1024;

// CTAs an SM. Shared memory would hold three at D = 128, but with 80 registers a fifth is lost.
template <class S>
constexpr int kCtasPerSm = S::kDim > 128 ? 1 : 2;

template <int kNum>
__device__ __forceinline__ float MaxOf(const float (&max)[kNum]) {
  float all = NegativeInfinity();
#pragma unroll
  for (const float m : max) all = fmaxf(all, m);
  return all;
}

// Leaves a warp's sums in `area`, and its part of the softmax in `shared`.
template <class S, int kEach>
__device__ __forceinline__ void HandOver(const AttendArgs& args, const State<S>& state, float* area,
                                         Shared<S, kEach>* shared) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    const float sum = ptx::QuadSum(state.sum[set]);
    if (t == 0) shared->warps[warp][g + 8 * set] = {state.max[set], sum};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 8 * set + 2 * t + i;
      if (head >= args.group) continue;
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        area[head * S::kHeadStride + 16 * step + g] = state.o[set][step][i];
        area[head * S::kHeadStride + 16 * step + 8 + g] = state.o[set][step][2 + i];
      }
    }
  }
}

// Merges the CTA's warps into part `part`; every CTA of the cluster gets the part of every head,
// and of the sums the share that it finishes: vectors of four dims in order, as many for each.
template <class S, int kEach>
__device__ __forceinline__ void SendMerged(const AttendArgs& args, const unsigned char* sums,
                                           int part, Shared<S, kEach>* shared) {
  constexpr int kCluster = kParts / kEach, kVectors = S::kDim / 4;  // of a head
  const int share = args.group * kVectors / kCluster;
  const auto part_of = [&](int head, float(&max)[kWarps]) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) max[w] = shared->warps[w][head].max;
    return MaxOf(max);
  };
  for (int i = static_cast<int>(threadIdx.x); i < args.group * kVectors; i += kThreads) {
    const int head = i / kVectors, d = 4 * (i % kVectors);
    float max[kWarps];
    const float all = part_of(head, max);
    float4 o = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = Weight(max[w], all);
      const float4 x = *reinterpret_cast<const float4*>(
          reinterpret_cast<const float*>(sums + w * SumsStride<S, kEach>(args.group)) +
          head * S::kHeadStride + d);
      o.x += weight * x.x, o.y += weight * x.y, o.z += weight * x.z, o.w += weight * x.w;
    }
    const uint4 bits = {__float_as_uint(o.x), __float_as_uint(o.y), __float_as_uint(o.z),
                        __float_as_uint(o.w)};
    ptx::Send(i / share, &shared->o[part][4 * (i % share)], bits, &shared->here);
  }
  for (int i = static_cast<int>(threadIdx.x); i < args.group * kCluster; i += kThreads) {
    const int head = i / kCluster;
    float max[kWarps];
    const float all = part_of(head, max);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += Weight(max[w], all) * shared->warps[w][head].sum;
    const uint64_t bits = static_cast<uint64_t>(__float_as_uint(sum)) << 32 | __float_as_uint(all);
    ptx::Send(i % kCluster, &shared->parts[part][head], bits, &shared->here);
  }
}

// Finishes this CTA's share of the row's output.
template <class S, int kEach>
__device__ void Finish(const AttendArgs& args, int64_t row, int rank,
                       const Shared<S, kEach>& shared) {
  const int share = args.group * S::kDim * kEach / kParts;
  for (int i = static_cast<int>(threadIdx.x); i < share; i += kThreads) {
    const int at = rank * share + i, head = at / S::kDim;
    float max[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) max[p] = shared.parts[p][head].max;
    const float all = MaxOf(max);
    float sum = 0, o = 0;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const float weight = Weight(max[p], all);
      sum += weight * shared.parts[p][head].sum;
      o += weight * shared.o[p][i];
    }
    const bool empty = all == NegativeInfinity();
    args.o[row * args.group * S::kDim + at] = empty ? 0 : o / sum;
    if (at % S::kDim == 0)
      args.lse[row * args.group + head] =
          empty ? NegativeInfinity() : (all + (log2f(sum) - S::kShift)) * kLn2;
  }
}

template <class S, int kEach, class Units>
__global__ void __cluster_dims__(kParts / kEach, 1, 1) __launch_bounds__(kThreads, kCtasPerSm<S>)
    AttendKernel(const __grid_constant__ typename Units::Args all) {
  constexpr int kCluster = kParts / kEach;
  const AttendArgs& args = Units::Common(all);
  extern __shared__ __align__(16) unsigned char memory[];
  auto* shared = reinterpret_cast<Shared<S, kEach>*>(memory + SharedAt<S, kEach>(args.group));
  unsigned char* sums = memory + (kEach == 1 ? 0 : kWarps * S::kWarpBytes);
  const int64_t row = blockIdx.x / kCluster;
  const int rank = static_cast<int>(blockIdx.x % kCluster), warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    ptx::BarrierInit(&shared->here, 1);
    ptx::BarrierInitFence();
    ptx::BarrierExpect(
        &shared->here,
        static_cast<uint32_t>(args.group * (S::kDim * kEach * static_cast<int>(sizeof(float)) +
                                            kParts * static_cast<int>(sizeof(Part)))));
  }
  const int slot = warp * kParts + rank * kEach;  // the warp's first of kEach
  Units units(
      all, row, rank,
      UnitMemory{memory, SharedAt<S, kEach>(args.group), memory + UnitsAt<S, kEach>(args.group)});
  __syncwarp();
  ptx::ClusterArrive();
  AwaitParameters(all);
  WaitForPredecessor();
  // By the time that all have come here, all run: the next scan takes room that nobody else needs.
  LetSuccessorStart();
  units.Begin(slot, kEach);
  Tiles<kEach, Units> tiles(units, slot);
  units.Append(tiles.num_units(), slot, kEach);
  const uint32_t area = ptx::SharedAddress(memory + warp * S::kWarpBytes);
  bool more = tiles.Next();
  if (more) StartTile<S>(args, area, tiles);
  const Queries<S> q = LoadQueries<S>(args, row);
#pragma unroll 1
  for (int part = 0; part < kEach; ++part) {
    State<S> state = EmptyState<S>();
    if constexpr (kEach == 1) {
      state = AttendOnly<S>(args, area, q, &tiles, &more);
    } else {
#pragma unroll 1
      while (more && tiles.part() == part) AttendTile<S>(args, area, q, &tiles, &more, &state);
    }
    if (part > 0) __syncthreads();  // the last part's sums have been read
    HandOver<S, kEach>(args, state,
                       reinterpret_cast<float*>(sums + warp * SumsStride<S, kEach>(args.group)),
                       shared);
    __syncthreads();
    if (part == 0) ptx::ClusterWait();  // the others' barriers are initialised
    if (part == 0) units.End(slot, kEach);
    SendMerged<S, kEach>(args, sums, rank * kEach + part, shared);
  }
  ptx::BarrierWait(&shared->here, 0);
  Finish<S, kEach>(args, row, rank, *shared);
}

template <class S, int kEach, class Units>
cudaError_t LaunchParts(const typename Units::Args& all, cudaStream_t stream) {
  const AttendArgs& args = Units::Common(all);
  const int bytes = SharedBytes<S, kEach, Units>(all);
  if (bytes > kSharedOfACta) return cudaErrorLaunchOutOfResources;
  const auto kernel = AttendKernel<S, kEach, Units>;
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      e != cudaSuccess)
    return e;
  const auto rows =
      static_cast<unsigned>(args.num_sequences) * static_cast<unsigned>(args.num_kv_heads);
  return LaunchOverlapped(kernel, rows * (kParts / kEach), kThreads, static_cast<size_t>(bytes), 0,
                          stream, all);
}

template <class S, class Units>
cudaError_t LaunchOne(const typename Units::Args& all, cudaStream_t stream) {
  const AttendArgs& args = Units::Common(all);
  if constexpr (S::kPadded == 8) {  // sums of more heads leave no room for as many CTAs an SM
    const auto fits = [](int bytes) { return kCtasPerSm<S> * (bytes + 1024) <= kSharedOfAnSm; };
    const int64_t rows = int64_t{args.num_sequences} * args.num_kv_heads;
    if (rows >= kManyRows && fits(SharedBytes<S, kEachOfMany, Units>(all)))
      return LaunchParts<S, kEachOfMany, Units>(all, stream);
    if (rows >= kSomeRows && fits(SharedBytes<S, kEachOfSome, Units>(all)))
      return LaunchParts<S, kEachOfSome, Units>(all, stream);
  }
  return LaunchParts<S, 1, Units>(all, stream);
}

template <int D, class Units>
cudaError_t LaunchForDim(const typename Units::Args& all, cudaStream_t stream) {
  const AttendArgs& args = Units::Common(all);
  const bool few = args.group <= 8;
  if (args.dtype == KvDtype::kBf16)
    return few ? LaunchOne<Shape<D, 8, true>, Units>(all, stream)
               : LaunchOne<Shape<D, 16, true>, Units>(all, stream);
  return few ? LaunchOne<Shape<D, 8, false>, Units>(all, stream)
             : LaunchOne<Shape<D, 16, false>, Units>(all, stream);
}

// Checks what all kinds of units share, and launches. cudaErrorLaunchOutOfResources: the units' own
// part of shared memory has no room.
template <class Units>
cudaError_t Launch(const typename Units::Args& all, cudaStream_t stream) {
  const AttendArgs& args = Units::Common(all);
  if (args.num_sequences < 0 || args.num_kv_heads < 1 || args.group < 1 || args.group > 16 ||
      args.max_units < 0 || (args.page_tokens != 16 && args.page_tokens != 32) ||
      (args.dtype != KvDtype::kBf16 && args.dtype != KvDtype::kFp16))
    return cudaErrorInvalidValue;
  if (args.num_sequences == 0) return cudaSuccess;
  switch (args.head_dim) {
    case 64:
      return LaunchForDim<64, Units>(all, stream);
    case 128:
      return LaunchForDim<128, Units>(all, stream);
#if KVD_ALL_GEOMETRIES
    case 96:
      return LaunchForDim<96, Units>(all, stream);
    case 256:
      return LaunchForDim<256, Units>(all, stream);
#else
    case 96:
    case 256:
      return cudaErrorNotSupported;
#endif
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace kvd::attend

#endif  // LOCKS_KVD_KERNELS_ATTEND_ROW_CUH_
