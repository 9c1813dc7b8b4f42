// What became of one fetch over ucx: for counters and the slowlog.
//
// Thread safety: plain values.

#ifndef LOCKS_KVD_SERVICE_FETCH_EVENT_H_
#define LOCKS_KVD_SERVICE_FETCH_EVENT_H_

#include <cstdint>

#include "absl/time/time.h"
#include "proto/wire.h"
#include "service/lease_table.h"

namespace kvd {

struct FetchEvent {
  WireStatus status = WireStatus::kOk;
  SessionId session{};          // 0: the sender has none
  uint32_t units = 0;           // asked for
  uint32_t missing_units = 0;   // of these, not delivered
  uint32_t unleased_units = 0;  // of these, because the session does not lease their page
  uint64_t bytes = 0;           // sent
  absl::Duration queued;        // from its arrival until its first unit was copied
  absl::Duration total;         // from its arrival until its last piece had left
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_FETCH_EVENT_H_
