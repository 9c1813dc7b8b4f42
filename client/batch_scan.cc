#include "client/batch_scan.h"

namespace kvd {
namespace {

// Of an H200 (bench/results/step_bench.json): fixed cost of a scan over few pages, bytes a second
// of whole records and of coarse parts; and what the second select and refine cost beside their
// bytes, more of it for every list and for every page of one.
constexpr double kScanSeconds = 4e-6;
constexpr double kFullRate = 4.1e12;
constexpr double kCoarseRate = 3.9e12;
constexpr double kRefineSeconds = 18e-6;
constexpr double kListSeconds = 0.15e-6;
constexpr double kPageSeconds = 2e-12;
constexpr double kWideGroupSeconds =
    6e-6;  // of more than 4 query heads a KV head: coarse scores compute more for a byte

}  // namespace

ScanEstimate EstimateBatchScan(const WorkerShape& shape, int num_sequences, int64_t num_pages,
                               int64_t num_candidates) {
  const double lists = static_cast<double>(num_sequences) * shape.num_heads();
  const double pages = lists * static_cast<double>(num_pages);
  const double full = pages * shape.summary.record_bytes();
  const double coarse = pages * shape.summary.coarse_bytes;
  const double refined = lists * static_cast<double>(num_candidates) * shape.summary.record_bytes();
  return {kScanSeconds + full / kFullRate,
          kScanSeconds + coarse / kCoarseRate + kRefineSeconds + lists * kListSeconds +
              pages * kPageSeconds + (shape.geometry.group() > 4 ? kWideGroupSeconds : 0) +
              refined / kFullRate};
}

ScanMode ChooseBatchScan(const WorkerShape& shape, int num_sequences, int64_t num_pages,
                         int64_t num_candidates, ScanMode asked) {
  if (num_candidates >= num_pages) return ScanMode::kFull;
  if (asked != ScanMode::kAuto) return asked;
  const ScanEstimate estimate = EstimateBatchScan(shape, num_sequences, num_pages, num_candidates);
  return estimate.progressive_seconds * 1.1 <= estimate.full_seconds ? ScanMode::kProgressive
                                                                     : ScanMode::kFull;
}

cudaError_t LaunchPageSelection(ScanMode scan, const ScoreArgs& score, const SelectArgs& select,
                                const CandidateLists& lists, cudaStream_t stream) {
  if (scan == ScanMode::kFull) {
    const cudaError_t scored = LaunchScoreFull(score, stream);
    return scored != cudaSuccess ? scored : LaunchSelect(select, stream);
  }
  SelectArgs choose = select;
  choose.num_select = lists.max_chosen;
  SelectArgs among = select;
  const CandidateOut& out = lists.out;
  among.max_candidates = out.max_candidates;
  among.candidates = out.candidates;
  among.num_candidates = out.num_candidates;
  cudaError_t error = LaunchScoreCoarse(score, stream);
  if (error == cudaSuccess) error = LaunchSelectCandidates(choose, out, stream);
  if (error == cudaSuccess) {
    error =
        LaunchScoreRefine({score, out.max_candidates, out.candidates, out.num_candidates}, stream);
  }
  return error == cudaSuccess ? LaunchSelectAmong(among, stream) : error;
}

}  // namespace kvd
