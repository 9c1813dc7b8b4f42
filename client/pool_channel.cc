#include "client/pool_channel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/geometry.h"
#include "proto/grpc_channel.h"
#include "proto/heartbeat_stream.h"
#include "proto/page_key.h"
#include "proto/pool.grpc.pb.h"
#include "proto/status.h"
#include "proto/ucx_worker.h"

namespace kvd {
namespace {

// A fifth more or less: the workers of a restarted daemon do not all come back at once.
absl::Duration Jittered(absl::Duration duration) {
  std::random_device random;
  return duration * (0.8 + 0.4 * static_cast<double>(random()) / std::random_device::max());
}

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(100);
constexpr absl::Duration kLongestBackoff = absl::Seconds(5);

std::chrono::system_clock::time_point Deadline(absl::Duration timeout) {
  return std::chrono::system_clock::now() + absl::ToChronoNanoseconds(timeout);
}

template <typename Array>
Array BytesOf(const std::string& text) {
  Array bytes = {};
  std::memcpy(bytes.data(), text.data(), std::min(bytes.size(), text.size()));
  return bytes;
}

}  // namespace

absl::string_view EventName(ClientEvent::Kind kind) {
  switch (kind) {
    case ClientEvent::Kind::kPathChosen:
      return "path_chosen";
    case ClientEvent::Kind::kDaemonLost:
      return "daemon_lost";
    case ClientEvent::Kind::kMembersProblem:
      return "members_problem";
    case ClientEvent::Kind::kDaemonBack:
      return "daemon_back";
    case ClientEvent::Kind::kDaemonDraining:
      return "daemon_draining";
  }
  return "unknown";
}

struct PoolChannel::Stub {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<locks_kvd::v1::Pool::Stub> pool;
};

PoolChannel::PoolChannel(std::string address, int daemon, const ClientOptions* options,
                         const WorkerShape* shape, UcxWorker* ucx)
    : address_(std::move(address)),
      daemon_(daemon),
      options_(*options),
      shape_(*shape),
      ucx_(ucx) {}

void PoolChannel::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
  std::shared_ptr<Attachment> last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last = std::exchange(attachment_, nullptr);
  }
  if (last == nullptr) return;
  grpc::ClientContext context;
  context.set_deadline(Deadline(absl::Seconds(1)));
  locks_kvd::v1::DetachRequest request;
  locks_kvd::v1::DetachReply reply;
  *request.mutable_session() = last->session();
  // Best effort: if it does not arrive, the session's TTL ends it.
  (void)stub()->pool->Detach(&context, request, &reply);
  last->MarkLost();
}

absl::Status PoolChannel::Start() {
  absl::StatusOr<std::shared_ptr<Attachment>> first = Attach();
  watcher_ = std::thread([this] { Watch(); });
  return first.ok() ? absl::OkStatus() : first.status();
}

std::shared_ptr<Attachment> PoolChannel::attachment() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return attachment_;
}

std::shared_ptr<PoolChannel::Stub> PoolChannel::stub() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stub_;
}

absl::StatusOr<std::shared_ptr<Attachment>> PoolChannel::Attach() {
  absl::StatusOr<std::shared_ptr<Attachment>> attached = TryAttach();
  figures_->CountAttach(attached.status().code());
  if (!attached.ok()) return attached;
  figures_->CountPath((*attached)->path);
  const std::string& incarnation = (*attached)->session().incarnation();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!last_incarnation_.empty() && last_incarnation_ != incarnation) {
    figures_->CountIncarnationChange();
  }
  last_incarnation_ = incarnation;
  return attached;
}

absl::StatusOr<std::shared_ptr<Attachment>> PoolChannel::TryAttach() {
  auto stub = std::make_shared<Stub>();
  KVD_ASSIGN_OR_RETURN(stub->channel, OpenGrpcChannel(address_, options_.tls));
  stub->pool = locks_kvd::v1::Pool::NewStub(stub->channel);
  locks_kvd::v1::AttachRequest request;
  request.set_protocol_min(kProtocolVersion);
  request.set_protocol_max(kProtocolVersion);
  request.set_tenant(options_.tenant);
  request.set_model(options_.model);
  request.set_layout_fingerprint(LayoutFingerprint(shape_.geometry));
  const Fingerprint fingerprint =
      ModelFingerprint(shape_.geometry, options_.weights_id, options_.rope);
  request.set_model_fingerprint(std::string(fingerprint.begin(), fingerprint.end()));
  request.set_client_name(options_.client_name);
  if (ucx_ != nullptr) request.set_ucx_version(UcxWorker::Version());
  grpc::ClientContext context;
  context.set_deadline(Deadline(options_.control_timeout));
  locks_kvd::v1::AttachReply reply;
  const grpc::Status status = stub->pool->Attach(&context, request, &reply);
  if (!status.ok()) return Annotate(FromGrpc(status), absl::StrCat("attach to ", address_));
  absl::StatusOr<std::shared_ptr<Attachment>> made = Accept(std::move(reply));
  if (!made.ok()) return Annotate(made.status(), absl::StrCat("attach to ", address_));
  std::lock_guard<std::mutex> lock(mutex_);
  attachment_ = *made;
  stub_ = std::move(stub);
  return made;
}

