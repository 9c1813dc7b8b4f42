// The codes of a record in one warp: int4 basis, least-squares coefficients, scales, tau.
//
// Device code only. Internal to kernels/summarize*.

#ifndef LOCKS_KVD_KERNELS_SUMMARIZE_CODES_CUH_
#define LOCKS_KVD_KERNELS_SUMMARIZE_CODES_CUH_

#include "kernels/quant.h"
#include "kernels/summarize_modes.cuh"

namespace kvd::summarize {

inline constexpr int kNumClips = 5;

__device__ __forceinline__ float Clip(int i) {
  return i == 0 ? 1.0f : i == 1 ? 0.92f : i == 2 ? 0.85f : i == 3 ? 0.78f : 0.70f;
}

// --- centroid ----------------------------------------------------------------------------------

struct Centroid {
  uint32_t bits;  // s_mu as stored
  float scale;    // s_mu, times the prescale
};

// Writes both nibbles of the centroid into the record, and what rounding left of mean / s_mu, in
// fp16, [D].
template <int D, int B>
__device__ Centroid EncodeCentroid(const float (&mean)[D / 16][4], int exponent,
                                   const SummaryLayout& layout, Lane lane, uint8_t* record,
                                   __half* remainder) {
  using S = Shape<D, B>;
  float largest = 0;
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(mean[tile][e]));
  }
  const Scale scale = RoundScale(ptx::QuadMax(largest) / 127.0f, exponent);
  const float inverse = scale.value > 0 ? 1.0f / scale.value : 0.0f;
#pragma unroll
  for (int i = 0; i < S::kPieces; ++i) {
    uint32_t high = 0, low = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float x = mean[2 * i + e / 4][e % 4] * inverse;
      const float code = RoundClamped(x, -127.0f, 127.0f);
      const int mu8 = static_cast<int>(code);
      high |= static_cast<uint32_t>(CentroidHighNibble(mu8)) << (4 * e);
      low |= static_cast<uint32_t>(CentroidLowNibble(mu8)) << (4 * e);
      if (lane.g == 0) remainder[32 * i + 8 * lane.t + e] = __float2half_rn(x - code);
    }
    if (lane.g != i) continue;
    const int at = 16 * i + 4 * lane.t;
    *reinterpret_cast<uint32_t*>(record + layout.coarse[kCentroidHigh] + at) = high;
    *reinterpret_cast<uint32_t*>(record + layout.coarse_bytes + layout.fine[kCentroidLow] + at) =
        low;
  }
  return {scale.bits, scale.value};
}

// --- int4 basis --------------------------------------------------------------------------------

// The codes of mode g: as a left operand of a product (fp16: exact), and packed as stored.
template <int D>
struct BasisCodes {
  uint32_t halves[D / 16][2];  // registers 0 and 2 of each tile
  uint32_t packed[D / 32];
  float step;  // v is about step * code
};

struct Step {
  float step, inverse;
};
template <int D>
__device__ __forceinline__ Step StepOf(const Basis<D>& basis, float clip) {
  const float step = Bf16ToFloat(RoundToBf16(clip * basis.largest / 7.0f));
  return {step, step > 0 ? 1.0f / step : 0.0f};
}

__device__ __forceinline__ float BasisCode(float v, Step s) {
  return RoundClamped(v * s.inverse, -8.0f, 7.0f);
}
__device__ __forceinline__ float BasisError(float v, Step s) {
  return fmaf(-s.step, BasisCode(v, s), v);
}

