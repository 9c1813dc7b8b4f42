#include "proto/heartbeat_stream.h"

#include <utility>

#include "proto/status.h"

namespace kvd {

HeartbeatStream::HeartbeatStream(locks_kvd::v1::Pool::Stub* stub,
                                 const locks_kvd::v1::SessionRef& session, OnEvent on_event)
    : on_event_(std::move(on_event)), incarnation_(session.incarnation()) {
  *ping_.mutable_session() = session;
  stub->async()->Session(&context_, this);
  AddHold();
  StartRead(&event_);
  StartCall();
}

void HeartbeatStream::Ping() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (write_in_flight_ || broken_) return;
    write_in_flight_ = true;
    ping_.set_sequence_number(++num_pings_);
  }
  StartWrite(&ping_);
}

HeartbeatStream::Clock::time_point HeartbeatStream::last_answer() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_answer_;
}

bool HeartbeatStream::WaitBroken(Clock::duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return broken_; });
}

std::string HeartbeatStream::End() {
  context_.TryCancel();
  RemoveHold();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  if (!problem_.empty()) return problem_;
  if (status_.ok()) return "the daemon ended the session's stream";
  return FromGrpc(status_).ToString();
}

void HeartbeatStream::OnReadDone(bool ok) {
  const bool foreign = ok && event_.incarnation() != incarnation_;
  if (!ok || foreign) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (foreign) problem_ = "another incarnation speaks on the session's stream";
    broken_ = true;
    changed_.notify_all();
    return;
  }
  if (event_.has_ping_ack()) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_answer_ = Clock::now();
  } else {
    on_event_(event_);
  }
  StartRead(&event_);
}

void HeartbeatStream::OnWriteDone(bool) {
  std::lock_guard<std::mutex> lock(mutex_);
  write_in_flight_ = false;
}

void HeartbeatStream::OnDone(const grpc::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  status_ = status;
  done_ = true;
  changed_.notify_all();
}

}  // namespace kvd
