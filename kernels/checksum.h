// The project's 64-bit checksum: order-sensitive, parallel, the same value on GPU and host.
//
// Why our own: it must run inside a gather on either side, and no library has one function for
// both.
// Definition: sum over the 32-bit little-endian words i of Mix64(word + (i + 1) * golden) mod 2^64;
// lengths that are not a multiple of 4 are padded with zero bytes. It detects damage, not forgery.
// Thread safety: pure functions.

#ifndef LOCKS_KVD_KERNELS_CHECKSUM_H_
#define LOCKS_KVD_KERNELS_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

#include "kernels/check.h"

#if KVD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvd {

inline constexpr uint64_t kGolden64 = 0x9E3779B97F4A7C15ull;

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
KVD_HD constexpr uint64_t Mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// The checksum of `bytes` bytes at `data`; 0 for none.
uint64_t Checksum64(const void* data, size_t bytes);

#if KVD_CUDA
// sums[i] = Checksum64 of the `bytes` bytes at data[i]; all in device memory, each piece 4-byte
// aligned.
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable.
// Errors:   cudaErrorInvalidValue unless bytes is a multiple of 4; else the launch's.
[[nodiscard]] cudaError_t LaunchChecksum64(const uint8_t* const* data, int64_t num_pieces,
                                           size_t bytes, uint64_t* sums, cudaStream_t stream);
#endif

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_CHECKSUM_H_
