// Decode attention on the GPU: one cluster of CTAs a (sequence, KV head), its list of units dealt to the cluster's
// warps. Warps stream their units (attend_tile.cuh) and merge by CTA; each CTA then sends every other the share of
// the output that is the other's to finish. One launch; nothing goes through global memory.
//
// Repeatability: which warp takes which unit, and the order of every sum, depend on the list alone.
#include <cmath>

#include "kernels/attend_tile.cuh"
#include "kernels/launch.cuh"

namespace kvd {
namespace {

using namespace attend;  // NOLINT(build/namespaces): this file's other part

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
// CTAs of a row: a list is short, and without them a single sequence would leave most of the device idle.
constexpr int kCluster = 8;

struct Part {
  float max, sum;
};

// What is left of a CTA's shared memory beside the warps' areas. Marked "from all": written by the whole cluster.
template <class S>
struct Shared {
  alignas(16) float o[kCluster][S::kPadded * S::kDim / kCluster];  // from all: sums of this CTA's share of the output
  Part parts[kCluster][S::kPadded];                                // from all: of every head
  Part warps[kWarps][S::kPadded];
  uint64_t here;  // barrier of what comes from all
};

template <class S>
constexpr int kSharedBytes = kWarps * static_cast<int>(S::kWarpBytes) + static_cast<int>(sizeof(Shared<S>));

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

// Leaves a warp's sums in its area, and its parts in `shared`.
template <class S>
__device__ void HandOver(const AttendArgs& args, const State<S>& state, float* area, Shared<S>* shared) {
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

// Merges the CTA's warps; every CTA of the cluster gets the part of every head, and of the sums the share that it
// finishes: vectors of four dims in order, an eighth for each.
template <class S>
__device__ void SendMerged(const AttendArgs& args, const unsigned char* areas, int rank, Shared<S>* shared) {
  constexpr int kVectors = S::kDim / 4;  // of a head
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
          reinterpret_cast<const float*>(areas + w * S::kWarpBytes) + head * S::kHeadStride + d);
      o.x += weight * x.x, o.y += weight * x.y, o.z += weight * x.z, o.w += weight * x.w;
    }
    const uint4 bits = {__float_as_uint(o.x), __float_as_uint(o.y), __float_as_uint(o.z), __float_as_uint(o.w)};
    ptx::Send(i / share, &shared->o[rank][4 * (i % share)], bits, &shared->here);
  }
  for (int i = static_cast<int>(threadIdx.x); i < args.group * kCluster; i += kThreads) {
    const int head = i / kCluster;
    float max[kWarps];
    const float all = part_of(head, max);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += Weight(max[w], all) * shared->warps[w][head].sum;
    const uint64_t bits = static_cast<uint64_t>(__float_as_uint(sum)) << 32 | __float_as_uint(all);
    ptx::Send(i % kCluster, &shared->parts[rank][head], bits, &shared->here);
  }
}

// Finishes this CTA's share of the row's output.
template <class S>
__device__ void Finish(const AttendArgs& args, int64_t row, int rank, const Shared<S>& shared) {
  const int share = args.group * S::kDim / kCluster;
  for (int i = static_cast<int>(threadIdx.x); i < share; i += kThreads) {
    const int at = rank * share + i, head = at / S::kDim;
    float max[kCluster];
#pragma unroll
    for (int c = 0; c < kCluster; ++c) max[c] = shared.parts[c][head].max;
    const float all = MaxOf(max);
    float sum = 0, o = 0;
#pragma unroll
    for (int c = 0; c < kCluster; ++c) {
      const float weight = Weight(max[c], all);
      sum += weight * shared.parts[c][head].sum;
      o += weight * shared.o[c][i];
    }
    const bool empty = all == NegativeInfinity();
    args.o[row * args.group * S::kDim + at] = empty ? 0 : o / sum;
    if (at % S::kDim == 0)
      args.lse[row * args.group + head] = empty ? NegativeInfinity() : (all + (log2f(sum) - S::kShift)) * kLn2;
  }
}

