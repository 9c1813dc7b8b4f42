// Writes a decode step's new key and value into each KV head's tail unit.
//
// Thread safety: compatible. Ownership: views only.
//
// Shapes (slowest to fastest)  dtype      notes
//   k, v   [N, Hk, D]          bf16|fp16  post-RoPE key, value
//   tails  [N, Hk] pointers    bytes      unit that holds the sequence's next token
//   token  [N]                 int32      row of the unit to write, 0 <= token < B

#ifndef LOCKS_KVD_KERNELS_APPEND_H_
#define LOCKS_KVD_KERNELS_APPEND_H_

#include <cstdint>

#if KVD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvd {

struct AppendArgs {
  int num_sequences;
  int num_kv_heads;
  int head_dim;
  int page_tokens;
  const uint16_t* k;
  const uint16_t* v;
  uint8_t* const* tails;
  const int32_t* token;
};

namespace ref {
void Append(const AppendArgs& args);
}  // namespace ref

#if KVD_CUDA
// The same on the GPU: every pointer, and every pointer behind one, is to device memory; k, v and
// tails are 16-byte aligned.
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable.
// Errors:   cudaErrorInvalidValue unless head_dim is a multiple of 8; else the launch's.
[[nodiscard]] cudaError_t LaunchAppend(const AppendArgs& args, cudaStream_t stream);
#endif
}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_APPEND_H_
