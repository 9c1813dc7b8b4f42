// The modes of a page in one warp: Gram matrix, eigenvectors by Jacobi rotations in registers,
// basis vectors.
//
// Why one-sided Jacobi on a Cholesky factor: the Gram is L L', so rotations V from the right that
// make the columns of L V orthogonal leave L V = U sqrt(W). The columns are then the eigenvectors,
// scaled: V need not be kept, half of the two-sided method's work, and a factor of rows in falling
// order takes 5 sweeps where the Gram itself takes
// 8. Step x pairs column c with column c ^ x, which is one shuffle.
// Device code only. Internal to kernels/summarize*.

#ifndef LOCKS_KVD_KERNELS_SUMMARIZE_MODES_CUH_
#define LOCKS_KVD_KERNELS_SUMMARIZE_MODES_CUH_

#include "kernels/summarize_keys.cuh"

namespace kvd::summarize {

// The thresholds of kernels/README.md, "Building a record", step 4.
inline constexpr float kModeFloor = 0x1p-10f;
inline constexpr float kNoiseFloor = 0x1p-16f;

template <int B>
inline constexpr int kMaxSweeps = B == 16 ? 10 : 12;
// What is below these, beside a trace of 1 to 2, is rounding: pivots that are taken for 0, columns
// (squared lengths) that need not be orthogonal before the sweeps end, and the square of a dot
// product that is no longer rotated away.
inline constexpr float kZeroPivot = 1e-7f;
inline constexpr float kWeak = 1e-7f;
inline constexpr float kNegligible = 1e-36f;
// Convergence is quadratic: after a sweep that met no larger cosine than this, all are at rounding.
inline constexpr float kNearlyOrthogonal = 1e-3f;

// --- the packed metric -------------------------------------------------------------------------

// [high | low][tile i][tile j][lane] of 16 bytes: dims of tile i by dims of tile j as the right
// operands for the first and the last eight columns. Then its trace. Scaled by a power of two to a
// largest magnitude in [1, 2).
template <int D>
struct Metric {
  static constexpr int kTiles = D / 16;
  static constexpr int kPart = kTiles * kTiles * 32;  // 16-byte words
  const uint4* words;