template <class S>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, kCtasPerSm<S>)
    AttendKernel(const __grid_constant__ AttendArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* shared = reinterpret_cast<Shared<S>*>(memory + kWarps * S::kWarpBytes);
  const int64_t row = blockIdx.x / kCluster;
  const int rank = static_cast<int>(blockIdx.x % kCluster), warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    ptx::BarrierInit(&shared->here, 1);
    ptx::BarrierInitFence();
    ptx::BarrierExpect(&shared->here,
                       static_cast<uint32_t>(args.group * (S::kDim * static_cast<int>(sizeof(float)) +
                                                           kCluster * static_cast<int>(sizeof(Part)))));
  }
  __syncwarp();
  ptx::ClusterArrive();
  WaitForPredecessor();
  Tiles tiles(args.units + row * args.max_units, args.max_units, warp * kCluster + rank, kWarps * kCluster);
  tiles.SetCount(args.num_units[row]);
  unsigned char* area = memory + warp * S::kWarpBytes;
  const State<S> state = AttendTiles<S>(args, row, ptx::SharedAddress(area), tiles);
  LetSuccessorStart();
  HandOver<S>(args, state, reinterpret_cast<float*>(area), shared);
  __syncthreads();
  ptx::ClusterWait();  // the others' barriers are initialised
  SendMerged<S>(args, memory, rank, shared);
  ptx::BarrierWait(&shared->here, 0);
  Finish<S>(args, row, rank, *shared);
}

template <class S>
cudaError_t LaunchOne(const AttendArgs& args, cudaStream_t stream) {
  if (const cudaError_t e =
          cudaFuncSetAttribute(AttendKernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<S>);
      e != cudaSuccess)
    return e;
  const auto rows = static_cast<unsigned>(args.num_sequences) * static_cast<unsigned>(args.num_kv_heads);
  return LaunchOverlapped(AttendKernel<S>, rows * kCluster, kThreads, kSharedBytes<S>, 0, stream, args);
}

template <int D>
cudaError_t LaunchForDim(const AttendArgs& args, cudaStream_t stream) {
  if (args.dtype == KvDtype::kBf16)
    return args.group <= 8 ? LaunchOne<Shape<D, 8, true>>(args, stream) : LaunchOne<Shape<D, 16, true>>(args, stream);
  return args.group <= 8 ? LaunchOne<Shape<D, 8, false>>(args, stream) : LaunchOne<Shape<D, 16, false>>(args, stream);
}

constexpr int kMergeThreads = 128;

__global__ void __launch_bounds__(kMergeThreads) MergeAttentionKernel(const MergeArgs args) {
  const int64_t row = blockIdx.x;
  const float lse1 = args.lse1[row], lse2 = args.lse2[row];
  __syncthreads();  // lse may be lse1 or lse2: all have read them
  const float max = fmaxf(lse1, lse2);
  const bool empty = max == NegativeInfinity();
  const float lse = empty ? max : max + log1pf(expf(fminf(lse1, lse2) - max));
  const float weight1 = empty ? 0 : expf(lse1 - lse), weight2 = empty ? 0 : expf(lse2 - lse);
  for (int d = static_cast<int>(threadIdx.x); d < args.head_dim; d += kMergeThreads) {
    const int64_t at = row * args.head_dim + d;
    args.o[at] = weight1 * args.o1[at] + weight2 * args.o2[at];
  }
  if (threadIdx.x == 0) args.lse[row] = lse;
}

}  // namespace

cudaError_t LaunchAttend(const AttendArgs& args, cudaStream_t stream) {
  if (args.num_sequences < 0 || args.num_kv_heads < 1 || args.group < 1 || args.group > 16 || args.max_units < 0 ||
      (args.page_tokens != 16 && args.page_tokens != 32) ||
      (args.dtype != KvDtype::kBf16 && args.dtype != KvDtype::kFp16))
    return cudaErrorInvalidValue;
  if (args.num_sequences == 0) return cudaSuccess;
  switch (args.head_dim) {
    case 64: return LaunchForDim<64>(args, stream);
    case 96: return LaunchForDim<96>(args, stream);
    case 128: return LaunchForDim<128>(args, stream);
    case 256: return LaunchForDim<256>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t LaunchMergeAttention(const MergeArgs& args, cudaStream_t stream) {
  if (args.num_rows < 0 || args.head_dim < 1) return cudaErrorInvalidValue;
  if (args.num_rows == 0) return cudaSuccess;
  MergeAttentionKernel<<<static_cast<unsigned>(args.num_rows), kMergeThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvd
