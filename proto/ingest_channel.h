// Sends units of reserved slots to their daemon over UCX.
//
// Right because: units are copied into buffers of the channel first, so after Send returned, with
// whatever outcome, nothing reads the caller's memory any more; and a unit counts as sent only once
// the daemon has acknowledged that it stored it.
// Thread safety: safe; calls on one channel take turns.

#ifndef LOCKS_KVD_PROTO_INGEST_CHANNEL_H_
#define LOCKS_KVD_PROTO_INGEST_CHANNEL_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/ucx_worker.h"
#include "proto/wire.h"

namespace kvd {

// One unit to store, or a slot's records. `bytes` is unit_bytes or record_bytes long and must live
// until the call returns.
struct IngestUnit {
  uint64_t ticket;  // of Reserve
  uint16_t layer;
  uint16_t head;  // of the shard
  const uint8_t* bytes;
};

class IngestChannel {
 public:
  // Connects; `worker` must outlive the channel. Errors: see UcxLink::Connect.
  static absl::StatusOr<std::unique_ptr<IngestChannel>> Connect(
      UcxWorker* worker, const std::string& remote_address, const Incarnation& incarnation,
      const SessionToken& session, size_t unit_bytes, absl::Duration timeout);
  ~IngestChannel();

  // Sends all units and waits for their acknowledgements. Blocking: up to `timeout`. Idempotent:
  // yes. kFailedPrecondition: the daemon does not hold a reservation for some unit (which, and how
  // many); kAborted: the session is gone; kUnavailable: the daemon is; kResourceExhausted;
  // kDeadlineExceeded.
  absl::Status Send(std::span<const IngestUnit> units, absl::Duration timeout);

  // The same for all records of each ticket's slot (SlotLayout::summary_bytes(); layer and head are
  // 0). Mover sessions only: others get kInvalidArgument.
  absl::Status SendRecords(std::span<const IngestUnit> records, size_t record_bytes,
                           absl::Duration timeout);

  // True once the connection is beyond repair: only another session helps. Any thread.
  bool failed() const;

  // Once the session is lost: later sends end with kAborted, a waiting one soon. Any thread.
  void Shutdown();

 private:
  class Impl;
  explicit IngestChannel(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_INGEST_CHANNEL_H_
