#include "bench/local_step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "bench/decode_kernels.h"
#include "bench/synthetic_pages.h"
#include "client/batch_scan.h"
#include "client/step_args.h"
#include "kernels/attend_pages.h"
#include "kernels/summarize.h"
#include "tests/support/oracle.h"

namespace kvd::bench {
namespace {

using testing::DeviceArray;

size_t Rows(const BatchOptions& options) { return static_cast<size_t>(options.max_sequences); }

}  // namespace

// Device memory. [N] stands for rows, P_cap for page_capacity_.
struct LocalStep::Memory {
  Memory(const WorkerShape& shape, const BatchOptions& options, int page_capacity)
      : row_bytes(static_cast<size_t>(page_capacity) * shape.slot.slot_bytes()),
        coarse_bytes(shape.units_per_page() * static_cast<size_t>(page_capacity) *
                     shape.summary.coarse_bytes),
        fine_bytes(shape.units_per_page() * static_cast<size_t>(page_capacity) *
                   shape.summary.fine_bytes),
        lse_stride((page_capacity + 3) / 4 * 4),
        chosen_per_row(options.step.candidates()),
        candidates_per_row(chosen_per_row + options.step.n_sink + options.step.n_win),
        pages(Rows(options) * row_bytes),
        coarse(Rows(options) * coarse_bytes),
        fine(Rows(options) * fine_bytes),
        coarse_at(Rows(options) * static_cast<size_t>(shape.num_layers())),
        fine_at(coarse_at.size()),
        capacities(std::vector<int64_t>(Rows(options), page_capacity)),
        num_pages(Rows(options)),
        rows(Rows(options)),
        lse(q_rows(shape, options) * static_cast<size_t>(lse_stride)),
        select_scratch(SelectGpuScratchBytes(static_cast<int64_t>(kv_rows(shape, options)),
                                             shape.geometry.group(), lse_stride)),
        selected(kv_rows(shape, options) * static_cast<size_t>(options.step.budget) *
                 static_cast<size_t>(shape.num_layers())),
        num_selected(kv_rows(shape, options) * static_cast<size_t>(shape.num_layers())),
        threshold(kv_rows(shape, options)),
        log_norm(q_rows(shape, options)),
        candidates(kv_rows(shape, options) * static_cast<size_t>(candidates_per_row)),
        num_candidates(kv_rows(shape, options)) {
    select_scratch.Poison(0);  // as select.h asks
  }
  static size_t q_rows(const WorkerShape& shape, const BatchOptions& options) {
    return Rows(options) * static_cast<size_t>(shape.num_q_heads());
  }
  static size_t kv_rows(const WorkerShape& shape, const BatchOptions& options) {
    return Rows(options) * static_cast<size_t>(shape.num_heads());
  }

