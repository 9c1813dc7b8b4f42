#include "client/tail_ring.h"

#include "proto/status.h"

namespace kvd {

absl::StatusOr<std::unique_ptr<TailRing>> TailRing::Make(const WorkerShape& shape, int n_win) {
  auto ring = std::unique_ptr<TailRing>(new TailRing(shape, n_win + kSlackPages));
  const size_t units = static_cast<size_t>(ring->num_pages_) * shape.units_per_page();
  KVD_ASSIGN_OR_RETURN(ring->units_,
                       Buffer<uint8_t>::Make(units * shape.unit_bytes(), "tail ring"));
  return ring;
}

}  // namespace kvd
