// The vectorised inner loops of the reference kernels: the only code that is dispatched at run time
// by what the CPU can do. Each *_ref.cc is the mathematics, these are its sums.
//
// Thread safety: pure functions of caller's memory, except UseTarget. Nothing allocates.
// Repeatability: a target gives equal bits for equal inputs; targets differ in rounding and are
// held to
//           the tolerances of kernels/README.md. Golden values come from the scalar target.
// Lanes:    score works on NumLanes() records at once, one record a lane; every step is the plain
//           formula in each lane, so a result depends neither on its lane nor on its neighbours. A
//           *lane array* [n] holds n rows of NumLanes() values.
// Alignment: lane arrays on 64 bytes, records on 4.

#ifndef LOCKS_KVD_KERNELS_SIMD_H_
#define LOCKS_KVD_KERNELS_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/layout.h"

namespace kvd::simd {

inline constexpr int kMaxLanes = 16;
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxGroup = 16;
inline constexpr int kMaxRank = 8;
// Logits saturate here, so that no input makes an infinity or a NaN.
inline constexpr float kLogitLimit = 1e30f;

// --- targets
// ---------------------------------------------------------------------------------------

// Targets that were built in and that this CPU has; index 0 is the best, the last is scalar.
int NumTargets();
const char* TargetName();  // of the target in use
// Uses target `idx` from now on in this process. For tests and benchmarks; not thread-safe.
void UseTarget(int idx);
int NumLanes();

// --- score
// -----------------------------------------------------------------------------------------

// The queries of one KV head, prepared for the dot products: each scaled by a power of two so that
// its largest component is in [1, 2): no product with a code can then overflow.
struct LaneQuery {
  int group;
  int head_dim;
  // [D][G], times 16^-(d % 4): codes are read where they stand in their word, the weight undoes it.
  alignas(64) float weighted[kMaxHeadDim * kMaxGroup];
  // Where the dtype is bf16: two components as bf16 a word, [D / 8][4][G]. Pair n of word w holds
  // dims 8w + n (low half) and 8w + n + 4.
  bool has_pairs;
  alignas(64) uint32_t pairs[kMaxHeadDim / 2 * kMaxGroup];
  float sum[kMaxGroup];         // sum of the scaled query's components
  float multiplier[kMaxGroup];  // softmax scale * log2(e) * the power of two taken out
  float half_norm[kMaxGroup];   // .5 * scale^2 * |q|^2, of the query as given, saturated
};
void PrepareQuery(const uint16_t* query, int group, int head_dim, KvDtype dtype,
                  float softmax_scale, LaneQuery* out);

// Lane array of the 32-bit words of NumLanes() rows of `bytes` bytes. REQUIRES: bytes % 16 == 0.
void Transpose(const uint8_t* const* rows, size_t bytes, int32_t* words);

// NumLanes() rows of `bytes` bytes that a dot product brings into the cache while it computes,
// evenly over its steps: the scan is then bound by arithmetic, not by the latency of memory.
struct Prefetch {
  const uint8_t* const* rows;
  size_t bytes;
};

// z[r][g] = sum_d code[r][d] * q_g[d] over rows of int4 codes, each a lane array [D / 8].
// Coarse part: rows[0] holds the centroid's high nibbles, offset binary; rows 1 and 2 the two
// modes.
void CoarseDots(const int32_t* const* rows, const LaneQuery& query, const Prefetch& ahead,
                float* z);
// Modes, two's complement. REQUIRES: num_rows % 4 == 0.
void ModeDots(const int32_t* const* rows, int num_rows, const LaneQuery& query,
              const Prefetch& ahead, float* z);
// z[g] = sum_d mu8[d] * q_g[d], the centroid put together from its high and low nibbles.
void CentroidDots(const int32_t* high, const int32_t* low, const LaneQuery& query,
                  const Prefetch& ahead, float* z);

// What remains of NumLanes() records once their codes have met the queries: B logits per head,
// x_t = center + sum_k coefficient[k][t] * y[k], in units of ln 2.
struct LaneModes {
  int group;
  int num_modes;
  int page_tokens;
  const int32_t* coefficients[kMaxRank];  // lane arrays [B / 4] of int8 coefficients
  alignas(64) float y[kMaxRank * kMaxGroup * kMaxLanes];  // [k][g]
  alignas(64) float center[kMaxGroup * kMaxLanes];        // [g]
};

// y[first + k][g] = scale[k] * multiplier[g] * z[k][g] for `count` modes, saturated. `scales`: lane
// array [ceil(count / 2)] of bf16 pairs, as they stand in the record.
void FoldScales(const int32_t* scales, int first, int count, const float* z, const LaneQuery& query,
                LaneModes* modes);

// center[g] = s_mu * multiplier[g] * (codes . q_g), saturated. `scale_tau`: lane array [1], s_mu in
// the low half. High nibbles alone stand for 16 hi + 7.5.
enum class CentroidCodes { kWhole, kHighNibbles };
void FoldCentroid(const int32_t* scale_tau, const float* z, CentroidCodes codes,
                  const LaneQuery& query, LaneModes* modes);

// lse[g] = ln sum_t exp(f(x_t)), with f the soft cap if softcap > 0. With `scale_tau` not null adds
// half_norm[g] * tau (tau stands in its high half).
void PageLse(const LaneModes& modes, float softcap, const int32_t* scale_tau,
             const LaneQuery& query, float* lse);

// --- attend
// ----------------------------------------------------------------------------------------

// Row length of logits and weights: the longest page.
inline constexpr int kLogitStride = 32;

// logits[g][t] = f(scale * q_g . k_t), saturated, for t < num_tokens; what stands after them is
// overwritten. `query` is [group][D] fp32, `keys` [B][D] of `dtype`.
void KeyLogits(const float* query, int group, const uint16_t* keys, int num_tokens, int head_dim,
               KvDtype dtype, float scale, float softcap, float* logits);

// o[g] = decay[g] * o[g] + sum_t p[g][t] * v_t. `o` is [group][D], `p` as logits above.
void AddValues(const float* p, int group, const uint16_t* values, int num_tokens, int head_dim,
               KvDtype dtype, const float* decay, float* o);

// x[i] = exp(x[i] - shift); returns their sum. REQUIRES: count % 16 == 0, shift finite and >= every
// x.
float ExpInPlace(float* x, int count, float shift);

// --- rows of lse
// -----------------------------------------------------------------------------------

struct MaxResult {
  float max;            // -inf if there is no value
  uint64_t num_faults;  // NaNs, left out of the maximum
};
// Over the x[i] whose bit in `include` is set (bit i % 64 of word i / 64; null: all).
MaxResult MaskedMax(const float* x, int64_t count, const uint64_t* include);
// Sum of exp(x[i] - shift) over the same; NaN adds nothing. REQUIRES: shift finite and >= every x.
float MaskedSumExp(const float* x, int64_t count, const uint64_t* include, float shift);

// keys[p] = the rank of ln sum_g exp(lse[g][p] - norm[g]) as an unsigned integer of the same order,
// 0 where bit p of `allowed` is clear; -inf ranks above 0. NaN, and heads with a norm of -inf, add
// nothing. best[w] = the largest key of word w's 64 pages; keys of words without a bit are not
// written. REQUIRES: room for whole words of keys; no bit at or after num_pages.
void ScoreKeys(const float* lse, int64_t lse_stride, int group, const float* norm,
               int64_t num_pages, const uint64_t* allowed, uint32_t* keys, uint32_t* best);
float FromOrderedKey(uint32_t key);

}  // namespace kvd::simd

#endif  // LOCKS_KVD_KERNELS_SIMD_H_
