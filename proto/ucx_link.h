// A session's way to its daemon: an endpoint, a channel for the answers, and the greeting that
// opens the way back. The client end of the data plane.
//
// Thread safety: what is marked "progress thread" only there; the rest from the thread that owns
// it.

#ifndef LOCKS_KVD_PROTO_UCX_LINK_H_
#define LOCKS_KVD_PROTO_UCX_LINK_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/ucx_worker.h"

namespace kvd {

class UcxLink final : private UcxReceiver {
 public:
  // Connects to the daemon's `remote_address` and waits for its greeting. `answers` takes the
  // answers of this link. kUnavailable: not reachable, or draining; kAborted: the daemon does not
  // know the session; kDeadlineExceeded: no answer in time (also from a daemon that does not know
  // the session's token).
  static absl::StatusOr<std::unique_ptr<UcxLink>> Connect(
      UcxWorker* worker, const std::string& remote_address, const Incarnation& incarnation,
      const SessionToken& session, UcxReceiver* answers, absl::Duration timeout);
  // After it no answer is delivered any more. Operations in flight must have ended.
  ~UcxLink() override;

  // A header that names the session, with request number `number` of this link (below 2^48).
  MessageHeader Header(MessageType type, uint64_t number) const;

  // True once the connection is beyond repair. Any thread.
  bool failed() const { return UcxWorker::Failed(endpoint_); }
  // Progress thread.
  void Send(UcxSend& message, std::span<const uint8_t> payload) {
    worker_->Send(endpoint_, message, payload);
  }
  void Abort() { worker_->Abort(endpoint_); }

  UcxWorker* worker() const { return worker_; }

 private:
  class Greeting;
  UcxLink(UcxWorker* worker, const Incarnation& incarnation, const SessionToken& session,
          UcxReceiver* answers)
      : worker_(worker), incarnation_(incarnation), session_(session), answers_(answers) {}
  void OnMessage(const MessageHeader& header, UcxPayload& payload) override;

  UcxWorker* worker_;
  Incarnation incarnation_;
  SessionToken session_;
  UcxReceiver* answers_;
  uint16_t channel_ = 0;
  UcxEndpoint* endpoint_ = nullptr;
  std::shared_ptr<Greeting> greeting_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_UCX_LINK_H_
