// The sparse decode step of one sequence, host-driven: append, score, select, resolve, fetch,
// attend.
//
// Use: Plan once (allocates everything), then for each token Run layer 0, 1, ... L-1 in order.
// Layer 0 begins a step (sealed pages are adopted, lost daemons masked), layer L-1 ends it (the
// token counts). Thread safety: compatible; one thread at a time, which also owns the
// SequencePages. The sealer runs beside it. After the first steps Run allocates nothing, takes no
// lock and makes no RPC, unless a page is lost: errors carry text.
//
// Shapes (slowest to fastest)  dtype      notes; heads are the worker's own
//   q    [query heads, D]      bf16|fp16  post-RoPE
//   k, v [KV heads, D]         bf16|fp16  post-RoPE key, value of the new token
//   o    [query heads, D]      fp32       out
//   lse  [query heads]         fp32       out, natural log, over what was attended
// Guarantee: o and lse are exact over the attended units, each of which is local or was proved by
// its generation after it was copied (G1). Units that did not arrive are left out, counted and
// masked.

#ifndef LOCKS_KVD_CLIENT_DECODE_STEP_H_
#define LOCKS_KVD_CLIENT_DECODE_STEP_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/buffer.h"
#include "client/miss_fetch.h"
#include "client/page_cache.h"
#include "client/selector.h"
#include "client/sequence_pages.h"
#include "client/stats.h"
#include "client/step_options.h"
#include "kernels/attend.h"

namespace kvd {

struct StepInput {
  const uint16_t* q;
  const uint16_t* k;
  const uint16_t* v;
};
struct StepOutput {
  float* o;
  float* lse;
};

class DecodeStep {
 public:
  // `pages` must outlive the step and have been made with the options' n_sink and n_win. `model`
  // null: measured. Errors: kInvalidArgument names the option; kResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<DecodeStep>> Plan(SequencePages* pages,
                                                          const StepOptions& options,
                                                          const ScanModel* model = nullptr);

  // One layer of one token. Blocking: up to fetch_timeout. Errors:
  //   kInvalidArgument    not the next layer: a bug of the caller
  //   kResourceExhausted  no room for the token (layer 0 only; nothing changed: retry, or open
  //   again) kUnavailable        LossPolicy::kRecompute and pages are missing: o and lse are valid
  //   over the rest;
  //                       put the missing pages again and repair
  //   kAborted            LossPolicy::kFail and pages are missing: o and lse are not to be used
  absl::Status Run(int layer, const StepInput& input, const StepOutput& output);

  const LayerResult& result() const { return result_; }                 // of the last Run
  const StepTotals& totals() const { return totals_; }                  // any thread
  const FetchTotals& fetch_totals() const { return fetch_->totals(); }  // any thread
  const PageCache& cache() const { return *cache_; }
  const StepOptions& options() const { return options_; }
  int next_layer() const { return next_layer_; }

 private:
  class StageTimer;

  DecodeStep(SequencePages* pages, const StepOptions& options);
  absl::Status Allocate(const ScanModel* model);
  void AppendToken(int layer, const StepInput& input);
  void ResolveLayer(int layer);
  void AttendPresent(int layer, const StepInput& input);
  void AttendFetched(const StepInput& input, const StepOutput& output);
  void Attend(const StepInput& input, float* o, float* lse);
  void DropFailedUnits(int layer);
  void EstimateMassFigures(const StepOutput& output);
  void MarkAttended(int head);
  int64_t AttendedBytes() const;
  // Adds the layer to the figures of its step.
  void CountLayer();
  void EndStep();
  absl::Status Outcome(int layer) const;

  SequencePages& pages_;
  const WorkerShape& shape_;
  const StepOptions options_;
  std::unique_ptr<Selector> selector_;
  std::unique_ptr<PageCache> cache_;
  std::unique_ptr<MissFetch> fetch_;

  int next_layer_ = 0;
  uint64_t step_ = 1;
  size_t max_units_ = 0;
  Buffer<uint8_t*> tails_;     // [heads]
  Buffer<int32_t> slots_;      // [heads, max_budget] cache slot of each selected page
  Buffer<int32_t> miss_idx_;   // [max_budget]
  Buffer<uint8_t> is_miss_;    // [heads, max_budget]
  Buffer<UnitRef> units_;      // [heads, max_units]
  Buffer<int32_t> num_units_;  // [heads]
  Buffer<float> present_o_;    // [query heads, D]
  Buffer<float> present_lse_;  // [query heads]
  Buffer<float> fetched_o_;
  Buffer<float> fetched_lse_;
  Buffer<uint64_t> attended_;      // bitset over pages, of one head
  Buffer<uint64_t> unselectable_;  // the same, of the sequence
  Buffer<float> unread_mass_;      // [query heads]
  Buffer<float> lost_mass_;
  LayerResult result_;
  StepTotals totals_;
  // Of the step that is under way.
  struct StepFigures {
    std::array<int64_t, kNumStages> ns = {};
    bool sparse = false;
    double lost_mass = 0;  // sum over its lossy layers of the mean over query heads
    int lossy_layers = 0;
  };
  StepFigures figures_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_DECODE_STEP_H_
