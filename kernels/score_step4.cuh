// Eight records and up to 4 query heads: the step of most models.
//
// Both halves of the warp hold the same heads, so each takes the modes of other records: half the
// work of what follows the first product.
// Device code only. Internal to kernels/score*.cu.

#ifndef LOCKS_KVD_KERNELS_SCORE_STEP4_CUH_
#define LOCKS_KVD_KERNELS_SCORE_STEP4_CUH_

#include "kernels/score_step.cuh"

namespace kvd::score {

// Tokens of records 2 i and 2 i + 1: the lower half's heads with the first, the upper half's with
// the second. y: this lane's two modes of its half's record. Rows 0..7 of the product take the high
// parts, rows 8..15 the low ones.
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
  const uint32_t a[4] = {upper ? 0 : split.high, upper ? 0 : split.low, upper ? split.high : 0,
                         upper ? split.low : 0};
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
__device__ __noinline__ PerPage<S> FullGuarded4(Records records, Queries<S> q, float cap2,
                                                PerPage<S> center) {
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
    const float c = SaturateCenter(__shfl_sync(kAllLanes, center.at[0][0], quad + i));
    const float result = GuardedLogSum(x, c, cap2, shifted);
    if (i == t) log_sum.at[0][0] = result;
  }
  return log_sum;
}

template <class S>
__device__ __forceinline__ PerPage<S> ScoreFullStep4(const Records& records, const Queries<S>& q,
                                                     float cap2) {
  const FullLane<S> lane(records);
  const PerPage<S> center = Centers(records, q);
  PerPage<S> lse2;
  float2 y[kStep / 2];
  bool plain = !(cap2 > 0) & ArePlain<S>(center, {});
#pragma unroll
  for (int i = 0; i < kStep / 2; ++i) {
    y[i] = FullModes4(lane, i, q);
    plain &= IsPlain(y[i].x, y[i].y, kPlainY);
  }
  if (!__all_sync(kAllLanes, plain)) {
    lse2 = FullGuarded4<S>(records, q, cap2, center);
    FinishGuarded(center, {}, cap2, &lse2);
  } else {
    float part[kStep / 2];
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      float x[2 * S::kTiles];
      FullTokens4(lane, i, y[i].x, y[i].y, x);
      part[i] = SumOfPowers(x);
    }
    lse2.at[0][0] = ptx::Log2(ScatterSum4(part)) + center.at[0][0];
  }
  return lse2;
}

// Which four records' modes this lane keeps after the first product: in the lower half the even
// ones of records 0..3 and the odd ones of records 4..7, in the upper half the others. So each half
// has half of either.
__device__ __forceinline__ int CoarsePart4() { return (threadIdx.x % 32 / 16) ^ (threadIdx.x & 1); }

// What a lane would compute again in every step: where it finds its part of eight records, and
// which rows of the second product's operand are its own.
template <class S>
struct CoarseLane4 {
  uint32_t high, codes, scales, center, coefficients;  // offsets from the first of the eight
  uint32_t mask[4];  // all ones where CoarsePart4() and t / 2 are those of [2 part + i]

  __device__ __forceinline__ CoarseLane4() {
    constexpr SummaryLayout kL = S::kLayout;
    constexpr uint32_t kRow = S::kDim / 2;
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto part = static_cast<uint32_t>(CoarsePart4());
    high = ptx::Keep(g * S::kCoarseBytes + kL.coarse[kCentroidHigh] + t * (kRow / 4));
    codes = ptx::Keep(g / 2 * S::kCoarseBytes + kL.coarse[kCoarseBasis] + g % 2 * kRow +
                      t * (kRow / 4));
    scales = ptx::Keep((4 * part + t) * S::kCoarseBytes + kL.coarse[kCoarseScales]);
    center = ptx::Keep(static_cast<uint32_t>(PageOf<S>(0)) * S::kCoarseBytes +
                       kL.coarse[kCentroidScale]);
    coefficients = ptx::Keep(t * S::kCoarseBytes + kL.coarse[kCoarseCoefficients]);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      mask[i] = ptx::Keep(part == i / 2 && t / 2 == i % 2 ? 0xFFFFFFFFu : 0u);
  }
};

// y of record 4 * CoarsePart4() + t: its modes 0 and 1.
template <class S>
__device__ __forceinline__ float2 CoarseModes4(const CoarseLane4<S>& lane, const Records& records,
                                               const Queries<S>& q) {
  const bool second = CoarsePart4() != 0;
  const Sums<S> low = CoarseSums<S>(records.coarse + lane.codes, q);
  const Sums<S> high = CoarseSums<S>(records.coarse + lane.codes + 4 * S::kCoarseBytes, q);
  const float2 scale =
      ptx::Bf16Pair(*reinterpret_cast<const uint32_t*>(records.coarse + lane.scales));
  float y[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float a = low.Combine(0, k), b = high.Combine(0, k);
    y[k] = SumHalves(second ? b : a, second ? a : b);
  }
  return {YOf(y[0], q.factor[0], scale.x), YOf(y[1], q.factor[0], scale.y)};
}

