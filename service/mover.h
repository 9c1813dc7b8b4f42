// How the bytes of sealed pages get into reservations at another daemon. What surrounds them,
// reserving and sealing with proof by checksums, is the same for every carrier
// (service/peer_session.h).
//
// Thread safety: compatible. Blocking: Move, within the carrier's own limits.

#ifndef LOCKS_KVD_SERVICE_MOVER_H_
#define LOCKS_KVD_SERVICE_MOVER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "service/metrics.h"

namespace kvd {

// A sealed page here, and the reservation there that it goes into.
struct MovedPage {
  uint32_t slot;
  uint64_t ticket;
};

// Of one call.
inline constexpr size_t kMaxMovedPages = 1024;

class Mover {
 public:
  virtual ~Mover() = default;
  virtual Carrier carrier() const = 0;
  // Brings units and records of pages that cannot change meanwhile (Arena::BeginCopying). Returns
  // the checksum of each page's records as they are here, by which the seal proves them. After an
  // error nothing is known of the reservations: give them up.
  virtual absl::StatusOr<std::vector<uint64_t>> Move(std::span<const MovedPage> pages) = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_MOVER_H_
