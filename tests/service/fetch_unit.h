// One unit through a fetcher, as a client fetches it.

#ifndef LOCKS_KVD_TESTS_SERVICE_FETCH_UNIT_H_
#define LOCKS_KVD_TESTS_SERVICE_FETCH_UNIT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/fetcher.h"

namespace kvd {

struct FetchedUnit {
  absl::StatusCode code;
  uint8_t valid;
  std::vector<uint8_t> bytes;
};

inline FetchedUnit FetchUnit(Fetcher& fetcher, size_t unit_bytes, const FetchEntry& entry,
                             absl::Duration deadline) {
  FetchedUnit unit = {absl::StatusCode::kUnknown, 0, std::vector<uint8_t>(unit_bytes)};
  uint8_t* destination = unit.bytes.data();
  FetchList list;
  list.entries = {&entry, 1};
  list.destinations = &destination;
  list.valid = &unit.valid;
  list.deadline = deadline;
  fetcher.Start(list);
  fetcher.Wait(list);
  unit.code = list.code;
  return unit;
}

}  // namespace kvd

#endif  // LOCKS_KVD_TESTS_SERVICE_FETCH_UNIT_H_
