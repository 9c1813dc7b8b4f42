// Which scan of the records a batch on a GPU runs.
//
// Why a model and not a measurement: a captured step fixes the scan at Plan, and two workers of one kind should not
// differ for a coin toss. The rates are of an H200 (bench/results/decode_bench.json); on another card the ratio of the
// two scans, which is all that counts, is much the same. Thread safety: pure functions.

#ifndef LOCKS_KVD_CLIENT_BATCH_SCAN_H_
#define LOCKS_KVD_CLIENT_BATCH_SCAN_H_

#include "client/scan_model.h"
#include "client/step_options.h"
#include "client/worker_shape.h"

namespace kvd {

// Microseconds of one layer's selection by either scan.
ScanEstimate EstimateBatchScan(const WorkerShape& shape, int num_sequences, int64_t num_pages, int64_t num_candidates);

// `asked`, or for kAuto the progressive scan if it wins by at least 10%. Never progressive where the candidates are all pages.
ScanMode ChooseBatchScan(const WorkerShape& shape, int num_sequences, int64_t num_pages, int64_t num_candidates,
                         ScanMode asked);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_BATCH_SCAN_H_