  __device__ explicit Metric(const uint8_t* packed)
      : words(reinterpret_cast<const uint4*>(packed)) {}
  __device__ __forceinline__ uint4 High(int i, int j, Lane lane) const {
    return __ldg(words + (i * kTiles + j) * 32 + lane.id);
  }
  __device__ __forceinline__ uint4 Low(int i, int j, Lane lane) const {
    return __ldg(words + kPart + (i * kTiles + j) * 32 + lane.id);
  }
  __device__ __forceinline__ float Trace() const {
    return __ldg(reinterpret_cast<const float*>(words + 2 * kPart));
  }
};

// c[0], c[1] (columns 0-7 and 8-15 of tile j) += a times the metric's tile (i, j).
template <int D>
__device__ __forceinline__ void MultiplyMetric(float (&c)[2][4], const SplitTile& a,
                                               const Metric<D>& metric, int i, int j, Lane lane) {
  const uint4 high = metric.High(i, j, lane), low = metric.Low(i, j, lane);
  MultiplySplit(c[0], a, {high.x, low.x}, {high.y, low.y});
  MultiplySplit(c[1], a, {high.z, low.z}, {high.w, low.w});
}

// The result for one tile, as a left operand of the next product.
__device__ __forceinline__ SplitTile SplitResult(const float (&c)[2][4]) {
  const SplitPair a0 = Split(c[0][0], c[0][1]), a1 = Split(c[0][2], c[0][3]);
  const SplitPair a2 = Split(c[1][0], c[1][1]), a3 = Split(c[1][2], c[1][3]);
  return {{a0.high, a1.high, a2.high, a3.high}, {a0.low, a1.low, a2.low, a3.low}};
}

// --- Gram --------------------------------------------------------------------------------------

// Writes H with H + H' = X S X' (S = I without a metric): X U X' for S = U + U', U the part above
// the diagonal and half of the diagonal.
template <int D, int B, bool kMetric>
__device__ void MakeHalfGram(const uint4* keys, const uint8_t* packed, Lane lane, float* gram) {
  using S = Shape<D, B>;
  float half[S::kSets][S::kRows][4] = {};
#pragma unroll 1
  for (int j = 0; j < S::kTiles; ++j) {
    SplitTile rows[S::kSets];
    SplitTile product[S::kSets];
#pragma unroll
    for (int m = 0; m < S::kSets; ++m) rows[m] = LoadKeys<D, B>(keys, m, j, lane);
    if constexpr (kMetric) {
      const Metric<D> metric(packed);
      float c[S::kSets][2][4] = {};
#pragma unroll
      for (int m = 0; m < S::kSets; ++m) {
        MultiplyMetric(c[m], rows[m], metric, j, j, lane);
#pragma unroll
        for (int i = 0; i < 8; ++i) c[m][i / 4][i % 4] *= 0.5f;
      }
#pragma unroll 2
      for (int i = 0; i < j; ++i) {
#pragma unroll
        for (int m = 0; m < S::kSets; ++m)
          MultiplyMetric(c[m], LoadKeys<D, B>(keys, m, i, lane), metric, i, j, lane);
      }
#pragma unroll
      for (int m = 0; m < S::kSets; ++m) product[m] = SplitResult(c[m]);
    } else {
#pragma unroll
      for (int m = 0; m < S::kSets; ++m) product[m] = rows[m];
    }
#pragma unroll
    for (int m = 0; m < S::kSets; ++m) {
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        const SplitTile& x = rows[r / 2];
        MultiplySplit(half[m][r], product[m], {x.high[r % 2], x.low[r % 2]},
                      {x.high[r % 2 + 2], x.low[r % 2 + 2]});
      }
    }
  }
#pragma unroll
  for (int m = 0; m < S::kSets; ++m) {
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * m + lane.g + 8 * (i / 2), column = 8 * r + 2 * lane.t + i % 2;
        gram[row * S::kGramStride + column] = kMetric ? half[m][r][i] : 0.5f * half[m][r][i];
      }
    }
  }
}

// --- eigenvectors ------------------------------------------------------------------------------

// A lane's share of the columns: elements first .. of column c, first = kEach * (id / B), c = id %
// B.
template <int B>
struct Column {
  static constexpr int kEach = B * B / 32;
  float a[kEach];
};

// Sum over the lanes of a column.
template <int B>
__device__ __forceinline__ float ColumnSum(float x) {
  if constexpr (B == 16) x += __shfl_xor_sync(kAllLanes, x, 16);
  return x;
}

template <int B>
__device__ __forceinline__ float SquaredLength(const Column<B>& column) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Column<B>::kEach; ++i) sum = fmaf(column.a[i], column.a[i], sum);
  return ColumnSum<B>(sum);
}

