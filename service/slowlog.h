// The last slow or failed fetches over ucx, for `locksctl slowlog`.
//
// Why: a histogram says that some fetches are slow, not which. Cheap, because a fetch that is
// neither slow nor failed costs two comparisons, and one that is never waits: if a reader copies
// the ring at that moment, the entry is dropped and counted. Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_SLOWLOG_H_
#define LOCKS_KVD_SERVICE_SLOWLOG_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "absl/time/time.h"
#include "service/fetch_event.h"

namespace kvd {

class Slowlog {
 public:
  static constexpr size_t kEntries = 1024;
  static constexpr absl::Duration kThreshold = absl::Milliseconds(10);

  struct Entry {
    absl::Time ended;
    FetchEvent event;
  };

  explicit Slowlog(absl::Duration threshold = kThreshold) : threshold_(threshold) {
    entries_.reserve(kEntries);
  }

  absl::Duration threshold() const { return threshold_; }

  // Keeps the event if it failed or took at least the threshold. Never waits, allocates nothing.
  void Note(const FetchEvent& event);

  // At most `max_entries`, newest first.
  std::vector<Entry> Newest(size_t max_entries) const;

  // Events that were to be kept, dropped and overwritten ones included.
  uint64_t num_seen() const { return num_seen_.load(std::memory_order_relaxed); }

 private:
  const absl::Duration threshold_;
  std::atomic<uint64_t> num_seen_{0};
  mutable std::mutex mutex_;    // guards what follows
  std::vector<Entry> entries_;  // a ring once it holds kEntries
  size_t next_ = 0;             // entry that is written next
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_SLOWLOG_H_
