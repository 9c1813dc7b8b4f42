// The newest pages of a sequence, in unit layout, in the worker's own memory (the shape says
// where): the window (the last n_win sealed pages), complete pages that are not mirrored yet, and
// the page that is being filled.
//
// Why: a step must never wait for a seal. A page leaves the ring when it is sealed, mirrored and
// out of the window; until then it is attended from here. Shape: n_win + kSlackPages pages of
// [L][heads] units; page p lives in place p % num_pages(). Thread safety: compatible. A complete
// page is not written any more, so the sealer may read it while another page is filled.

#ifndef LOCKS_KVD_CLIENT_TAIL_RING_H_
#define LOCKS_KVD_CLIENT_TAIL_RING_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/device_buffer.h"
#include "client/worker_shape.h"
#include "kernels/gather.h"

namespace kvd {

// The GPU's progress through a batch's steps, for those who read what steps wrote.
struct StepEvents {
  // The cudaEvent_t of the latest step, recorded before its token counts; null before the first.
  std::atomic<void*> latest{nullptr};
  std::vector<void*> all;  // cudaEvent_t; destroyed with this object
  ~StepEvents();
};

class TailRing {
 public:
  // Complete pages that may wait for their seal, the page being filled included.
  static constexpr int kSlackPages = 8;

  static absl::StatusOr<std::unique_ptr<TailRing>> Make(const WorkerShape& shape, int n_win);

  // The unit of a page that is in the ring.
  uint8_t* unit(int page, int layer, int head) {
    return this->page(page) + shape_.unit_idx(layer, head) * shape_.unit_bytes();
  }
  // All units of a page that is in the ring, [L][heads].
  uint8_t* page(int page) {
    return units_.data() + static_cast<size_t>(page % num_pages_) * shape_.page_bytes();
  }

  // Copies tokens [kv_token, kv_token + count) of an engine's cache, one EngineKv a layer, to where
  // tokens [token, token + count) of the sequence stand. Blocking. Where the ring is on a GPU, the
  // engine's cache may be on it too. REQUIRES: all in one page.
  absl::Status AppendRows(std::span<const EngineKv> layers, int64_t kv_token, int64_t token,
                          int count);

  // Copies a complete page to host memory. Where the ring is on a GPU: after every step whose token
  // counts. May run beside steps. Blocking.
  absl::Status ReadPage(int page, uint8_t* to);

  // Whose steps write the ring, null for nobody's. Not in a step.
  void SetStepEvents(std::shared_ptr<StepEvents> events) {
    const std::lock_guard<std::mutex> lock(mutex_);
    step_events_ = std::move(events);
  }

  int num_pages() const { return num_pages_; }
  size_t bytes() const { return units_.size(); }

 private:
  absl::Status AwaitSteps();
  TailRing(const WorkerShape& shape, int num_pages) : shape_(shape), num_pages_(num_pages) {}

  const WorkerShape shape_;
  const int num_pages_;
  PlacedBytes units_;
  std::mutex mutex_;  // guards what follows
  std::shared_ptr<StepEvents> step_events_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_TAIL_RING_H_
