// Chooses the pages to attend: the group's mean share of each page, then an exact top-K.
//
// Why exact: a count fixed by construction and ties to the lowest page keep results repeatable; a
// threshold test lets thousands of equal pages through (seen in other engines).
// Thread safety: compatible. Ownership: views only. Allocates nothing: scratch comes from the caller.
// Source: LOCKS (arXiv 2607.24555) section 3 for the share; `peak` is the authors' code.
//
// Shapes (slowest to fastest)  dtype     notes
//   lse         [N, H, P_max]  fp32      from score; natural log; NaN counts as -inf and as a fault
//   num_pages   [N]            int32
//   selectable  N pointers     uint64    bitset over pages, bit p of word p / 64; a null pointer: all set
//   candidates  [N, Hk, C]     int32     optional: only these pages may be chosen (progressive scan)
//   pages       [N, Hk, K]     int32     out, ascending; entries from num_selected on are -1
//   num_selected[N, Hk]        int32     out, min(K, selectable pages)
//   threshold   [N, Hk]        fp32      out: ln score of the weakest page taken; +inf if none was
//   log_norm    [N, H]         fp32      out: Z_g, lse over all summarised pages; -inf if there are none
// The always-kept pages (the first n_sink, the last n_win) are never chosen and never selectable; they are
// in Z. Pages whose bit is clear are not chosen but stay in Z.

#ifndef LOCKS_KVD_KERNELS_SELECT_H_
#define LOCKS_KVD_KERNELS_SELECT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/layout.h"

namespace kvd {

enum class CombineRule : uint32_t {
  kShare = 0,  // ln score = LSE_g(lse - Z_g) - ln G: the group's mean share of all summarised mass
  kPeak = 1,   // sum_g exp(lse - max over sinks and selectable pages): the authors' code, for comparison
};

struct SelectArgs {
  int num_sequences;
  int num_kv_heads;
  int group;
  CombineRule rule;
  int n_sink;
  int n_win;
  int num_select;                     // K, 0 <= K
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
  uint64_t* num_faults;               // NaNs seen are added here; may be null
  void* scratch;                      // SelectScratchBytes(lse_stride) bytes, 64-byte aligned
};

// Scratch for one (sequence, KV head) at a time.
size_t SelectScratchBytes(int64_t lse_stride);

namespace ref {
void Select(const SelectArgs& args);
}  // namespace ref
}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_SELECT_H_
