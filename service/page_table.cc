#include "service/page_table.h"

#include "kernels/check.h"

namespace kvd {

PageTable::PageTable(uint32_t num_slots) : slots_(num_slots) {
  KVD_CHECK(num_slots >= 2);
  slots_[kCanarySlot].state = SlotState::kSealed;
  slots_[kCanarySlot].generation = kCanaryGeneration;
  free_.reserve(num_slots - 1);
  for (uint32_t slot = num_slots - 1; slot > kCanarySlot; --slot) free_.push_back(slot);
  counts_[static_cast<int>(SlotState::kFree)] = num_slots - 1;
}

std::optional<uint32_t> PageTable::Find(const PageId& page) const {
  const auto it = slot_by_page_.find(page);
  if (it == slot_by_page_.end()) return std::nullopt;
  return it->second;
}

void PageTable::SetState(uint32_t slot, SlotState state) {
  --counts_[static_cast<int>(slots_[slot].state)];
  ++counts_[static_cast<int>(state)];
  slots_[slot].state = state;
}

std::optional<uint32_t> PageTable::Reserve(const PageId& page, uint32_t page_idx, uint64_t word) {
  if (free_.empty()) return std::nullopt;
  const uint32_t slot = free_.back();
  KVD_CHECK(slots_[slot].state == SlotState::kFree);
  const bool inserted = slot_by_page_.emplace(page, slot).second;
  KVD_CHECK(inserted);
  free_.pop_back();
  slots_[slot].page = page;
  slots_[slot].page_idx = page_idx;
  slots_[slot].word = word;
  slots_[slot].matched = false;
  SetState(slot, SlotState::kReserved);
  return slot;
}

uint64_t PageTable::Seal(uint32_t slot) {
  KVD_CHECK(slots_[slot].state == SlotState::kReserved);
  SetState(slot, SlotState::kSealed);
  const uint64_t generation = ++slots_[slot].generation;
  KVD_CHECK(generation % 2 == 0);
  return generation;
}

uint64_t PageTable::SkipSeal(uint32_t slot) {
  KVD_CHECK(slots_[slot].state == SlotState::kReserved);
  slots_[slot].generation += 2;
  KVD_CHECK(slots_[slot].generation % 2 == 1);
  return slots_[slot].generation;
}

uint64_t PageTable::Evict(uint32_t slot) {
  KVD_CHECK(slots_[slot].state == SlotState::kSealed && slot != kCanarySlot);
  const uint64_t generation = ++slots_[slot].generation;
  KVD_CHECK(generation % 2 == 1);
  slot_by_page_.erase(slots_[slot].page);
  SetState(slot, SlotState::kFree);
  free_.push_back(slot);
  return generation;
}

void PageTable::Free(uint32_t slot) {
  KVD_CHECK(slots_[slot].state == SlotState::kReserved);
  slot_by_page_.erase(slots_[slot].page);
  SetState(slot, SlotState::kFree);
  free_.push_back(slot);
}

void PageTable::Quarantine(uint32_t slot, absl::Duration until) {
  KVD_CHECK(slots_[slot].state == SlotState::kReserved);
  KVD_CHECK(quarantined_.empty() || quarantined_.back().first <= until);
  slot_by_page_.erase(slots_[slot].page);
  SetState(slot, SlotState::kQuarantined);
  quarantined_.emplace_back(until, slot);
}

uint32_t PageTable::FreeExpired(absl::Duration now) {
  uint32_t freed = 0;
  while (!quarantined_.empty() && quarantined_.front().first <= now) {
    const uint32_t slot = quarantined_.front().second;
    quarantined_.pop_front();
    SetState(slot, SlotState::kFree);
    free_.push_back(slot);
    ++freed;
  }
  return freed;
}

}  // namespace kvd
