// Fetches of a daemon's canary page, whose bytes follow from its incarnation: they prove a path.
//
// Thread safety: compatible. Ownership: owns the memory that the units come to.

#ifndef LOCKS_KVD_CLIENT_CANARY_H_
#define LOCKS_KVD_CLIENT_CANARY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/device_buffer.h"
#include "client/fetcher.h"
#include "kernels/layout.h"
#include "proto/wire.h"

namespace kvd {

class Canary {
 public:
  // `canary_slot`: of the arena. `place`: where the worker's units go.
  static absl::StatusOr<Canary> Make(const SlotLayout& slot, uint32_t canary_slot,
                                     const Incarnation& incarnation, const MemoryPlace& place);

  // Fetches the page once. Returns the seconds that took.
  // Errors: the fetch's; DATA_LOSS if units are missing or any byte is wrong.
  absl::StatusOr<double> Fetch(Fetcher& fetcher, absl::Duration timeout);
  double num_bytes() const { return static_cast<double>(bytes_.size()); }

 private:
  bool IsRight() const;  // the units in bytes_, in order

  Incarnation incarnation_;
  std::vector<FetchEntry> entries_;
  std::vector<uint8_t> bytes_;
  PlacedBytes landing_;  // where the worker's units go
  std::vector<uint8_t*> destinations_;
  std::vector<uint8_t> valid_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_CANARY_H_