// Half of e' S e for the errors of two clips, in one product: rows 0-7 are the first, rows 8-15 the
// second. One part of the operands is enough: the sum is right to about 2^-11, and only compared.
template <int D>
__device__ float2 MetricErrors(const Basis<D>& basis, Step first, Step second,
                               const Metric<D>& metric, Lane lane) {
  constexpr int kTiles = D / 16;
  uint32_t a[kTiles][4];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float* v = basis.v[tile];
    a[tile][0] = PackHalves(BasisError(v[0], first), BasisError(v[1], first));
    a[tile][1] = PackHalves(BasisError(v[0], second), BasisError(v[1], second));
    a[tile][2] = PackHalves(BasisError(v[2], first), BasisError(v[3], first));
    a[tile][3] = PackHalves(BasisError(v[2], second), BasisError(v[3], second));
  }
  float2 sum = {0, 0};
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    float c[2][4] = {};
    const uint4 diagonal = metric.High(j, j, lane);
    ptx::MmaFp16(c[0], a[j], diagonal.x, diagonal.y, c[0]);
    ptx::MmaFp16(c[1], a[j], diagonal.z, diagonal.w, c[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i / 4][i % 4] *= 0.5f;
#pragma unroll
    for (int i = 0; i < j; ++i) {
      const uint4 s = metric.High(i, j, lane);
      ptx::MmaFp16(c[0], a[i], s.x, s.y, c[0]);
      ptx::MmaFp16(c[1], a[i], s.z, s.w, c[1]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 x = UnpackHalves(a[j][2 * n]), y = UnpackHalves(a[j][2 * n + 1]);
      sum.x = fmaf(c[n][0], x.x, fmaf(c[n][1], x.y, sum.x));
      sum.y = fmaf(c[n][2], y.x, fmaf(c[n][3], y.y, sum.y));
    }
  }
  return {ptx::QuadSum(sum.x), ptx::QuadSum(sum.y)};
}

template <int D>
__device__ float PlainError(const Basis<D>& basis, Step s) {
  float sum = 0;
#pragma unroll
  for (int tile = 0; tile < D / 16; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float error = BasisError(basis.v[tile][e], s);
      sum = fmaf(error, error, sum);
    }
  }
  return ptx::QuadSum(sum);
}

// The clip with the least squared error, the first of equals.
template <int D, Encoder kEncoder>
__device__ Step ChooseStep(const Basis<D>& basis, const uint8_t* packed, Lane lane) {
  Step best = StepOf(basis, 1.0f);
  if constexpr (kEncoder == Encoder::kE0) return best;
  float least = INFINITY;
#pragma unroll 1
  for (int i = 0; i < kNumClips; i += 2) {
    const Step first = StepOf(basis, Clip(i)), second = StepOf(basis, Clip(i + 1));
    float2 errors;
    if constexpr (kEncoder == Encoder::kE1S) {
      errors = MetricErrors<D>(basis, first, second, Metric<D>(packed), lane);
    } else {
      errors = {PlainError<D>(basis, first), PlainError<D>(basis, second)};
    }
    if (errors.x < least) least = errors.x, best = first;
    if (i + 1 < kNumClips && errors.y < least) least = errors.y, best = second;
  }
  return best;
}

template <int D>
__device__ BasisCodes<D> EncodeBasis(const Basis<D>& basis, Step step) {
  BasisCodes<D> codes;
  codes.step = step.step;
#pragma unroll
  for (int tile = 0; tile < D / 16; ++tile) {
    float x[4];
    uint32_t nibbles = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = BasisCode(basis.v[tile][e], step);
      nibbles |= Nibble(x[e]) << (4 * e);
    }
    codes.halves[tile][0] = PackHalves(x[0], x[1]);
    codes.halves[tile][1] = PackHalves(x[2], x[3]);
    codes.packed[tile / 2] = tile % 2 == 0 ? nibbles : codes.packed[tile / 2] | nibbles << 16;
  }
  return codes;
}

// --- least squares -----------------------------------------------------------------------------

// What the refit works on, in shared memory, row-major. V are the integer basis rows, delta what
// the centroid's rounding leaves, over s_mu.
template <int B>
struct Normal {
  static constexpr int kStride = kModes + 1;
  float* targets;  // [B][kStride]  X S V'
  float* normal;   // [kModes][kModes]  V S V'
  float* delta;    // [kModes]  delta S V'
  __device__ explicit Normal(float* scratch)
      : targets(scratch), normal(scratch + B * kStride), delta(normal + kModes * kModes) {}
  static_assert(B * kStride + kModes * kModes + kModes <= B * (B + 1));
};

