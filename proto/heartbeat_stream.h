// The stream that keeps a session alive: pings out, events in, in gRPC's callback form.
//
// Thread safety: safe. gRPC's threads run the On... methods; the channel's thread the others.
// Lifetime: the owner calls End before it destroys the stream. A hold keeps the call open for Ping
// until then, so that no write can meet a finished call.

#ifndef LOCKS_KVD_PROTO_HEARTBEAT_STREAM_H_
#define LOCKS_KVD_PROTO_HEARTBEAT_STREAM_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

#include "proto/pool.grpc.pb.h"

namespace kvd {

class HeartbeatStream final
    : public grpc::ClientBidiReactor<locks_kvd::v1::SessionPing, locks_kvd::v1::SessionEvent> {
 public:
  using Clock = std::chrono::steady_clock;
  using OnEvent = std::function<void(const locks_kvd::v1::SessionEvent&)>;

  // Starts the stream of `session`. `on_event` runs on gRPC's thread for everything but ping
  // answers.
  HeartbeatStream(locks_kvd::v1::Pool::Stub* stub, const locks_kvd::v1::SessionRef& session,
                  OnEvent on_event);

  // Sends a ping unless the last one is still on its way.
  void Ping();
  // When the daemon last answered (or the stream began).
  Clock::time_point last_answer() const;
  // Waits until the stream is broken, for at most `timeout`; true if it is.
  bool WaitBroken(Clock::duration timeout);
  // Cancels the call and waits for its end. Says how it ended. Once.
  std::string End();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  grpc::ClientContext context_;
  const OnEvent on_event_;
  const std::string incarnation_;
  locks_kvd::v1::SessionPing ping_;    // being sent while write_in_flight_
  locks_kvd::v1::SessionEvent event_;  // being read

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  bool write_in_flight_ = false;
  bool broken_ = false;  // nothing comes any more
  bool done_ = false;    // gRPC has let go of this object
  grpc::Status status_;
  std::string problem_;
  Clock::time_point last_answer_ = Clock::now();
  uint64_t num_pings_ = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_HEARTBEAT_STREAM_H_
