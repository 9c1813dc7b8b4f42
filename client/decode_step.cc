#include "client/decode_step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/step_args.h"
#include "kernels/append.h"
#include "kernels/check.h"
#include "kernels/mass.h"
#include "proto/clock.h"
#include "proto/status.h"

namespace kvd {

// Adds the time since the last mark to a stage.
class DecodeStep::StageTimer {
 public:
  explicit StageTimer(LayerResult* result) : result_(result) {}
  void Mark(Stage stage) {
    const auto now = std::chrono::steady_clock::now();
    result_->seconds_of(stage) += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  LayerResult* result_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

DecodeStep::DecodeStep(SequencePages* pages, const StepOptions& options)
    : pages_(*pages), shape_(pages->shape()), options_(options) {}

absl::StatusOr<std::unique_ptr<DecodeStep>> DecodeStep::Plan(SequencePages* pages,
                                                             const StepOptions& options,
                                                             const ScanModel* model) {
  KVD_RETURN_IF_ERROR(Validate(options, pages->shape().num_layers()));
  if (options.n_sink != pages->n_sink() || options.n_win != pages->n_win()) {
    return absl::InvalidArgumentError(
        absl::StrCat("n_sink and n_win must be the sequence's own (", pages->n_sink(), ", ",
                     pages->n_win(), "), got (", options.n_sink, ", ", options.n_win, ")"));
  }
  auto step = std::unique_ptr<DecodeStep>(new DecodeStep(pages, options));
  KVD_RETURN_IF_ERROR(step->Allocate(model));
  return step;
}

absl::Status DecodeStep::Allocate(const ScanModel* model) {
  const int capacity = pages_.page_capacity();
  KVD_ASSIGN_OR_RETURN(selector_, Selector::Make(shape_, capacity, options_, model));
  std::vector<int> slots_per_layer;
  for (int layer = 0; layer < shape_.num_layers(); ++layer) {
    const double wanted = std::ceil(options_.cache_ratio * selector_->budget(layer));
    slots_per_layer.push_back(static_cast<int>(std::clamp<double>(wanted, 1, capacity)));
  }
  KVD_ASSIGN_OR_RETURN(cache_, PageCache::Make(shape_, capacity, slots_per_layer));
  const auto heads = static_cast<size_t>(shape_.num_heads());
  const auto q_heads = static_cast<size_t>(shape_.num_q_heads());
  const size_t values = q_heads * static_cast<size_t>(shape_.geometry.head_dim);
  const auto budget = static_cast<size_t>(selector_->max_budget());
  const auto words = static_cast<size_t>(capacity + 63) / 64;
  KVD_ASSIGN_OR_RETURN(fetch_,
                       MissFetch::Make(shape_, heads * budget, pages_.max_daemons(), options_));
  max_units_ =
      budget + static_cast<size_t>(options_.n_sink + options_.n_win + TailRing::kSlackPages);
  constexpr char kWhat[] = "decode step";
  KVD_ASSIGN_OR_RETURN(tails_, Buffer<uint8_t*>::Make(heads, kWhat));
  KVD_ASSIGN_OR_RETURN(slots_, Buffer<int32_t>::Make(heads * budget, kWhat));
  KVD_ASSIGN_OR_RETURN(miss_idx_, Buffer<int32_t>::Make(budget, kWhat));
  KVD_ASSIGN_OR_RETURN(is_miss_, Buffer<uint8_t>::Make(heads * budget, kWhat));
  KVD_ASSIGN_OR_RETURN(units_, Buffer<UnitRef>::Make(heads * max_units_, kWhat));
  KVD_ASSIGN_OR_RETURN(num_units_, Buffer<int32_t>::Make(heads, kWhat));
  KVD_ASSIGN_OR_RETURN(present_o_, Buffer<float>::Make(values, kWhat));
  KVD_ASSIGN_OR_RETURN(present_lse_, Buffer<float>::Make(q_heads, kWhat));
  KVD_ASSIGN_OR_RETURN(fetched_o_, Buffer<float>::Make(values, kWhat));
  KVD_ASSIGN_OR_RETURN(fetched_lse_, Buffer<float>::Make(q_heads, kWhat));
  KVD_ASSIGN_OR_RETURN(attended_, Buffer<uint64_t>::Make(words, kWhat));
  KVD_ASSIGN_OR_RETURN(unselectable_, Buffer<uint64_t>::Make(words, kWhat));
  KVD_ASSIGN_OR_RETURN(unread_mass_, Buffer<float>::Make(q_heads, kWhat));
  KVD_ASSIGN_OR_RETURN(lost_mass_, Buffer<float>::Make(q_heads, kWhat));
  return absl::OkStatus();
}

absl::Status DecodeStep::Run(int layer, const StepInput& input, const StepOutput& output) {
  if (layer != next_layer_) [[unlikely]] {
    return absl::InvalidArgumentError(
        absl::StrCat("layers run in order: expected ", next_layer_, ", got ", layer));
  }
  if (layer == 0) {
    KVD_RETURN_IF_ERROR(pages_.BeginStep(SteadyClock().Now()));
    figures_ = {};
  }
  result_ = LayerResult{};
  StageTimer timer(&result_);
  AppendToken(layer, input);
  timer.Mark(Stage::kAppend);
  result_.selection = selector_->Run(layer, pages_, input.q);
  timer.Mark(Stage::kScore);
  ResolveLayer(layer);
  timer.Mark(Stage::kResolve);
  fetch_->Start(pages_, layer);
  timer.Mark(Stage::kFetch);
  AttendPresent(layer, input);
  timer.Mark(Stage::kAttend);
  result_.bytes_fetched = fetch_->Finish(pages_, layer, result_.units);
  DropFailedUnits(layer);
  timer.Mark(Stage::kFetch);
  AttendFetched(input, output);
  timer.Mark(Stage::kAttend);
  result_.num_missing_pages = pages_.num_missing();
  if (options_.mass == MassReport::kAlways || result_.num_missing_pages > 0) {
    EstimateMassFigures(output);
    timer.Mark(Stage::kMass);
  }
  result_.bytes_scanned = result_.selection.bytes_scanned;
  result_.bytes_attended = AttendedBytes();
  totals_.Add(result_);
  const int64_t token_bytes = int64_t{shape_.num_heads()} * shape_.geometry.head_dim * 4;
  totals_.dense_equivalent_bytes.Add((pages_.num_tokens() + 1) * token_bytes);
  CountLayer();
  next_layer_ = layer + 1;
  if (next_layer_ == shape_.num_layers()) EndStep();
  if (result_.num_missing_pages > 0) [[unlikely]]
    return Outcome(layer);
  return absl::OkStatus();
}

void DecodeStep::AppendToken(int layer, const StepInput& input) {
  const KvGeometry& g = shape_.geometry;
  for (int h = 0; h < shape_.num_heads(); ++h) {
    tails_[static_cast<size_t>(h)] = pages_.ring_unit(pages_.tail_page(), layer, h);
  }
  const int32_t row = pages_.tail_row();
  ref::Append({.num_sequences = 1,
               .num_kv_heads = shape_.num_heads(),
               .head_dim = g.head_dim,
               .page_tokens = g.page_tokens,
               .k = input.k,
               .v = input.v,
               .tails = tails_.data(),
               .token = &row});
}

void DecodeStep::ResolveLayer(int layer) {
  const auto budget = static_cast<size_t>(selector_->max_budget());
  fetch_->Clear();
  for (int h = 0; h < shape_.num_heads(); ++h) {
    const std::span<const int32_t> selected = result_.selection.pages_of(h);
    int32_t* slots = slots_.data() + static_cast<size_t>(h) * budget;
    uint8_t* is_miss = is_miss_.data() + static_cast<size_t>(h) * budget;
    const int num_misses =
        cache_->Resolve(layer, h, step_, selected, pages_.versions(), slots, miss_idx_.data());
    if (!selected.empty()) std::memset(is_miss, 0, selected.size());
    for (int m = 0; m < num_misses; ++m) {
      const auto i = static_cast<size_t>(miss_idx_[static_cast<size_t>(m)]);
      is_miss[i] = 1;
      fetch_->Add(selected[i], h, slots[i], cache_->unit(layer, h, slots[i]));
    }
    result_.units.misses += num_misses;
    result_.units.hits += static_cast<int64_t>(selected.size()) - num_misses;
  }
}

void DecodeStep::AttendPresent(int layer, const StepInput& input) {
  const auto budget = static_cast<size_t>(selector_->max_budget());
  const int page_tokens = shape_.geometry.page_tokens;
  for (int h = 0; h < shape_.num_heads(); ++h) {
    UnitRef* units = units_.data() + static_cast<size_t>(h) * max_units_;
    int32_t n = 0;
    for (int p = 0; p < pages_.num_sinks(); ++p) {
      units[n++] = {pages_.sink_unit(p, layer, h), page_tokens};
    }
    const std::span<const int32_t> selected = result_.selection.pages_of(h);
    const size_t row = static_cast<size_t>(h) * budget;
    for (size_t i = 0; i < selected.size(); ++i) {
      if (is_miss_[row + i] != 0) continue;
      units[n++] = {cache_->unit(layer, h, slots_[row + i]), page_tokens};
    }
    for (int p = pages_.first_ring_page(); p < pages_.tail_page(); ++p) {
      units[n++] = {pages_.ring_unit(p, layer, h), page_tokens};
    }
    units[n++] = {pages_.ring_unit(pages_.tail_page(), layer, h), pages_.tail_row() + 1};
    KVD_CHECK(static_cast<size_t>(n) <= max_units_);
    num_units_[static_cast<size_t>(h)] = n;
  }
  Attend(input, present_o_.data(), present_lse_.data());
}

void DecodeStep::DropFailedUnits(int layer) {
  for (const Miss& miss : fetch_->misses()) {
    if (miss.outcome == Miss::Outcome::kVerified) continue;
    cache_->Evict(layer, miss.head, miss.cache_slot);
  }
}

void DecodeStep::AttendFetched(const StepInput& input, const StepOutput& output) {
  const int64_t q_heads = shape_.num_q_heads();
  const auto values = static_cast<size_t>(q_heads * shape_.geometry.head_dim);
  if (fetch_->misses().empty()) {
    std::memcpy(output.o, present_o_.data(), values * sizeof(float));
    std::memcpy(output.lse, present_lse_.data(), static_cast<size_t>(q_heads) * sizeof(float));
    return;
  }
  for (int h = 0; h < shape_.num_heads(); ++h) num_units_[static_cast<size_t>(h)] = 0;
  for (const Miss& miss : fetch_->misses()) {
    if (miss.outcome != Miss::Outcome::kVerified) continue;
    const auto head = static_cast<size_t>(miss.head);
    units_[head * max_units_ + static_cast<size_t>(num_units_[head]++)] = {
        miss.destination, shape_.geometry.page_tokens};
  }
  Attend(input, fetched_o_.data(), fetched_lse_.data());
  ref::MergeAttention({.num_rows = q_heads,
                       .head_dim = shape_.geometry.head_dim,
                       .o1 = present_o_.data(),
                       .lse1 = present_lse_.data(),
                       .o2 = fetched_o_.data(),
                       .lse2 = fetched_lse_.data(),
                       .o = output.o,
                       .lse = output.lse});
}

void DecodeStep::Attend(const StepInput& input, float* o, float* lse) {
  AttendArgs args = AttendArgsOf(shape_, 1, input.q);
  args.max_units = static_cast<int>(max_units_);
  args.units = units_.data();
  args.num_units = num_units_.data();
  args.o = o;
  args.lse = lse;
  ref::Attend(args);
}

void DecodeStep::MarkAttended(int head) {
  const auto set = [this](int page) {
    attended_[static_cast<size_t>(page) / 64] |= uint64_t{1} << (page % 64);
  };
  const auto words = static_cast<size_t>(pages_.num_pages() + 63) / 64;
  std::fill(attended_.begin(), attended_.begin() + words, uint64_t{0});
  for (int p = 0; p < pages_.num_sinks(); ++p) set(p);
  for (int p = pages_.first_ring_page(); p < pages_.num_pages(); ++p) set(p);
  for (const int32_t page : result_.selection.pages_of(head)) set(page);
  for (const Miss& miss : fetch_->misses()) {
    if (miss.head != head || miss.outcome == Miss::Outcome::kVerified) continue;
    attended_[static_cast<size_t>(miss.page) / 64] &= ~(uint64_t{1} << (miss.page % 64));
  }
}

void DecodeStep::EstimateMassFigures(const StepOutput& output) {
  const int num_pages = pages_.num_pages();
  const auto words = static_cast<size_t>(num_pages + 63) / 64;
  for (size_t w = 0; w < words; ++w) unselectable_[w] = ~pages_.selectable()[w];
  const int group = shape_.geometry.group();
  for (int h = 0; h < shape_.num_heads(); ++h) {
    MarkAttended(h);
    for (int q = h * group; q < (h + 1) * group; ++q) {
      const auto row = static_cast<size_t>(q);
      const MassFigures figures =
          ref::EstimateMass({.num_pages = num_pages,
                             .lse = result_.selection.lse + q * result_.selection.lse_stride,
                             .lse_attended = output.lse[q],
                             .attended = attended_.data(),
                             .missing = unselectable_.data()});
      unread_mass_[row] = figures.unread;
      lost_mass_[row] = figures.lost;
    }
  }
  result_.unread_mass = {unread_mass_.data(), unread_mass_.size()};
  result_.lost_mass = {lost_mass_.data(), lost_mass_.size()};
}

int64_t DecodeStep::AttendedBytes() const {
  const int64_t local_pages = pages_.num_sinks() + pages_.tail_page() - pages_.first_ring_page();
  const int64_t tail_bytes = int64_t{pages_.tail_row() + 1} * shape_.geometry.head_dim * 4;
  const auto unit_bytes = static_cast<int64_t>(shape_.unit_bytes());
  return shape_.num_heads() * (local_pages * unit_bytes + tail_bytes) +
         (result_.units.hits + result_.units.verified) * unit_bytes;
}

void DecodeStep::CountLayer() {
  totals_.considered_pages.Add(int64_t{result_.selection.num_pages} * shape_.num_heads());
  for (size_t i = 0; i < figures_.ns.size(); ++i)
    figures_.ns[i] += static_cast<int64_t>(result_.seconds[i] * 1e9);
  const auto selected = static_cast<int>(result_.selection.pages_of(0).size());
  const int local = pages_.num_sinks() + pages_.num_pages() - pages_.first_ring_page();
  figures_.sparse = figures_.sparse || selected + local < pages_.num_pages();
  if (result_.num_missing_pages == 0) return;
  if (figures_.lossy_layers++ == 0) totals_.lossy_steps.Add(1);
  double lost = 0;
  for (const float mass : result_.lost_mass) lost += mass;
  figures_.lost_mass += lost / shape_.num_q_heads();
}

void DecodeStep::EndStep() {
  pages_.AdvanceTail();
  next_layer_ = 0;
  ++step_;
  const int lossy = figures_.lossy_layers;
  totals_.AddStep(figures_.ns, figures_.sparse, lossy == 0 ? -1 : figures_.lost_mass / lossy);
  totals_.unsealed_pages.Set(pages_.complete_pages() - pages_.num_pages());
}

absl::Status DecodeStep::Outcome(int layer) const {
  const int missing = result_.num_missing_pages;
  switch (options_.loss) {
    case LossPolicy::kGoOn:
      return absl::OkStatus();
    case LossPolicy::kFail:
      return absl::AbortedError(
          absl::StrCat("layer ", layer, ": ", missing, " pages are missing; close the sequence"));
    case LossPolicy::kRecompute:
      break;
  }
  return absl::UnavailableError(absl::StrCat(
      "layer ", layer, ": ", missing,
      " pages are missing, the output covers the others; put them again and repair the sequence"));
}

}  // namespace kvd
