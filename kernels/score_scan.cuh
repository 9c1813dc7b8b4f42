// The scan kernel: one body for the full, the refining and the coarse scan.
//
// How: every warp streams its run of pieces through a ring of its own (no barrier between warps), and
// scores eight records at a time. First product: the queries' digits times the int4 codes (rows: heads,
// columns: modes; integers, exact). Second product: its result, split in two fp16 parts, times the int8
// coefficients (columns: tokens). Then the log of the sum of exponentials over the tokens of a page.
// Repeatability: a page's result depends on its record and its queries alone, bit for bit.
// Device code only. Internal to kernels/score*.cu.

#ifndef LOCKS_KVD_KERNELS_SCORE_SCAN_CUH_
#define LOCKS_KVD_KERNELS_SCORE_SCAN_CUH_

#include <algorithm>
#include <limits>

#include "kernels/score_ring.cuh"

namespace kvd::score {

// Eight records in shared memory: record i's coarse part at coarse + i kCoarseBytes, and so the fine.
struct Records {
  const uint8_t* coarse;
  const uint8_t* fine;
};

// The logits of the centroids, in units of ln 2, without soft cap.
template <class S>
__device__ __forceinline__ PerPage<S> Centers(const Records& records, const Queries<S>& q) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  PerPage<S> center;
  Sums<S> sums;
  uint32_t high[S::kWords];
  LoadCodes<S>(records.coarse + g * S::kCoarseBytes + S::kLayout.coarse[kCentroidHigh] + t * (S::kDim / 8), high);
  if constexpr (S::kOnlyCoarse) {
#pragma unroll
    for (int w = 0; w < S::kWords; ++w) sums.Add(q, w, HighCodes(high[w]));
  } else {
    uint32_t low[S::kWords];
    LoadCodes<S>(records.fine + g * S::kFineBytes + S::kLayout.fine[kCentroidLow] + t * (S::kDim / 8), low);
#pragma unroll
    for (int w = 0; w < S::kWords; ++w) sums.Add(q, w, CentroidCodes(high[w], low[w]));
  }
#pragma unroll
  for (int i = 0; i < S::kPages; ++i) {
    const float scale = ptx::Bf16Pair(*reinterpret_cast<const uint32_t*>(
        records.coarse + PageOf<S>(i) * S::kCoarseBytes + S::kLayout.coarse[kCentroidScale])).x;
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      float code = sums.Combine(set, i);
      if constexpr (S::kPadded == 4) {
        const float other = sums.Combine(set, 1);
        const bool odd = PageOf<S>(0) % 2 != 0;
        code = SumHalves(odd ? other : code, odd ? code : other);
      }
      // The coarse scan takes the middle of the codes that share the high nibble.
      if constexpr (S::kOnlyCoarse) code += 7.5f * q.sum[set];
      center.at[set][i] = Saturate(Saturate(code * q.factor[set], kMaxFloat) * scale, kMaxLogit2);
    }
  }
  return center;
}

// y of a mode from its sum (16 is ModeCodes'), its scale and the query's factor.
__device__ __forceinline__ float YOf(float sum, float factor, float scale) {
  return sum * factor * (scale * (kYScale / 16));
}

// --- full ------------------------------------------------------------------------------------------

// Where this lane finds its part of record 0 and how far record i is from it: rows of codes (mode g) and
// coefficients and scales (modes 2 t and 2 t + 1) stand in the coarse part for the first two modes.
template <class S>
struct FullLane {
  const uint8_t* codes;
  const uint8_t* coefficients;
  const uint8_t* scales;
  uint32_t codes_stride, modes_stride;
  bool has_codes, has_modes;  // rank 4: lanes beyond it supply zeros

  __device__ __forceinline__ explicit FullLane(const Records& records) {
    constexpr SummaryLayout kL = S::kLayout;
    constexpr int kRow = S::kDim / 2;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    has_codes = g < S::kRank;
    has_modes = 2 * t < S::kRank;
    const int mode = has_codes ? g - kCoarseModes : 0, pair = has_modes ? 2 * t - kCoarseModes : 0;
    codes = (g < kCoarseModes ? records.coarse + kL.coarse[kCoarseBasis] + g * kRow
                              : records.fine + kL.fine[kFineBasis] + mode * kRow) + t * (S::kDim / 8);
    codes_stride = g < kCoarseModes ? S::kCoarseBytes : S::kFineBytes;
    coefficients = t == 0 ? records.coarse + kL.coarse[kCoarseCoefficients]
                          : records.fine + kL.fine[kFineCoefficients] + pair * S::kTokens;
    scales = t == 0 ? records.coarse + kL.coarse[kCoarseScales] : records.fine + kL.fine[kFineScales] + pair * 2;
    modes_stride = t == 0 ? S::kCoarseBytes : S::kFineBytes;
  }
};

template <class S>
__device__ __forceinline__ Sums<S> FullSums(const FullLane<S>& lane, int u, const Queries<S>& q) {
  uint32_t words[S::kWords];
  LoadCodes<S>(lane.codes + u * lane.codes_stride, words);
  Sums<S> sums;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) sums.Add(q, w, ModeCodes(S::kRank == 8 || lane.has_codes ? words[w] : 0));
  return sums;
}

template <class S>
__device__ __forceinline__ float2 FullScales(const FullLane<S>& lane, int u) {
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(lane.scales + u * lane.modes_stride);
  return ptx::Bf16Pair(S::kRank == 8 || lane.has_modes ? bits : 0);
}

// y[set][i] of record `u`: this lane's modes 2 t + i.
template <class S>
__device__ __forceinline__ void FullModes(const FullLane<S>& lane, int u, const Queries<S>& q,
                                          float (&y)[S::kSets][2]) {
  const Sums<S> sums = FullSums(lane, u, q);
  const float2 scale = FullScales(lane, u);
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    y[set][0] = YOf(sums.Combine(set, 0), q.factor[set], scale.x);
    y[set][1] = YOf(sums.Combine(set, 1), q.factor[set], scale.y);
  }
}

// x[set][2 * tile + i]: this lane's token logits of record `u`.
template <class S>
__device__ __forceinline__ void FullTokens(const FullLane<S>& lane, int u, const float (&y)[S::kSets][2],
                                           float (&x)[S::kSets][2 * S::kTiles]) {
  uint32_t tiles[S::kTiles];
  const uint8_t* row = lane.coefficients + u * lane.modes_stride;
  LoadCoefficients<S>(row, row + S::kTokens, tiles);
  uint32_t a[4] = {};
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    const Split split = SplitPair(y[set][0], y[set][1]);
    a[set] = split.high;
    a[2 + set] = split.low;
  }
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
    float d[4] = {};
    ptx::MmaFp16(d, a, tiles[tile], tiles[tile], d);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      x[set][2 * tile] = d[2 * set];
      x[set][2 * tile + 1] = d[2 * set + 1];
    }
  }
}

// Any logits, any soft cap: one record at a time. Where a page's logits are plain and there is no cap the
// result has the bits of the fast way. Out of line and by value, so that the fast way's registers stay free.
template <class S>
__device__ __noinline__ PerPage<S> FullGuarded(Records records, Queries<S> q, float cap2, PerPage<S> center) {
  const FullLane<S> lane(records);
  PerPage<S> log_sum = {};
  const int t = threadIdx.x % 4, quad = threadIdx.x % 32 & ~3;
#pragma unroll 1
  for (int u = 0; u < kStep; ++u) {
    float y[S::kSets][2], x[S::kSets][2 * S::kTiles], excess[S::kSets];
    bool shifted[S::kSets];
    FullModes(lane, u, q, y);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      shifted[set] = (__ballot_sync(kAllLanes, !IsPlain(y[set][0], y[set][1], kPlainY)) >> quad & 15) != 0;
      y[set][0] = SaturateY(y[set][0]);
      y[set][1] = SaturateY(y[set][1]);
      excess[set] = Excess(ptx::QuadMax(fmaxf(fabsf(y[set][0]), fabsf(y[set][1]))));
      y[set][0] /= excess[set];
      y[set][1] /= excess[set];
    }
    FullTokens(lane, u, y, x);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
#pragma unroll
      for (int i = 0; i < 2 * S::kTiles; ++i) x[set][i] *= excess[set];
      const float pair = u % 2 == 0 ? center.at[set][0] : center.at[set][1];
      const float c = __shfl_sync(kAllLanes, pair, quad + u / 2);
      const float result = GuardedLogSum(x[set], c, cap2, shifted[set]);
      if (u == 2 * t) log_sum.at[set][0] = result;
      if (u == 2 * t + 1) log_sum.at[set][1] = result;
    }
  }
  return log_sum;
}

// The lse of eight records, in units of ln 2.
template <class S>
__device__ __forceinline__ PerPage<S> ScoreFullStep(const Records& records, const Queries<S>& q, float cap2) {
  const FullLane<S> lane(records);
  const PerPage<S> center = Centers(records, q);
  PerPage<S> lse2;
  float y[kStep][S::kSets][2];
  bool plain = !(cap2 > 0);
#pragma unroll
  for (int u = 0; u < kStep; ++u) {
    FullModes(lane, u, q, y[u]);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) plain = plain && IsPlain(y[u][set][0], y[u][set][1], kPlainY);
  }
  if (!__all_sync(kAllLanes, plain)) {
    lse2 = FullGuarded<S>(records, q, cap2, center);
    if (cap2 > 0) return lse2;
  } else {
    float part[S::kSets][kStep] = {};
#pragma unroll
    for (int u = 0; u < kStep; ++u) {
      float x[S::kSets][2 * S::kTiles];
      FullTokens(lane, u, y[u], x);
#pragma unroll
      for (int set = 0; set < S::kSets; ++set) {
#pragma unroll
        for (int i = 0; i < 2 * S::kTiles; ++i) part[set][u] += ptx::Exp2(x[set][i]);
      }
    }
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      const float2 sums = ScatterSums(part[set]);
      lse2.at[set][0] = ptx::Log2(sums.x);
      lse2.at[set][1] = ptx::Log2(sums.y);
    }
  }
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    lse2.at[set][0] += center.at[set][0];
    lse2.at[set][1] += center.at[set][1];
  }
  return lse2;
}

// --- coarse ----------------------------------------------------------------------------------------

// Columns of the product: the two modes of each of four records.
template <class S>
__device__ __forceinline__ Sums<S> CoarseSums(const Records& records, int part, const Queries<S>& q) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint32_t words[S::kWords];
  LoadCodes<S>(records.coarse + (4 * part + g / 2) * S::kCoarseBytes + S::kLayout.coarse[kCoarseBasis] +
                   g % 2 * (S::kDim / 2) + t * (S::kDim / 8), words);
  Sums<S> sums;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) sums.Add(q, w, ModeCodes(words[w]));
  return sums;
}

template <class S>
__device__ __forceinline__ float2 CoarseScales(const Records& records, int u) {
  return ptx::Bf16Pair(*reinterpret_cast<const uint32_t*>(
      records.coarse + u * S::kCoarseBytes + S::kLayout.coarse[kCoarseScales]));
}

// y[set][i] of record 4 * part + t: its modes 0 and 1.
template <class S>
__device__ __forceinline__ void CoarseModes(const Records& records, int part, const Queries<S>& q,
                                            float (&y)[S::kSets][2]) {
  const Sums<S> sums = CoarseSums(records, part, q);
  const float2 scale = CoarseScales<S>(records, 4 * part + threadIdx.x % 4);
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    y[set][0] = YOf(sums.Combine(set, 0), q.factor[set], scale.x);
    y[set][1] = YOf(sums.Combine(set, 1), q.factor[set], scale.y);
  }
}

// The coefficients of record 4 * part + t.
template <class S>
__device__ __forceinline__ void CoarseCoefficients(const Records& records, int part, uint32_t (&tiles)[S::kTiles]) {
  const uint8_t* row = records.coarse + (4 * part + threadIdx.x % 4) * S::kCoarseBytes +
                       S::kLayout.coarse[kCoarseCoefficients];
  LoadCoefficients<S>(row, row + S::kTokens, tiles);
}

// One product gives the tokens of one record for both sets of heads, or of two records for one set: the A
// operand keeps the modes of those records and zeros the others'.
template <class S>
__device__ __forceinline__ void CoarseTokens(const Split& first, int first_lane, const Split& second,
                                             int second_lane, const uint32_t (&tiles)[S::kTiles],
                                             float (&x0)[2 * S::kTiles], float (&x1)[2 * S::kTiles]) {
  const int t = threadIdx.x % 4;
  const uint32_t a[4] = {t == first_lane ? first.high : 0, t == second_lane ? second.high : 0,
                         t == first_lane ? first.low : 0, t == second_lane ? second.low : 0};
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
    float d[4] = {};
    ptx::MmaFp16(d, a, tiles[tile], tiles[tile], d);
    x0[2 * tile] = d[0], x0[2 * tile + 1] = d[1];
    x1[2 * tile] = d[2], x1[2 * tile + 1] = d[3];
  }
}

// As FullGuarded.
template <class S>
__device__ __noinline__ PerPage<S> CoarseGuarded(Records records, Queries<S> q, float cap2, PerPage<S> center) {
  PerPage<S> log_sum = {};
  const int t = threadIdx.x % 4, quad = threadIdx.x % 32 & ~3;
#pragma unroll 1
  for (int u = 0; u < kStep; ++u) {
    float y[S::kSets][2], excess[S::kSets], x[2][2 * S::kTiles];
    uint32_t tiles[S::kTiles];
    bool shifted[S::kSets];
    Split split[S::kSets];
    CoarseModes(records, u / 4, q, y);
    CoarseCoefficients<S>(records, u / 4, tiles);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      shifted[set] = (__ballot_sync(kAllLanes, !IsPlain(y[set][0], y[set][1], kPlainY)) >> (quad + u % 4) & 1) != 0;
      y[set][0] = SaturateY(y[set][0]);
      y[set][1] = SaturateY(y[set][1]);
      const float largest = fmaxf(fabsf(y[set][0]), fabsf(y[set][1]));
      excess[set] = Excess(__shfl_sync(kAllLanes, largest, quad + u % 4));
      split[set] = SplitPair(y[set][0] / excess[set], y[set][1] / excess[set]);
    }
    CoarseTokens<S>(split[0], u % 4, split[S::kSets - 1], u % 4, tiles, x[0], x[1]);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
#pragma unroll
      for (int i = 0; i < 2 * S::kTiles; ++i) x[set][i] *= excess[set];
      const float pair = u % 2 == 0 ? center.at[set][0] : center.at[set][1];
      const float c = __shfl_sync(kAllLanes, pair, quad + u / 2);
      const float result = GuardedLogSum(x[set], c, cap2, shifted[set]);
      if (u == 2 * t) log_sum.at[set][0] = result;
      if (u == 2 * t + 1) log_sum.at[set][1] = result;
    }
  }
  return log_sum;
}

template <class S>
__device__ __forceinline__ void AddCenterAndTau(const Records& records, const Queries<S>& q, const PerPage<S>& center,
                                                PerPage<S>* lse2) {
#pragma unroll
  for (int i = 0; i < S::kPages; ++i) {
    const float tau = ptx::Bf16Pair(*reinterpret_cast<const uint32_t*>(
        records.coarse + PageOf<S>(i) * S::kCoarseBytes + S::kLayout.coarse[kCentroidScale])).y;
#pragma unroll
    for (int set = 0; set < S::kSets; ++set)
      lse2->at[set][i] += center.at[set][i] + Saturate(q.half_norm[set] * tau, kMaxLogit2);
  }
}

template <class S>
__device__ __forceinline__ PerPage<S> ScoreCoarseStep(const Records& records, const Queries<S>& q, float cap2) {
  const PerPage<S> center = Centers(records, q);
  PerPage<S> lse2;
  float y[2][S::kSets][2];
  bool plain = !(cap2 > 0);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    CoarseModes(records, part, q, y[part]);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) plain = plain && IsPlain(y[part][set][0], y[part][set][1], kPlainY);
  }
  if (!__all_sync(kAllLanes, plain)) {
    lse2 = CoarseGuarded<S>(records, q, cap2, center);
    if (cap2 > 0) return lse2;
  } else {
    float sums[S::kSets][kStep] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t tiles[S::kTiles];
      CoarseCoefficients<S>(records, part, tiles);
      Split split[S::kSets];
#pragma unroll
      for (int set = 0; set < S::kSets; ++set) split[set] = SplitPair(y[part][set][0], y[part][set][1]);
#pragma unroll
      for (int i = 0; i < 4; i += 3 - S::kSets) {
        float x[2][2 * S::kTiles];
        const int next = S::kSets == 1 ? i + 1 : i;
        CoarseTokens<S>(split[0], i, split[S::kSets - 1], next, tiles, x[0], x[1]);
#pragma unroll
        for (int k = 0; k < 2 * S::kTiles; ++k) {
          sums[0][4 * part + i] += ptx::Exp2(x[0][k]);
          sums[S::kSets - 1][4 * part + next] += ptx::Exp2(x[1][k]);
        }
      }
    }
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      const float2 both = ScatterSums(sums[set]);
      lse2.at[set][0] = ptx::Log2(both.x);
      lse2.at[set][1] = ptx::Log2(both.y);
    }
  }
  AddCenterAndTau(records, q, center, &lse2);
  return lse2;
}

