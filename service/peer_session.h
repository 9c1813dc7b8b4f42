// A session with another daemon's arena of the same tenant and model, to bring it copies of sealed pages.
//
// Why the ordinary calls: a copy is reserved, sent and sealed like a worker's page, so the other daemon's
// limits, checks and metrics hold for it too; only its records come with it and are proved instead of built, so that every copy of a
// page is the same bytes. Thread safety: compatible. Blocking: every call up to the timeout.

#ifndef LOCKS_KVD_SERVICE_PEER_SESSION_H_
#define LOCKS_KVD_SERVICE_PEER_SESSION_H_

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/grpc_channel.h"
#include "proto/heartbeat_stream.h"
#include "proto/ingest_channel.h"
#include "proto/pool.grpc.pb.h"
#include "proto/staging.h"
#include "proto/ucx_worker.h"
#include "service/arena.h"

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
  // `arena` and `worker` must outlive the session. Errors: as Attach, and kUnavailable without UCX there.
  static absl::StatusOr<std::unique_ptr<PeerSession>> Open(const std::string& address, const TlsFiles& tls,
                                                           Arena* arena, UcxWorker* worker,
                                                           absl::Duration timeout);
  // Detaches, best effort.
  ~PeerSession();

  // Copies pages of one shard. One outcome a page; those that are kFailed say why by the status:
  // kResourceExhausted: the other daemon is full; kUnavailable, kAborted, kDeadlineExceeded: it is draining,
  // gone or slow; kDataLoss: bytes were damaged on the way. Adds the bytes sent to `bytes`.
  absl::Status Copy(std::span<const SealedCopy> pages, std::span<CopyOutcome> outcomes, uint64_t* bytes);

 private:
  struct Batch;
  PeerSession(Arena* arena, absl::Duration timeout) : arena_(*arena), timeout_(timeout) {}
  absl::Status Attach(const std::string& address, const TlsFiles& tls, UcxWorker* worker);
  absl::Status Reserve(Batch& batch, std::span<const SealedCopy> pages, std::span<CopyOutcome> outcomes);
  absl::Status Send(Batch& batch, uint64_t* bytes);
  absl::Status Seal(const Batch& batch, std::span<CopyOutcome> outcomes);
  template <typename Request, typename Reply, typename Method>
  absl::Status Call(Request& request, Reply* reply, Method method, const char* name);

  Arena& arena_;
  const absl::Duration timeout_;
  std::string address_;
  std::unique_ptr<locks_kvd::v1::Pool::Stub> stub_;
  locks_kvd::v1::SessionRef session_;
  std::unique_ptr<HeartbeatStream> heartbeat_;
  std::unique_ptr<IngestChannel> ingest_;
  std::vector<StagingBuffer> staging_;  // of a batch's pages, where the arena is on a GPU
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_PEER_SESSION_H_
