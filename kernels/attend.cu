#include <cooperative_groups.h>
#include <cuda_fp16.h>

#include <cmath>

#include "kernels/attend.h"
#include "kernels/ptx.cuh"

namespace kvd {
namespace {

namespace cg = cooperative_groups;
using ptx::kAllLanes;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
// CTAs that share one (sequence, KV head) and merge through each other's shared memory: a list is short,
// and without them a single sequence would leave most of the device idle.
constexpr int kCluster = 8;
constexpr int kTile = 16;  // tokens that a warp takes at a time
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMaxLogit2 = 1e30f * kLog2e;

// Shared memory of a CTA, in floats: the queries as A operands, then for each warp its probabilities and
// decays, then its state; the CTA's merged state comes last, where the cluster reads it.
template <int D, int kPadded>
struct Layout {
  static constexpr int kSteps = D / 16;
  static constexpr int kQueries = 0;
  static constexpr int kProbabilities = kQueries + kSteps * 4 * 32;
  static constexpr int kDecays = kProbabilities + kWarps * kPadded * kTile;
  static constexpr int kStates = kDecays + kWarps * kPadded;       // o [kWarps][kPadded][D]
  static constexpr int kMaxima = kStates + kWarps * kPadded * D;   // [kWarps][kPadded]
  static constexpr int kSums = kMaxima + kWarps * kPadded;         // [kWarps][kPadded]
  static constexpr int kMerged = kSums + kWarps * kPadded;         // o [kPadded][D], maximum, sum [kPadded]
  static constexpr int kFloats = kMerged + kPadded * (D + 2);
};

__device__ __forceinline__ float2 ToFloats(bool is_bf16, uint32_t pair) {
  return is_bf16 ? ptx::Bf16Pair(pair) : __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(static_cast<int>(0xFF800000u)); }

// 2^(x - max), 0 for an empty part, never NaN.
__device__ __forceinline__ float Weight(float x, float max) {
  return x == NegativeInfinity() ? 0.0f : ptx::Exp2(x - max);
}

// The queries of a KV head as A operands, the same for all warps. Lane 4 g + t supplies the dims of the
// 16-byte pieces t, t + 4, ... of a row.
template <int D, int kPadded>
__device__ void StageQueries(const AttendArgs& args, int64_t row, float* shared) {
  auto* a = reinterpret_cast<uint32_t*>(shared);
  const auto* query = reinterpret_cast<const uint32_t*>(args.query + row * args.group * D);
  for (int i = static_cast<int>(threadIdx.x); i < D / 16 * 4 * 32; i += kThreads) {
    const int reg = i % 4, lane = i / 4 % 32, step = i / 128;
    const int head = lane / 4 + 8 * (reg % 2);
    const int piece = step / 2 * 4 + lane % 4;
    const int pair = piece * 4 + step % 2 * 2 + reg / 2;
    a[i] = head < args.group ? query[head * (D / 2) + pair] : 0;
  }
}

// One warp's running softmax: state of heads g and g + 8 in its lanes, o of every head for dims that the lane
// owns (kEach neighbours; for D = 96 dims 32 apart).
template <int D, int kPadded>
struct WarpState {
  static constexpr int kEach = D / 32;
  static constexpr int kSets = kPadded / 8;
  float max[kSets];
  float sum[kSets];
  float o[kPadded][kEach];
};

template <int D, bool kBf16>
__device__ __forceinline__ void LoadValues(const uint16_t* row, float (&v)[D / 32]) {
  const int lane = threadIdx.x % 32;
  if constexpr (D == 96) {
#pragma unroll
    for (int i = 0; i < 3; ++i) v[i] = ToFloats(kBf16, row[32 * i + lane]).x;
  } else {
    constexpr int kPairs = D / 64;
    uint32_t pairs[kPairs];
    if constexpr (kPairs == 4) {
      const uint4 x = reinterpret_cast<const uint4*>(row)[lane];
      pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
    } else if constexpr (kPairs == 2) {
      const uint2 x = reinterpret_cast<const uint2*>(row)[lane];
      pairs[0] = x.x, pairs[1] = x.y;
    } else {
      pairs[0] = reinterpret_cast<const uint32_t*>(row)[lane];
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 x = ToFloats(kBf16, pairs[i]);
      v[2 * i] = x.x;
      v[2 * i + 1] = x.y;
    }
  }
}

// Logits of up to 16 tokens in units of ln 2: x[set][2 j + i] is token 8 j + 2 t + i; -inf from num_tokens on.
template <int D, int kPadded, bool kBf16>
__device__ __forceinline__ void TileLogits(const AttendArgs& args, const uint16_t* keys, int num_tokens,
                                           const float* queries, float (&x)[kPadded / 8][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float acc[2][4] = {};
  uint4 k[2][D / 32];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const auto* row = reinterpret_cast<const uint4*>(keys + (8 * j + g) * D);
#pragma unroll
    for (int piece = 0; piece < D / 32; ++piece)
      k[j][piece] = 8 * j + g < num_tokens ? row[4 * piece + t] : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    const uint4 q = reinterpret_cast<const uint4*>(queries)[step * 32 + lane];
    const uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 b = k[j][step / 2];
      const uint32_t b0 = step % 2 == 0 ? b.x : b.z, b1 = step % 2 == 0 ? b.y : b.w;
      if constexpr (kBf16) {
        ptx::MmaBf16(acc[j], a, b0, b1, acc[j]);
      } else {
        ptx::MmaFp16(acc[j], a, b0, b1, acc[j]);
      }
    }
  }
  const float scale2 = args.softmax_scale * kLog2e;
#pragma unroll
  for (int set = 0; set < kPadded / 8; ++set) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float logit = acc[i / 2][2 * set + i % 2] * scale2;
      if (args.logit_softcap > 0) logit = args.logit_softcap * kLog2e * tanhf(logit * kLn2 / args.logit_softcap);
      logit = fminf(fmaxf(logit, -kMaxLogit2), kMaxLogit2);
      x[set][i] = 8 * (i / 2) + 2 * t + i % 2 < num_tokens ? logit : NegativeInfinity();
    }
  }
}