// --- up to 4 heads ---------------------------------------------------------------------------------
//
// Both halves of the warp hold the same heads, so each takes the modes of other records: half the work of what
// follows the first product.

// Tokens of records 2 i and 2 i + 1: the lower half's heads with the first, the upper half's with the second.
// y: this lane's two modes of its half's record. Rows 0..7 of the product take the high parts, rows 8..15 the
// low ones.
template <class S>
__device__ __forceinline__ void FullTokens4(const FullLane<S>& lane, int i, float y0, float y1,
                                            float (&x)[2 * S::kTiles]) {
  uint32_t first[S::kTiles], second[S::kTiles];
  const uint8_t* row = lane.coefficients + 2 * i * lane.modes_stride;
  LoadCoefficients<S>(row, row + S::kTokens, first);
  row += lane.modes_stride;
  LoadCoefficients<S>(row, row + S::kTokens, second);
  const bool upper = threadIdx.x % 32 >= 16;
  const Split split = SplitPair(y0, y1);
  const uint32_t a[4] = {upper ? 0 : split.high, upper ? 0 : split.low, upper ? split.high : 0, upper ? split.low : 0};
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
    float d[4] = {};
    ptx::MmaFp16(d, a, first[tile], second[tile], d);
    x[2 * tile] = d[0] + d[2];
    x[2 * tile + 1] = d[1] + d[3];
  }
}

// This lane's two modes of record 2 i (lower half) or 2 i + 1 (upper half).
template <class S>
__device__ __forceinline__ float2 FullModes4(const FullLane<S>& lane, int i, const Queries<S>& q) {
  const bool upper = threadIdx.x % 32 >= 16;
  const Sums<S> first = FullSums(lane, 2 * i, q), second = FullSums(lane, 2 * i + 1, q);
  const float2 scale = FullScales(lane, 2 * i + (upper ? 1 : 0));
  float y[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float a = first.Combine(0, k), b = second.Combine(0, k);
    y[k] = SumHalves(upper ? b : a, upper ? a : b);
  }
  return {YOf(y[0], q.factor[0], scale.x), YOf(y[1], q.factor[0], scale.y)};
}

// As FullGuarded.
template <class S>
__device__ __noinline__ PerPage<S> FullGuarded4(Records records, Queries<S> q, float cap2, PerPage<S> center) {
  const FullLane<S> lane(records);
  const int t = threadIdx.x % 4, quad = threadIdx.x % 32 & ~3;
  PerPage<S> log_sum = {};
#pragma unroll 1
  for (int i = 0; i < kStep / 2; ++i) {
    float2 y = FullModes4(lane, i, q);
    const bool shifted = (__ballot_sync(kAllLanes, !IsPlain(y.x, y.y, kPlainY)) >> quad & 15) != 0;
    y = {SaturateY(y.x), SaturateY(y.y)};
    const float excess = Excess(ptx::QuadMax(fmaxf(fabsf(y.x), fabsf(y.y))));
    float x[2 * S::kTiles];
    FullTokens4(lane, i, y.x / excess, y.y / excess, x);
#pragma unroll
    for (int k = 0; k < 2 * S::kTiles; ++k) x[k] *= excess;
    const float result = GuardedLogSum(x, __shfl_sync(kAllLanes, center.at[0][0], quad + i), cap2, shifted);
    if (i == t) log_sum.at[0][0] = result;
  }
  return log_sum;
}

