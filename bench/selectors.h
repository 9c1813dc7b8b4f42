// Ways to choose pages that LOCKS is compared with, in one frame: same pages, same always-kept set,
// same budget, same attention; only the score of a page differs.
//
// Sources: Quest (arXiv 2406.10774), elementwise min and max of a page's keys; the mean centroid;
// LOCKS (arXiv 2607.24555) through kernels/. Formulas only, the code is ours.
// Thread safety: immutable after construction; Score is const.

#ifndef LOCKS_KVD_BENCH_SELECTORS_H_
#define LOCKS_KVD_BENCH_SELECTORS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/study.h"
#include "kernels/query_metric.h"
#include "kernels/select.h"
#include "kernels/summarize.h"

namespace kvd::bench {

// The K pages of the largest score among those that are not always kept, ascending; ties to the
// lowest.
std::vector<int32_t> TopPages(std::span<const float> score, int num_select, AlwaysKept kept);

// How the scores of a group's heads become one.
enum class Combine { kShare, kZ, kMax };

// A page score of one stream, per query head, in nats where the method has them.
class PageScorer {
 public:
  virtual ~PageScorer() = default;
  // out: [G, num_pages] of `step`.
  virtual std::vector<float> Score(const Stream& stream, int step) const = 0;
};
std::unique_ptr<PageScorer> MakeQuest(const Stream& stream);
std::unique_ptr<PageScorer> MakeCentroid(const Stream& stream);

std::vector<int32_t> SelectByScore(std::span<const float> score, int group, Combine combine,
                                   int num_select, AlwaysKept kept);

// LOCKS through the product's own kernels.
struct LocksOptions {
  Encoder encoder = Encoder::kE1S;
  bool rotated = true;
  int rank = 8;
  CombineRule rule = CombineRule::kShare;
};

class LocksSelector {
 public:
  // `metric` [D, D] of this layer and head, prepared for `rotated`; null unless the encoder is E1S.
  LocksSelector(const Stream& stream, const LocksOptions& options, const float* metric);

  // Full scan.
  std::vector<int32_t> SelectFull(const Stream& stream, int step, int num_select,
                                  AlwaysKept kept) const;
  // Progressive scan with `num_candidates` candidates.
  std::vector<int32_t> SelectProgressive(const Stream& stream, int step, int num_select,
                                         int num_candidates, AlwaysKept kept) const;
  // Root mean square of (estimate - exact) page lse, the mean taken off, over the group.
  double LseRms(const Stream& stream, int step, const Truth& truth) const;

 private:
  LocksOptions options_;
  SummaryLayout layout_;
  std::vector<uint8_t> coarse_;
  std::vector<uint8_t> fine_;
};

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_SELECTORS_H_