// Adds up to 16 tokens to the state. REQUIRES: num_tokens >= 1.
template <int D, int kPadded, bool kBf16>
__device__ __forceinline__ void AddTile(const AttendArgs& args, const uint16_t* keys, const uint16_t* values,
                                        int num_tokens, float* shared, WarpState<D, kPadded>* state) {
  using L = Layout<D, kPadded>;
  constexpr int kSets = kPadded / 8, kEach = D / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  float* probabilities = shared + L::kProbabilities + warp * kPadded * kTile;
  float* decays = shared + L::kDecays + warp * kPadded;
  float x[kSets][4];
  TileLogits<D, kPadded, kBf16>(args, keys, num_tokens, shared + L::kQueries, x);
  __syncwarp();  // the last tile's probabilities have been read
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const float max = fmaxf(state->max[set], ptx::QuadMax(fmaxf(fmaxf(x[set][0], x[set][1]), fmaxf(x[set][2], x[set][3]))));
    const float decay = Weight(state->max[set], max);
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = Weight(x[set][i], max);
    float* out = probabilities + (g + 8 * set) * kTile + 2 * t;
    *reinterpret_cast<float2*>(out) = {p[0], p[1]};
    *reinterpret_cast<float2*>(out + 8) = {p[2], p[3]};
    if (t == 0) decays[g + 8 * set] = decay;
    state->max[set] = max;
    state->sum[set] = state->sum[set] * decay + ptx::QuadSum((p[0] + p[1]) + (p[2] + p[3]));
  }
  __syncwarp();
#pragma unroll
  for (int h = 0; h < kPadded; ++h) {
    if (h >= args.group) break;
#pragma unroll
    for (int e = 0; e < kEach; ++e) state->o[h][e] *= decays[h];
  }
#pragma unroll
  for (int four = 0; four < kTile / 4; ++four) {
    if (4 * four >= num_tokens) break;
    float v[4][kEach] = {};  // rows from num_tokens on hold anything: they must not be read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * four + i < num_tokens) LoadValues<D, kBf16>(values + (4 * four + i) * D, v[i]);
    }
#pragma unroll
    for (int h = 0; h < kPadded; ++h) {
      if (h >= args.group) break;
      const float4 p = *reinterpret_cast<const float4*>(probabilities + h * kTile + 4 * four);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        float o = state->o[h][e];
        o += p.x * v[0][e];
        o += p.y * v[1][e];
        o += p.z * v[2][e];
        o += p.w * v[3][e];
        state->o[h][e] = o;
      }
    }
  }
}

// Merges the parts of `num` states, part i of an array at base + i * stride: one output element a thread.
struct Part {
  float max;
  float sum;
};
template <class MaxAt, class SumAt>
__device__ __forceinline__ Part MergeParts(int num, MaxAt max_at, SumAt sum_at) {
  Part all = {NegativeInfinity(), 0};
  for (int i = 0; i < num; ++i) all.max = fmaxf(all.max, max_at(i));
  for (int i = 0; i < num; ++i) all.sum += Weight(max_at(i), all.max) * sum_at(i);
  return all;
}

