// Decode attention straight over the pages of sequences that are all in this GPU's memory, by the
// pages that select chose.
//
// Why: where nothing has to be fetched, a list of units says no more than the list of pages does,
// and the kernel that would write it, and append the step's token, costs a layer a launch. So
// attend appends, and finds the units itself.
// Thread safety: compatible. Ownership: views only; allocates nothing. GPU only; every pointer, and
// every pointer behind one, is to device memory, 16-byte aligned.

#ifndef LOCKS_KVD_KERNELS_ATTEND_PAGES_H_
#define LOCKS_KVD_KERNELS_ATTEND_PAGES_H_

#include "kernels/attend.h"
#include "kernels/step.h"

namespace kvd {

struct AttendPagesArgs {
  AttendArgs attend;  // units, num_units and max_units are not used
  int layer;
  int num_layers;  // L
  // Of each sequence: num_tokens, num_sinks, first_ring_page and `ring`, where page p of all its
  // pages stands in place p: [P_cap][L][Hk] units. Attended are pages [0, num_sinks), the selected
  // ones, and from first_ring_page to the tail.
  const StepRow* rows;  // [N]
  // [N, Hk, D] of the model's dtype: the step's token, written into the tail unit
  const uint16_t* k;
  const uint16_t* v;
  int max_selected;
  const int32_t* selected;      // [N, Hk, max_selected], ascending, none of them always attended
  const int32_t* num_selected;  // [N, Hk]
};

// o and lse have the bits that LaunchAttend gives for a list of the same units in this order.
// Padding (num_tokens < 0): nothing is appended, o = 0 and lse = -inf.
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable. `rows`, k and v
//           are read before the kernel just before it has ended (kernels/launch.cuh): that one,
//           select, must not write them.
// Errors:   as LaunchAttend, and cudaErrorInvalidValue for a layer that there is not.
[[nodiscard]] cudaError_t LaunchAttendPages(const AttendPagesArgs& args, cudaStream_t stream);

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_ATTEND_PAGES_H_