// x[2 part + upper]: token logits of the record whose modes lane CoarseOwner(2 part + upper) of
// this quad keeps. Rows 4 j .. 4 j + 3 of a product are the heads with one record: a record's modes
// are columns 2 t and 2 t + 1 of A, all others are zeroed.
__device__ __forceinline__ int CoarseOwner(int i) {
  return 2 * (i % 2) + ((threadIdx.x % 32 / 16) ^ (i / 2));
}

template <class S>
__device__ __forceinline__ void CoarseTokens4(const CoarseLane4<S>& lane, const Records& records,
                                              float y0, float y1, float (&x)[4][2 * S::kTiles]) {
  const Split split = SplitPair(y0, y1);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t tiles[S::kTiles];
    const uint8_t* row = records.coarse + lane.coefficients + 4 * part * S::kCoarseBytes;
    LoadCoefficients<S>(row, row + S::kTokens, tiles);
    const uint32_t first = lane.mask[2 * part], second = lane.mask[2 * part + 1];
    const uint32_t a[4] = {split.high & first, split.high & second, split.low & first,
                           split.low & second};
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
__device__ __noinline__ PerPage<S> CoarseGuarded4(Records records, Queries<S> q, float cap2,
                                                  PerPage<S> center) {
  const CoarseLane4<S> lane;
  const int t = threadIdx.x % 4, quad = threadIdx.x % 32 & ~3;
  float2 y = CoarseModes4(lane, records, q);
  const unsigned wild = __ballot_sync(kAllLanes, !IsPlain(y.x, y.y, kPlainY));
  y = {SaturateY(y.x), SaturateY(y.y)};
  const float excess = Excess(fmaxf(fabsf(y.x), fabsf(y.y)));
  float x[4][2 * S::kTiles];
  CoarseTokens4(lane, records, y.x / excess, y.y / excess, x);
  PerPage<S> log_sum = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int owner = quad + CoarseOwner(i);
    const float times = __shfl_sync(kAllLanes, excess, owner);
#pragma unroll
    for (int k = 0; k < 2 * S::kTiles; ++k) x[i][k] *= times;
    const float c = SaturateCenter(__shfl_sync(kAllLanes, center.at[0][0], quad + i));
    const float result = GuardedLogSum(x[i], c, cap2, (wild >> owner & 1) != 0);
    if (i == t) log_sum.at[0][0] = result;
  }
  return log_sum;
}

// All steps of a stage side by side: one's latencies hide behind another's work.
template <class S>
__device__ __forceinline__ void ScoreCoarseSteps4(const CoarseLane4<S>& lane,
                                                  const Records (&records)[S::kStepsAStage],
                                                  const Queries<S>& q, float cap2,
                                                  PerPage<S> (&lse2)[S::kStepsAStage]) {
  PerPage<S> center[S::kStepsAStage], term[S::kStepsAStage];
  float2 y[S::kStepsAStage];
  bool plain = !(cap2 > 0);
#pragma unroll
  for (int s = 0; s < S::kStepsAStage; ++s) {
    const float2 scale_and_tau =
        ptx::Bf16Pair(*reinterpret_cast<const uint32_t*>(records[s].coarse + lane.center));
    const Sums<S> high = NibbleSums(records[s].coarse + lane.high, q, q.start);
    const float even = high.Combine(0, 0), odd = high.Combine(0, 1);
    const bool is_odd = PageOf<S>(0) % 2 != 0;
    center[s].at[0][0] =
        CenterOf(SumHalves(is_odd ? odd : even, is_odd ? even : odd), q, 0, scale_and_tau.x);
    term[s].at[0][0] = q.half_norm[0] * scale_and_tau.y;
    y[s] = CoarseModes4(lane, records[s], q);
    plain &= ArePlain<S>(center[s], term[s]) & IsPlain(y[s].x, y[s].y, kPlainY);
  }
  if (!__all_sync(kAllLanes, plain)) {
#pragma unroll
    for (int s = 0; s < S::kStepsAStage; ++s) {
      lse2[s] = CoarseGuarded4<S>(records[s], q, cap2, center[s]);
      FinishGuarded(center[s], term[s], cap2, &lse2[s]);
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < S::kStepsAStage; ++s) {
    float x[4][2 * S::kTiles], part[4];
    CoarseTokens4(lane, records[s], y[s].x, y[s].y, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = SumOfPowers(x[i]);
    lse2[s].at[0][0] = ptx::Log2(ScatterSum4(part)) + (center[s].at[0][0] + term[s].at[0][0]);
  }
}

}  // namespace kvd::score

#endif  // LOCKS_KVD_KERNELS_SCORE_STEP4_CUH_
