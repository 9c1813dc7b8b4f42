// What a page's lse is made of beside its modes: the centroid's logit and, in a coarse scan, the
// residual's term.
//
// Device code only. Internal to kernels/score*.cu.

#ifndef LOCKS_KVD_KERNELS_SCORE_CENTER_CUH_
#define LOCKS_KVD_KERNELS_SCORE_CENTER_CUH_

#include "kernels/score_lanes.cuh"

namespace kvd::score {

// Eight records in shared memory: record i's coarse part at coarse + i kCoarseBytes, and so the
// fine.
struct Records {
  const uint8_t* coarse;
  const uint8_t* fine;
};

// Products with the centroid's high or low nibbles, this lane's part of which is at `codes`.
template <class S>
__device__ __forceinline__ Sums<S> NibbleSums(const uint8_t* codes, const Queries<S>& q,
                                              const int32_t (&start)[S::kMmas][4]) {
  uint32_t words[S::kWords];
  LoadCodes<S>(codes, words);
  Sums<S> sums;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) sums.Add(q, start, w, CentroidCodes(words[w]));
  return sums;
}

// The logit of a centroid, in units of ln 2, without soft cap, from its sum; anything where it is
// not plain.
template <class S>
__device__ __forceinline__ float CenterOf(float sum, const Queries<S>& q, int set, float scale) {
  // The coarse scan takes the middle of the codes that share the high nibble.
  return (S::kOnlyCoarse ? sum + q.middle[set] : sum) * (q.factor[set] * scale);
}

// Those of this lane's pages.
template <class S>
__device__ __forceinline__ PerPage<S> Centers(const Records& records, const Queries<S>& q) {
  constexpr SummaryLayout kL = S::kLayout;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint8_t* codes =
      records.coarse + g * S::kCoarseBytes + kL.coarse[kCentroidHigh] + t * (S::kDim / 8);
  const Sums<S> high = NibbleSums(codes, q, q.start);
  Sums<S> low;
  if constexpr (!S::kOnlyCoarse)
    low = NibbleSums(records.fine + g * S::kFineBytes + kL.fine[kCentroidLow] + t * (S::kDim / 8),
                     q, q.low_start);
  const auto sum = [&](int set, int i) {
    const float of_high = high.Combine(set, i);
    return S::kOnlyCoarse ? of_high : fmaf(low.Combine(set, i), 1.0f / 16, of_high);
  };
  PerPage<S> center;
#pragma unroll
  for (int i = 0; i < S::kPages; ++i) {
    const float scale = ptx::Bf16Pair(*reinterpret_cast<const uint32_t*>(
                                          records.coarse + PageOf<S>(i) * S::kCoarseBytes +
                                          kL.coarse[kCentroidScale]))
                            .x;
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      float code = sum(set, i);
      if constexpr (S::kPadded == 4) {
        const float other = sum(set, 1);
        const bool odd = PageOf<S>(0) % 2 != 0;
        code = SumHalves(odd ? other : code, odd ? code : other);
      }
      center.at[set][i] = CenterOf(code, q, set, scale);
    }
  }
  return center;
}

// What the expected residual adds to each lse.
template <class S>
__device__ __forceinline__ PerPage<S> TauTerms(const Records& records, const Queries<S>& q) {
  PerPage<S> term;
#pragma unroll
  for (int i = 0; i < S::kPages; ++i) {
    const float tau = ptx::Bf16Pair(*reinterpret_cast<const uint32_t*>(
                                        records.coarse + PageOf<S>(i) * S::kCoarseBytes +
                                        S::kLayout.coarse[kCentroidScale]))
                          .y;
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) term.at[set][i] = q.half_norm[set] * tau;
  }
  return term;
}

// Whether no center (beside `term`) needs saturation.
template <class S>
__device__ __forceinline__ bool ArePlain(const PerPage<S>& center, const PerPage<S>& term) {
  bool plain = true;
#pragma unroll
  for (int i = 0; i < S::kSets * S::kPages; ++i)
    plain &= IsPlain(center.at[i / S::kPages][i % S::kPages], term.at[i / S::kPages][i % S::kPages],
                     kPlainCenter);
  return plain;
}

// The lse from the guarded log of the sum, the center and what else is added to it; a soft cap has
// taken them in already.
template <class S>
__device__ __forceinline__ void FinishGuarded(const PerPage<S>& center, const PerPage<S>& term,
                                              float cap2, PerPage<S>* lse2) {
#pragma unroll
  for (int i = 0; i < S::kSets * S::kPages; ++i) {
    const int set = i / S::kPages, page = i % S::kPages;
    float& value = lse2->at[set][page];
    if (!(cap2 > 0))
      value += SaturateCenter(center.at[set][page]) + Saturate(term.at[set][page], kMaxLogit2);
    value = Saturate(value, kMaxLogit2);
  }
}

}  // namespace kvd::score

#endif  // LOCKS_KVD_KERNELS_SCORE_CENTER_CUH_
