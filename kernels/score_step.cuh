// Eight records and more than 4 query heads; and what score_step4.cuh shares of it.
//
// Device code only. Internal to kernels/score*.cu.

#ifndef LOCKS_KVD_KERNELS_SCORE_STEP_CUH_
#define LOCKS_KVD_KERNELS_SCORE_STEP_CUH_

#include "kernels/score_center.cuh"

namespace kvd::score {

// y of a mode from its sum, 16 times too large, its scale and the query's factor.
__device__ __forceinline__ float YOf(float sum, float factor, float scale) {
  return sum * (factor * (kYScale / 16) * scale);
}

// --- full ----------------------------------------------------------------------------------------

// Where this lane finds its part of record 0 and how far record i is from it: rows of codes (mode
// g) and coefficients and scales (modes 2 t and 2 t + 1) stand in the coarse part for the first two
// modes.
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
                              : records.fine + kL.fine[kFineBasis] + mode * kRow) +
            t * (S::kDim / 8);
    codes_stride = g < kCoarseModes ? S::kCoarseBytes : S::kFineBytes;
    coefficients = t == 0 ? records.coarse + kL.coarse[kCoarseCoefficients]
                          : records.fine + kL.fine[kFineCoefficients] + pair * S::kTokens;
    scales = t == 0 ? records.coarse + kL.coarse[kCoarseScales]
                    : records.fine + kL.fine[kFineScales] + pair * 2;
    modes_stride = t == 0 ? S::kCoarseBytes : S::kFineBytes;
  }
};

template <class S>
__device__ __forceinline__ Sums<S> FullSums(const FullLane<S>& lane, int u, const Queries<S>& q) {
  uint32_t words[S::kWords];
  LoadCodes<S>(lane.codes + u * lane.codes_stride, words);
  Sums<S> sums;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w)
    sums.Add(q, q.start, w, ModeCodes(S::kRank == 8 || lane.has_codes ? words[w] : 0));
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
__device__ __forceinline__ void FullTokens(const FullLane<S>& lane, int u,
                                           const float (&y)[S::kSets][2],
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

// Any logits, any soft cap: one record at a time. Where a page's logits are plain and there is no
// cap the result has the bits of the fast way. Out of line and by value, so that the fast way's
// registers stay free.
template <class S>
__device__ __noinline__ PerPage<S> FullGuarded(Records records, PackedQueries<S> packed, float cap2,
                                               PerPage<S> center) {
  const Queries<S> q = packed.Unpacked();
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
      shifted[set] =
          (__ballot_sync(kAllLanes, !IsPlain(y[set][0], y[set][1], kPlainY)) >> quad & 15) != 0;
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
      const float c = SaturateCenter(__shfl_sync(kAllLanes, pair, quad + u / 2));
      const float result = GuardedLogSum(x[set], c, cap2, shifted[set]);
      if (u == 2 * t) log_sum.at[set][0] = result;
      if (u == 2 * t + 1) log_sum.at[set][1] = result;
    }
  }
  return log_sum;
}

// The lse of eight records, in units of ln 2.
template <class S>
__device__ __forceinline__ PerPage<S> ScoreFullStep(const Records& records, const Queries<S>& q,
                                                    float cap2) {
  const FullLane<S> lane(records);
  const PerPage<S> center = Centers(records, q);
  PerPage<S> lse2;
  float y[kStep][S::kSets][2];
  bool plain = !(cap2 > 0) & ArePlain<S>(center, {});
#pragma unroll
  for (int u = 0; u < kStep; ++u) {
    FullModes(lane, u, q, y[u]);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) plain &= IsPlain(y[u][set][0], y[u][set][1], kPlainY);
  }
  if (!__all_sync(kAllLanes, plain)) {
    lse2 = FullGuarded<S>(records, PackedQueries<S>(q), cap2, center);
    FinishGuarded(center, {}, cap2, &lse2);
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
      lse2.at[set][0] = ptx::Log2(sums.x) + center.at[set][0];
      lse2.at[set][1] = ptx::Log2(sums.y) + center.at[set][1];
    }
  }
  return lse2;
}

// --- coarse --------------------------------------------------------------------------------------

// Columns of the product: the two modes of each of four records; this lane's part of them is at
// `codes`.
template <class S>
__device__ __forceinline__ Sums<S> CoarseSums(const uint8_t* codes, const Queries<S>& q) {
  uint32_t words[S::kWords];
  LoadCodes<S>(codes, words);
  Sums<S> sums;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) sums.Add(q, q.start, w, ModeCodes(words[w]));
  return sums;
}

