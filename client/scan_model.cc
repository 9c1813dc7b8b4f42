#include "client/scan_model.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "client/step_args.h"
#include "kernels/score.h"
#include "kernels/select.h"

namespace kvd {
namespace {

constexpr int kSamplePages = 2048;
constexpr double kWinFactor = 1.1;

// Fastest of a few runs: the others met something else on the machine.
double Seconds(const std::function<void()>& run) {
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return std::max(best, 1e-9);
}

}  // namespace

ScanModel ScanModel::Measure(const WorkerShape& shape) {
  const KvGeometry& g = shape.geometry;
  const auto group = static_cast<size_t>(g.group());
  const std::vector<uint16_t> query(group * static_cast<size_t>(g.head_dim), 0x3F80);
  const std::vector<uint8_t> coarse(size_t{kSamplePages} * shape.summary.coarse_bytes);
  const std::vector<uint8_t> fine(size_t{kSamplePages} * shape.summary.fine_bytes);
  std::vector<float> lse(group * kSamplePages);
  const uint8_t* coarse_base = coarse.data();
  const uint8_t* fine_base = fine.data();
  const int64_t capacity = kSamplePages;
  int32_t num_pages = kSamplePages;
  ScoreArgs score = ScoreArgsOf(shape, 1, query.data());
  score.num_kv_heads = 1;
  score.coarse = &coarse_base;
  score.fine = &fine_base;
  score.page_capacity = &capacity;
  score.num_pages = &num_pages;
  score.lse_stride = kSamplePages;
  score.lse = lse.data();
  ScanModel model;
  const double full = Seconds([&] { ref::ScoreFull(score); });
  const double coarse_only = Seconds([&] { ref::ScoreCoarse(score); });
  num_pages = 1;
  model.launch_seconds = Seconds([&] { ref::ScoreFull(score); });
  num_pages = kSamplePages;
  model.full_bytes_per_second = kSamplePages * double{1} * shape.summary.record_bytes() / full;
  model.coarse_bytes_per_second =
      kSamplePages * double{1} * shape.summary.coarse_bytes / coarse_only;

  constexpr int kSampleBudget = 128;
  std::vector<int32_t> pages(kSampleBudget);
  std::vector<float> log_norm(group);
  int32_t num_selected = 0;
  float threshold = 0;
  const size_t scratch_bytes = SelectScratchBytes(kSamplePages);
  std::vector<std::max_align_t> scratch(scratch_bytes / sizeof(std::max_align_t) + 8);
  const auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64;
  const SelectArgs select = {.num_sequences = 1,
                             .num_kv_heads = 1,
                             .group = g.group(),
                             .rule = CombineRule::kShare,
                             .n_sink = 1,
                             .n_win = 1,
                             .num_select = kSampleBudget,
                             .lse = lse.data(),
                             .lse_stride = kSamplePages,
                             .num_pages = &num_pages,
                             .selectable = nullptr,
                             .max_candidates = 0,
                             .candidates = nullptr,
                             .num_candidates = nullptr,
                             .pages = pages.data(),
                             .num_selected = &num_selected,
                             .threshold = &threshold,
                             .log_norm = log_norm.data(),
                             .num_faults = nullptr,
                             .scratch = reinterpret_cast<void*>(aligned)};
  model.select_pages_per_second = kSamplePages / Seconds([&] { ref::Select(select); });
  return model;
}

ScanEstimate EstimateScan(const ScanModel& model, const WorkerShape& shape, int64_t num_pages,
                          int64_t num_candidates) {
  const double heads = shape.num_heads();
  const double pages = heads * static_cast<double>(num_pages);
  const double candidates = heads * static_cast<double>(std::min(num_candidates, num_pages));
  const double record = shape.summary.record_bytes();
  const double select = pages / model.select_pages_per_second;
  const double full = model.launch_seconds + pages * record / model.full_bytes_per_second + select;
  const double progressive = 3 * model.launch_seconds +
                             pages * shape.summary.coarse_bytes / model.coarse_bytes_per_second +
                             candidates * record / model.full_bytes_per_second + 2 * select;
  return {full, progressive};
}

ScanMode ChooseScan(const ScanModel& model, const WorkerShape& shape, int64_t num_pages,
                    int64_t num_candidates) {
  if (num_candidates >= num_pages) return ScanMode::kFull;
  const ScanEstimate estimate = EstimateScan(model, shape, num_pages, num_candidates);
  return estimate.progressive_seconds * kWinFactor <= estimate.full_seconds ? ScanMode::kProgressive
                                                                            : ScanMode::kFull;
}

}  // namespace kvd