template <int D, int kPadded>
__device__ void MergeWarps(const AttendArgs& args, const WarpState<D, kPadded>& state, float* shared) {
  using L = Layout<D, kPadded>;
  constexpr int kEach = D / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int h = 0; h < kPadded; ++h) {
    if (h >= args.group) break;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int d = D == 96 ? 32 * e + lane : kEach * lane + e;
      shared[L::kStates + (warp * kPadded + h) * D + d] = state.o[h][e];
    }
  }
  if (lane % 4 == 0) {
#pragma unroll
    for (int set = 0; set < kPadded / 8; ++set) {
      shared[L::kMaxima + warp * kPadded + lane / 4 + 8 * set] = state.max[set];
      shared[L::kSums + warp * kPadded + lane / 4 + 8 * set] = state.sum[set];
    }
  }
  __syncthreads();
  float* merged = shared + L::kMerged;
  for (int i = static_cast<int>(threadIdx.x); i < args.group * D; i += kThreads) {
    const int h = i / D;
    const auto max_at = [&](int w) { return shared[L::kMaxima + w * kPadded + h]; };
    const Part all = MergeParts(kWarps, max_at, [&](int w) { return shared[L::kSums + w * kPadded + h]; });
    float o = 0;
    for (int w = 0; w < kWarps; ++w)
      o += Weight(max_at(w), all.max) * shared[L::kStates + w * kPadded * D + i];
    merged[i] = o;
    if (i % D == 0) {
      merged[kPadded * D + h] = all.max;
      merged[kPadded * D + kPadded + h] = all.sum;
    }
  }
}

// Each CTA of the cluster finishes a share of the output elements from all CTAs' merged states.
template <int D, int kPadded>
__device__ void MergeCluster(const AttendArgs& args, int64_t row, float* shared) {
  using L = Layout<D, kPadded>;
  cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  const int rank = static_cast<int>(cluster.block_rank());
  const float* merged[kCluster];
#pragma unroll
  for (int c = 0; c < kCluster; ++c) merged[c] = cluster.map_shared_rank(shared + L::kMerged, c);
  for (int i = rank * kThreads + static_cast<int>(threadIdx.x); i < args.group * D; i += kCluster * kThreads) {
    const int h = i / D;
    float max[kCluster], sum[kCluster];
#pragma unroll
    for (int c = 0; c < kCluster; ++c) {
      max[c] = merged[c][kPadded * D + h];
      sum[c] = merged[c][kPadded * D + kPadded + h];
    }
    float all_max = NegativeInfinity(), all_sum = 0, o = 0;
#pragma unroll
    for (int c = 0; c < kCluster; ++c) all_max = fmaxf(all_max, max[c]);
#pragma unroll
    for (int c = 0; c < kCluster; ++c) {
      const float weight = Weight(max[c], all_max);
      all_sum += weight * sum[c];
      o += weight * merged[c][i];
    }
    const bool empty = all_max == NegativeInfinity();
    args.o[row * args.group * D + i] = empty ? 0 : o / all_sum;
    if (i % D == 0) args.lse[row * args.group + h] = empty ? NegativeInfinity() : (all_max + log2f(all_sum)) * kLn2;
  }
  cluster.sync();  // nobody leaves while its shared memory is read
}

template <int D, int kPadded, bool kBf16>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    AttendKernel(const __grid_constant__ AttendArgs args) {
  extern __shared__ __align__(16) float shared[];
  const int64_t row = blockIdx.x / kCluster;
  const int rank = static_cast<int>(blockIdx.x % kCluster), warp = threadIdx.x / 32;
  StageQueries<D, kPadded>(args, row, shared);
  __syncthreads();
  WarpState<D, kPadded> state = {};
#pragma unroll
  for (float& max : state.max) max = NegativeInfinity();
  const UnitRef* units = args.units + row * args.max_units;
  const int num_units = args.num_units[row];
  for (int u = warp * kCluster + rank; u < num_units; u += kWarps * kCluster) {
    const UnitRef unit = units[u];
    const auto* keys = reinterpret_cast<const uint16_t*>(unit.unit);
    const uint16_t* values = keys + args.page_tokens * D;
    for (int first = 0; first < unit.num_tokens; first += kTile)
      AddTile<D, kPadded, kBf16>(args, keys + first * D, values + first * D, min(kTile, unit.num_tokens - first), shared,
                                 &state);
  }
  MergeWarps(args, state, shared);
  MergeCluster<D, kPadded>(args, row, shared);
}

template <int D, int kPadded, bool kBf16>
cudaError_t LaunchOne(const AttendArgs& args, cudaStream_t stream) {
  constexpr size_t kBytes = Layout<D, kPadded>::kFloats * sizeof(float);
  if (const cudaError_t e = cudaFuncSetAttribute(AttendKernel<D, kPadded, kBf16>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      e != cudaSuccess)
    return e;
  const auto rows = static_cast<unsigned>(args.num_sequences) * static_cast<unsigned>(args.num_kv_heads);
  AttendKernel<D, kPadded, kBf16><<<rows * kCluster, kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <int D>
cudaError_t LaunchForDim(const AttendArgs& args, cudaStream_t stream) {
  if (args.dtype == KvDtype::kBf16)
    return args.group <= 8 ? LaunchOne<D, 8, true>(args, stream) : LaunchOne<D, 16, true>(args, stream);
  return args.group <= 8 ? LaunchOne<D, 8, false>(args, stream) : LaunchOne<D, 16, false>(args, stream);
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