// Fills `out`; returns delta S delta' (0 without a metric: nothing needs it).
template <int D, int B, bool kMetric>
__device__ float MakeNormal(const uint4* keys, const BasisCodes<D>& codes, const __half* remainder,
                            const uint8_t* packed, Lane lane, const Normal<B>& out) {
  using S = Shape<D, B>;
  // Row 8 of the left operand: delta.
  uint32_t delta[S::kTiles][2];
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
    const uint2 bits =
        *reinterpret_cast<const uint2*>(remainder + tile / 2 * 32 + 8 * lane.t + tile % 2 * 4);
    delta[tile][0] = lane.g == 0 ? bits.x : 0;
    delta[tile][1] = lane.g == 0 ? bits.y : 0;
  }
  float targets[S::kSets][4] = {}, normal[4] = {};
  float squared = 0;
#pragma unroll
  for (int j = 0; j < S::kTiles; ++j) {
    const uint32_t row[4] = {codes.halves[j][0], delta[j][0], codes.halves[j][1], delta[j][1]};
    SplitPair b0 = {row[0], 0}, b1 = {row[2], 0};
    if constexpr (kMetric) {
      const Metric<D> metric(packed);
      float c[2][4] = {};
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) {
        const uint32_t a[4] = {codes.halves[i][0], delta[i][0], codes.halves[i][1], delta[i][1]};
        const uint4 high = metric.High(i, j, lane), low = metric.Low(i, j, lane);
        ptx::MmaFp16(c[0], a, high.x, high.y, c[0]);
        ptx::MmaFp16(c[1], a, high.z, high.w, c[1]);
        ptx::MmaFp16(c[0], a, low.x, low.y, c[0]);
        ptx::MmaFp16(c[1], a, low.z, low.w, c[1]);
      }
      b0 = Split(c[0][0], c[0][1]);
      b1 = Split(c[1][0], c[1][1]);
      const float2 x = UnpackHalves(delta[j][0]), y = UnpackHalves(delta[j][1]);
      squared += c[0][2] * x.x + c[0][3] * x.y + c[1][2] * y.x + c[1][3] * y.y;
    }
    ptx::MmaFp16(normal, row, b0.high, b1.high, normal);
    if constexpr (kMetric) ptx::MmaFp16(normal, row, b0.low, b1.low, normal);
#pragma unroll
    for (int m = 0; m < S::kSets; ++m) {
      const SplitTile x = LoadKeys<D, B>(keys, m, j, lane);
      ptx::MmaFp16(targets[m], x.high, b0.high, b1.high, targets[m]);
      ptx::MmaFp16(targets[m], x.low, b0.high, b1.high, targets[m]);
      if constexpr (kMetric) ptx::MmaFp16(targets[m], x.high, b0.low, b1.low, targets[m]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * lane.t + i % 2;
    if (i < 2) out.normal[lane.g * kModes + column] = normal[i];
    if (i >= 2 && lane.g == 0) out.delta[column] = normal[i];
#pragma unroll
    for (int m = 0; m < S::kSets; ++m)
      out.targets[(16 * m + lane.g + 8 * (i / 2)) * Normal<B>::kStride + column] = targets[m][i];
  }
  return WarpSum(squared);
}

