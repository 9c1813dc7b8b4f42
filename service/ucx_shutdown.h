// How a server of UCX messages ends: no new messages, what is in flight aborted, then a bounded
// wait.
//
// Why one place: a server's buffers must outlive every operation that UCX may still write to or
// read from, and both servers (fetch, ingest) need exactly that.
// Thread safety: not from the progress thread. Blocking: up to a second.

#ifndef LOCKS_KVD_SERVICE_UCX_SHUTDOWN_H_
#define LOCKS_KVD_SERVICE_UCX_SHUTDOWN_H_

#include <chrono>
#include <memory>
#include <thread>

#include "proto/ucx_worker.h"

namespace kvd {

// `server` is a UcxReceiver of `type` and a UcxPoller; its AbortAll() and Idle() are called on the
// progress thread. What is not idle in time is kept until UCX is shut down.
template <class Server>
void StopUcxServer(UcxWorker& worker, MessageType type, const std::shared_ptr<Server>& server) {
  using Steady = std::chrono::steady_clock;
  constexpr auto kShutdownLimit = std::chrono::seconds(1);
  worker.SetReceiver(type, nullptr);
  worker.RemovePoller(server.get());
  const auto limit = Steady::now() + kShutdownLimit;
  bool idle = false;
  while (!idle && Steady::now() < limit) {
    worker.Run([&] {
      server->AbortAll();
      idle = server->Idle();
    });
    if (!idle) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!idle) worker.KeepUntilEnd(server);
}

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_UCX_SHUTDOWN_H_