template <class S>
__device__ __forceinline__ PerPage<S> ScoreFullStep4(const Records& records, const Queries<S>& q, float cap2) {
  const FullLane<S> lane(records);
  const PerPage<S> center = Centers(records, q);
  PerPage<S> lse2;
  float2 y[kStep / 2];
  bool plain = !(cap2 > 0);
#pragma unroll
  for (int i = 0; i < kStep / 2; ++i) {
    y[i] = FullModes4(lane, i, q);
    plain = plain && IsPlain(y[i].x, y[i].y, kPlainY);
  }
  if (!__all_sync(kAllLanes, plain)) {
    lse2 = FullGuarded4<S>(records, q, cap2, center);
    if (cap2 > 0) return lse2;
  } else {
    float part[kStep / 2] = {};
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      float x[2 * S::kTiles];
      FullTokens4(lane, i, y[i].x, y[i].y, x);
#pragma unroll
      for (int k = 0; k < 2 * S::kTiles; ++k) part[i] += ptx::Exp2(x[k]);
    }
    lse2.at[0][0] = ptx::Log2(ScatterSum4(part));
  }
  lse2.at[0][0] += center.at[0][0];
  return lse2;
}

// Which four records' modes this lane keeps after the first product: in the lower half the even ones of
// records 0..3 and the odd ones of records 4..7, in the upper half the others. So each half has half of either.
__device__ __forceinline__ int CoarsePart4() { return (threadIdx.x % 32 / 16) ^ (threadIdx.x & 1); }

// y of record 4 * CoarsePart4() + t: its modes 0 and 1.
template <class S>
__device__ __forceinline__ float2 CoarseModes4(const Records& records, const Queries<S>& q) {
  const bool second = CoarsePart4() != 0;
  const Sums<S> low = CoarseSums(records, 0, q), high = CoarseSums(records, 1, q);
  const float2 scale = CoarseScales<S>(records, (second ? 4 : 0) + threadIdx.x % 4);
  float y[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float a = low.Combine(0, k), b = high.Combine(0, k);
    y[k] = SumHalves(second ? b : a, second ? a : b);
  }
  return {YOf(y[0], q.factor[0], scale.x), YOf(y[1], q.factor[0], scale.y)};
}

// x[2 part + upper]: token logits of the record whose modes lane CoarseOwner(2 part + upper) of this quad
// keeps. Rows 4 j .. 4 j + 3 of a product are the heads with one record: a record's modes are columns 2 t and
// 2 t + 1 of A, all others are zeroed.
__device__ __forceinline__ int CoarseOwner(int i) { return 2 * (i % 2) + ((threadIdx.x % 32 / 16) ^ (i / 2)); }

template <class S>
__device__ __forceinline__ void CoarseTokens4(const Records& records, float y0, float y1,
                                              float (&x)[4][2 * S::kTiles]) {
  const int t = threadIdx.x % 4;
  const Split split = SplitPair(y0, y1);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t tiles[S::kTiles];
    CoarseCoefficients<S>(records, part, tiles);
    const bool first = CoarsePart4() == part && t < 2, second = CoarsePart4() == part && t >= 2;
    const uint32_t a[4] = {first ? split.high : 0, second ? split.high : 0, first ? split.low : 0,
                           second ? split.low : 0};
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      float d[4] = {};
      ptx::MmaFp16(d, a, tiles[tile], tiles[tile], d);
      x[2 * part][2 * tile] = d[0], x[2 * part][2 * tile + 1] = d[1];
      x[2 * part + 1][2 * tile] = d[2], x[2 * part + 1][2 * tile + 1] = d[3];
    }
  }
}

// As FullGuarded.
template <class S>
__device__ __noinline__ PerPage<S> CoarseGuarded4(Records records, Queries<S> q, float cap2, PerPage<S> center) {
  const int t = threadIdx.x % 4, quad = threadIdx.x % 32 & ~3;
  float2 y = CoarseModes4(records, q);
  const unsigned wild = __ballot_sync(kAllLanes, !IsPlain(y.x, y.y, kPlainY));
  y = {SaturateY(y.x), SaturateY(y.y)};
  const float excess = Excess(fmaxf(fabsf(y.x), fabsf(y.y)));
  float x[4][2 * S::kTiles];
  CoarseTokens4<S>(records, y.x / excess, y.y / excess, x);
  PerPage<S> log_sum = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int owner = quad + CoarseOwner(i);
    const float times = __shfl_sync(kAllLanes, excess, owner);
#pragma unroll
    for (int k = 0; k < 2 * S::kTiles; ++k) x[i][k] *= times;
    const float c = __shfl_sync(kAllLanes, center.at[0][0], quad + i);
    const float result = GuardedLogSum(x[i], c, cap2, (wild >> owner & 1) != 0);
    if (i == t) log_sum.at[0][0] = result;
  }
  return log_sum;
}

