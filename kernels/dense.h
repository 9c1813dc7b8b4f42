// The few dense loops of the record builder, written so that any vector width gives the same bits:
// every loop is elementwise or keeps eight fixed running sums, and no sum is ever reordered.
//
// Why: golden records (tests/golden) must not depend on the compiler's choice of instructions. The
// files that include this are built with -ffp-contract=off for the same reason.
// Thread safety: pure functions. Internal to kernels/.

#ifndef LOCKS_KVD_KERNELS_DENSE_H_
#define LOCKS_KVD_KERNELS_DENSE_H_

#include <algorithm>
#include <cmath>

namespace kvd {

// REQUIRES: count % 8 == 0, here and in MaxAbs.
inline float Dot(const float* a, const float* b, int count) {
  float sums[8] = {};
  for (int i = 0; i < count; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

inline float MaxAbs(const float* x, int count) {
  float largest[8] = {};
  for (int i = 0; i < count; i += 8) {
    for (int j = 0; j < 8; ++j) largest[j] = std::max(largest[j], std::fabs(x[i + j]));
  }
  return *std::max_element(largest, largest + 8);
}

// out += factor * row.
inline void AddScaled(float* __restrict out, float factor, const float* __restrict row, int count) {
  for (int i = 0; i < count; ++i) out[i] += factor * row[i];
}

// Clamps x, then rounds half to even. REQUIRES: integer bounds of magnitude under 2^22.
inline float RoundClamped(float x, float low, float high) {
  constexpr float kMagic = 0x1.8p23f;  // at this magnitude fp32 holds integers only
  return (std::min(std::max(x, low), high) + kMagic) - kMagic;
}

// Rows that one step of TimesMetric takes; `num_rows` must be a multiple.
inline constexpr int kMetricRows = 4;

// With kFull out[r] = rows[r] S, for a symmetric S [dim, dim]. With kUpper out[r] = rows[r] U,
// where S = U + U' and U is upper triangular with half of S's diagonal: then x'S y = Dot(xU, y) +
// Dot(yU, x), for half the work. rows and out are [num_rows, dim] and must not overlap.
enum class Half { kUpper, kFull };
void TimesMetric(const float* rows, int num_rows, const float* s, int dim, Half half, float* out);

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_DENSE_H_