template <class S>
__device__ __forceinline__ float2 CoarseScales(const Records& records, int u) {
  return ptx::Bf16Pair(*reinterpret_cast<const uint32_t*>(records.coarse + u * S::kCoarseBytes +
                                                          S::kLayout.coarse[kCoarseScales]));
}

// y[set][i] of record 4 * part + t: its modes 0 and 1.
template <class S>
__device__ __forceinline__ void CoarseModes(const Records& records, int part, const Queries<S>& q,
                                            float (&y)[S::kSets][2]) {
  constexpr SummaryLayout kL = S::kLayout;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const Sums<S> sums =
      CoarseSums<S>(records.coarse + (4 * part + g / 2) * S::kCoarseBytes +
                        kL.coarse[kCoarseBasis] + g % 2 * (S::kDim / 2) + t * (S::kDim / 8),
                    q);
  const float2 scale = CoarseScales<S>(records, 4 * part + threadIdx.x % 4);
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    y[set][0] = YOf(sums.Combine(set, 0), q.factor[set], scale.x);
    y[set][1] = YOf(sums.Combine(set, 1), q.factor[set], scale.y);
  }
}

// The coefficients of record 4 * part + t.
template <class S>
__device__ __forceinline__ void CoarseCoefficients(const Records& records, int part,
                                                   uint32_t (&tiles)[S::kTiles]) {
  const uint8_t* row = records.coarse + (4 * part + threadIdx.x % 4) * S::kCoarseBytes +
                       S::kLayout.coarse[kCoarseCoefficients];
  LoadCoefficients<S>(row, row + S::kTokens, tiles);
}

// One product gives the tokens of one record for both sets of heads, or of two records for one set:
// the A operand keeps the modes of those records and zeros the others'.
template <class S>
__device__ __forceinline__ void CoarseTokens(const Split& first, int first_lane,
                                             const Split& second, int second_lane,
                                             const uint32_t (&tiles)[S::kTiles],
                                             float (&x0)[2 * S::kTiles],
                                             float (&x1)[2 * S::kTiles]) {
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
__device__ __noinline__ PerPage<S> CoarseGuarded(Records records, PackedQueries<S> packed,
                                                 float cap2, PerPage<S> center) {
  const Queries<S> q = packed.Unpacked();
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
      shifted[set] =
          (__ballot_sync(kAllLanes, !IsPlain(y[set][0], y[set][1], kPlainY)) >> (quad + u % 4) &
           1) != 0;
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
      const float c = SaturateCenter(__shfl_sync(kAllLanes, pair, quad + u / 2));
      const float result = GuardedLogSum(x[set], c, cap2, shifted[set]);
      if (u == 2 * t) log_sum.at[set][0] = result;
      if (u == 2 * t + 1) log_sum.at[set][1] = result;
    }
  }
  return log_sum;
}

template <class S>
__device__ __forceinline__ PerPage<S> ScoreCoarseStep(const Records& records, const Queries<S>& q,
                                                      float cap2) {
  const PerPage<S> center = Centers(records, q), term = TauTerms(records, q);
  PerPage<S> lse2;
  float y[2][S::kSets][2];
  bool plain = !(cap2 > 0) & ArePlain<S>(center, term);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    CoarseModes(records, part, q, y[part]);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set)
      plain &= IsPlain(y[part][set][0], y[part][set][1], kPlainY);
  }
  if (!__all_sync(kAllLanes, plain)) {
    lse2 = CoarseGuarded<S>(records, PackedQueries<S>(q), cap2, center);
    FinishGuarded(center, term, cap2, &lse2);
  } else {
    float sums[S::kSets][kStep] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t tiles[S::kTiles];
      CoarseCoefficients<S>(records, part, tiles);
      Split split[S::kSets];
#pragma unroll
      for (int set = 0; set < S::kSets; ++set)
        split[set] = SplitPair(y[part][set][0], y[part][set][1]);
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
      lse2.at[set][0] = ptx::Log2(both.x) + (center.at[set][0] + term.at[set][0]);
      lse2.at[set][1] = ptx::Log2(both.y) + (center.at[set][1] + term.at[set][1]);
    }
  }
  return lse2;
}

}  // namespace kvd::score

#endif  // LOCKS_KVD_KERNELS_SCORE_STEP_CUH_