// All steps of a stage side by side: one's latencies hide behind another's work.
template <class S>
__device__ __forceinline__ void ScoreCoarseSteps4(const Records (&records)[S::kStepsAStage], const Queries<S>& q,
                                                  float cap2, PerPage<S> (&lse2)[S::kStepsAStage]) {
  PerPage<S> center[S::kStepsAStage];
  float2 y[S::kStepsAStage];
  bool plain = !(cap2 > 0);
#pragma unroll
  for (int s = 0; s < S::kStepsAStage; ++s) {
    center[s] = Centers(records[s], q);
    y[s] = CoarseModes4(records[s], q);
    plain = plain && IsPlain(y[s].x, y[s].y, kPlainY);
  }
  if (!__all_sync(kAllLanes, plain)) {
#pragma unroll
    for (int s = 0; s < S::kStepsAStage; ++s) lse2[s] = CoarseGuarded4<S>(records[s], q, cap2, center[s]);
    if (cap2 > 0) return;
  } else {
#pragma unroll
    for (int s = 0; s < S::kStepsAStage; ++s) {
      float x[4][2 * S::kTiles], part[4] = {};
      CoarseTokens4<S>(records[s], y[s].x, y[s].y, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int k = 0; k < 2 * S::kTiles; ++k) part[i] += ptx::Exp2(x[i][k]);
      }
      lse2[s].at[0][0] = ptx::Log2(ScatterSum4(part));
    }
  }
#pragma unroll
  for (int s = 0; s < S::kStepsAStage; ++s) AddCenterAndTau(records[s], q, center[s], &lse2[s]);
}

template <class S>
__device__ __forceinline__ void ScoreSteps(const Records (&records)[S::kStepsAStage], const Queries<S>& q, float cap2,
                                           PerPage<S> (&lse2)[S::kStepsAStage]) {
  if constexpr (S::kOnlyCoarse && S::kPadded == 4) {
    ScoreCoarseSteps4(records, q, cap2, lse2);
  } else {
#pragma unroll
    for (int s = 0; s < S::kStepsAStage; ++s) {
      if constexpr (S::kOnlyCoarse) {
        lse2[s] = ScoreCoarseStep(records[s], q, cap2);
      } else if constexpr (S::kPadded == 4) {
        lse2[s] = ScoreFullStep4(records[s], q, cap2);
      } else {
        lse2[s] = ScoreFullStep(records[s], q, cap2);
      }
    }
  }
}

// --- the kernel ------------------------------------------------------------------------------------

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kCtasPerSm) ScanKernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barriers[S::kWarps * S::kStages];
  const int warp = threadIdx.x / 32;
  uint8_t* ring = shared + warp * (S::kStages * S::kStageBytes);
  uint64_t* full = barriers + warp * S::kStages;
  if (threadIdx.x % 32 == 0) {
    for (int s = 0; s < S::kStages; ++s) ptx::BarrierInit(full + s, 1);
    ptx::BarrierInitFence();
  }
  __syncwarp();
  Place place;
  const int run = TakeRun<S>(args, &place);
  Source ahead = {place, nullptr, nullptr};
  if (run > 0) FindRow<S>(args, &ahead);
  for (int i = 0; i < S::kStages && i < run; ++i) {
    if (i > 0) Advance<S>(args, S::kWarps, &ahead);
    StartCopy<S>(args, ahead, ring + i * S::kStageBytes, full + i);
  }
  if (args.candidates == nullptr)
    FillBeyondTheEnd(args.score, int64_t{blockIdx.x} * S::kWarps + warp, int64_t{gridDim.x} * S::kWarps);

  const float cap2 = args.score.logit_softcap * kLog2e;
  Queries<S> q;
  int row = -1;
  for (int i = 0; i < run; ++i) {
    if (i > 0) Advance<S>(args, S::kWarps, &place);
    if (place.row != row) q = LoadQueries<S>(args.score, place.row);
    row = place.row;
    const int stage = i % S::kStages;
    uint8_t* base = ring + stage * S::kStageBytes;
    ptx::BarrierWait(full + stage, static_cast<uint32_t>(i / S::kStages) & 1);
    // Steps beyond the row's end score what the ring held before; nobody stores it.
    Records records[S::kStepsAStage];
    PerPage<S> lse2[S::kStepsAStage];
#pragma unroll
    for (int s = 0; s < S::kStepsAStage; ++s)
      records[s] = {base + s * kStep * S::kCoarseBytes,
                    base + S::kPiece * S::kCoarseBytes + s * kStep * S::kFineBytes};
    ScoreSteps<S>(records, q, cap2, lse2);
#pragma unroll
    for (int s = 0; s < S::kStepsAStage; ++s) StoreLse<S>(args, place, place.piece * S::kPiece + s * kStep, lse2[s]);
    __syncwarp();
    if (i + S::kStages >= run) continue;
    Advance<S>(args, S::kWarps, &ahead);
    StartCopy<S>(args, ahead, base, full + stage);
  }
}

