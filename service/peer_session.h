// A session with another daemon's arena of the same tenant and model, to bring it copies of sealed
// pages.
//
// Why the ordinary calls: a copy is reserved, sent and sealed like a worker's page, so the other
// daemon's limits, checks and metrics hold for it too; only its records come with it and are proved
// instead of built, so that every copy of a page is the same bytes. The bytes go by UCX, or by NCCL
// once UseNccl has succeeded.
// Thread safety: compatible. Blocking: every call up to the timeout, or NCCL's watchdog.

#ifndef LOCKS_KVD_SERVICE_PEER_SESSION_H_
#define LOCKS_KVD_SERVICE_PEER_SESSION_H_

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/clock.h"
#include "proto/grpc_channel.h"
#include "proto/heartbeat_stream.h"
#include "proto/pool.grpc.pb.h"
#include "proto/ucx_worker.h"
#include "service/arena.h"
#include "service/communicator.h"
#include "service/mover.h"

namespace kvd {

enum class CopyOutcome {
  kFailed,   // see the status of the call
  kCopied,   // the other daemon has it now, and serves it
  kHadIt,    // it was there before
  kPending,  // somebody is writing it there
  kGone,     // it is no longer here
};

class PeerSession {
 public:
  // `worker` must outlive the session. Errors: as Attach, and kUnavailable without UCX there.
  static absl::StatusOr<std::unique_ptr<PeerSession>> Open(const std::string& address,
                                                           const TlsFiles& tls,
                                                           std::shared_ptr<Arena> arena,
                                                           UcxWorker* worker,
                                                           absl::Duration timeout);
  // Detaches, best effort.
  ~PeerSession();

  // From now on bytes go by NCCL. Errors: as NcclMover::Make; bytes then go by UCX as before.
  // `go_on`: asked while NCCL is waited for; false ends that.
  absl::Status UseNccl(std::shared_ptr<const CommunicatorLibrary> library, absl::Duration watchdog,
                       std::function<bool()> go_on);
  Carrier carrier() const { return mover_->carrier(); }
  // Not OK once the carrier has failed, or the seal has refused what it brought: open another
  // session, since of this one's reservations nothing is known.
  const absl::Status& carrier_problem() const { return carrier_problem_; }
  // Pings if it is time to. Whoever waits between or within calls calls it every now and then.
  void KeepAlive();

  // Copies pages of one shard. One outcome a page; those that are kFailed say why by the status:
  // kResourceExhausted: the other daemon is full; kUnavailable, kAborted, kDeadlineExceeded: it is
  // draining, gone or slow; kDataLoss: bytes were damaged on the way. Adds the bytes sent to
  // `bytes`.
  absl::Status Copy(std::span<const SealedCopy> pages, std::span<CopyOutcome> outcomes,
                    uint64_t* bytes);

 private:
  struct Batch;
  PeerSession(std::shared_ptr<Arena> arena, absl::Duration timeout)
      : shared_arena_(std::move(arena)), arena_(*shared_arena_), timeout_(timeout) {}
  absl::Status Attach(const std::string& address, const TlsFiles& tls, UcxWorker* worker);
  absl::Status Reserve(Batch& batch, std::span<const SealedCopy> pages,
                       std::span<CopyOutcome> outcomes);
  absl::Status Send(Batch& batch, uint64_t* bytes);
  absl::Status Seal(const Batch& batch, std::span<CopyOutcome> outcomes);
  template <typename Request, typename Reply, typename Method>
  absl::Status Call(Request& request, Reply* reply, Method method, const char* name);

  const std::shared_ptr<Arena> shared_arena_;
  Arena& arena_;
  const absl::Duration timeout_;
  std::string address_;
  std::unique_ptr<locks_kvd::v1::Pool::Stub> stub_;
  locks_kvd::v1::SessionRef session_;
  std::unique_ptr<HeartbeatStream> heartbeat_;
  std::unique_ptr<Mover> mover_;
  absl::Status carrier_problem_;
  const SteadyClock clock_;
  absl::Duration heartbeat_interval_;
  absl::Duration last_ping_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_PEER_SESSION_H_
