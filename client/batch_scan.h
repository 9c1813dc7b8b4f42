// Which scan of the records a batch on a GPU runs, and its launches.
//
// Why a model and not a measurement: a captured step fixes the scan at Plan, and two workers of one
// kind should not differ for a coin toss. The rates are of an H200; on another card the ratio of
// the two scans, which is all that counts, is much the same. Thread safety: pure functions, and a
// launcher that enqueues only. Built with KVD_CUDA only.

#ifndef LOCKS_KVD_CLIENT_BATCH_SCAN_H_
#define LOCKS_KVD_CLIENT_BATCH_SCAN_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "client/scan_model.h"
#include "client/step_options.h"
#include "client/worker_shape.h"
#include "kernels/score.h"
#include "kernels/select.h"

namespace kvd {

// Seconds of one layer's selection by either scan.
ScanEstimate EstimateBatchScan(const WorkerShape& shape, int num_sequences, int64_t num_pages,
                               int64_t num_candidates);

// `asked`, or for kAuto the progressive scan if it wins by at least 10%. Never progressive where
// the candidates are all pages.
ScanMode ChooseBatchScan(const WorkerShape& shape, int num_sequences, int64_t num_pages,
                         int64_t num_candidates, ScanMode asked);

// What a progressive scan takes as candidates, and where it keeps them.
struct CandidateLists {
  int max_chosen = 0;     // StepOptions::candidates, at most the pages there are
  CandidateOut out = {};  // of these and the always-kept pages
};

// The pages of one layer: score and select, with the progressive scan both twice. `select` names
// the lse of `score` and no candidates.
// Stream: enqueues on `stream` only, capturable. Errors: the launchers'.
[[nodiscard]] cudaError_t LaunchPageSelection(ScanMode scan, const ScoreArgs& score,
                                              const SelectArgs& select, const CandidateLists& lists,
                                              cudaStream_t stream);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_BATCH_SCAN_H_