// x = A^-1 x by Cholesky, A = V S V' + e I. In double: e stands at the edge of what fp32 resolves.
__device__ __forceinline__ void Solve(const float* normal, int rank, double (&x)[kModes]) {
  constexpr double kRidge = 1e-6;
  double l[kModes][kModes], inverse[kModes], trace = 0;
#pragma unroll
  for (int k = 0; k < kModes; ++k) trace += static_cast<double>(normal[k * kModes + k]);
#pragma unroll
  for (int i = 0; i < kModes; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      double sum = static_cast<double>(normal[i * kModes + j]);
      if (i == j) sum += kRidge * trace / rank;
#pragma unroll
      for (int k = 0; k < j; ++k) sum -= l[i][k] * l[j][k];
      if (i == j) {
        inverse[i] = rsqrt(fmax(sum, 1e-300));
      } else {
        l[i][j] = sum * inverse[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kModes; ++i) {
#pragma unroll
    for (int k = 0; k < i; ++k) x[i] -= l[i][k] * x[k];
    x[i] *= inverse[i];
  }
#pragma unroll
  for (int i = kModes - 1; i >= 0; --i) {
#pragma unroll
    for (int k = i + 1; k < kModes; ++k) x[i] -= l[k][i] * x[k];
    x[i] *= inverse[i];
  }
}

// --- coefficients, tau -------------------------------------------------------------------------

// Quantises the lane's token: `c` become the coefficients as stored, scale times code. Writes codes
// and scales into the record; returns the scale of mode id % 8.
template <int B>
__device__ float EncodeCoefficients(int exponent, int rank, const SummaryLayout& layout, Lane lane,
                                    float (&c)[kModes], uint8_t* record) {
  float largest = 0;
#pragma unroll
  for (int k = 0; k < kModes; ++k) {
    const float of_mode = WarpMax(lane.id < B ? fabsf(c[k]) : 0.0f);
    if (lane.id % kModes == k) largest = of_mode;
  }
  const Scale scale = RoundScale(largest / 127.0f, exponent);
  const float inverse = scale.value > 0 ? 1.0f / scale.value : 0.0f;
  uint8_t* fine = record + layout.coarse_bytes;
#pragma unroll
  for (int k = 0; k < kModes; ++k) {
    const float code = RoundClamped(c[k] * __shfl_sync(kAllLanes, inverse, k), -127.0f, 127.0f);
    c[k] = code * __shfl_sync(kAllLanes, scale.value, k);
    uint8_t* out = k < kCoarseModes
                       ? record + layout.coarse[kCoarseCoefficients] + k * B
                       : fine + layout.fine[kFineCoefficients] + (k - kCoarseModes) * B;
    if (lane.id < B && k < rank) out[lane.id] = static_cast<uint8_t>(static_cast<int>(code));
  }
  if (lane.id < rank) {
    uint8_t* out = lane.id < kCoarseModes
                       ? record + layout.coarse[kCoarseScales] + 2 * lane.id
                       : fine + layout.fine[kFineScales] + 2 * (lane.id - kCoarseModes);
    *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(scale.bits);
  }
  return scale.value;
}

// Basis rows into the record, but of modes whose scale vanished: `scale` is that of mode id % 8.
template <int D>
__device__ void WriteBasis(const BasisCodes<D>& codes, float scale, int rank,
                           const SummaryLayout& layout, Lane lane, uint8_t* record) {
  const float own = __shfl_sync(kAllLanes, scale, lane.g);
  if (own == 0 || lane.g >= rank) return;
  uint8_t* row = lane.g < kCoarseModes ? record + layout.coarse[kCoarseBasis] + lane.g * (D / 2)
                                       : record + layout.coarse_bytes + layout.fine[kFineBasis] +
                                             (lane.g - kCoarseModes) * (D / 2);
#pragma unroll
  for (int i = 0; i < D / 32; ++i)
    *reinterpret_cast<uint32_t*>(row + 16 * i + 4 * lane.t) = codes.packed[i];
}

// What the two coarse modes `c`, as stored, take off the energy of the lane's token, of which `b` =
// T S V'.
__device__ __forceinline__ float CoarseEnergy(const float (&c)[kModes], const float (&b)[kModes],
                                              const float* normal) {
  const float square =
      c[0] * c[0] * normal[0] + 2 * c[0] * c[1] * normal[kModes] + c[1] * c[1] * normal[kModes + 1];
  return 2 * (c[0] * b[0] + c[1] * b[1]) - square;
}

// bf16 bits of energy / (tokens tr(S)), with a prescale of 2^exponent undone. In double: twice the
// prescale may leave fp32.
__device__ __forceinline__ uint32_t EncodeTau(float energy, int tokens, float trace, int exponent) {
  const double tau =
      ldexp(static_cast<double>(energy) / (static_cast<double>(trace) * tokens), -2 * exponent);
  return RoundToBf16(static_cast<float>(fmin(fmax(tau, 0.0), static_cast<double>(kMaxBf16))));
}

}  // namespace kvd::summarize

#endif  // LOCKS_KVD_KERNELS_SUMMARIZE_CODES_CUH_
