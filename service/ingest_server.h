// Takes units of reserved slots that come over UCX, copies them into place and acknowledges them.
//
// Why staging: a writer never gets a key to the arena; the daemon reads the bytes from the sender
// into its own buffer, checks whom they are for, and copies.
// Thread safety: made, destroyed and asked for figures from any thread; the work is on the progress
// thread.
// Limits: a message is at most kMaxPieceBytes; staging buffers are bounded for each session and in
// all: a message that finds none waits, unreceived, with its sender.

#ifndef LOCKS_KVD_SERVICE_INGEST_SERVER_H_
#define LOCKS_KVD_SERVICE_INGEST_SERVER_H_

#include <cstdint>
#include <memory>

#include "proto/ucx_worker.h"
#include "service/session_table.h"

namespace kvd {

class IngestServer {
 public:
  // All must outlive it.
  IngestServer(UcxWorker* worker, SessionTable* sessions);
  // Cuts off what is in flight.
  ~IngestServer();

  // Bytes of units that were stored.
  uint64_t num_bytes() const;
  // Units that were refused: unknown or foreign tickets, reservations that are over.
  uint64_t num_refused_units() const;
  uint64_t num_refused_bytes() const;
  // Messages that could not be understood, or whose sender is not connected.
  uint64_t num_malformed() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
  UcxWorker* worker_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_INGEST_SERVER_H_
