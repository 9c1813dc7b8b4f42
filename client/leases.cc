#include "client/leases.h"

namespace kvd {

void LeaseBook::Add(std::span<const SlotRef> slots) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const SlotRef& slot : slots) ++holders_[slot.slot];
}

std::vector<SlotRef> LeaseBook::Drop(std::span<const SlotRef> slots) {
  std::vector<SlotRef> last;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const SlotRef& slot : slots) {
    const auto it = holders_.find(slot.slot);
    if (it == holders_.end() || --it->second > 0) continue;
    holders_.erase(it);
    last.push_back(slot);
  }
  return last;
}

size_t LeaseBook::num_slots() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return holders_.size();
}

}  // namespace kvd
