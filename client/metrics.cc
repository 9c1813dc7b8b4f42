#include "client/metrics.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace kvd {
namespace {

constexpr auto kCounter = MetricType::kCounter;
constexpr auto kGauge = MetricType::kGauge;
constexpr auto kHistogram = MetricType::kHistogram;

// In the order of deploy/docs/metrics.md.
constexpr MetricInfo kTable[] = {
    {"path_info", kGauge, "daemon, path=peer|shared|ucx", "Path to an attached daemon; always 1."},
    {"attach_total", kCounter, "result", "Attempts to attach, by canonical code."},
    {"path_refused_total", kCounter,
     "path=peer|shared|ucx, "
     "reason=host_memory|no_gpu|not_offered|other_host|no_ucx|other_version|by_options|failed",
     "Better paths that an attached session does not use; failed: it should work and does not."},
    {"daemon_incarnation_changes_total", kCounter, "daemon", "Daemons that came back as others."},
    {"considered_pages_total", kCounter, "", "Pages that steps chose from, per layer and KV head."},
    {"selected_pages_total", kCounter, "", "Pages that steps chose, per layer and KV head."},
    {"dense_equivalent_bytes_total", kCounter, "", "Bytes that full attention would have read."},
    {"page_cache_lookups_total", kCounter, "result=hit|miss", "Lookups of chosen pages."},
    {"page_cache_bytes", kGauge, "", "Memory of open sequences' page caches."},
    {"mirror_bytes", kGauge, "", "Memory of open sequences' records."},
    {"fetched_units_total", kCounter, "path=peer|shared|ucx, result=ok|missing|late|failed",
     "Units fetched; missing: the generation changed or the lease is lost."},
    {"fetched_bytes_total", kCounter, "path=peer|shared|ucx", "Bytes that travelled for units."},
    {"fetch_seconds", kHistogram, "path=peer|shared|ucx",
     "Time that a step spent on a list: starting it and waiting for it, not what was hidden."},
    {"fetch_post_seconds", kHistogram, "path=peer|shared|ucx",
     "Of these, starting it; the mapped paths copy then."},
    {"verified_units_total", kCounter, "path=peer|shared|ucx",
     "Units proved and attended: every one that was delivered, less verify failures by checksum."},
    {"verify_failures_total", kCounter,
     "path=peer|shared|ucx, reason=generation|checksum|incarnation",
     "Units that could not be proved and were left out; incarnation: the session was lost."},
    {"step_seconds", kHistogram, "stage=append|score|resolve|fetch|attend|mass, mode=host",
     "Time of a stage in a decode step, over its layers; score: selection too."},
    {"lost_mass_ratio", kHistogram, "policy=recompute|fail|go_on",
     "Estimated attention mass on missing pages, of steps that had any."},
    {"loss_actions_total", kCounter, "policy=recompute|fail|go_on",
     "Steps that had missing pages, by what the sequence does about it."},
    {"unused_hits_total", kCounter, "reason=late", "Resident pages whose records did not come."},
    {"rows_total", kCounter, "kind=sparse|dense",
     "Rows of a batch that were stepped; dense: no page was left out."},
    {"seal_lag_pages", kGauge, "", "Complete pages of open sequences that wait for their seal."},
};

constexpr const char* kLossNames[] = {"recompute", "fail", "go_on"};
constexpr size_t kNumLosses = std::size(kLossNames);

uint64_t Value(const StepCounter& counter) { return static_cast<uint64_t>(counter.value()); }

}  // namespace

std::span<const MetricInfo> ClientMetricTable() { return kTable; }

void ChannelFigures::CountPath(const PathReport& report) {
  for (const auto& [path, reason] : report.refusals)
    refusals_[static_cast<size_t>(path)][static_cast<size_t>(reason)].Add();
}

