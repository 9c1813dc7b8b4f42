#include "service/slowlog.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace kvd {

void Slowlog::Note(const FetchEvent& event) {
  if (event.status == WireStatus::kOk && event.total < threshold_) [[likely]]
    return;
  num_seen_.fetch_add(1, std::memory_order_relaxed);
  const Entry entry = {absl::Now(), event};
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  if (entries_.size() < kEntries) {
    entries_.push_back(entry);
  } else {
    entries_[next_] = entry;
  }
  next_ = (next_ + 1) % kEntries;
}

std::vector<Slowlog::Entry> Slowlog::Newest(size_t max_entries) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Entry> newest;
  const size_t count = std::min(max_entries, entries_.size());
  for (size_t i = 0; i < count; ++i) {
    newest.push_back(entries_[(next_ + kEntries - 1 - i) % kEntries]);
  }
  return newest;
}

}  // namespace kvd
