#include "service/evictor.h"

#include <algorithm>

#include "kernels/check.h"

namespace kvd {

void Evictor::HoldUntil(uint32_t slot, absl::Duration until) {
  KVD_CHECK(!entries_[slot].has_value());
  held_until_[slot] = std::max(held_until_[slot], until);
}

void Evictor::Add(uint32_t slot, uint32_t page_idx, absl::Duration now) {
  KVD_CHECK(!entries_[slot].has_value());
  entries_[slot] = order_.insert({std::max(now, held_until_[slot]), page_idx, slot}).first;
}

void Evictor::Remove(uint32_t slot) {
  if (!entries_[slot].has_value()) return;
  order_.erase(*entries_[slot]);
  entries_[slot].reset();
}

std::optional<uint32_t> Evictor::PopVictim(absl::Duration now) {
  if (order_.empty() || order_.begin()->lease_end > now) return std::nullopt;
  const uint32_t slot = order_.begin()->slot;
  Remove(slot);
  return slot;
}

}  // namespace kvd
