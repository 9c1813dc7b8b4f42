// What operators see of an arena's slots.

#include "service/arena.h"

namespace kvd {

SlotView Arena::ViewLocked(uint32_t slot) const {
  const PageTable::Slot& s = pages_.slot(slot);
  return {.slot = slot,
          .state = s.state,
          .generation = s.generation,
          .page = s.page,
          .matched = s.matched,
          .leases = leases_.holders(slot)};
}

std::vector<SlotView> Arena::ViewSlots(uint32_t first, uint32_t count) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t num_slots = memory_->shape().num_slots;
  std::vector<SlotView> views;
  for (uint32_t slot = first; slot < num_slots && slot - first < count; ++slot) {
    views.push_back(ViewLocked(slot));
  }
  return views;
}

std::optional<SlotView> Arena::ViewPage(const PageId& page) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::optional<uint32_t> slot = pages_.Find(page);
  if (!slot.has_value()) return std::nullopt;
  return ViewLocked(*slot);
}

}  // namespace kvd
