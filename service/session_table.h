// Sessions: who is attached, to which arena, and whether it is still alive.
//
// A session ends by Detach, by its TTL (monotonic clock) or with the process; its leases and
// reservations end with it. Only pings keep it alive. Tokens are secrets: they appear in no log,
// metric or listing. Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_SESSION_TABLE_H_
#define LOCKS_KVD_SERVICE_SESSION_TABLE_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/clock.h"
#include "proto/wire.h"
#include "service/arena.h"

namespace kvd {

// A live session as the data plane sees it.
struct SessionHandle {
  SessionId id;
  std::shared_ptr<Arena> arena;
  SessionKind kind = SessionKind::kWorker;
};

struct AttachedSession {
  SessionId id;
  SessionToken token;
};

// One session for people; `id` is what logs call it.
struct SessionInfo {
  SessionId id;
  std::string client_name;
  std::shared_ptr<Arena> arena;
  absl::Duration age;
  absl::Duration silent;  // since its last ping
};

// 16 bytes that nobody can guess. Ends the process if the kernel has no entropy, which does not
// happen after boot.
std::array<uint8_t, 16> RandomBytes16();

class SessionTable {
 public:
  struct Options {
    Incarnation incarnation = {};
    absl::Duration ttl = absl::Seconds(5);
    uint32_t sessions_per_tenant = 1024;
    const Clock* clock = nullptr;  // must outlive the table
  };
  explicit SessionTable(const Options& options) : options_(options) {}
  // Ends every session.
  ~SessionTable();

  const Incarnation& incarnation() const { return options_.incarnation; }
  absl::Duration ttl() const { return options_.ttl; }

  // The live session that `token` names, if `incarnation` is this process's. kAborted otherwise,
  // with the reason: another incarnation (a restarted daemon), or an ended session.
  absl::StatusOr<SessionHandle> Find(const SessionToken& token,
                                     const Incarnation& incarnation) const;

  // kResourceExhausted if the arena's tenant has as many workers' sessions as it may.
  absl::StatusOr<AttachedSession> Attach(std::shared_ptr<Arena> arena, std::string client_name,
                                         SessionKind kind = SessionKind::kWorker);
  // Keeps the session alive for another TTL. Errors as Find.
  absl::StatusOr<SessionHandle> Ping(const SessionToken& token, const Incarnation& incarnation);
  // Ends the session in order. Errors as Find.
  absl::Status Detach(const SessionToken& token, const Incarnation& incarnation);
  // Ends a session that asks but cannot be answered: its client learns of it and attaches again.
  // Nothing happens if there is no such session.
  void Lose(const SessionToken& token, const Incarnation& incarnation);
  // Ends the sessions that were silent for a TTL. Returns them, as they were.
  std::vector<SessionInfo> EndSilent();

  std::vector<SessionInfo> List() const;
  size_t size() const;

 private:
  struct Session {
    SessionId id;
    std::string client_name;
    std::shared_ptr<Arena> arena;
    SessionKind kind;
    absl::Duration attached;
    absl::Duration last_ping;
  };
  using Sessions = absl::flat_hash_map<SessionToken, Session>;

  absl::StatusOr<Sessions::const_iterator> FindLocked(const SessionToken& token,
                                                      const Incarnation& incarnation) const;
  absl::StatusOr<SessionHandle> End(const SessionToken& token, const Incarnation& incarnation,
                                    SessionEnd why);
  SessionInfo Info(const Session& session, absl::Duration now) const;

  const Options options_;
  mutable std::mutex mutex_;  // guards what follows; FindLocked needs it
  // By token: the hash is salted per process, so its timing tells nothing about tokens.
  Sessions sessions_;
  uint64_t next_id_ = 1;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_SESSION_TABLE_H_
