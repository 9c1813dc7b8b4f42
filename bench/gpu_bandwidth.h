// What a GPU's memory gives to the simplest kernels: the bound that the other kernels are measured
// against.
//
// Thread safety: compatible. Only built with KVD_CUDA; device memory throughout, 16-byte aligned.
// Stream: enqueue on `stream` only, allocate nothing, can be captured.

#ifndef LOCKS_KVD_BENCH_GPU_BANDWIDTH_H_
#define LOCKS_KVD_BENCH_GPU_BANDWIDTH_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kvd::bench {

enum class ReadKind { kVectorLoads, kBulkCopies };

// Reads `bytes` bytes (a multiple of 16 KiB) once; `sink` takes a value that depends on all of
// them, so that nothing is left out by the compiler.
[[nodiscard]] cudaError_t LaunchRead(ReadKind kind, const uint8_t* data, size_t bytes,
                                     uint32_t* sink, cudaStream_t stream);

// Copies `bytes` bytes (a multiple of 16).
[[nodiscard]] cudaError_t LaunchCopy(const uint8_t* from, size_t bytes, uint8_t* to,
                                     cudaStream_t stream);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_GPU_BANDWIDTH_H_
