// Looks the selected pages up in a worker's page cache and claims a slot for each that is not
// there.
//
// Why: selections overlap from step to step; with three slots per selected page about 9 of 10
// lookups hit, so that only the rest travels. Policy: exact LRU; hits are touched before any miss
// claims a slot, so a page of this step is never a victim of this step. The maps page -> slot and
// slot -> page stay mutually inverse. Thread safety: compatible. Ownership: views only; allocates
// nothing.
//
// Shapes, one (layer, KV head) of one sequence:
//   page_slot  [P_cap]  int32   slot of a page, -1 if it is not cached
//   slot_page  [S]      int32   page in a slot, -1 if it is empty
//   slot_step  [S]      uint64  last step that used the slot; 0 if empty
//   pages      [K]      int32   selected, ascending, distinct
//   slots      [K]      int32   out: the slot of each page; -1 if every slot is in use by this step
//   miss_idx   [K]      int32   out: positions in `pages` whose unit must be fetched, ascending
// REQUIRES: step grows from call to call and is at least 1; S <= kMaxCacheSlots.

#ifndef LOCKS_KVD_KERNELS_RESOLVE_H_
#define LOCKS_KVD_KERNELS_RESOLVE_H_

#include <cstdint>

namespace kvd {

// Slots that one (layer, KV head) of one sequence may have: six for each of 682 selected pages.
inline constexpr int kMaxCacheSlots = 4096;

struct ResolveArgs {
  int num_slots;  // S
  uint64_t step;
  const int32_t* pages;
  int num_pages;
  int32_t* page_slot;
  int32_t* slot_page;
  uint64_t* slot_step;
  int32_t* slots;
  int32_t* miss_idx;
};

namespace ref {

// Returns the number of misses. Pages that got no slot (S < K) are among neither hits nor misses.
int Resolve(const ResolveArgs& args);

// Forgets the page in `slot` (its fetch failed, or its daemon is gone).
void Evict(const ResolveArgs& args, int slot);

}  // namespace ref
}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_RESOLVE_H_