template <class S>
cudaError_t LaunchScan(const KernelArgs& args, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device); e != cudaSuccess)
    return e;
  if (const cudaError_t e =
          cudaFuncSetAttribute(ScanKernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
      e != cudaSuccess)
    return e;
  const int64_t pages = args.candidates != nullptr ? args.max_candidates : args.score.lse_stride;
  const int64_t pieces = (pages + S::kPiece - 1) / S::kPiece * args.score.num_sequences * args.score.num_kv_heads;
  if (pieces > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  // At least a warp for every piece, up to what fits on the device at once.
  const int64_t ctas = std::clamp<int64_t>((pieces + S::kWarps - 1) / S::kWarps, 1, num_sms * S::kCtasPerSm);
  ScanKernel<S><<<static_cast<unsigned>(ctas), S::kThreads, S::kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

template <int D, int B, int R, bool kCoarse>
cudaError_t LaunchForGroup(const KernelArgs& args, cudaStream_t stream) {
  constexpr int kSteps = kCoarse ? 2 : 1;
  if (args.score.group <= 4) return LaunchScan<Shape<D, B, R, 4, kSteps, kCoarse>>(args, stream);
  if (args.score.group <= 8) return LaunchScan<Shape<D, B, R, 8, kSteps, kCoarse>>(args, stream);
  return LaunchScan<Shape<D, B, R, 16, kSteps, kCoarse>>(args, stream);
}

// Rank matters only to the full scan: the coarse part is the same for all.
template <int D, bool kCoarse>
cudaError_t LaunchForDim(const KernelArgs& args, cudaStream_t stream) {
  const int tokens = args.score.page_tokens, rank = args.score.rank;
  if (kCoarse || rank == 8) {
    if (tokens == 16) return LaunchForGroup<D, 16, 8, kCoarse>(args, stream);
    if (tokens == 32) return LaunchForGroup<D, 32, 8, kCoarse>(args, stream);
  } else if (rank == 4) {
    if (tokens == 16) return LaunchForGroup<D, 16, kCoarse ? 8 : 4, kCoarse>(args, stream);
    if (tokens == 32) return LaunchForGroup<D, 32, kCoarse ? 8 : 4, kCoarse>(args, stream);
  }
  return cudaErrorInvalidValue;
}

inline bool IsValid(const ScoreArgs& a) {
  return a.num_sequences >= 0 && a.num_kv_heads >= 1 && a.group >= 1 && a.group <= 16 && a.lse_stride >= 0 &&
         a.lse_stride <= kMaxPages && (a.dtype == KvDtype::kBf16 || a.dtype == KvDtype::kFp16) &&
         (a.rank == 4 || a.rank == 8);
}

template <bool kCoarse>
cudaError_t Launch(const KernelArgs& args, cudaStream_t stream) {
  if (!IsValid(args.score)) return cudaErrorInvalidValue;
  if (args.score.num_sequences == 0 || args.score.lse_stride == 0) return cudaSuccess;
  switch (args.score.head_dim) {
    case 64: return LaunchForDim<64, kCoarse>(args, stream);
    case 96: return LaunchForDim<96, kCoarse>(args, stream);
    case 128: return LaunchForDim<128, kCoarse>(args, stream);
    case 256: return LaunchForDim<256, kCoarse>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace kvd::score

#endif  // LOCKS_KVD_KERNELS_SCORE_SCAN_CUH_
