// Brings the next records into the cache while the last ones are scored. Inside of simd.cc and
// simd_bf16.cc.

#ifndef LOCKS_KVD_KERNELS_SIMD_PREFETCH_H_
#define LOCKS_KVD_KERNELS_SIMD_PREFETCH_H_

#include <algorithm>

#include "kernels/simd.h"

// Loops over registers: unrolled in full, or the arrays of vectors would live in memory. Not under
// sanitizers, where it gains nothing and takes minutes to compile; the order of sums stays.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVD_UNROLL
#else
#define KVD_UNROLL _Pragma("GCC unroll 16")
#endif

namespace kvd::simd {

// Query heads that are scored together, so that their sums stay in registers.
inline constexpr int kTileHeads = 4;
inline int NumHeadTiles(int group) { return (group + kTileHeads - 1) / kTileHeads; }

// Spreads a prefetch over `num_steps` calls of Step: in a burst it would fill the core's miss
// buffers and stall it. Into L2 only, since two rounds of records would push the working set out of
// L1.
template <int kNumLanes>
class LanePrefetcher {
 public:
  LanePrefetcher(const Prefetch& what, int num_steps)
      : what_(what), lines_per_step_((LinesOfRow() * kNumLanes + num_steps - 1) / num_steps) {}

  void Step() {
    for (int i = 0; i < lines_per_step_ && row_ < kNumLanes; ++i) {
      const size_t offset = std::min(static_cast<size_t>(line_) * 64, what_.bytes - 1);
      __builtin_prefetch(what_.rows[row_] + offset, 0, 2);
      if (++line_ == LinesOfRow()) {
        line_ = 0;
        ++row_;
      }
    }
  }

 private:
  // One more than its length in lines: a row need not begin with one.
  int LinesOfRow() const { return static_cast<int>((what_.bytes + 63) / 64) + 1; }

  Prefetch what_;
  int lines_per_step_;
  int row_ = 0;
  int line_ = 0;
};

}  // namespace kvd::simd

#endif  // LOCKS_KVD_KERNELS_SIMD_PREFETCH_H_