void ChannelFigures::CountFetch(const FetchList& list, PathKind path) {
  Fetched& f = fetched_[static_cast<size_t>(path)];
  const auto asked = static_cast<uint64_t>(list.entries.size());
  const auto valid =
      static_cast<uint64_t>(std::count(list.valid, list.valid + list.entries.size(), uint8_t{1}));
  f.verified.Add(valid);
  f.bytes.Add(list.path_bytes);
  if (list.code == absl::StatusCode::kOk) {
    f.missing.Add(asked - valid);
  } else if (list.code == absl::StatusCode::kDeadlineExceeded) {
    f.late.Add(asked - valid);
  } else {
    f.failed.Add(asked - valid);
    if (list.code == absl::StatusCode::kAborted) f.aborted.Add(asked - valid);
  }
}

void ChannelFigures::AddUnits(PathKind path, UnitTotals* totals) const {
  const Fetched& f = fetched_[static_cast<size_t>(path)];
  totals->verified += f.verified.value();
  totals->missing += f.missing.value();
  totals->late += f.late.value();
  totals->failed += f.failed.value();
  totals->aborted += f.aborted.value();
  totals->bytes += f.bytes.value();
}

struct ClientMetrics::Sums {
  std::array<StepTotals, kNumLosses> steps;  // by LossPolicy
  FetchTotals fetch;
  uint64_t mirror_bytes = 0;
  uint64_t cache_bytes = 0;
};

ClientMetrics::ClientMetrics() : ended_(std::make_unique<Sums>()) {}
ClientMetrics::~ClientMetrics() = default;

void ClientMetrics::Fold(const SequenceFigures& sequence, Sums* sums) {
  sums->steps[static_cast<size_t>(sequence.loss)].Add(*sequence.step);
  for (size_t p = 0; p < kNumPaths; ++p) sums->fetch[p].Add((*sequence.fetch)[p]);
  sums->mirror_bytes += sequence.mirror_bytes;
  sums->cache_bytes += sequence.cache_bytes;
}

void ClientMetrics::Add(const SequenceFigures& sequence) {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_.push_back(sequence);
}

void ClientMetrics::Remove(const StepTotals* step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = std::find_if(open_.begin(), open_.end(),
                               [step](const SequenceFigures& open) { return open.step == step; });
  if (it == open_.end()) return;
  Fold(*it, ended_.get());
  open_.erase(it);
  // Levels end with their sequence.
  ended_->mirror_bytes = ended_->cache_bytes = 0;
  for (StepTotals& steps : ended_->steps) steps.unsealed_pages.Set(0);
}

