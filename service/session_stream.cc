#include "service/session_stream.h"

#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/status.h"

namespace kvd {

using locks_kvd::v1::SessionEvent;
using locks_kvd::v1::SessionPing;

absl::StatusOr<SessionKey> ParseSessionRef(const locks_kvd::v1::SessionRef& session) {
  SessionKey key;
  if (session.token().size() != key.token.size() ||
      session.incarnation().size() != key.incarnation.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("session: expected a token and an incarnation of 16 bytes, got %d and %d: "
                        "send what Attach returned",
                        session.token().size(), session.incarnation().size()));
  }
  std::memcpy(key.token.data(), session.token().data(), key.token.size());
  std::memcpy(key.incarnation.data(), session.incarnation().data(), key.incarnation.size());
  return key;
}

absl::Status CheckSessionTenant(const PeerIdentity& peer, const SessionHandle& session) {
  if (!peer.authenticated) return absl::OkStatus();
  if (peer.role == Role::kClient && peer.tenant == session.arena->tenant()) return absl::OkStatus();
  if (peer.role == Role::kDaemon && session.kind == SessionKind::kMover) return absl::OkStatus();
  return absl::PermissionDeniedError("the session belongs to another tenant than the certificate");
}

// One stream. gRPC holds it by pointer until OnDone; whoever else uses it holds a shared_ptr.
// The mutex is held over StartRead, StartWrite and Finish, so that nothing is started after Finish.
// That is safe: gRPC runs reactions of a reactor that is not inlineable on its own threads, never
// inside these calls.
class SessionStream final : public SessionStreams::Reactor {
 public:
  SessionStream(SessionStreams* streams, absl::StatusOr<PeerIdentity> peer)
      : streams_(streams), peer_(std::move(peer)), opened_(streams->clock_->Now()) {}

  void Start() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (peer_.ok()) {
      StartRead(&ping_);
    } else {
      FinishLocked(peer_.status());
    }
  }

  void OnReadDone(bool ok) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (finished_) return;
    if (!ok) return FinishLocked(absl::OkStatus());  // the client has no more pings
    const absl::Status status = HandlePingLocked();
    if (!status.ok()) return FinishLocked(status);
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (finished_) return;
    if (!ok) return FinishLocked(absl::CancelledError("the client is gone"));
    const bool was_ack = events_.front().has_ping_ack();
    events_.pop_front();
    if (!events_.empty()) StartWrite(&events_.front());
    if (was_ack) StartRead(&ping_);
  }

  void OnCancel() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    FinishLocked(absl::CancelledError("the call was cancelled"));
  }

  void OnDone() override {
    { const std::lock_guard<std::mutex> lock(mutex_); }  // whoever finished the stream has left it
    streams_->Remove(this);
  }

  // Nothing is sent before the stream has named its session.
  void Drain(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (finished_ || !session_.has_value() || told_draining_) return;
    told_draining_ = true;
    SessionEvent event;
    event.mutable_draining()->set_reason(reason);
    SendLocked(std::move(event));
  }

  std::optional<SessionId> session_id() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return session_.has_value() ? std::optional<SessionId>(session_->id) : std::nullopt;
  }

  absl::Duration opened() const { return opened_; }

  void EndUnnamed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (session_.has_value()) return;  // it came just in time
    FinishLocked(absl::DeadlineExceededError("no ping came: the first one names the session"));
  }

  void End(const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    FinishLocked(status);
  }

 private:
  absl::Status HandlePingLocked() {
    KVD_ASSIGN_OR_RETURN(const SessionKey key, ParseSessionRef(ping_.session()));
    // The tenant first: another tenant's ping must not keep a session alive.
    KVD_ASSIGN_OR_RETURN(const SessionHandle found,
                         streams_->sessions_->Find(key.token, key.incarnation));
    KVD_RETURN_IF_ERROR(CheckSessionTenant(*peer_, found));
    if (session_.has_value() && session_->id != found.id) {
      return absl::InvalidArgumentError(
          "a stream belongs to one session: open another stream for another");
    }
    KVD_ASSIGN_OR_RETURN(session_, streams_->sessions_->Ping(key.token, key.incarnation));
    // Taken first: what is evicted once the client has its answer belongs to the next ping.
    const Evictions evictions = session_->arena->TakeEvictions(session_->id);
    SessionEvent event;
    event.mutable_ping_ack()->set_sequence_number(ping_.sequence_number());
    SendLocked(std::move(event));
    SendEvictionsLocked(evictions);
    const std::string reason = streams_->DrainingReason();
    if (!reason.empty() && !told_draining_) {
      told_draining_ = true;
      SessionEvent draining;
      draining.mutable_draining()->set_reason(reason);
      SendLocked(std::move(draining));
    }
    return absl::OkStatus();
  }

  void SendEvictionsLocked(const Evictions& evictions) {
    if (evictions.some_dropped) ++sequence_number_;  // a gap: the client has not been told all
    if (evictions.pages.empty()) return;
    SessionEvent event;
    for (const PageLocation& page : evictions.pages) {
      event.mutable_evicted()->add_slots(page.slot);
      event.mutable_evicted()->add_generations(page.generation);
    }
    SendLocked(std::move(event));
  }

  void SendLocked(SessionEvent event) {
    const Incarnation& incarnation = streams_->sessions_->incarnation();
    event.set_sequence_number(++sequence_number_);
    event.set_incarnation(incarnation.data(), incarnation.size());
    events_.push_back(std::move(event));
    if (events_.size() == 1) StartWrite(&events_.front());
  }

  void FinishLocked(const absl::Status& status) {
    if (finished_) return;
    finished_ = true;
    streams_->metrics_
        ->rpc_requests[static_cast<size_t>(Rpc::kSession)][static_cast<size_t>(status.code())]
        .Add();
    Finish(ToGrpc(status));
  }

  SessionStreams* const streams_;
  const absl::StatusOr<PeerIdentity> peer_;
  const absl::Duration opened_;
  std::mutex mutex_;  // guards what follows; functions named ...Locked need it
  SessionPing ping_;
  std::optional<SessionHandle> session_;
  std::deque<SessionEvent> events_;  // the first is being written
  uint64_t sequence_number_ = 0;
  bool told_draining_ = false;
  bool finished_ = false;
};

