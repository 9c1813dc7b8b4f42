// One daemon: attaches, keeps the session alive, notices its loss, and attaches again.
//
// A session is lost when its stream ends, when a call answers ABORTED, when a data connection
// fails, or when pings are not answered within the session's TTL. The attachment is then fenced
// (its fetches end with kAborted, its pages are missing) and a new one is sought with backoff. A
// daemon that comes back is a stranger: guarantee G3. Thread safety: safe. One thread a channel.
// Blocking: calls up to control_timeout.

#ifndef LOCKS_KVD_CLIENT_POOL_CHANNEL_H_
#define LOCKS_KVD_CLIENT_POOL_CHANNEL_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/attachment.h"
#include "client/client_options.h"
#include "client/worker_shape.h"
#include "proto/pool.pb.h"

namespace kvd {

class UcxWorker;

class PoolChannel {
 public:
  // Does nothing yet. `options`, `shape` and `ucx` (may be null) must outlive the channel.
  PoolChannel(std::string address, int daemon, const ClientOptions* options,
              const WorkerShape* shape, UcxWorker* ucx);
  ~PoolChannel() { Stop(); }
  PoolChannel(const PoolChannel&) = delete;
  PoolChannel& operator=(const PoolChannel&) = delete;

  // First attach, then a thread that watches the session and attaches again. Errors: kUnavailable
  // (not reached; the thread keeps trying), kFailedPrecondition (version, fingerprint, arena,
  // path), kUnauthenticated, kPermissionDenied.
  absl::Status Start();

  // Detaches (best effort, up to a second) and joins; there is no session from then on.
  void Stop();

  // The session in force; null while there is none.
  std::shared_ptr<Attachment> attachment() const;
  const std::string& address() const { return address_; }
  // Over all sessions.
  const std::shared_ptr<ChannelFigures>& figures() const { return figures_; }
  int daemon() const { return daemon_; }

  // Control calls in `attachment`'s session; they fill in its SessionRef. kAborted also fences it.
  absl::StatusOr<locks_kvd::v1::MatchReply> Match(Attachment& attachment,
                                                  locks_kvd::v1::MatchRequest request);
  absl::StatusOr<locks_kvd::v1::ReserveReply> Reserve(Attachment& attachment,
                                                      locks_kvd::v1::ReserveRequest request);
  absl::StatusOr<locks_kvd::v1::SealReply> Seal(Attachment& attachment,
                                                locks_kvd::v1::SealRequest request);
  absl::StatusOr<locks_kvd::v1::ReleaseReply> Release(Attachment& attachment,
                                                      locks_kvd::v1::ReleaseRequest request);

 private:
  struct Stub;  // gRPC channel and stub of one attachment

  // One attempt, counted.
  absl::StatusOr<std::shared_ptr<Attachment>> Attach();
  absl::StatusOr<std::shared_ptr<Attachment>> TryAttach();
  absl::StatusOr<std::shared_ptr<Attachment>> Accept(locks_kvd::v1::AttachReply reply);
  void Watch();
  // Keeps the session's stream until it is lost or the channel ends; says why.
  std::string KeepSession(Attachment& attachment);
  void Lose(Attachment& attachment, const std::string& why);
  // False if the channel ended meanwhile.
  bool Wait(absl::Duration duration);
  void Emit(ClientEvent::Kind kind, std::string detail) const;
  std::shared_ptr<Stub> stub() const;
  template <typename Request, typename Reply, typename Method>
  absl::StatusOr<Reply> Call(Attachment& attachment, Request request, Method method,
                             const char* name);

  const std::string address_;
  const int daemon_;
  const ClientOptions& options_;
  const WorkerShape& shape_;
  UcxWorker* const ucx_;
  const std::shared_ptr<ChannelFigures> figures_ = std::make_shared<ChannelFigures>();

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  bool stopping_ = false;
  std::shared_ptr<Attachment> attachment_;
  std::string last_incarnation_;  // of the last session; empty before the first one
  std::shared_ptr<Stub> stub_;
  std::thread watcher_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_POOL_CHANNEL_H_
