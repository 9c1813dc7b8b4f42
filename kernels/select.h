// Chooses the pages to attend: the group's mean share of each page, then an exact top-K.
//
// Why exact: a count fixed by construction and ties to the lowest page keep results repeatable; a
// threshold test lets thousands of equal pages through (seen in other engines).
// Thread safety: compatible. Ownership: views only. Allocates nothing: scratch comes from the
// caller.
// Source: LOCKS (arXiv 2607.24555) section 3 for the share; `peak` is the authors' code.
//
// Shapes (slowest to fastest)  dtype     notes
//   lse         [N, H, P_max]  fp32      from score; natural log; NaN counts as -inf and as a fault
//   num_pages   [N]            int32
//   selectable  N pointers     uint64    bitset over pages, bit p of word p / 64; a null pointer:
//                                        all set
//   candidates  [N, Hk, C]     int32     optional: only these pages may be chosen (progressive
//                                        scan)
//   pages       [N, Hk, K]     int32     out, ascending; entries from num_selected on are -1
//   num_selected[N, Hk]        int32     out, min(K, selectable pages)
//   threshold   [N, Hk]        fp32      out: ln score of the weakest page taken; +inf if none was
//   log_norm    [N, H]         fp32      out: Z_g, lse over all summarised pages; -inf if there are
//                                        none
// The always-kept pages (the first n_sink, the last n_win) are never chosen and never selectable;
// they are in Z. Pages whose bit is clear are not chosen but stay in Z.

#ifndef LOCKS_KVD_KERNELS_SELECT_H_
#define LOCKS_KVD_KERNELS_SELECT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/layout.h"

#if KVD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvd {

enum class CombineRule : uint32_t {
  kShare = 0,  // ln score = LSE_g(lse - Z_g) - ln G: the group's mean share of all summarised mass
  // sum_g exp(lse - max over sinks and selectable pages): the authors' code, for comparison
  kPeak = 1,
};

struct SelectArgs {
  int num_sequences;
  int num_kv_heads;
  int group;
  CombineRule rule;
  int n_sink;
  int n_win;
  int num_select;  // K, 0 <= K
  const float* lse;
  int64_t lse_stride;
  const int32_t* num_pages;
  const uint64_t* const* selectable;  // [N]; null: every page of every sequence
  int max_candidates;                 // C; 0: no candidate lists
  const int32_t* candidates;          // ascending
  const int32_t* num_candidates;      // [N, Hk]
  int32_t* pages;
  int32_t* num_selected;
  float* threshold;
  float* log_norm;
  uint64_t* num_faults;  // NaNs seen are added here; may be null
  void* scratch;         // SelectScratchBytes(lse_stride) bytes, 64-byte aligned; GPU: see below
};

// Scratch of the reference, for one (sequence, KV head) at a time.
size_t SelectScratchBytes(int64_t lse_stride);

namespace ref {
void Select(const SelectArgs& args);
}  // namespace ref

#if KVD_CUDA
// Scratch of the launchers below for `num_rows` (sequence, KV head) rows. Launches of one stream
// with the same num_rows, group and lse_stride may share it. Its owner sets it to 0 once, before
// the first of them; each launch relies on what the one before left in it.
size_t SelectGpuScratchBytes(int64_t num_rows, int group, int64_t lse_stride);

// The same on the GPU: every pointer, and every pointer behind one, is to device memory; `scratch`
// is of SelectGpuScratchBytes bytes, 128-byte aligned. num_pages, selectable and the candidate
// lists are read when the kernels run, not when they are launched.
// Stream:   one launch, enqueued on `stream` only; allocates nothing; no host sync; capturable. Of
//           rows of many pages it is cooperative: it begins when an SM for each of its CTAs is
//           free.
// REQUIRES: 0 <= num_pages[n] <= lse_stride; candidates are pages of their sequence; lse is not
// +inf.
// Numerics: log_norm, threshold and scores as the reference's within 1e-5 nats, relative 2e-6 of
//           the largest |Z|; on these scores the choice is exact. Equal inputs give equal bits,
//           whatever the rest of the batch is.
// Errors:   cudaErrorInvalidValue if group is not in 1..16, lse or scratch not aligned, lse_stride
//           not a multiple of 4 in 4..kMaxPages, a count is negative (or one of sequences or KV
//           heads above 65535) or the rule is unknown (nothing is enqueued); else the launch's. A
//           scratch that was not 0 at first, or is shared otherwise, gives wrong pages, or ends
//           after some ten seconds as a failed launch.
[[nodiscard]] cudaError_t LaunchSelect(const SelectArgs& args, cudaStream_t stream);

// The two selects of a progressive scan, around LaunchScoreRefine (kernels/score.h). The first
// lists as candidates what may still be selected, with the pages that are always kept.
struct CandidateOut {
  int max_candidates;       // C >= num_select + n_sink + n_win
  int32_t* candidates;      // [N, Hk, C] sinks, the num_select best pages, window: ascending
  int32_t* num_candidates;  // [N, Hk]
};
// Of `args.pages`, `num_selected` and `threshold` nothing is written; args names no candidates.
// Leaves in the scratch what the second needs: no other launch may use it between them.
[[nodiscard]] cudaError_t LaunchSelectCandidates(const SelectArgs& args, const CandidateOut& out,
                                                 cudaStream_t stream);
// LaunchSelect among these candidates (args.candidates), of rows that differ from those of the
// first in the candidates' lse only; the sequences' tables have not changed. It need not read the
// other pages again: log_norm is within the same limits as if it had. num_faults: of the
// candidates' NaNs.
[[nodiscard]] cudaError_t LaunchSelectAmong(const SelectArgs& args, cudaStream_t stream);
#endif
}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_SELECT_H_