// Checks what the daemon offers and opens the data paths. A daemon is trusted with bytes, not with
// our memory: nothing of a reply is used unchecked.
absl::StatusOr<std::shared_ptr<Attachment>> PoolChannel::Accept(locks_kvd::v1::AttachReply reply) {
  if (reply.protocol() != kProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat("protocol: expected ", kProtocolVersion,
                                                      ", got ", reply.protocol(),
                                                      "; run one version everywhere"));
  }
  if (reply.session().token().size() != sizeof(SessionToken) ||
      reply.session().incarnation().size() != sizeof(Incarnation) || reply.heartbeat_ms() == 0 ||
      reply.session_ttl_ms() < reply.heartbeat_ms()) {
    return absl::FailedPreconditionError(
        "malformed session in the reply: token and incarnation of 16 bytes and 0 < heartbeat_ms <= "
        "session_ttl_ms expected");
  }
  KVD_ASSIGN_OR_RETURN(const KvGeometry geometry, FromProto(reply.arena().geometry()));
  if (!(geometry == shape_.geometry)) {
    return absl::FailedPreconditionError(
        "the arena's geometry is not the client's: compare `locksctl status` with the worker's");
  }
  const ArenaShape arena = {MakeSlotLayout(geometry), reply.arena().num_slots(),
                            reply.arena().slots_per_slab()};
  if (arena.num_slots == 0 || arena.slots_per_slab == 0) {
    return absl::FailedPreconditionError("the arena has no slots");
  }
  auto attachment = std::make_shared<Attachment>();
  attachment->address = address_;
  attachment->daemon = daemon_;
  attachment->figures = figures_;
  const PathOptions path_options = {options_.required_path, options_.best_path,
                                    options_.control_timeout, options_.gpu};
  KVD_ASSIGN_OR_RETURN(ChosenPath path, ChoosePath(reply, arena, ucx_, path_options));
  attachment->fetcher = std::move(path.fetcher);
  attachment->path = std::move(path.report);
  if (ucx_ != nullptr && reply.has_ucx()) {
    KVD_ASSIGN_OR_RETURN(attachment->ingest,
                         IngestChannel::Connect(ucx_, reply.ucx().worker_address(),
                                                BytesOf<Incarnation>(reply.session().incarnation()),
                                                BytesOf<SessionToken>(reply.session().token()),
                                                shape_.unit_bytes(), options_.control_timeout));
  }
  attachment->reply = std::move(reply);
  Emit(ClientEvent::Kind::kPathChosen,
       absl::StrCat(PathName(attachment->path.path), attachment->path.memory.empty() ? "" : ", ",
                    attachment->path.memory, ", canary ",
                    static_cast<int64_t>(attachment->path.canary_bytes_per_second / 1e6), " MB/s",
                    attachment->path.rejected.empty() ? "" : "; not ",
                    absl::StrJoin(attachment->path.rejected, "; not ")));
  return attachment;
}

void PoolChannel::Watch() {
  absl::Duration backoff = kFirstBackoff;
  for (;;) {
    if (const std::shared_ptr<Attachment> current = attachment()) {
      const std::string why = KeepSession(*current);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stopping_) return;  // the destructor detaches
      }
      Lose(*current, why);
      backoff = kFirstBackoff;
    }
    if (!Wait(Jittered(backoff))) return;
    backoff = std::min(backoff * 2, kLongestBackoff);
    if (Attach().ok()) Emit(ClientEvent::Kind::kDaemonBack, "attached again, without our pages");
  }
}

