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
}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_APPEND_H_
