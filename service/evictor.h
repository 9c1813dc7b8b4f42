// Which sealed page that nobody leases goes next.
//
// Order: the oldest end of lease first; among equals the deepest page first, because a prefix
// without its head is worthless while one without its tail is merely shorter. A page that a lost
// session leased is held until the quarantine has passed (guarantee G4), whoever leases and
// releases it meanwhile. Thread safety: compatible (Arena's mutex guards it). No I/O, no clock:
// times are arguments.

#ifndef LOCKS_KVD_SERVICE_EVICTOR_H_
#define LOCKS_KVD_SERVICE_EVICTOR_H_

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "absl/time/time.h"

namespace kvd {

class Evictor {
 public:
  explicit Evictor(uint32_t num_slots)
      : held_until_(num_slots, absl::ZeroDuration()), entries_(num_slots) {}

  // The page in `slot` is no victim before `until`. To be called before Add.
  void HoldUntil(uint32_t slot, absl::Duration until);
  // The last lease of `slot` ends at `now`. REQUIRES: not a candidate.
  void Add(uint32_t slot, uint32_t page_idx, absl::Duration now);
  // The slot is leased again. Nothing happens if it is no candidate.
  void Remove(uint32_t slot);
  // True if the slot would be a victim now, whatever its turn.
  bool IsVictim(uint32_t slot, absl::Duration now) const {
    return entries_[slot].has_value() && (*entries_[slot])->lease_end <= now;
  }
  // When the last lease of a candidate ended; nullopt if it is none.
  std::optional<absl::Duration> lease_end(uint32_t slot) const {
    return entries_[slot].has_value() ? std::optional((*entries_[slot])->lease_end) : std::nullopt;
  }
  // Takes the next victim out; nullopt if there is none yet.
  std::optional<uint32_t> PopVictim(absl::Duration now);

  uint32_t num_candidates() const { return static_cast<uint32_t>(order_.size()); }

 private:
  struct Candidate {
    absl::Duration lease_end;
    uint32_t page_idx;
    uint32_t slot;
    friend bool operator<(const Candidate& a, const Candidate& b) {
      if (a.lease_end != b.lease_end) return a.lease_end < b.lease_end;
      if (a.page_idx != b.page_idx) return a.page_idx > b.page_idx;
      return a.slot < b.slot;
    }
  };
  std::vector<absl::Duration> held_until_;  // [num_slots]
  std::set<Candidate> order_;
  std::vector<std::optional<std::set<Candidate>::iterator>> entries_;  // [num_slots]
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_EVICTOR_H_
