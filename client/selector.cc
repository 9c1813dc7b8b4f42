#include "client/selector.h"

#include <algorithm>

#include "client/step_args.h"
#include "kernels/check.h"
#include "kernels/score.h"
#include "proto/status.h"

namespace kvd {

absl::StatusOr<std::unique_ptr<Selector>> Selector::Make(const WorkerShape& shape,
                                                         int page_capacity,
                                                         const StepOptions& options,
                                                         const ScanModel* model) {
  KVD_RETURN_IF_ERROR(Validate(options, shape.num_layers()));
  auto selector = std::unique_ptr<Selector>(new Selector(shape, page_capacity, options));
  Selector& s = *selector;
  s.budget_.assign(static_cast<size_t>(shape.num_layers()),
                   std::min(options.budget, page_capacity));
  for (const int layer : options.dense_layers)
    s.budget_[static_cast<size_t>(layer)] = page_capacity;
  s.max_budget_ = *std::max_element(s.budget_.begin(), s.budget_.end());
  s.max_chosen_ = std::min(options.candidates(), page_capacity);
  s.max_candidates_ = s.max_chosen_ + options.n_sink + options.n_win;
  if (model != nullptr) {
    s.model_ = *model;
  } else if (options.scan == ScanMode::kAuto && s.max_chosen_ < page_capacity) {
    s.model_ = ScanModel::Measure(shape);
  }
  const auto heads = static_cast<size_t>(shape.num_heads());
  const auto q_heads = static_cast<size_t>(shape.num_q_heads());
  const auto capacity = static_cast<size_t>(page_capacity);
  constexpr char kWhat[] = "selector";
  KVD_ASSIGN_OR_RETURN(s.lse_, Buffer<float>::Make(q_heads * capacity, kWhat));
  KVD_ASSIGN_OR_RETURN(s.pages_,
                       Buffer<int32_t>::Make(heads * static_cast<size_t>(s.max_budget_), kWhat));
  KVD_ASSIGN_OR_RETURN(s.num_selected_, Buffer<int32_t>::Make(heads, kWhat));
  KVD_ASSIGN_OR_RETURN(s.threshold_, Buffer<float>::Make(heads, kWhat));
  KVD_ASSIGN_OR_RETURN(s.log_norm_, Buffer<float>::Make(q_heads, kWhat));
  if (options.scan != ScanMode::kFull) {
    KVD_ASSIGN_OR_RETURN(s.chosen_,
                         Buffer<int32_t>::Make(heads * static_cast<size_t>(s.max_chosen_), kWhat));
    KVD_ASSIGN_OR_RETURN(s.num_chosen_, Buffer<int32_t>::Make(heads, kWhat));
    KVD_ASSIGN_OR_RETURN(s.candidates_, Buffer<int32_t>::Make(
                                            heads * static_cast<size_t>(s.max_candidates_), kWhat));
    KVD_ASSIGN_OR_RETURN(s.num_candidates_, Buffer<int32_t>::Make(heads, kWhat));
  }
  KVD_ASSIGN_OR_RETURN(s.scratch_, Buffer<uint8_t>::Make(SelectScratchBytes(page_capacity), kWhat));
  return selector;
}

const Selection& Selector::Run(int layer, SequencePages& pages, const uint16_t* q) {
  const KvGeometry& g = shape_.geometry;
  const int32_t num_pages = pages.num_pages();
  const uint8_t* coarse = pages.mirror().coarse(layer);
  const uint8_t* fine = pages.mirror().fine(layer);
  const int64_t capacity = page_capacity_;
  const uint64_t* selectable = pages.selectable();
  ScoreArgs score = ScoreArgsOf(shape_, 1, q);
  score.coarse = &coarse;
  score.fine = &fine;
  score.page_capacity = &capacity;
  score.num_pages = &num_pages;
  score.lse_stride = page_capacity_;
  score.lse = lse_.data();
  const SelectArgs select = {.num_sequences = 1,
                             .num_kv_heads = shape_.num_heads(),
                             .group = g.group(),
                             .rule = options_.rule,
                             .n_sink = options_.n_sink,
                             .n_win = options_.n_win,
                             .num_select = budget(layer),
                             .lse = lse_.data(),
                             .lse_stride = page_capacity_,
                             .num_pages = &num_pages,
                             .selectable = &selectable,
                             .max_candidates = 0,
                             .candidates = nullptr,
                             .num_candidates = nullptr,
                             .pages = pages_.data(),
                             .num_selected = num_selected_.data(),
                             .threshold = threshold_.data(),
                             .log_norm = log_norm_.data(),
                             .num_faults = &selection_.num_faults,
                             .scratch = scratch_.data()};
  ScanMode scan = options_.scan;
  if (budget(layer) >= num_pages || max_chosen_ >= num_pages) scan = ScanMode::kFull;
  if (scan == ScanMode::kAuto) scan = ChooseScan(model_, shape_, num_pages, max_chosen_);
  selection_.scan = scan;
  selection_.num_pages = num_pages;
  selection_.stride = budget(layer);
  selection_.pages = pages_.data();
  selection_.num_selected = num_selected_.data();
  selection_.lse = lse_.data();
  selection_.lse_stride = page_capacity_;
  selection_.threshold = threshold_.data();
  selection_.log_norm = log_norm_.data();
  selection_.bytes_scanned = 0;
  if (scan == ScanMode::kProgressive) {
    ScanProgressive(score, select, pages);
  } else {
    ScanFull(score, select);
  }
  return selection_;
}

void Selector::ScanFull(const ScoreArgs& score, SelectArgs select) {
  ref::ScoreFull(score);
  ref::Select(select);
  selection_.bytes_scanned = int64_t{*score.num_pages} * shape_.num_heads() *
                             static_cast<int64_t>(shape_.summary.record_bytes());
}

void Selector::ScanProgressive(const ScoreArgs& score, SelectArgs select,
                               const SequencePages& pages) {
  ref::ScoreCoarse(score);
  SelectArgs choose = select;
  choose.num_select = max_chosen_;
  choose.pages = chosen_.data();
  choose.num_selected = num_chosen_.data();
  ref::Select(choose);
  ListCandidates(pages);
  ref::ScoreRefine({.score = score,
                    .max_candidates = max_candidates_,
                    .candidates = candidates_.data(),
                    .num_candidates = num_candidates_.data()});
  select.max_candidates = max_candidates_;
  select.candidates = candidates_.data();
  select.num_candidates = num_candidates_.data();
  ref::Select(select);
  int64_t refined = 0;
  for (int h = 0; h < shape_.num_heads(); ++h) refined += num_candidates_[static_cast<size_t>(h)];
  selection_.bytes_scanned = int64_t{*score.num_pages} * shape_.num_heads() *
                                 static_cast<int64_t>(shape_.summary.coarse_bytes) +
                             refined * static_cast<int64_t>(shape_.summary.record_bytes());
}

void Selector::ListCandidates(const SequencePages& pages) {
  const int window_begin = std::max(pages.num_sinks(), pages.num_pages() - options_.n_win);
  for (int h = 0; h < shape_.num_heads(); ++h) {
    const auto head = static_cast<size_t>(h);
    int32_t* out = candidates_.data() + head * static_cast<size_t>(max_candidates_);
    const int32_t* chosen = chosen_.data() + head * static_cast<size_t>(max_chosen_);
    const int num_chosen = num_chosen_[head];
    int n = 0;
    for (int p = 0; p < pages.num_sinks(); ++p) out[n++] = p;
    for (int i = 0; i < num_chosen; ++i) out[n++] = chosen[i];
    for (int p = window_begin; p < pages.num_pages(); ++p) out[n++] = p;
    KVD_CHECK(n <= max_candidates_);
    num_candidates_[head] = n;
  }
}

}  // namespace kvd
