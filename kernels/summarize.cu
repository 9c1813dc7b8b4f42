#include <algorithm>

#include "kernels/built_geometries.h"
#include "kernels/summarize_codes.cuh"

namespace kvd {
namespace summarize {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ void Clear(int bytes, Lane lane, void* shared) {
  for (int i = lane.id; i < bytes / 16; i += 32) static_cast<uint4*>(shared)[i] = {0, 0, 0, 0};
}

__device__ __forceinline__ void StoreRecord(const uint8_t* record, const SummaryLayout& layout,
                                            Lane lane, uint8_t* coarse, uint8_t* fine) {
  const auto* words = reinterpret_cast<const uint4*>(record);
  const int num_coarse = static_cast<int>(layout.coarse_bytes / 16),
            num_fine = static_cast<int>(layout.fine_bytes / 16);
  for (int i = lane.id; i < num_coarse; i += 32) reinterpret_cast<uint4*>(coarse)[i] = words[i];
  for (int i = lane.id; i < num_fine; i += 32)
    reinterpret_cast<uint4*>(fine)[i] = words[num_coarse + i];
}

// Steps 3 to 9 of kernels/README.md, "Building a record": modes and their codes, of keys that are
// centred in their slots, `largest` in magnitude. `exponent` is the prescale. Returns tau's bits.
template <int D, int B, Encoder kEncoder>
__device__ uint32_t EncodeModes(const SummarizeUnitsArgs& args, const SummaryLayout& layout,
                                const uint8_t* metric, float largest, int exponent,
                                float centroid_scale, Lane lane, uint8_t* shared) {
  using S = Shape<D, B>;
  constexpr bool kMetric = kEncoder == Encoder::kE1S;
  auto* keys = reinterpret_cast<uint4*>(shared + S::kKeysAt);
  auto* scratch = reinterpret_cast<float*>(shared + S::kScratchAt);
  auto* remainder = reinterpret_cast<__half*>(shared + S::kRemainderAt);
  uint8_t* record = shared + S::kRecordAt;

  // The centred keys again to [1, 2): a page of near neighbours has few bits that differ. Below
  // 2^-60 their Gram would vanish in fp32: they are left to vanish here, and the page is one of
  // equal tokens.
  const int centred_exponent = largest > 0x1p-60f ? -FloorLog2(largest) : 0;
  const float centred_factor = PowerOfTwo(centred_exponent);
  exponent += centred_exponent;
  const float norm = sqrtf(SplitKeys<D, B>(centred_factor, lane, keys));
  MakeHalfGram<D, B, kMetric>(keys, metric, lane, scratch);
  __syncwarp();
  const float energy = FindEigenvectors<B>(scratch, lane);
  const Basis<D> basis =
      MakeBasis<D, B>(keys, scratch, scratch + kModes * B, norm, args.rank, lane);
  const BasisCodes<D> codes = EncodeBasis<D>(basis, ChooseStep<D, kEncoder>(basis, metric, lane));

  const int token = lane.id % B;
  float c[kModes], b[kModes];
  const Normal<B> normal(scratch);
  float delta_energy = 0;
  if constexpr (kEncoder == Encoder::kE0) {
    const float factor = basis.sign * basis.length * codes.step;  // of mode g
#pragma unroll
    for (int k = 0; k < kModes; ++k)
      c[k] = scratch[k * B + token] * __shfl_sync(kAllLanes, factor, 4 * k);
    Clear(2 * D, lane, remainder);
    __syncwarp();
  } else {
    __syncwarp();  // every lane has read the vectors
    delta_energy = MakeNormal<D, B, kMetric>(keys, codes, remainder, metric, lane, normal);
    __syncwarp();
    Clear(2 * D, lane, remainder);
    __syncwarp();
    double x[kModes];
    const float delta = centroid_scale * centred_factor;
#pragma unroll
    for (int k = 0; k < kModes; ++k) {
      b[k] = fmaf(delta, normal.delta[k], normal.targets[token * Normal<B>::kStride + k]);
      x[k] = static_cast<double>(b[k]);
    }
    Solve(normal.normal, args.rank, x);
#pragma unroll
    for (int k = 0; k < kModes; ++k) c[k] = static_cast<float>(x[k]);
    delta_energy *= delta * delta * B;
  }
  const float scale = EncodeCoefficients<B>(exponent, args.rank, layout, lane, c, record);
  WriteBasis<D>(codes, scale, args.rank, layout, lane, record);
  if constexpr (!kMetric) return 0;
  const float taken = WarpSum(lane.id < B ? CoarseEnergy(c, b, normal.normal) : 0.0f);
  return EncodeTau(energy + delta_energy - taken, B, Metric<D>(metric).Trace(), exponent);
}

// One unit a warp, no barrier between warps. A unit's record depends on it, its metric and the
// arguments alone.
template <int D, int B, Encoder kEncoder>
__device__ void SummarizeUnit(const KernelArgs& kernel, int64_t unit_idx, Lane lane,
                              uint8_t* shared) {
  using S = Shape<D, B>;
  const SummarizeUnitsArgs& args = kernel.args;
  const SummaryLayout& layout = kernel.layout;
  const bool is_bf16 = args.dtype == KvDtype::kBf16;
  auto* keys = reinterpret_cast<uint4*>(shared + S::kKeysAt);
  uint8_t* record = shared + S::kRecordAt;
  const uint8_t* unit = args.units[unit_idx];

  Clear(S::kRecordBytes, lane, record);
  __syncwarp();
  const Loaded loaded = LoadUnit<D, B>(unit, is_bf16, lane, keys);
  int non_finite = -1;
  if (!loaded.finite) {
    non_finite = FindNonFinite<D, B>(unit, is_bf16, lane);
  } else {
    const int exponent = loaded.largest > 0 ? -FloorLog2(loaded.largest) : 0;
    RotateKeys<D, B>(is_bf16, args.rotated, exponent, lane, keys);
    float mean[S::kTiles][4];
    const float largest = Centre<D, B>(lane, keys, mean);
    const Centroid centroid = EncodeCentroid<D, B>(
        mean, exponent, layout, lane, record, reinterpret_cast<__half*>(shared + S::kRemainderAt));
    __syncwarp();
    const uint8_t* metric = kEncoder == Encoder::kE1S ? args.metrics[unit_idx] : nullptr;
    const uint32_t tau = EncodeModes<D, B, kEncoder>(args, layout, metric, largest, exponent,
                                                     centroid.scale, lane, shared);
    if (lane.id == 0) {
      *reinterpret_cast<uint16_t*>(record + layout.coarse[kCentroidScale]) =
          static_cast<uint16_t>(centroid.bits);
      *reinterpret_cast<uint16_t*>(record + layout.coarse[kTau]) = static_cast<uint16_t>(tau);
      *reinterpret_cast<uint64_t*>(record + layout.coarse[kUnitChecksum]) = loaded.checksum;
    }
  }
  __syncwarp();
  if (lane.id == 0) args.non_finite[unit_idx] = non_finite;
  StoreRecord(record, layout, lane, args.coarse[unit_idx], args.fine[unit_idx]);
}

// What a multiprocessor has for the CTAs' shared memory, 1 KiB of each taken by the system. The
// rest of its 256 KiB is L1 and should hold a metric: at D 128, B 16 four CTAs leave 92 KiB, a
// metric is 64.
constexpr int kSharedOfSm = 227 << 10;
template <int D, int B>
struct Cta {
  static constexpr int kSharedBytes = kWarps * Shape<D, B>::kBytes;
  static constexpr int kPerSm =
      kSharedOfSm / (kSharedBytes + 1024) < 4 ? kSharedOfSm / (kSharedBytes + 1024) : 4;
};

template <int D, int B, Encoder kEncoder>
__global__ void __launch_bounds__(kThreads, Cta<D, B>::kPerSm)
    SummarizeKernel(const __grid_constant__ KernelArgs kernel) {
  extern __shared__ __align__(16) uint8_t shared[];
  const int id = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t unit_idx = int64_t{blockIdx.x} * kWarps + warp;
  if (unit_idx >= kernel.args.num_units) return;
  SummarizeUnit<D, B, kEncoder>(kernel, unit_idx, {id, id / 4, id % 4},
                                shared + warp * Shape<D, B>::kBytes);
}

template <int D, int B, Encoder kEncoder>
cudaError_t LaunchUnits(const SummarizeUnitsArgs& args, cudaStream_t stream) {
  using C = Cta<D, B>;
  const auto kernel = SummarizeKernel<D, B, kEncoder>;
  if (const cudaError_t e = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
      e != cudaSuccess)
    return e;
  const int64_t ctas = (args.num_units + kWarps - 1) / kWarps;
  kernel<<<static_cast<unsigned>(ctas), kThreads, C::kSharedBytes, stream>>>(
      {args, MakeSummaryLayout(D, B, args.rank)});
  return cudaGetLastError();
}

template <int D, int B>
cudaError_t LaunchEncoder(const SummarizeUnitsArgs& args, cudaStream_t stream) {
  switch (args.encoder) {
    case Encoder::kE0:
      return LaunchUnits<D, B, Encoder::kE0>(args, stream);
    case Encoder::kE1:
      return LaunchUnits<D, B, Encoder::kE1>(args, stream);
    case Encoder::kE1S:
      return LaunchUnits<D, B, Encoder::kE1S>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <int D>
cudaError_t LaunchTokens(const SummarizeUnitsArgs& args, cudaStream_t stream) {
#if KVD_ALL_GEOMETRIES
  if (args.page_tokens == 32) return LaunchEncoder<D, 32>(args, stream);
#endif
  return LaunchEncoder<D, 16>(args, stream);
}

// --- the packed metric -------------------------------------------------------------------------

constexpr int kPackThreads = 256;

// Dim that stands at place `place` of a tile.
__device__ __forceinline__ int DimOf(int tile, int place) {
  return tile / 2 * 32 + place % 8 / 2 * 8 + tile % 2 * 4 + place / 8 * 2 + place % 2;
}

// The largest (kMax) or the sum of the threads' values, in a fixed order.
template <bool kMax>
__device__ float CombineThreads(float x, float* shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  for (int half = kPackThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) {
      const float other = shared[threadIdx.x + half];
      shared[threadIdx.x] = kMax ? fmaxf(shared[threadIdx.x], other) : shared[threadIdx.x] + other;
    }
    __syncthreads();
  }
  const float result = shared[0];
  __syncthreads();
  return result;
}

// One metric a CTA; only the part above the diagonal is read.
__global__ void __launch_bounds__(kPackThreads)
    PackMetricsKernel(const float* metrics, int dim, size_t packed_bytes, uint8_t* packed) {
  __shared__ float shared[kPackThreads];
  const float* s = metrics + int64_t{blockIdx.x} * dim * dim;
  auto* out = reinterpret_cast<uint4*>(packed + blockIdx.x * packed_bytes);
  float largest = 0, trace = 0;
  for (int i = static_cast<int>(threadIdx.x); i < dim * dim; i += kPackThreads) {
    if (i / dim <= i % dim) largest = fmaxf(largest, fabsf(s[i]));
    if (i / dim == i % dim) trace += s[i];
  }
  largest = CombineThreads<true>(largest, shared);
  trace = CombineThreads<false>(trace, shared);
  const int exponent = largest > 0 ? -FloorLog2(largest) : 0;

  const int tiles = dim / 16, part = tiles * tiles * 32;
  for (int i = static_cast<int>(threadIdx.x); i < part; i += kPackThreads) {
    const int lane = i % 32, row_tile = i / 32 / tiles, column_tile = i / 32 % tiles;
    SplitPair pairs[4];
    for (int reg = 0; reg < 4; ++reg) {
      const int column = DimOf(column_tile, reg / 2 * 8 + lane / 4);
      float x[2];
      for (int j = 0; j < 2; ++j) {
        const int row = DimOf(row_tile, reg % 2 * 8 + lane % 4 * 2 + j);
        x[j] = ldexpf(s[min(row, column) * dim + max(row, column)], exponent);
      }
      pairs[reg] = Split(x[0], x[1]);
    }
    out[i] = {pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high};
    out[part + i] = {pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low};
  }
  if (threadIdx.x == 0) out[2 * part] = {__float_as_uint(ldexpf(trace, exponent)), 0, 0, 0};
}

bool IsHeadDim(int head_dim) {
  return head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

}  // namespace
}  // namespace summarize

cudaError_t LaunchSummarize(const SummarizeUnitsArgs& args, cudaStream_t stream) {
  const bool valid = args.num_units >= 0 && args.num_units <= (int64_t{1} << 31) &&
                     (args.rank == 4 || args.rank == 8) &&
                     (args.dtype == KvDtype::kBf16 || args.dtype == KvDtype::kFp16) &&
                     (args.metrics != nullptr) == (args.encoder == Encoder::kE1S);
  if (!valid) return cudaErrorInvalidValue;
  if (args.num_units == 0) return cudaSuccess;
  if (!summarize::IsHeadDim(args.head_dim) || (args.page_tokens != 16 && args.page_tokens != 32))
    return cudaErrorInvalidValue;
  if (!IsBuilt(args.head_dim, args.page_tokens, args.rank)) return cudaErrorNotSupported;
  switch (args.head_dim) {
    case 64:
      return summarize::LaunchTokens<64>(args, stream);
    case 128:
      return summarize::LaunchTokens<128>(args, stream);
#if KVD_ALL_GEOMETRIES
    case 96:
      return summarize::LaunchTokens<96>(args, stream);
    case 256:
      return summarize::LaunchTokens<256>(args, stream);
#endif
    default:
      return cudaErrorNotSupported;
  }
}

cudaError_t LaunchPackMetrics(const float* metrics, int num_metrics, int head_dim, uint8_t* packed,
                              cudaStream_t stream) {
  if (num_metrics < 0 || !summarize::IsHeadDim(head_dim)) return cudaErrorInvalidValue;
  if (num_metrics == 0) return cudaSuccess;
  summarize::
      PackMetricsKernel<<<static_cast<unsigned>(num_metrics), summarize::kPackThreads, 0, stream>>>(
          metrics, head_dim, PackedMetricBytes(head_dim), packed);
  return cudaGetLastError();
}

}  // namespace kvd
