// Estimates how long a scan of the records takes, full or progressive, and chooses.
//
// Why estimated: which one wins depends on the machine and on the length; a step must not try both.
// Model: seconds = launches * launch_seconds + bytes read / bytes per second, the rates measured
// once per plan on the machine that runs the step, on records of its own geometry. Thread safety:
// plain values and pure functions.

#ifndef LOCKS_KVD_CLIENT_SCAN_MODEL_H_
#define LOCKS_KVD_CLIENT_SCAN_MODEL_H_

#include <cstdint>

#include "client/step_options.h"
#include "client/worker_shape.h"

namespace kvd {

struct ScanModel {
  double launch_seconds = 0;           // fixed cost of one pass over all heads
  double full_bytes_per_second = 0;    // whole records (full scan and refine)
  double coarse_bytes_per_second = 0;  // coarse parts
  double select_pages_per_second = 0;  // top-K over the pages of one KV head

  // Measures the rates: some milliseconds. Allocates.
  static ScanModel Measure(const WorkerShape& shape);
};

struct ScanEstimate {
  double full_seconds;
  double progressive_seconds;
};
// Of one layer with `num_pages` pages and `num_candidates` candidates.
ScanEstimate EstimateScan(const ScanModel& model, const WorkerShape& shape, int64_t num_pages,
                          int64_t num_candidates);

// kProgressive only if it reads less and wins by at least 10%: two runs on one machine should not
// differ for a coin toss.
ScanMode ChooseScan(const ScanModel& model, const WorkerShape& shape, int64_t num_pages,
                    int64_t num_candidates);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_SCAN_MODEL_H_
