// Answers fetches that come over UCX: checks the session, its leases and every bound, gathers the
// units into staging memory, and sends them in pieces, in the order of the request.
//
// Why staging: the arena itself is never handed to UCX, so no peer ever gets a key to it; and one
// message of many units costs what one message costs. A piece is gathered while the one before it
// travels.
// Right because: the generation is checked after the copy (PageStore), and what is sent is the
// copy.
// Thread safety: made, destroyed and asked for figures from any thread; the work is on the progress
// thread.
// Limits: bytes in flight and staging buffers are bounded for each session and in all; a peer that
// does not take its answer is cut off, so it cannot starve others (guarantee G6).

#ifndef LOCKS_KVD_SERVICE_FETCH_SERVER_H_
#define LOCKS_KVD_SERVICE_FETCH_SERVER_H_

#include <cstdint>
#include <memory>

#include "proto/ucx_worker.h"
#include "service/fetch_event.h"
#include "service/session_table.h"

namespace kvd {

struct FetchLimits {
  uint32_t units_per_fetch = 65536;
  uint64_t bytes_in_flight_per_session = uint64_t{256} << 20;
};

// Learns of every fetch. Called on the progress thread: must be quick and take no lock.
class FetchObserver {
 public:
  virtual ~FetchObserver() = default;
  virtual void OnFetch(const FetchEvent& event) = 0;
};

class FetchServer {
 public:
  // All must outlive it; `observer` may be null.
  FetchServer(UcxWorker* worker, SessionTable* sessions, const FetchLimits& limits,
              FetchObserver* observer);
  // Cuts off what is in flight.
  ~FetchServer();

  // Refuses new fetches with WireStatus::kUnavailable from now on.
  void Drain();
  // Fetches that are queued or being answered.
  uint32_t num_in_flight() const;
  // Requests that could not be understood, or whose sender is not connected.
  uint64_t num_malformed() const;
  // Requests refused because a limit was met.
  uint64_t num_refused() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
  UcxWorker* worker_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_FETCH_SERVER_H_
