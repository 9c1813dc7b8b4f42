// What the fetchers do alike with a list: its outcome before anything was fetched, the check of its
// entries, and the slots that lists in flight occupy.
//
// Thread safety: SlotPool is safe; the rest are functions of a list, which belongs to one caller.

#ifndef LOCKS_KVD_CLIENT_FETCH_LIST_H_
#define LOCKS_KVD_CLIENT_FETCH_LIST_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "client/fetcher.h"
#include "proto/arena_memory.h"

namespace kvd {

// Clears what a list's outcome is about to be written to.
inline void BeginList(FetchList& list) {
  list.code = absl::StatusCode::kOk;
  list.num_valid = 0;
  list.path_bytes = 0;
  list.in_flight = nullptr;
  if (!list.entries.empty()) std::memset(list.valid, 0, list.entries.size());
}

// Nothing that a list read counts once its session is lost: a daemon may have been gone for a part
// of the copy, and only the fence tells (guarantee G3).
inline void AbortList(FetchList& list) {
  BeginList(list);
  list.code = absl::StatusCode::kAborted;
}

inline bool AllInRange(const FetchList& list, const ArenaShape& shape) {
  return std::all_of(list.entries.begin(), list.entries.end(), [&](const FetchEntry& entry) {
    return entry.slot < shape.num_slots && entry.layer < shape.slot.num_layers &&
           entry.head < shape.slot.shard_heads;
  });
}

// Of what has `deadline` left, which may be longer than a clock can add.
inline std::chrono::steady_clock::time_point DeadlineOf(absl::Duration deadline) {
  return std::chrono::steady_clock::now() +
         absl::ToChronoNanoseconds(std::min(deadline, absl::Hours(1)));
}

// A fixed number of slots, each for one list in flight. A list that finds none in Start asks again
// in Wait. `begin(Slot&, deadline)` starts the list in a slot.
template <typename Slot>
class SlotPool {
 public:
  using Clock = std::chrono::steady_clock;

  // Start's part.
  template <typename Begin>
  void StartIn(FetchList& list, const Begin& begin) {
    Slot* slot = TryTake();
    list.in_flight = slot != nullptr ? static_cast<void*>(slot) : this;
    if (slot != nullptr) begin(*slot, DeadlineOf(list.deadline));
  }
  // Wait's part: the slot in which the list is in flight, to be given back. Null if there is
  // nothing to wait for: it was done or refused in Start, or no slot came free within the deadline,
  // which is then the list's outcome.
  template <typename Begin>
  Slot* TakeBack(FetchList& list, const Begin& begin) {
    void* const in_flight = std::exchange(list.in_flight, nullptr);
    if (in_flight != this) return static_cast<Slot*>(in_flight);
    const Clock::time_point deadline = DeadlineOf(list.deadline);
    Slot* slot = Take(deadline);
    if (slot == nullptr) {
      list.code = absl::StatusCode::kDeadlineExceeded;
    } else {
      begin(*slot, deadline);
    }
    return slot;
  }

  void Give(Slot* slot) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      free_.push_back(slot);
    }
    freed_.notify_one();
  }

 private:
  // Null if none is free.
  Slot* TryTake() { return Take(Clock::time_point::min()); }
  // Waits for one until `deadline`; null if none came.
  Slot* Take(Clock::time_point deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (free_.empty() && (deadline == Clock::time_point::min() ||
                          !freed_.wait_until(lock, deadline, [this] { return !free_.empty(); }))) {
      return nullptr;
    }
    Slot* slot = free_.back();
    free_.pop_back();
    return slot;
  }

  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<Slot*> free_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_FETCH_LIST_H_