SessionStreams::Reactor* SessionStreams::Open(absl::StatusOr<PeerIdentity> peer) {
  auto stream = std::make_shared<SessionStream>(this, std::move(peer));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_.emplace(stream.get(), stream);
  }
  stream->Start();
  return stream.get();
}

std::string SessionStreams::DrainingReason() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return draining_reason_;
}

std::vector<std::shared_ptr<SessionStream>> SessionStreams::List() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<SessionStream>> list;
  list.reserve(streams_.size());
  for (const auto& [unused, stream] : streams_) list.push_back(stream);
  return list;
}

void SessionStreams::Remove(SessionStream* stream) {
  std::shared_ptr<SessionStream> last;  // destroyed after the mutex is released
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = streams_.find(stream);
  last = std::move(it->second);
  streams_.erase(it);
}

void SessionStreams::StartDraining(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    draining_reason_ = reason;
  }
  for (const auto& stream : List()) stream->Drain(reason);
}

void SessionStreams::Tick() {
  // Names first: a session that is attached after the list of the live was made is not in it.
  std::vector<std::pair<std::shared_ptr<SessionStream>, std::optional<SessionId>>> named;
  for (auto& stream : List()) named.emplace_back(stream, stream->session_id());
  std::set<SessionId> live;
  for (const SessionInfo& session : sessions_->List()) live.insert(session.id);
  const absl::Duration now = clock_->Now();
  for (const auto& [stream, id] : named) {
    if (id.has_value() && !live.contains(*id)) {
      stream->End(absl::AbortedError("the session has ended: attach again"));
    }
    if (!id.has_value() && now - stream->opened() >= sessions_->ttl()) {
      stream->EndUnnamed();
    }
  }
}

void SessionStreams::EndAll() {
  for (const auto& stream : List())
    stream->End(absl::UnavailableError("the daemon stops: use another one"));
}

}  // namespace kvd

#if defined(__SANITIZE_THREAD__)
// gRPC's library is not instrumented, but its callback templates are, where they are instantiated
// above: how it hands them from thread to thread is invisible. Only top frames of theirs are
// excused, never ours.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race_top:grpc::internal::\n"
         "race_top:grpc::ByteBuffer::\n"
         "race_top:grpc::ServerBidiReactor\n"
         "race_top:std::function<void (bool)>::\n"
         "race_top:std::_Function_base::\n"
         "race_top:std::_Any_data\n";
}
#endif