namespace {

void AddSteps(const StepTotals& s, MetricsText* out) {
  out->Count("considered_pages_total", {}, Value(s.considered_pages));
  out->Count("selected_pages_total", {}, Value(s.selected_pages));
  out->Count("dense_equivalent_bytes_total", {}, Value(s.dense_equivalent_bytes));
  out->Count("page_cache_lookups_total", {"hit"}, Value(s.hits));
  out->Count("page_cache_lookups_total", {"miss"}, Value(s.misses));
  for (size_t i = 0; i < s.step_seconds.size(); ++i) {
    out->Histogram("step_seconds", {StageName(static_cast<Stage>(i)), "host"}, kLatencyBounds,
                   s.step_seconds[i].counts(), s.step_seconds[i].sum_seconds());
  }
  out->Count("rows_total", {"sparse"}, Value(s.sparse_steps));
  out->Count("rows_total", {"dense"}, Value(s.dense_steps));
  out->Level("seal_lag_pages", {}, static_cast<double>(s.unsealed_pages.value()));
}

void AddLosses(const StepTotals& s, const char* policy, MetricsText* out) {
  std::array<uint64_t, kLostMassBounds.size() + 1> counts;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = Value(s.lost_mass_counts[i]);
  out->Histogram("lost_mass_ratio", {policy}, kLostMassBounds, counts,
                 static_cast<double>(s.lost_mass_ppm.value()) * 1e-6);
  out->Count("loss_actions_total", {policy}, Value(s.lossy_steps));
}

void AddPath(PathKind kind, const PathTotals& step, const UnitTotals& other, MetricsText* out) {
  const absl::string_view path = PathName(kind);
  const uint64_t verified = Value(step.verified) + other.verified;
  const uint64_t corrupt = Value(step.corrupt);
  const uint64_t missing = Value(step.missing) + other.missing;
  out->Count("fetched_units_total", {path, "ok"}, verified + corrupt);
  out->Count("fetched_units_total", {path, "missing"}, missing);
  out->Count("fetched_units_total", {path, "late"}, Value(step.late) + other.late);
  out->Count("fetched_units_total", {path, "failed"}, Value(step.failed) + other.failed);
  out->Count("fetched_bytes_total", {path}, Value(step.bytes) + other.bytes);
  out->Histogram("fetch_seconds", {path}, kLatencyBounds, step.seconds.counts(),
                 step.seconds.sum_seconds());
  out->Histogram("fetch_post_seconds", {path}, kLatencyBounds, step.post_seconds.counts(),
                 step.post_seconds.sum_seconds());
  out->Count("verified_units_total", {path}, verified);
  out->Count("verify_failures_total", {path, "generation"}, missing);
  out->Count("verify_failures_total", {path, "checksum"}, corrupt);
  out->Count("verify_failures_total", {path, "incarnation"}, Value(step.aborted) + other.aborted);
}

// A daemon that left the pool and came back has several channels under one address.
void AddDaemons(std::span<const ChannelView> daemons, MetricsText* out) {
  std::set<std::pair<std::string, PathKind>> paths;
  std::map<std::string, uint64_t> changes;
  for (const ChannelView& view : daemons) {
    if (view.path.has_value()) paths.emplace(view.daemon, *view.path);
    changes[view.daemon] += view.figures->incarnation_changes();
  }
  for (const auto& [daemon, path] : paths) out->Level("path_info", {daemon, PathName(path)}, 1);
  for (const auto& [daemon, count] : changes)
    out->Count("daemon_incarnation_changes_total", {daemon}, count);
}

// One series that is always there, and those of other codes once they are met.
void AddAttaches(std::span<const ChannelView> daemons, MetricsText* out) {
  for (size_t i = 0; i < ChannelFigures::kNumCodes; ++i) {
    const auto code = static_cast<absl::StatusCode>(i);
    uint64_t attaches = 0;
    for (const ChannelView& view : daemons) attaches += view.figures->attaches(code);
    if (attaches > 0 || i == 0)
      out->Count("attach_total", {absl::StatusCodeToString(code)}, attaches);
  }
}

}  // namespace

std::string ClientMetrics::Text(std::span<const ChannelView> daemons) const {
  Sums sums;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < kNumLosses; ++i) sums.steps[i].Add(ended_->steps[i]);
    for (size_t p = 0; p < kNumPaths; ++p) sums.fetch[p].Add(ended_->fetch[p]);
    for (const SequenceFigures& sequence : open_) Fold(sequence, &sums);
  }
  MetricsText out(kClientPrefix, kTable);
  AddDaemons(daemons, &out);
  AddAttaches(daemons, &out);
  StepTotals all;
  for (size_t i = 0; i < kNumLosses; ++i) {
    AddLosses(sums.steps[i], kLossNames[i], &out);
    all.Add(sums.steps[i]);
  }
  AddSteps(all, &out);
  out.Level("page_cache_bytes", {}, static_cast<double>(sums.cache_bytes));
  out.Level("mirror_bytes", {}, static_cast<double>(sums.mirror_bytes));
  out.Count("unused_hits_total", {"late"}, unused_hits_.value());
  for (const PathKind path : {PathKind::kPeer, PathKind::kShared, PathKind::kUcx}) {
    UnitTotals other;
    for (const ChannelView& view : daemons) view.figures->AddUnits(path, &other);
    AddPath(path, sums.fetch[static_cast<size_t>(path)], other, &out);
  }
  for (const PathKind path : {PathKind::kPeer, PathKind::kShared, PathKind::kUcx}) {
    for (size_t r = 0; r < kNumPathRefusals; ++r) {
      const auto reason = static_cast<PathRefusal>(r);
      uint64_t refused = 0;
      for (const ChannelView& view : daemons) refused += view.figures->refusals(path, reason);
      out.Count("path_refused_total", {PathName(path), PathRefusalName(reason)}, refused);
    }
  }
  return out.Text();
}

}  // namespace kvd
