// Completes pages: checks that keys and values are finite, builds the records, and spreads many
// pages over a few threads.
//
// Why here: a record is built once, by the daemon that seals the page, and copied ever after.
// Thread safety: SummarizePage is pure; Sealer is safe.

#ifndef LOCKS_KVD_SERVICE_SEALER_H_
#define LOCKS_KVD_SERVICE_SEALER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/query_metric.h"
#include "kernels/summarize.h"

namespace kvd {

struct SummarizeJob {
  const KvGeometry* geometry;
  Encoder encoder;
  const QueryMetric* metric;  // empty unless encoder is kE1S
  const uint8_t* units;       // the slot: [L][shard heads] units
  uint8_t* records;           // out: SlotLayout::summary_bytes()
  uint32_t shard;
  uint32_t page_idx;  // for messages
};

// Builds every record of a page and returns the checksum of all of them. kInvalidArgument if a key
// or value is NaN or Inf, naming page, layer, head, token and K or V; `records` is then undefined.
absl::StatusOr<uint64_t> SummarizePage(const SummarizeJob& job);

// Why a page is refused: value `value_idx` of the K and V of one unit (FirstNonFinite) is NaN or
// Inf.
absl::Status NonFiniteError(const KvGeometry& geometry, uint32_t shard, uint32_t page_idx,
                            int layer, int head, int64_t value_idx);

// Runs batches of page-sized work on a fixed number of threads, one item of each batch in turn, so
// that a caller with a thousand pages does not keep one with a single page waiting.
class Sealer {
 public:
  explicit Sealer(int num_threads);
  // REQUIRES: no Run is under way.
  ~Sealer();

  // Calls work(i) for every i < count, then returns. Blocking: as long as the work takes; `work`
  // itself decides to do nothing once its caller has gone.
  void Run(size_t count, const std::function<void(size_t)>& work);

 private:
  struct Batch {
    const std::function<void(size_t)>* work;
    size_t count;
    size_t next = 0;
    size_t num_done = 0;
  };
  void Loop();

  std::mutex mutex_;                    // guards what follows, and every Batch
  std::condition_variable work_added_;  // or stopping
  std::condition_variable batch_done_;
  std::deque<Batch*> batches_;  // with items not yet begun
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_SEALER_H_
