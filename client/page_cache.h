// A sequence's copy of recently selected units, per layer and KV head, with exact LRU.
//
// Why: selections overlap from step to step; with three slots per selected page about 9 of 10
// lookups hit, so that only the rest travels. Invariant: page -> slot and slot -> page are mutually
// inverse, per (layer, head). A slot remembers the version of its page's row: a page that was put
// again has another version, and its old bytes are a miss. Thread safety: compatible: one step at a
// time. Ownership: owns its memory; allocates in Make only.

#ifndef LOCKS_KVD_CLIENT_PAGE_CACHE_H_
#define LOCKS_KVD_CLIENT_PAGE_CACHE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/buffer.h"
#include "client/worker_shape.h"

namespace kvd {

class PageCache {
 public:
  // Of a slot without valid bytes.
  static constexpr uint32_t kNoVersion = 0;

  // `slots_per_layer`[l] slots for each KV head of layer l.
  static absl::StatusOr<std::unique_ptr<PageCache>> Make(const WorkerShape& shape,
                                                         int page_capacity,
                                                         std::span<const int> slots_per_layer);

  // Looks up the selected pages (ascending, distinct) of one layer and head and claims a slot for
  // each that is not cached. slots[i] is page i's slot, never -1; miss_idx lists the positions
  // whose units must be fetched, ascending. `versions` is indexed by page, and never kNoVersion.
  // Returns the number of misses. REQUIRES: pages.size() <= the layer's slots; `step` >= 1 grows
  // from step to step.
  int Resolve(int layer, int head, uint64_t step, std::span<const int32_t> pages,
              const uint32_t* versions, int32_t* slots, int32_t* miss_idx);

  // Forgets the page in a slot: its fetch failed.
  void Evict(int layer, int head, int32_t slot);

  // Memory of a slot's unit.
  uint8_t* unit(int layer, int head, int32_t slot);

  // For checks of the invariant: -1 if there is none.
  int32_t slot_of(int layer, int head, int32_t page) const;
  int32_t page_in(int layer, int head, int32_t slot) const;
  int num_slots(int layer) const { return slots_per_layer_[static_cast<size_t>(layer)]; }

  size_t bytes() const { return units_.size(); }

 private:
  PageCache(const WorkerShape& shape, int page_capacity)
      : shape_(shape), page_capacity_(page_capacity) {}
  // First page-map entry and first slot of (layer, head).
  size_t page_base(int layer, int head) const {
    return shape_.unit_idx(layer, head) * static_cast<size_t>(page_capacity_);
  }
  size_t slot_base(int layer, int head) const {
    return layer_slot_base_[static_cast<size_t>(layer)] +
           static_cast<size_t>(head) * static_cast<size_t>(num_slots(layer));
  }

  const WorkerShape shape_;
  const int page_capacity_;
  std::vector<int> slots_per_layer_;
  std::vector<size_t> layer_slot_base_;
  Buffer<int32_t> page_slot_;      // [L][heads][P_cap]
  Buffer<int32_t> slot_page_;      // [L][heads][S of the layer]
  Buffer<uint64_t> slot_step_;     // the same
  Buffer<uint32_t> slot_version_;  // the same
  Buffer<uint8_t> units_;          // the same, a unit each
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_PAGE_CACHE_H_