std::string PoolChannel::KeepSession(Attachment& attachment) {
  using std::chrono::milliseconds;
  const milliseconds heartbeat(attachment.reply.heartbeat_ms());
  const milliseconds ttl(attachment.reply.session_ttl_ms());
  HeartbeatStream stream(stub()->pool.get(), attachment.session(),
                         [this, &attachment](const locks_kvd::v1::SessionEvent& event) {
                           if (!event.has_draining()) return;
                           attachment.draining.store(true, std::memory_order_relaxed);
                           Emit(ClientEvent::Kind::kDaemonDraining, event.draining().reason());
                         });
  for (;;) {
    stream.Ping();
    // Short waits notice a lost attachment (a call that answered ABORTED, a failed data connection)
    // and the end of the channel.
    const auto next = HeartbeatStream::Clock::now() + heartbeat;
    do {
      const milliseconds slice = std::min(heartbeat, milliseconds(50));
      if (stream.WaitBroken(slice)) return stream.End();
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_ || attachment.lost.load() || attachment.failed()) break;
    } while (HeartbeatStream::Clock::now() < next);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) break;
    }
    if (attachment.lost.load()) {
      stream.End();
      return "a call was answered with ABORTED: the session is gone";
    }
    if (attachment.failed()) {
      stream.End();
      return "a data connection failed";
    }
    if (HeartbeatStream::Clock::now() - stream.last_answer() > ttl) {
      stream.End();
      return absl::StrCat("no answer to a ping for ", ttl.count(), " ms");
    }
  }
  stream.End();
  return "the client ends";
}

void PoolChannel::Lose(Attachment& attachment, const std::string& why) {
  attachment.MarkLost();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (attachment_.get() == &attachment) attachment_ = nullptr;
  }
  Emit(ClientEvent::Kind::kDaemonLost, why);
}

bool PoolChannel::Wait(absl::Duration duration) {
  std::unique_lock<std::mutex> lock(mutex_);
  return !changed_.wait_for(lock, absl::ToChronoNanoseconds(duration),
                            [this] { return stopping_; });
}

void PoolChannel::Emit(ClientEvent::Kind kind, std::string detail) const {
  if (options_.on_event) options_.on_event({kind, address_, std::move(detail)});
}

template <typename Request, typename Reply, typename Method>
absl::StatusOr<Reply> PoolChannel::Call(Attachment& attachment, Request request, Method method,
                                        const char* name) {
  if (attachment.lost.load(std::memory_order_acquire)) {
    return absl::AbortedError(absl::StrCat(name, " at ", address_, ": the session is lost"));
  }
  const std::shared_ptr<Stub> current = stub();
  *request.mutable_session() = attachment.session();
  grpc::ClientContext context;
  context.set_deadline(Deadline(options_.control_timeout));
  Reply reply;
  const grpc::Status status = (current->pool.get()->*method)(&context, request, &reply);
  if (status.ok()) return reply;
  if (status.error_code() == grpc::StatusCode::ABORTED) attachment.MarkLost();
  return Annotate(FromGrpc(status), absl::StrCat(name, " at ", address_));
}

absl::StatusOr<locks_kvd::v1::MatchReply> PoolChannel::Match(Attachment& attachment,
                                                             locks_kvd::v1::MatchRequest request) {
  return Call<locks_kvd::v1::MatchRequest, locks_kvd::v1::MatchReply>(
      attachment, std::move(request), &locks_kvd::v1::Pool::Stub::Match, "match");
}

absl::StatusOr<locks_kvd::v1::ReserveReply> PoolChannel::Reserve(
    Attachment& attachment, locks_kvd::v1::ReserveRequest request) {
  return Call<locks_kvd::v1::ReserveRequest, locks_kvd::v1::ReserveReply>(
      attachment, std::move(request), &locks_kvd::v1::Pool::Stub::Reserve, "reserve");
}

absl::StatusOr<locks_kvd::v1::SealReply> PoolChannel::Seal(Attachment& attachment,
                                                           locks_kvd::v1::SealRequest request) {
  return Call<locks_kvd::v1::SealRequest, locks_kvd::v1::SealReply>(
      attachment, std::move(request), &locks_kvd::v1::Pool::Stub::Seal, "seal");
}

absl::StatusOr<locks_kvd::v1::ReleaseReply> PoolChannel::Release(
    Attachment& attachment, locks_kvd::v1::ReleaseRequest request) {
  return Call<locks_kvd::v1::ReleaseRequest, locks_kvd::v1::ReleaseReply>(
      attachment, std::move(request), &locks_kvd::v1::Pool::Stub::Release, "release");
}

}  // namespace kvd