// Within 2^-22, denormals as 0: a rotation only needs the same angle in both of its columns.
__device__ __forceinline__ float RoughRoot(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float RoughInverseRoot(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float RoughInverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rotates columns c and c ^ x so that they become orthogonal, the longer one in the lower place
// (sorted columns converge sooner); returns whether their cosine was not small.
template <int B>
__device__ __forceinline__ bool RotatePair(int x, Lane lane, Column<B>* own, float* squared) {
  constexpr int kEach = Column<B>::kEach;
  float other[kEach];
  float dots[2] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    other[i] = __shfl_xor_sync(kAllLanes, own->a[i], x);
    dots[i % 2] = fmaf(own->a[i], other[i], dots[i % 2]);
  }
  const float dot = ColumnSum<B>(dots[0] + dots[1]);
  const float alpha = *squared, beta = __shfl_xor_sync(kAllLanes, alpha, x);
  const float longer = fmaxf(alpha, beta), shorter = fminf(alpha, beta);
  const bool upper = (lane.id & (1 << (31 - __clz(x)))) != 0;
  const float side = upper ? -1.0f : 1.0f;
  const bool swaps = (beta - alpha) * side > 0;
  // The tangent of the smaller angle, with the sign of the dot product.
  const float square = dot * dot, difference = longer - shorter;
  const float magnitude = difference + RoughRoot(fmaf(difference, difference, 4.0f * square));
  const float tangent = square > kNegligible ? 2.0f * dot * RoughInverse(magnitude) : 0.0f;
  const float cosine = RoughInverseRoot(fmaf(tangent, tangent, 1.0f));
  const float sine = cosine * tangent * side;
  const float of_own = swaps ? sine : cosine, of_other = swaps ? cosine : sine;
#pragma unroll
  for (int i = 0; i < kEach; ++i) own->a[i] = fmaf(of_other, other[i], of_own * own->a[i]);
  *squared = fmaxf(fmaf(side, tangent * dot, upper ? shorter : longer), 0.0f);
  return shorter > kWeak && square > kNearlyOrthogonal * kNearlyOrthogonal * alpha * beta;
}

// The column's place among B values that the first B lanes hold: falling, equal ones by their
// column.
template <int B>
__device__ __forceinline__ int RankOf(float value, int c) {
  int rank = 0;
#pragma unroll 4
  for (int other = 0; other < B; ++other) {
    const float w = __shfl_sync(kAllLanes, value, other);
    rank += w > value || (w == value && other < c);
  }
  return rank;
}

// Cholesky, in place: columns of a symmetric semidefinite matrix become those of its lower factor.
template <int B>
__device__ __forceinline__ void Factor(int c, int first, Column<B>* own) {
  constexpr int kEach = Column<B>::kEach;
  float own_inverse = 0;
#pragma unroll
  for (int k = 0; k < B; ++k) {
    float row_k = own->a[k % kEach];  // of the own column: held by one half
    if constexpr (B == 16) row_k = __shfl_sync(kAllLanes, row_k, k / kEach * B + c);
    const float pivot = __shfl_sync(kAllLanes, row_k, k);
    const float inverse = pivot > kZeroPivot ? rsqrtf(pivot) : 0.0f;
    if (c == k) own_inverse = inverse;
    const float factor = c > k ? row_k * inverse * inverse : 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float pivot_column = __shfl_sync(kAllLanes, own->a[i], first / kEach * B + k);
      own->a[i] = fmaf(-factor, pivot_column, own->a[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) own->a[i] = first + i < c ? 0.0f : own->a[i] * own_inverse;
}

// Eigenpairs of H + H': the kModes strongest, falling. Writes vectors [kModes][B] and values
// [kModes] over H; returns the matrix's trace.
template <int B>
__device__ float FindEigenvectors(float* scratch, Lane lane) {
  constexpr int kEach = Column<B>::kEach, kStride = B + 1;
  const int c = lane.id % B, first = lane.id / B * kEach;
  auto* tokens =
      reinterpret_cast<int*>(scratch + B * kStride);  // in falling order of their diagonal elements
  const float diagonal = 2.0f * scratch[c * kStride + c];
  const float trace = WarpSum(lane.id < B ? diagonal : 0.0f);
  const int place = RankOf<B>(diagonal, c);
  if (lane.id < B) tokens[place] = c;
  __syncwarp();
  // To a trace of 1 to 2, so that thresholds are absolute and no square under- or overflows.
  const float unit = trace > 0 ? PowerOfTwo(min(max(-FloorLog2(trace), -126), 126)) : 0.0f;
  const int column = tokens[c];
  Column<B> own;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = tokens[first + i];
    own.a[i] = (scratch[row * kStride + column] + scratch[column * kStride + row]) * unit;
  }
  __syncwarp();
  Factor(c, first, &own);
#pragma unroll 1
  for (int sweep = 0; sweep < kMaxSweeps<B>; ++sweep) {
    float squared = SquaredLength(own);
    bool again = false;
#pragma unroll 1
    for (int x = 1; x < B; ++x) again |= RotatePair(x, lane, &own, &squared);
    if (!__any_sync(kAllLanes, again)) break;
  }
  const float value = SquaredLength(own);
  const int rank = RankOf<B>(value, c);
  if (rank < kModes) {
    const float scale = value > 0 ? rsqrtf(value) : 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) scratch[rank * B + tokens[first + i]] = own.a[i] * scale;
    if (first == 0) scratch[kModes * B + rank] = value;
  }
  __syncwarp();
  return trace;
}

// --- basis -------------------------------------------------------------------------------------

// Transposes an 8 x 8 matrix of 16-bit elements (two a lane) across the warp.
__device__ __forceinline__ uint32_t Transpose(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Mode g of a quad: v[tile] are the lane's dims. A mode that is dropped, or is none of the rank, is
// zeros.
template <int D>
struct Basis {
  float v[D / 16][4];  // X' u, of length 1, its largest component positive
  float largest;       // component
  float length;        // before: sigma
  float sign;          // that v was multiplied by; u must be too
};

// v = X' u for the modes of `vectors`: rows 0-7 of the product are the high parts of u, rows 8-15
// the low ones.
template <int D, int B>
__device__ void MultiplyKeys(const uint4* keys, const float* vectors, Lane lane,
                             float (&v)[D / 16][4]) {
  using S = Shape<D, B>;
  SplitPair first[S::kSets], last[S::kSets];
#pragma unroll
  for (int m = 0; m < S::kSets; ++m) {
    const float* u = vectors + lane.g * B + 16 * m + 2 * lane.t;
    first[m] = Split(u[0], u[1]);
    last[m] = Split(u[8], u[9]);
  }
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
    float c[2][4] = {};
#pragma unroll
    for (int m = 0; m < S::kSets; ++m) {
      const uint32_t a[4] = {first[m].high, first[m].low, last[m].high, last[m].low};
      const SplitTile x = LoadKeys<D, B>(keys, m, tile, lane);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ptx::MmaFp16(c[n], a, Transpose(x.high[2 * n]), Transpose(x.high[2 * n + 1]), c[n]);
        ptx::MmaFp16(c[n], a, Transpose(x.low[2 * n]), Transpose(x.low[2 * n + 1]), c[n]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) v[tile][e] = c[e / 2][e % 2] + c[e / 2][e % 2 + 2];
  }
}

// `norm` is |X|_F, `values` the eigenvalues.
template <int D, int B>
__device__ Basis<D> MakeBasis(const uint4* keys, const float* vectors, const float* values,
                              float norm, int rank, Lane lane) {
  using S = Shape<D, B>;
  Basis<D> basis;
  MultiplyKeys<D, B>(keys, vectors, lane, basis.v);
  float squares = 0, largest = 0;
  int at = 0;
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = basis.v[tile][e];
      squares = fmaf(x, x, squares);
      if (fabsf(x) <= fabsf(largest)) continue;
      largest = x;
      at = tile / 2 * 32 + 8 * lane.t + tile % 2 * 4 + e;
    }
  }
  basis.length = sqrtf(ptx::QuadSum(squares));
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, largest, step);
    const int other_at = __shfl_xor_sync(kAllLanes, at, step);
    const bool takes =
        fabsf(other) > fabsf(largest) || (fabsf(other) == fabsf(largest) && other_at < at);
    if (takes) largest = other, at = other_at;
  }
  const float w = values[lane.g];
  const bool kept = lane.g < rank && w > 0 && w > kModeFloor * kModeFloor * values[0] &&
                    basis.length > kNoiseFloor * norm;
  basis.sign = !kept ? 0.0f : largest < 0 ? -1.0f : 1.0f;
  const float factor = kept ? basis.sign / basis.length : 0.0f;
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) basis.v[tile][e] *= factor;
  }
  basis.largest = fabsf(largest * factor);
  return basis;
}

}  // namespace kvd::summarize

#endif  // LOCKS_KVD_KERNELS_SUMMARIZE_MODES_CUH_
