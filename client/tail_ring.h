// The newest pages of a sequence, in unit layout, in the worker's own memory: the window (the last
// n_win sealed pages), complete pages that are not mirrored yet, and the page that is being filled.
//
// Why: a step must never wait for a seal. A page leaves the ring when it is sealed, mirrored and
// out of the window; until then it is attended from here. Shape: n_win + kSlackPages pages of
// [L][heads] units; page p lives in place p % num_pages(). Thread safety: compatible. A complete
// page is not written any more, so the sealer may read it while another page is filled.

#ifndef LOCKS_KVD_CLIENT_TAIL_RING_H_
#define LOCKS_KVD_CLIENT_TAIL_RING_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/buffer.h"
#include "client/worker_shape.h"

namespace kvd {

class TailRing {
 public:
  // Complete pages that may wait for their seal, the page being filled included.
  static constexpr int kSlackPages = 8;

  static absl::StatusOr<std::unique_ptr<TailRing>> Make(const WorkerShape& shape, int n_win);

  // The unit of a page that is in the ring.
  uint8_t* unit(int page, int layer, int head) {
    const size_t place = static_cast<size_t>(page % num_pages_);
    return units_.data() +
           (place * shape_.units_per_page() + shape_.unit_idx(layer, head)) * shape_.unit_bytes();
  }
  int num_pages() const { return num_pages_; }
  size_t bytes() const { return units_.size(); }

 private:
  TailRing(const WorkerShape& shape, int num_pages) : shape_(shape), num_pages_(num_pages) {}

  const WorkerShape shape_;
  const int num_pages_;
  Buffer<uint8_t> units_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_TAIL_RING_H_
