#include "service/session_table.h"

#include <sys/random.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "proto/status.h"

namespace kvd {

std::array<uint8_t, 16> RandomBytes16() {
  std::array<uint8_t, 16> bytes;
  KVD_CHECK(getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  return bytes;
}

SessionTable::~SessionTable() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [token, session] : sessions_) {
    session.arena->EndSession(session.id, SessionEnd::kDetached);
  }
}

absl::StatusOr<SessionTable::Sessions::const_iterator> SessionTable::FindLocked(
    const SessionToken& token, const Incarnation& incarnation) const {
  if (incarnation != options_.incarnation) {
    return absl::AbortedError(
        "another incarnation: the daemon was restarted, or this is another daemon: drop its pages "
        "and "
        "attach again");
  }
  const auto it = sessions_.find(token);
  if (it == sessions_.end() || !TokensEqual(it->first, token)) {
    return absl::AbortedError(
        "unknown session: it was detached, or no ping came within the session TTL: attach again");
  }
  return it;
}

absl::StatusOr<SessionHandle> SessionTable::Find(const SessionToken& token,
                                                 const Incarnation& incarnation) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  KVD_ASSIGN_OR_RETURN(const auto it, FindLocked(token, incarnation));
  return SessionHandle{it->second.id, it->second.arena, it->second.kind};
}

absl::StatusOr<AttachedSession> SessionTable::Attach(std::shared_ptr<Arena> arena,
                                                     std::string client_name, SessionKind kind) {
  const SessionToken token = RandomBytes16();
  const std::lock_guard<std::mutex> lock(mutex_);
  uint32_t of_tenant = 0;
  for (const auto& [unused, session] : sessions_) {
    const bool counts =
        session.kind == SessionKind::kWorker && session.arena->tenant() == arena->tenant();
    of_tenant += counts ? 1 : 0;
  }
  if (kind == SessionKind::kWorker && of_tenant >= options_.sessions_per_tenant) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "limits.sessions_per_tenant: tenant %s has %u sessions: detach some or raise the limit",
        arena->tenant(), of_tenant));
  }
  const auto id = static_cast<SessionId>(next_id_++);
  const absl::Duration now = options_.clock->Now();
  arena->BeginSession(id, kind);
  sessions_.emplace(token, Session{id, std::move(client_name), std::move(arena), kind, now, now});
  return AttachedSession{id, token};
}

absl::StatusOr<SessionHandle> SessionTable::Ping(const SessionToken& token,
                                                 const Incarnation& incarnation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  KVD_ASSIGN_OR_RETURN(const auto it, FindLocked(token, incarnation));
  Session& session = sessions_.find(it->first)->second;
  session.last_ping = options_.clock->Now();
  return SessionHandle{session.id, session.arena, session.kind};
}

absl::Status SessionTable::Detach(const SessionToken& token, const Incarnation& incarnation) {
  return End(token, incarnation, SessionEnd::kDetached).status();
}

void SessionTable::Lose(const SessionToken& token, const Incarnation& incarnation) {
  (void)End(token, incarnation, SessionEnd::kLost);
}

absl::StatusOr<SessionHandle> SessionTable::End(const SessionToken& token,
                                                const Incarnation& incarnation, SessionEnd why) {
  SessionHandle ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    KVD_ASSIGN_OR_RETURN(const auto it, FindLocked(token, incarnation));
    ended = {it->second.id, it->second.arena, it->second.kind};
    sessions_.erase(it);
  }
  ended.arena->EndSession(ended.id, why);
  return ended;
}

std::vector<SessionInfo> SessionTable::EndSilent() {
  std::vector<SessionInfo> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const absl::Duration now = options_.clock->Now();
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      const auto current = it++;
      if (now - current->second.last_ping < options_.ttl) continue;
      ended.push_back(Info(current->second, now));
      sessions_.erase(current);
    }
  }
  for (const SessionInfo& session : ended) session.arena->EndSession(session.id, SessionEnd::kLost);
  return ended;
}

std::vector<SessionInfo> SessionTable::List() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const absl::Duration now = options_.clock->Now();
  std::vector<SessionInfo> list;
  list.reserve(sessions_.size());
  for (const auto& [token, session] : sessions_) list.push_back(Info(session, now));
  return list;
}

size_t SessionTable::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sessions_.size();
}

SessionInfo SessionTable::Info(const Session& session, absl::Duration now) const {
  return {session.id, session.client_name, session.arena, now - session.attached,
          now - session.last_ping};
}

}  // namespace kvd
