// Which session holds which slot. A leased page is neither evicted nor reused (guarantee G2).
//
// Leases are a set of (session, slot): leasing twice is one lease, and one release ends it. A lease
// names no generation, because a leased slot cannot change; whoever leases has checked the
// generation under the same lock. A session holds leases only between Begin and End, so that a call
// that was under way when its session ended cannot leave a lease behind. Reservations count against
// the same cap, since each becomes a lease when its page is sealed. Thread safety: compatible
// (Arena's mutex guards it). No I/O, no clock.

#ifndef LOCKS_KVD_SERVICE_LEASE_TABLE_H_
#define LOCKS_KVD_SERVICE_LEASE_TABLE_H_

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace kvd {

enum class SessionId : uint64_t {};

class LeaseTable {
 public:
  explicit LeaseTable(uint32_t num_slots) : num_slots_(num_slots), holders_(num_slots, 0) {}

  void Begin(SessionId session);
  bool IsLive(SessionId session) const { return sessions_.contains(session); }
  // Ends every lease of `session`. Returns the slots that it held.
  std::vector<uint32_t> End(SessionId session);

  // False if it had the lease already. REQUIRES: the session is live, the slot in range.
  bool Lease(SessionId session, uint32_t slot);
  enum class Released { kNothing, kStillHeld, kLast };
  Released Release(SessionId session, uint32_t slot);

  bool Holds(SessionId session, uint32_t slot) const;
  // The leases of one session as a bit per slot, or null if it is not live. Valid until the next
  // change.
  const std::vector<uint64_t>* Bits(SessionId session) const;
  uint32_t holders(uint32_t slot) const { return holders_[slot]; }
  // Leases of one session; 0 if it is not live.
  uint32_t num_leases(SessionId session) const;
  // Slots that at least one session holds.
  uint32_t num_leased_slots() const { return num_leased_slots_; }
  // Leases of all sessions.
  uint64_t num_leases() const { return num_leases_; }

 private:
  struct Session {
    uint32_t count = 0;
    std::vector<uint64_t> bits;  // [num_slots / 64], made with the first lease
  };
  const Session* FindSession(SessionId session) const;

  uint32_t num_slots_;
  std::vector<uint32_t> holders_;  // [num_slots] sessions that hold the slot
  absl::flat_hash_map<SessionId, Session> sessions_;
  uint32_t num_leased_slots_ = 0;
  uint64_t num_leases_ = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_LEASE_TABLE_H_
