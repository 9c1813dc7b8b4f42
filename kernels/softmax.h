// The algebra of partial softmax results: how an (lse, o) pair, or a running (max, sum), takes in
// another. Natural logarithms throughout.
//
// Why it is safe with empty parts: an empty part has lse = -inf and o = 0. Every difference is
// taken against a maximum that is finite, so -inf - -inf, the one way to a NaN here, never happens.
// Thread safety: pure functions, host and device.

#ifndef LOCKS_KVD_KERNELS_SOFTMAX_H_
#define LOCKS_KVD_KERNELS_SOFTMAX_H_

#include <cmath>
#include <limits>

#include "kernels/check.h"

namespace kvd {

inline constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

// ln(exp(a) + exp(b)); -inf if both are empty.
KVD_HD inline float LogAddExp(float a, float b) {
  const float high = a > b ? a : b;
  const float low = a > b ? b : a;
  if (low == kEmptyLse) return high;
  return high + std::log1p(std::exp(low - high));
}

// How two partial attention results combine: o = weight1 o1 + weight2 o2. Both weights are 0 if
// both are empty.
struct MergeWeights {
  float lse;
  float weight1;
  float weight2;
};
KVD_HD inline MergeWeights MergeLse(float lse1, float lse2) {
  const float lse = LogAddExp(lse1, lse2);
  if (lse == kEmptyLse) return {lse, 0, 0};
  return {lse, std::exp(lse1 - lse), std::exp(lse2 - lse)};
}

// Running sum of exp(x - max) over the values taken in so far; empty at first.
struct SoftmaxState {
  float max = kEmptyLse;
  float sum = 0;
};

// Raises the maximum to cover `x`; returns the factor by which everything summed so far (the sum
// itself, and an o that is accumulated beside it) has to shrink. REQUIRES: x is finite.
KVD_HD inline float Rescale(SoftmaxState* state, float x) {
  if (!(x > state->max)) return 1;
  const float factor = state->max == kEmptyLse ? 0 : std::exp(state->max - x);
  state->max = x;
  state->sum *= factor;
  return factor;
}

KVD_HD inline float Lse(const SoftmaxState& state) {
  return state.sum > 0 ? state.max + std::log(state.sum) : kEmptyLse;
}

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_SOFTMAX_H_
