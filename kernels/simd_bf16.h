// Dot products of score by AVX-512's bf16 instruction, which Highway 1.0.3 does not have. Inside of
// simd.cc.
//
// Why: on the CPU score is bound by arithmetic. A code of 4 bits is a bf16, and so is a component
// of a bf16 model's query, so one instruction makes 32 exact products where a fused multiply-add
// makes 16, and a table lookup decodes two codes at once (bench/kernel_bench: 1.5 times the rate of
// the same loops in fp32). Thread safety: pure functions. Results: as the functions of the same
// names in kernels/simd.h, within rounding. REQUIRES: Supported(), query.has_pairs, 16 lanes.

#ifndef LOCKS_KVD_KERNELS_SIMD_BF16_H_
#define LOCKS_KVD_KERNELS_SIMD_BF16_H_

#include <cstdint>

#include "kernels/simd.h"

namespace kvd::simd::bf16 {

// True if this build and this CPU have the instruction.
bool Supported();

void CoarseDots(const int32_t* const* rows, const LaneQuery& query, const Prefetch& ahead,
                float* z);
void ModeDots(const int32_t* const* rows, int num_rows, const LaneQuery& query,
              const Prefetch& ahead, float* z);
void CentroidDots(const int32_t* high, const int32_t* low, const LaneQuery& query,
                  const Prefetch& ahead, float* z);

}  // namespace kvd::simd::bf16

#endif  // LOCKS_KVD_KERNELS_SIMD_BF16_H_
