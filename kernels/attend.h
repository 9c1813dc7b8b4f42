// Exact attention of one query token over a list of units per KV head, and the merge of two partial
// results.
//
// Thread safety: compatible. Ownership: views only; allocates nothing.
//
// Shapes (slowest to fastest)  dtype      notes
//   query   [N, H, D]          bf16|fp16  post-RoPE, not rotated
//   units   [N, Hk, U_max]     UnitRef    num_units[n, hk] of them are used
//   o       [N, H, D]          fp32       out
//   lse     [N, H]             fp32       out, natural log; -inf (and o = 0) if there is nothing to
//                                         attend
// Units:    logits scaled by softmax_scale, then soft-capped if logit_softcap > 0.
// Numerics: fp32 accumulation; o within 2e-5 of its largest component, lse within 1e-5 of the truth
//           in double precision on the same values.

#ifndef LOCKS_KVD_KERNELS_ATTEND_H_
#define LOCKS_KVD_KERNELS_ATTEND_H_

#include <cstdint>

#include "kernels/layout.h"

#if KVD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvd {

struct UnitRef {
  const uint8_t* unit;  // [K: B x D][V: B x D]
  int32_t num_tokens;   // rows that count, 0..B (a tail page is partly filled)
};

struct AttendArgs {
  int num_sequences;
  int num_kv_heads;
  int group;
  int head_dim;
  int page_tokens;
  KvDtype dtype;
  float softmax_scale;
  float logit_softcap;
  const uint16_t* query;
  int max_units;  // U_max
  const UnitRef* units;
  const int32_t* num_units;  // [N, Hk]
  float* o;
  float* lse;
};

struct MergeArgs {
  int64_t num_rows;
  int head_dim;
  const float* o1;    // [num_rows, D]
  const float* lse1;  // [num_rows]
  const float* o2;
  const float* lse2;
  float* o;    // out; may be o1 or o2
  float* lse;  // out; may be lse1 or lse2
};

namespace ref {

void Attend(const AttendArgs& args);

// lse = logaddexp(lse1, lse2), o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2; an empty part (-inf)
// leaves the other as it is, two empty parts give o = 0 and -inf.
void MergeAttention(const MergeArgs& args);

}  // namespace ref

#if KVD_CUDA
// The same on the GPU: every pointer, and every pointer behind one, is to device memory; units are
// 16-byte aligned. The lists and num_units are read when the kernel runs.
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable.
// Limits:   D in {64, 96, 128, 256}; B in {16, 32}; G in 1..16.
// Numerics: as above, save that o may differ by 4e-5 of its largest component; equal inputs give
// equal bits.
// Errors:   cudaErrorInvalidValue if a limit is violated, cudaErrorNotSupported for a head_dim that
//           is not built (kernels/built_geometries.h); nothing is enqueued then; else the launch's.
[[nodiscard]] cudaError_t LaunchAttend(const AttendArgs& args, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchMergeAttention(const MergeArgs& args, cudaStream_t stream);
#endif
}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_ATTEND_H_