  const size_t row_bytes;
  const size_t coarse_bytes;
  const size_t fine_bytes;
  const int64_t lse_stride;
  const int chosen_per_row;
  const int candidates_per_row;
  DeviceArray<uint8_t> pages;   // [N][P_cap][L][heads] units
  DeviceArray<uint8_t> coarse;  // [N][L][heads][P_cap] records
  DeviceArray<uint8_t> fine;
  DeviceArray<const uint8_t*> coarse_at;  // [L, N]
  DeviceArray<const uint8_t*> fine_at;
  DeviceArray<int64_t> capacities;
  DeviceArray<int32_t> num_pages;
  DeviceArray<StepRow> rows;
  DeviceArray<float> lse;
  DeviceArray<uint8_t> select_scratch;
  DeviceArray<int32_t> selected;  // [L][N, heads, budget]: all layers' are kept, to be checked
  DeviceArray<int32_t> num_selected;
  DeviceArray<float> threshold;
  DeviceArray<float> log_norm;
  DeviceArray<int32_t> candidates;
  DeviceArray<int32_t> num_candidates;
};

LocalStep::LocalStep(const WorkerShape& shape, const BatchOptions& options, int num_pages)
    : shape_(shape),
      options_(options),
      num_pages_(num_pages),
      page_capacity_(static_cast<int>((options.max_tokens + shape.geometry.page_tokens - 1) /
                                      shape.geometry.page_tokens) +
                     1),
      step_shape_{.num_rows = options.max_sequences,
                  .num_layers = shape.num_layers(),
                  .num_kv_heads = shape.num_heads(),
                  .shard_heads = shape.geometry.shard_heads(),
                  .group = shape.geometry.group(),
                  .head_dim = shape.geometry.head_dim,
                  .page_tokens = shape.geometry.page_tokens,
                  .cache_slots = 1,
                  .num_arenas = 0},
      rows_(Rows(options)) {}

LocalStep::~LocalStep() = default;

absl::StatusOr<std::unique_ptr<LocalStep>> LocalStep::Make(const WorkerShape& shape,
                                                           const BatchOptions& options,
                                                           int num_pages) {
  if (options.step.scan == ScanMode::kAuto)
    return absl::InvalidArgumentError("scan: expected full or progressive");
  auto step = std::unique_ptr<LocalStep>(new LocalStep(shape, options, num_pages));
  size_t free = 0, total = 0;
  KVD_CUDA_OK(cudaMemGetInfo(&free, &total));
  const size_t needed = Rows(options) * static_cast<size_t>(step->page_capacity_) *
                        (shape.slot.slot_bytes() + shape.slot.summary_bytes());
  if (needed + (size_t{2} << 30) > free) {
    return absl::ResourceExhaustedError(absl::StrCat("all KV in the worker needs ", needed >> 20,
                                                     " MiB of GPU memory, ", free >> 20,
                                                     " MiB are free"));
  }
  step->memory_ = std::make_unique<Memory>(shape, options, step->page_capacity_);
  step->Fill();
  return step;
}

void LocalStep::Fill() {
  Memory& m = *memory_;
  const testing::Stream stream;
  constexpr int kBatch = 1024;
  const size_t batch_units = kBatch * shape_.units_per_page();
  DeviceArray<const uint8_t*> units(batch_units);
  DeviceArray<uint8_t*> coarse_at(batch_units), fine_at(batch_units);
  DeviceArray<int32_t> non_finite(batch_units);
  std::vector<const uint8_t*> coarse_of(m.coarse_at.size()), fine_of(m.coarse_at.size());
  const size_t layer_coarse =
      static_cast<size_t>(shape_.num_heads() * page_capacity_) * shape_.summary.coarse_bytes;
  const size_t layer_fine =
      static_cast<size_t>(shape_.num_heads() * page_capacity_) * shape_.summary.fine_bytes;
  for (size_t n = 0; n < Rows(options_); ++n) {
    uint8_t* const pages = m.pages.data() + n * m.row_bytes;
    uint8_t* const coarse = m.coarse.data() + n * m.coarse_bytes;
    uint8_t* const fine = m.fine.data() + n * m.fine_bytes;
    for (int first = 0; first < num_pages_; first += kBatch) {
      const int count = std::min(kBatch, num_pages_ - first);
      KVD_CUDA_OK(LaunchSyntheticPages(
          step_shape_, static_cast<int>(n) * num_pages_ + first, count,
          pages + static_cast<size_t>(first) * shape_.slot.slot_bytes(), stream.get()));
      KVD_CUDA_OK(LaunchUnitTables({step_shape_, first, count, page_capacity_, pages, coarse, fine,
                                    shape_.summary.coarse_bytes, shape_.summary.fine_bytes,
                                    units.data(), coarse_at.data(), fine_at.data()},
                                   stream.get()));
      KVD_CUDA_OK(
          LaunchSummarize({.head_dim = shape_.geometry.head_dim,
                           .page_tokens = shape_.geometry.page_tokens,
                           .rank = shape_.geometry.rank,
                           .dtype = shape_.geometry.dtype,
                           .rotated = shape_.geometry.rotated,
                           .encoder = Encoder::kE1,
                           .num_units = count * static_cast<int64_t>(shape_.units_per_page()),
                           .units = units.data(),
                           .metrics = nullptr,
                           .coarse = coarse_at.data(),
                           .fine = fine_at.data(),
                           .non_finite = non_finite.data()},
                          stream.get()));
    }
    for (size_t l = 0; l < static_cast<size_t>(shape_.num_layers()); ++l) {
      coarse_of[l * Rows(options_) + n] = coarse + l * layer_coarse;
      fine_of[l * Rows(options_) + n] = fine + l * layer_fine;
    }
    const int first_ring = std::max(options_.step.n_sink, num_pages_ - options_.step.n_win);
    rows_[n] = {.num_tokens = int64_t{num_pages_} * shape_.geometry.page_tokens,
                .num_pages = num_pages_,
                .num_sinks = options_.step.n_sink,
                .first_ring_page = first_ring,
                .ring_pages = page_capacity_,
                .ring = pages,
                .sinks = pages,
                .places = nullptr,
                .selectable = nullptr,
                .cache = nullptr};
  }
  stream.Wait();
  m.coarse_at.Upload(coarse_of);
  m.fine_at.Upload(fine_of);
  m.num_pages.Upload(std::vector<int32_t>(Rows(options_), num_pages_));
}

absl::Status LocalStep::BeginStep(cudaStream_t stream) {
  // Pageable memory: the runtime has taken it when this returns.
  KVD_CUDA_OK(cudaMemcpyAsync(memory_->rows.data(), rows_.data(), rows_.size() * sizeof(StepRow),
                              cudaMemcpyHostToDevice, stream));
  last_rows_ = rows_;
  return absl::OkStatus();
}

void LocalStep::Select(int layer, const uint16_t* query, cudaStream_t stream) {
  Memory& m = *memory_;
  const KvGeometry& g = shape_.geometry;
  const size_t at = static_cast<size_t>(layer) * Rows(options_);
  ScoreArgs score = ScoreArgsOf(shape_, options_.max_sequences, query);
  score.coarse = m.coarse_at.data() + at;
  score.fine = m.fine_at.data() + at;
  score.page_capacity = m.capacities.data();
  score.num_pages = m.num_pages.data();
  score.lse_stride = m.lse_stride;
  score.lse = m.lse.data();
  const SelectArgs select = {.num_sequences = options_.max_sequences,
                             .num_kv_heads = shape_.num_heads(),
                             .group = g.group(),
                             .rule = options_.step.rule,
                             .n_sink = options_.step.n_sink,
                             .n_win = options_.step.n_win,
                             .num_select = options_.step.budget,
                             .lse = m.lse.data(),
                             .lse_stride = m.lse_stride,
                             .num_pages = m.num_pages.data(),
                             .selectable = nullptr,
                             .max_candidates = 0,
                             .candidates = nullptr,
                             .num_candidates = nullptr,
                             .pages = m.selected.data() + FirstList(layer) * Budget(),
                             .num_selected = m.num_selected.data() + FirstList(layer),
                             .threshold = m.threshold.data(),
                             .log_norm = m.log_norm.data(),
                             .num_faults = nullptr,
                             .scratch = m.select_scratch.data()};
  const CandidateLists lists = {.max_chosen = m.chosen_per_row,
                                .out = {.max_candidates = m.candidates_per_row,
                                        .candidates = m.candidates.data(),
                                        .num_candidates = m.num_candidates.data()}};
  KVD_CUDA_OK(LaunchPageSelection(options_.step.scan, score, select, lists, stream));
}

absl::Status LocalStep::Run(int layer, const BatchInput& input, const BatchOutput& output,
                            cudaStream_t stream) {
  const Memory& m = *memory_;
  last_layer_ = layer;
  Select(layer, input.q, stream);
  AttendArgs attend = AttendArgsOf(shape_, options_.max_sequences, input.q);
  attend.o = output.o;
  attend.lse = output.lse;
  KVD_CUDA_OK(LaunchAttendPages({.attend = attend,
                                 .layer = layer,
                                 .num_layers = shape_.num_layers(),
                                 .rows = m.rows.data(),
                                 .k = input.k,
                                 .v = input.v,
                                 .max_selected = options_.step.budget,
                                 .selected = m.selected.data() + FirstList(layer) * Budget(),
                                 .num_selected = m.num_selected.data() + FirstList(layer)},
                                stream));
  return absl::OkStatus();
}

absl::Status LocalStep::EndStep(cudaStream_t) {
  for (StepRow& row : rows_) ++row.num_tokens;
  return absl::OkStatus();
}

std::vector<int32_t> LocalStep::Selected(int row, int layer, int head) const {
  const Memory& m = *memory_;
  const size_t list = FirstList(layer) + static_cast<size_t>(row * shape_.num_heads() + head);
  int32_t count = 0;
  KVD_CUDA_OK(
      cudaMemcpy(&count, m.num_selected.data() + list, sizeof(count), cudaMemcpyDeviceToHost));
  std::vector<int32_t> pages(static_cast<size_t>(count));
  KVD_CUDA_OK(cudaMemcpy(pages.data(), m.selected.data() + list * Budget(),
                         pages.size() * sizeof(int32_t), cudaMemcpyDeviceToHost));
  return pages;
}

std::string LocalStep::CheckSelection(int row, int head) const {
  const Memory& m = *memory_;
  const int group = shape_.geometry.group(), first = options_.step.n_sink,
            end = num_pages_ - options_.step.n_win;
  const auto stride = static_cast<size_t>(m.lse_stride), pages = static_cast<size_t>(num_pages_);
  std::vector<double> share(pages);  // sum over the query heads of a page's part of their mass
  std::vector<float> lse(pages);
  for (int h = head * group; h < (head + 1) * group; ++h) {
    const auto at = static_cast<size_t>(row * shape_.num_q_heads() + h) * stride;
    KVD_CUDA_OK(
        cudaMemcpy(lse.data(), m.lse.data() + at, pages * sizeof(float), cudaMemcpyDeviceToHost));
    const double max = *std::max_element(lse.begin(), lse.end());
    double sum = 0;
    for (const float x : lse) sum += std::exp(x - max);
    for (size_t p = 0; p < pages; ++p) share[p] += std::exp(lse[p] - max) / sum;
  }
  const std::vector<int32_t> selected = Selected(row, last_layer_, head);
  const auto wanted = static_cast<size_t>(std::clamp(end - first, 0, options_.step.budget));
  std::vector<bool> is_selected(pages);
  double weakest = std::numeric_limits<double>::infinity(), best_left = 0;
  for (const int32_t page : selected) {
    if (page < first || page >= end || is_selected[static_cast<size_t>(page)])
      return absl::StrCat("head ", head, ": page ", page, " was selected twice, or may not be");
    is_selected[static_cast<size_t>(page)] = true;
    weakest = std::min(weakest, share[static_cast<size_t>(page)]);
  }
  for (int p = first; p < end; ++p)
    if (!is_selected[static_cast<size_t>(p)])
      best_left = std::max(best_left, share[static_cast<size_t>(p)]);
  if (selected.size() == wanted && weakest >= best_left * (1 - 1e-4)) return "";
  return absl::StrCat("head ", head, ": ", selected.size(), " pages of ", wanted,
                      " selected, the weakest of ", weakest, " while one of ", best_left,
                      " was left");
}

std::vector<int32_t> LocalStep::PagesRead(int row, int layer, int head) const {
  const StepRow& sequence = last_rows_[static_cast<size_t>(row)];
  std::vector<int32_t> pages(static_cast<size_t>(sequence.num_sinks));
  std::iota(pages.begin(), pages.end(), 0);
  const std::vector<int32_t> selected = Selected(row, layer, head);
  pages.insert(pages.end(), selected.begin(), selected.end());
  for (int p = sequence.first_ring_page; p <= sequence.num_tokens / shape_.geometry.page_tokens;
       ++p)
    pages.push_back(p);
  return pages;
}

std::string LocalStep::Check(int row, int layer, int head, const std::vector<uint16_t>& q,
                             const std::vector<float>& o, const std::vector<float>& lse) const {
  const KvGeometry& g = shape_.geometry;
  const StepRow& sequence = last_rows_[static_cast<size_t>(row)];
  const auto dim = static_cast<size_t>(g.head_dim), tokens = static_cast<size_t>(g.page_tokens);
  std::vector<uint16_t> keys, values, unit(shape_.unit_bytes() / 2), expected(unit.size());
  for (const int32_t page : PagesRead(row, layer, head)) {
    const size_t at = shape_.unit_idx(layer, head) * shape_.unit_bytes();
    KVD_CUDA_OK(cudaMemcpy(
        unit.data(), sequence.ring + static_cast<size_t>(page) * shape_.slot.slot_bytes() + at,
        shape_.unit_bytes(), cudaMemcpyDeviceToHost));
    FillSyntheticUnit(SyntheticUnit(static_cast<uint32_t>(row * num_pages_ + page),
                                    static_cast<uint32_t>(layer), static_cast<uint32_t>(head)),
                      static_cast<uint32_t>(dim), static_cast<uint32_t>(tokens), expected.data());
    if (page < num_pages_ && unit != expected)
      return absl::StrCat("page ", page, ", layer ", layer, ", head ", head,
                          ": other bytes than the host makes");
    const int64_t num_tokens =
        std::min<int64_t>(g.page_tokens, sequence.num_tokens + 1 - int64_t{page} * g.page_tokens);
    const auto n = static_cast<std::ptrdiff_t>(static_cast<size_t>(num_tokens) * dim);
    const auto v = static_cast<std::ptrdiff_t>(tokens * dim);
    keys.insert(keys.end(), unit.begin(), unit.begin() + n);
    values.insert(values.end(), unit.begin() + v, unit.begin() + v + n);
  }
  for (int h = head * g.group(); h < (head + 1) * g.group(); ++h) {
    const auto at = static_cast<size_t>(row * shape_.num_q_heads() + h);
    const auto truth = testing::OracleAttend(q.data() + at * dim, keys.data(), values.data(),
                                             static_cast<int64_t>(keys.size() / dim), g.head_dim,
                                             g.dtype, g.softmax_scale, g.logit_softcap);
    double largest = 0, worst = 0;
    for (size_t i = 0; i < dim; ++i) {
      largest = std::max(largest, std::abs(truth.o[i]));
      const double gap = std::abs(truth.o[i] - o[at * dim + i]);
      worst = gap <= worst ? worst : gap;  // a NaN is the worst
    }
    if (!(worst <= 1e-4 * largest) || !(std::abs(truth.lse - lse[at]) <= 1e-4)) {
      return absl::StrCat("row ", row, ", layer ", layer, ", query head ", h, ": o differs by ",
                          worst, " of ", largest, ", lse ", lse[at], " from ", truth.lse);
    }
  }
  return "";
}

}  // namespace kvd::bench
