// The leases that this process's sequences and puts hold in one session.
//
// Why counted here: a daemon's leases are a set of (session, slot), so one release would end the
// hold of every sequence of the session that shares the page. The book counts holders and releases
// a slot only with its last one. Thread safety: safe. Calls that lease (Match, Reserve, Seal) run
// under LeaseBook::Leasing, a release runs alone, so that a release cannot overtake the lease of a
// page that is being matched again.

#ifndef LOCKS_KVD_CLIENT_LEASES_H_
#define LOCKS_KVD_CLIENT_LEASES_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <vector>

namespace kvd {

// Where one shard of a page is, and the generation that proves it.
struct SlotRef {
  uint32_t slot = 0;
  uint64_t generation = 0;
  friend bool operator==(const SlotRef&, const SlotRef&) = default;
};

class LeaseBook {
 public:
  // Hold it from before a call that leases until after Add.
  std::shared_lock<std::shared_mutex> Leasing() { return std::shared_lock(order_); }
  // Hold it from before Drop until the release call ended.
  std::unique_lock<std::shared_mutex> Releasing() { return std::unique_lock(order_); }

  void Add(std::span<const SlotRef> slots);
  // Counts one holder less for each; returns those without any.
  std::vector<SlotRef> Drop(std::span<const SlotRef> slots);
  size_t num_slots() const;

 private:
  std::shared_mutex order_;
  mutable std::mutex mutex_;
  std::unordered_map<uint32_t, uint32_t> holders_;  // by slot
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LEASES_H_
