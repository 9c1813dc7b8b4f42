// Scores the current query against a sequence's records and chooses the pages to attend, for one
// layer.
//
// Progressive scan: coarse estimates of all pages -> the C best selectable ones are candidates,
// with the always-kept pages -> their full estimates -> exact top-K among the candidates. It equals
// the full scan when C covers every page. The result says which scan ran. Thread safety:
// compatible: one step at a time. Allocates in Make only.

#ifndef LOCKS_KVD_CLIENT_SELECTOR_H_
#define LOCKS_KVD_CLIENT_SELECTOR_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/buffer.h"
#include "client/scan_model.h"
#include "client/sequence_pages.h"
#include "client/step_options.h"
#include "client/worker_shape.h"
#include "kernels/score.h"

namespace kvd {

// Views of the selector's memory, valid until its next Run.
struct Selection {
  ScanMode scan = ScanMode::kFull;
  int num_pages = 0;                      // scanned
  int stride = 0;                         // row length of `pages`
  const int32_t* pages = nullptr;         // [heads, stride] ascending
  const int32_t* num_selected = nullptr;  // [heads]
  const float* lse = nullptr;             // [query heads, lse_stride] estimates
  int64_t lse_stride = 0;
  const float* threshold = nullptr;  // [heads]
  const float* log_norm = nullptr;   // [query heads] Z
  int64_t bytes_scanned = 0;
  uint64_t num_faults = 0;  // NaN estimates met, ever

  std::span<const int32_t> pages_of(int head) const {
    return {pages + static_cast<ptrdiff_t>(head) * stride, static_cast<size_t>(num_selected[head])};
  }
};

class Selector {
 public:
  // `model` null: measured here if the options leave the scan open.
  static absl::StatusOr<std::unique_ptr<Selector>> Make(const WorkerShape& shape, int page_capacity,
                                                        const StepOptions& options,
                                                        const ScanModel* model);

  // `q` [query heads, D], post-RoPE, not rotated. The estimates are of `pages`' mirror.
  const Selection& Run(int layer, SequencePages& pages, const uint16_t* q);

  // K of a layer: the budget, or every page for a dense layer.
  int budget(int layer) const { return budget_[static_cast<size_t>(layer)]; }
  int max_budget() const { return max_budget_; }

 private:
  Selector(const WorkerShape& shape, int page_capacity, const StepOptions& options)
      : shape_(shape), page_capacity_(page_capacity), options_(options) {}
  void ScanFull(const ScoreArgs& score, SelectArgs select);
  void ScanProgressive(const ScoreArgs& score, SelectArgs select, const SequencePages& pages);
  // Candidates chosen by the coarse estimates plus the always-kept pages, ascending.
  void ListCandidates(const SequencePages& pages);

  const WorkerShape shape_;
  const int page_capacity_;
  const StepOptions options_;
  ScanModel model_;
  std::vector<int> budget_;
  int max_budget_ = 0;
  int max_chosen_ = 0;      // candidates chosen by the coarse estimates
  int max_candidates_ = 0;  // and the always-kept pages

  Buffer<float> lse_;               // [query heads, P_cap]
  Buffer<int32_t> pages_;           // [heads, max_budget]
  Buffer<int32_t> num_selected_;    // [heads]
  Buffer<float> threshold_;         // [heads]
  Buffer<float> log_norm_;          // [query heads]
  Buffer<int32_t> chosen_;          // [heads, max_chosen]
  Buffer<int32_t> num_chosen_;      // [heads]
  Buffer<int32_t> candidates_;      // [heads, max_candidates]
  Buffer<int32_t> num_candidates_;  // [heads]
  Buffer<uint8_t> scratch_;
  Selection selection_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_SELECTOR_H_
