// Fetches outside of decode steps: records into a mirror, and units into local pages, when a
// sequence is opened, extended or repaired.
//
// Lists are bounded in bytes; all daemons at once; each record proved by its header's generation
// and checksum (Fetcher::FetchSummaries; StoreRecords where the mirror is on a GPU), each unit by
// its generation. Thread safety: safe for different destinations. Blocking: up to the timeout for
// each list.

#ifndef LOCKS_KVD_CLIENT_RECORD_FETCH_H_
#define LOCKS_KVD_CLIENT_RECORD_FETCH_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/mirror.h"
#include "client/pool.h"
#include "client/worker_shape.h"
#include "proto/wire.h"

namespace kvd {

// The records of one page.
struct RecordRequest {
  int page;                        // its place in the mirror
  int daemon;                      // attached in the view
  std::span<const SlotRef> slots;  // one a shard held
};

// Stores the records of each page in `mirror`; answers 1 for each page whose records are all there.
std::vector<uint8_t> FetchRecords(const PoolView& view, std::span<const RecordRequest> requests,
                                  absl::Duration timeout, Mirror& mirror, const WorkerShape& shape);

// Answers 1 for each page whose daemon has the very records that are in `mirror`: its bytes are the
// same.
std::vector<uint8_t> CompareRecords(const PoolView& view, std::span<const RecordRequest> requests,
                                    absl::Duration timeout, Mirror& mirror,
                                    const WorkerShape& shape);

struct UnitRequest {
  int daemon;  // attached in the view
  FetchEntry entry;
  uint8_t* destination;
};

// Fetches every unit, to destinations that are all in host memory or all on the worker's GPU.
// kUnavailable if one is missing or a daemon failed: the sequence must be opened again.
absl::Status FetchUnits(const PoolView& view, std::span<const UnitRequest> requests,
                        absl::Duration timeout);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_RECORD_FETCH_H_
