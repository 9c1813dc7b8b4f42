// The fixed rotation of keys and queries that makes records easier to quantise:
// x' = H (s * x) / sqrt(n), H Sylvester's Hadamard matrix, s fixed random signs.
//
// Why: orthogonal, so every logit stays; it spreads outlier channels over all dims, which lowers
// the rounding error of the int4 and int8 codes. Records and score's copy of q are rotated; units,
// page cache and attend never see it.
// Shapes: n = D; for D = 96 it is three such matrices, n = 32, side by side.
// Signs: bit 63 of the successive outputs of splitmix64 seeded with 1 (one a dim; 1 means -1).
// Thread safety: pure functions.

#ifndef LOCKS_KVD_KERNELS_ROTATE_H_
#define LOCKS_KVD_KERNELS_ROTATE_H_

#include <cstdint>

#include "kernels/checksum.h"
#include "kernels/layout.h"

#if KVD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvd {

// The signs s, a prefix of one sequence for every head_dim: bit d % 32 of word d / 32 is set where
// dim d changes its sign.
struct RotationSigns {
  static constexpr int kMaxDim = 256;
  uint32_t words[kMaxDim / 32];
};
constexpr RotationSigns MakeRotationSigns() {
  RotationSigns signs = {};
  uint64_t state = 1;
  for (int d = 0; d < RotationSigns::kMaxDim; ++d) {
    state += kGolden64;  // splitmix64: the state walks by golden, the output is its mix
    if (Mix64(state) >> 63 != 0) signs.words[d / 32] |= 1u << (d % 32);
  }
  return signs;
}

// Rotates `num_rows` rows of `head_dim` floats in place. REQUIRES: head_dim in {64, 96, 128, 256}.
void Rotate(float* rows, int64_t num_rows, int head_dim);

// q' of method: rotates in fp32, then rounds to the model's dtype. query and out are [num_rows, D]
// bit patterns of `dtype` and may be the same memory.
void RotateQuery(const uint16_t* query, int64_t num_rows, int head_dim, KvDtype dtype,
                 uint16_t* out);

#if KVD_CUDA
// RotateQuery on the GPU, bit for bit; query and out are device memory and may be the same.
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable.
// Errors:   cudaErrorInvalidValue for another head_dim or dtype (nothing is enqueued); else the
// launch's.
[[nodiscard]] cudaError_t LaunchRotateQuery(const uint16_t* query, int64_t num_rows, int head_dim,
                                            KvDtype dtype, uint16_t* out, cudaStream_t stream);
#endif

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_ROTATE_H_
