// Sessions: who is attached, to which arena, and whether it is still alive.
//
// Thread safety: safe. A session ends by Detach, by its TTL (monotonic clock) or with the process; its
// leases and reservations end with it.

#ifndef LOCKS_KVD_SERVICE_SESSION_TABLE_H_
#define LOCKS_KVD_SERVICE_SESSION_TABLE_H_

#include <memory>
#include <optional>

#include "proto/wire.h"
#include "service/arena.h"

namespace kvd {

// A live session as the data plane sees it.
struct SessionHandle {
  SessionId id;
  std::shared_ptr<Arena> arena;
};

class SessionTable {
 public:
  // The live session that `token` names, if `incarnation` is this process's. kAborted otherwise, with the
  // reason: another incarnation (a restarted daemon), or an ended session.
  absl::StatusOr<SessionHandle> Find(const SessionToken& token, const Incarnation& incarnation) const;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_SESSION_TABLE_H_
