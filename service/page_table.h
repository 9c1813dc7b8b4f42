// Which page is in which slot: the daemon's private truth about an arena's slots.
//
// States of a slot: free -> reserved -> sealed -> free, and reserved -> quarantined -> free for a
// writer that was lost. The generation is 1 when carved, +1 at a seal, +1 at an eviction, and never
// goes back: it is even only while the slot is sealed. A slot that is reserved again keeps its odd
// generation. Slot 0 is the canary's: sealed with generation 2 from the start, under no key, never
// given to a page. Thread safety: compatible (Arena's mutex guards it). No I/O, no clock: times are
// arguments.

#ifndef LOCKS_KVD_SERVICE_PAGE_TABLE_H_
#define LOCKS_KVD_SERVICE_PAGE_TABLE_H_

#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "proto/page_key.h"

namespace kvd {

inline constexpr uint32_t kCanarySlot = 0;
inline constexpr uint64_t kCanaryGeneration = 2;

enum class SlotState : uint8_t { kFree, kReserved, kSealed, kQuarantined };

// One page of one shard.
struct PageId {
  PageKey key = {};
  uint32_t shard = 0;
  friend bool operator==(const PageId&, const PageId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const PageId& id) {
    return H::combine(std::move(h), id.key, id.shard);
  }
};

// A sealed page as a reader names it.
struct PageLocation {
  uint32_t slot = 0;
  uint64_t generation = 0;
  friend bool operator==(const PageLocation&, const PageLocation&) = default;
};

class PageTable {
 public:
  struct Slot {
    SlotState state = SlotState::kFree;
    bool matched = false;   // sealed: was found by a lookup since it was sealed
    uint32_t page_idx = 0;  // reserved, sealed: place of the page in its sequence
    uint64_t word = 0;      // reserved, sealed: placement word of the page's stripe
    uint64_t generation = 1;
    PageId page;  // reserved, sealed
  };

  // REQUIRES: num_slots >= 2 (one is the canary's).
  explicit PageTable(uint32_t num_slots);

  // The slot that holds or will hold `page`, whatever its state.
  std::optional<uint32_t> Find(const PageId& page) const;
  const Slot& slot(uint32_t slot) const { return slots_[slot]; }
  uint32_t num_slots() const { return static_cast<uint32_t>(slots_.size()); }
  // Slots in `state`, the canary's not counted.
  uint32_t count(SlotState state) const { return counts_[static_cast<int>(state)]; }

  // Free -> reserved, for a page that has no slot. nullopt: no free slot.
  std::optional<uint32_t> Reserve(const PageId& page, uint32_t page_idx, uint64_t word = 0);
  // Reserved -> sealed. Returns the new (even) generation; the caller publishes it after this.
  uint64_t Seal(uint32_t slot);
  // Reserved, and stays so: the even generation that Seal would have given was published and told
  // to nobody. Returns the odd one after it, which the caller publishes before anything can be
  // written to the slot.
  uint64_t SkipSeal(uint32_t slot);
  // Sealed -> free. Returns the new (odd) generation, which the caller publishes before anything
  // can be written to the slot. REQUIRES: nobody leases the slot.
  uint64_t Evict(uint32_t slot);
  // Reserved -> free: a refused seal or a writer that left in order.
  void Free(uint32_t slot);
  // Reserved -> quarantined until `until`: bytes of a lost writer may still be on their way.
  void Quarantine(uint32_t slot, absl::Duration until);
  // Quarantined -> free for every slot whose time has come. Returns how many.
  uint32_t FreeExpired(absl::Duration now);
  // Marks a sealed page as found.
  void MarkMatched(uint32_t slot) { slots_[slot].matched = true; }

 private:
  void SetState(uint32_t slot, SlotState state);

  std::vector<Slot> slots_;
  absl::flat_hash_map<PageId, uint32_t> slot_by_page_;
  std::vector<uint32_t> free_;                                   // used from the back
  std::deque<std::pair<absl::Duration, uint32_t>> quarantined_;  // by time: the wait is constant
  uint32_t counts_[4] = {};
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_PAGE_TABLE_H_
