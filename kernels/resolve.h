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

#if KVD_CUDA
#include <cuda_runtime_api.h>
#endif

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

#if KVD_CUDA
// The page cache of one (layer, KV head) of one sequence, as the GPU sees it.
struct ResolveRow {
  int32_t* page_slot;   // [P_cap]
  int32_t* slot_page;   // [S]
  uint64_t* slot_step;  // [S]
  int32_t num_slots;    // S <= max_slots
};

// Many rows at once: every pointer, and every pointer behind one, is to device memory.
struct ResolveBatch {
  int num_rows;              // M
  int max_pages;             // K: row length of the lists; select's num_select
  int max_slots;             // no row has more; sizes the launch
  const ResolveRow* rows;    // [M]; no two share a map
  const int32_t* pages;      // [M, K] as select leaves them: ascending, distinct
  const int32_t* num_pages;  // [M] select's num_selected; 0 changes nothing
  const uint64_t* step;      // [1] grows from launch to launch; 1 <= step < 2^52
  int32_t* slots;            // [M, K] out: as above; -1 from num_pages on
  int32_t* miss_idx;         // [M, K] out: as above; -1 from num_misses on
  int32_t* num_misses;       // [M] out
};

// Resolve for every row: the same maps, slots and misses as the reference. Counts, rows and step
// are read when the kernel runs.
// Stream:   one launch, enqueued on `stream` only; allocates nothing; no host sync; capturable.
// Errors:   cudaErrorInvalidValue if a count is negative or max_slots > kMaxCacheSlots (nothing is
//           enqueued); else the launch's.
[[nodiscard]] cudaError_t LaunchResolve(const ResolveBatch& batch, cudaStream_t stream);

// Evicts the misses whose fetch failed: those with valid[m, j] = 0, j a position in miss_idx, as
// LaunchGatherUnits leaves it. Their entry of `slots` becomes -1, so that nothing attends them.
// Without it the next step would take the slot's bytes for a hit. Stream and Errors as above.
[[nodiscard]] cudaError_t LaunchEvictInvalid(const ResolveBatch& batch, const uint8_t* valid,
                                             cudaStream_t stream);
#endif
}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_RESOLVE_H_
