// The bidirectional streams that keep sessions alive and tell them what changes.
//
// A stream belongs to the session that its first ping names. Its end does not end the session; the
// session's end ends it. Events are numbered per stream from 1, so a client that opens a new one
// knows that it may have missed some. Bounds: the next ping is read only when the answer to the
// last one is on its way; a stream that names no session within a session TTL is ended. Thread
// safety: safe.

#ifndef LOCKS_KVD_SERVICE_SESSION_STREAM_H_
#define LOCKS_KVD_SERVICE_SESSION_STREAM_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "proto/clock.h"
#include "proto/pool.grpc.pb.h"
#include "service/auth.h"
#include "service/metrics.h"
#include "service/session_table.h"

namespace kvd {

// The session that a message names, checked against the caller. kInvalidArgument for wrong lengths;
// kPermissionDenied if it is another tenant's; otherwise as SessionTable::Find.
struct SessionKey {
  SessionToken token;
  Incarnation incarnation;
};
absl::StatusOr<SessionKey> ParseSessionRef(const locks_kvd::v1::SessionRef& session);
absl::Status CheckSessionTenant(const PeerIdentity& peer, const SessionHandle& session);

class SessionStream;

// Every open stream.
class SessionStreams {
 public:
  // All outlive this.
  SessionStreams(SessionTable* sessions, Metrics* metrics, const Clock* clock)
      : sessions_(sessions), metrics_(metrics), clock_(clock) {}
  // REQUIRES: every stream has ended (the gRPC server has).
  ~SessionStreams() = default;

  using Reactor = grpc::ServerBidiReactor<locks_kvd::v1::SessionPing, locks_kvd::v1::SessionEvent>;
  // A new stream; gRPC drives it until it is done.
  Reactor* Open(absl::StatusOr<PeerIdentity> peer);
  // Tells every session, those of later streams too.
  void StartDraining(const std::string& reason);
  void Tick();
  void EndAll();

 private:
  friend class SessionStream;
  std::vector<std::shared_ptr<SessionStream>> List() const;
  void Remove(SessionStream* stream);
  std::string DrainingReason() const;

  SessionTable* const sessions_;
  Metrics* const metrics_;
  const Clock* const clock_;
  mutable std::mutex mutex_;  // guards what follows
  absl::flat_hash_map<SessionStream*, std::shared_ptr<SessionStream>> streams_;
  std::string draining_reason_;  // empty: not draining
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_SESSION_STREAM_H_
