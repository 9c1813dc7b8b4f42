// Estimates each page's log-sum-exp of attention logits from its record.
//
// Why: reading the records (10% of the KV bytes; 3% for the coarse scan) replaces reading the keys.
// Thread safety: compatible. Ownership: views only.
// Source: LOCKS (arXiv 2607.24555) section 3; the coarse scan is ours (kernels/README.md).
//
// Shapes (slowest to fastest)  dtype      notes
//   query      [N, H, D]       bf16|fp16  q of the model, or q' already (see rotate_query)
//   coarse     N x [Hk, P_cap] coarse     one base pointer a sequence, of this layer
//   fine       N x [Hk, P_cap] fine       the same; unused by ScoreCoarse
//   num_pages  [N]             int32
//   lse        [N, H, P_max]   fp32       out; -inf for p >= num_pages[n]
// Units:    natural log; logits scaled by `softmax_scale`, then soft-capped if logit_softcap > 0.
// Limits:   D in {64, 96, 128, 256}; B in {16, 32}; R in {4, 8}; G in 1..16; P <= kMaxPages.
// Numerics: |lse - truth| <= 1e-3 up to a logit magnitude of 32, relative 3e-5 above (method of the
//           truth: tests/support/oracle); logits saturate at +-1e30, never NaN; equal inputs give
//           equal bits whatever the sequence's position in the batch.

#ifndef LOCKS_KVD_KERNELS_SCORE_H_
#define LOCKS_KVD_KERNELS_SCORE_H_

#include <cstdint>

#include "kernels/layout.h"

#if KVD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvd {

struct ScoreArgs {
  int num_sequences;  // N
  int num_kv_heads;   // Hk: the heads that this worker holds
  int group;          // G
  int head_dim;
  int page_tokens;
  int rank;
  KvDtype dtype;
  float softmax_scale;
  float logit_softcap;
  const uint16_t* query;
  const uint8_t* const* coarse;
  const uint8_t* const* fine;
  const int64_t* page_capacity;  // [N] P_cap: stride of one head's records, in records
  const int32_t* num_pages;
  int64_t lse_stride;  // P_max >= every num_pages[n]
  float* lse;
  // The records are rotated and `query` is not: score rotates its own copy. The same bits as from
  // what RotateQuery makes of it.
  bool rotate_query = false;
};

// A list of pages per (sequence, KV head) whose estimate is to be replaced by the full one.
struct RefineArgs {
  ScoreArgs score;
  int max_candidates;             // C: row length of `candidates`
  const int32_t* candidates;      // [N, Hk, C] ascending page indexes
  const int32_t* num_candidates;  // [N, Hk]
};

namespace ref {

// Full scan: lse of every page from both parts of its record.
void ScoreFull(const ScoreArgs& args);

// Coarse scan: lse of every page from the coarse part alone, with the expected-residual term
// .5 * scale^2 * |q'|^2 * tau added (not with a softcap).
void ScoreCoarse(const ScoreArgs& args);

// Overwrites lse[n, h, p] with the full estimate for the candidates p of h's KV head; bit-identical
// to what ScoreFull would have written there.
void ScoreRefine(const RefineArgs& args);

}  // namespace ref

#if KVD_CUDA
// The same on the GPU: every pointer, and every pointer behind one, is to device memory. Record
// bases and `query` are 16-byte aligned.
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable. num_pages,
//           num_candidates and the tables behind the pointers are read when the kernel runs, not
//           when it is launched. A full scan reads num_pages, page_capacity, the bases and its
//           first records before the kernel that precedes it in the stream has ended: that one must
//           not write them. Query and candidates may be its.
// REQUIRES: 0 <= num_pages[n] <= min(lse_stride, page_capacity[n]); candidates are pages of their
// sequence.
// Errors:   cudaErrorInvalidValue if a limit is violated, cudaErrorNotSupported for a geometry that
//           is not built (kernels/built_geometries.h); nothing is enqueued then; else the launch's.
[[nodiscard]] cudaError_t LaunchScoreFull(const ScoreArgs& args, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchScoreCoarse(const ScoreArgs& args, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchScoreRefine(const RefineArgs& args, cudaStream_t stream);
#endif

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_SCORE_H_
