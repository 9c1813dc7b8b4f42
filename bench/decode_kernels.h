// Small kernels of decode_bench: synthetic pages made where they are needed, and queries that
// drift.
//
// Thread safety: compatible. Only built with KVD_CUDA; device memory throughout. Stream: enqueue on
// `stream` only, allocate nothing, can be captured. Errors: the launch's.

#ifndef LOCKS_KVD_BENCH_DECODE_KERNELS_H_
#define LOCKS_KVD_BENCH_DECODE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/step.h"

namespace kvd::bench {

// Units of pages [first_page, first_page + num_pages) of the synthetic prompt (synthetic_pages.h):
// [pages][L][heads].
[[nodiscard]] cudaError_t LaunchSyntheticPages(const StepShape& shape, int first_page,
                                               int num_pages, uint8_t* units, cudaStream_t stream);

// state = rho * state + sqrt(1 - rho^2) * noise(step), and its bf16 in `values`; rho = 0 begins.
// Each element has variance 1.
[[nodiscard]] cudaError_t LaunchDrift(float* state, uint16_t* values, int64_t count, float rho,
                                      uint32_t step, cudaStream_t stream);

// Where the units and records of pages [first, first + num_pages) of a row are, for
// LaunchSummarize: [pages][L][heads] pointers each.
struct UnitTableArgs {
  StepShape shape;
  int first_page;
  int num_pages;
  int64_t page_capacity;  // stride of one head's records
  uint8_t* pages;         // [P_cap][L][heads] units
  uint8_t* coarse;        // [L][heads][P_cap] records
  uint8_t* fine;
  size_t coarse_bytes;
  size_t fine_bytes;
  const uint8_t** units;  // out
  uint8_t** coarse_at;    // out
  uint8_t** fine_at;      // out
};
[[nodiscard]] cudaError_t LaunchUnitTables(const UnitTableArgs& args, cudaStream_t stream);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_DECODE_KERNELS_H_
