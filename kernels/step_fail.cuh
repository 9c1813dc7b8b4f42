// A unit that a step asked for did not come as it should: nobody attends it now, and nobody selects
// its page from now on.

#ifndef LOCKS_KVD_KERNELS_STEP_FAIL_CUH_
#define LOCKS_KVD_KERNELS_STEP_FAIL_CUH_

#include "kernels/step.h"

namespace kvd {

// One thread of whoever found it. `row`: of (sequence, KV head); `position`: in its list of pages;
// the page cache gave the unit `slot`.
__device__ inline void FailUnit(const FetchArgs& args, const StepRow& sequence, int row,
                                int position, int page, int slot) {
  const ResolveRow& cache = args.resolve.rows[row];
  cache.page_slot[page] = -1;
  cache.slot_page[slot] = -1;
  cache.slot_step[slot] = 0;
  args.resolve.slots[int64_t{row} * args.resolve.max_pages + position] = -1;
  atomicAnd(reinterpret_cast<unsigned long long*>(sequence.selectable) + page / 64,
            ~(1ull << (page % 64)));
  StepFigures* figures = args.figures + row / args.shape.num_kv_heads;
  atomicAdd(&figures->failed, 1u);
  const uint32_t at = atomicAdd(&figures->num_failures, 1u);
  if (at < StepFigures::kMaxFailures) figures->failed_pages[at] = page;
}

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_STEP_FAIL_CUH_
