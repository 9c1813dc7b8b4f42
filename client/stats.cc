#include "client/stats.h"

namespace kvd {

absl::string_view StageName(Stage stage) {
  switch (stage) {
    case Stage::kAppend:
      return "append";
    case Stage::kScore:
      return "score";
    case Stage::kResolve:
      return "resolve";
    case Stage::kFetch:
      return "fetch";
    case Stage::kAttend:
      return "attend";
    case Stage::kMass:
      return "mass";
  }
  return "unknown";
}

void StepHistogram::Add(const StepHistogram& other) {
  for (size_t i = 0; i < counts_.size(); ++i) counts_[i].Add(other.counts_[i].value());
  sum_ns_.Add(other.sum_ns_.value());
}

LatencyCounts StepHistogram::counts() const {
  LatencyCounts counts;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = static_cast<uint64_t>(counts_[i].value());
  return counts;
}

void PathTotals::Add(const PathTotals& other) {
  verified.Add(other.verified.value());
  corrupt.Add(other.corrupt.value());
  missing.Add(other.missing.value());
  late.Add(other.late.value());
  failed.Add(other.failed.value());
  aborted.Add(other.aborted.value());
  bytes.Add(other.bytes.value());
  seconds.Add(other.seconds);
  post_seconds.Add(other.post_seconds);
}

void StepTotals::Add(const LayerResult& result) {
  layers.Add(1);
  progressive_layers.Add(result.selection.scan == ScanMode::kProgressive ? 1 : 0);
  selected_pages.Add(result.units.hits + result.units.misses);
  hits.Add(result.units.hits);
  misses.Add(result.units.misses);
  verified_units.Add(result.units.verified);
  missing_units.Add(result.units.missing);
  late_units.Add(result.units.late);
  failed_units.Add(result.units.failed);
  checksum_failures.Add(result.units.checksum_failures);
  score_faults.Add(static_cast<int64_t>(result.selection.num_faults) - score_faults.value());
  bytes_scanned.Add(result.bytes_scanned);
  bytes_attended.Add(result.bytes_attended);
  bytes_fetched.Add(result.bytes_fetched);
  for (size_t i = 0; i < result.seconds.size(); ++i) {
    nanoseconds[i].Add(static_cast<int64_t>(result.seconds[i] * 1e9));
  }
}

void StepTotals::AddStep(const std::array<int64_t, kNumStages>& ns, bool sparse, double lost_mass) {
  steps.Add(1);
  (sparse ? sparse_steps : dense_steps).Add(1);
  for (size_t i = 0; i < ns.size(); ++i) step_seconds[i].Observe(ns[i]);
  if (lost_mass >= 0) AddLostMass(lost_mass);
}

void StepTotals::AddLostMass(double lost_mass) {
  size_t bucket = 0;
  while (bucket < kLostMassBounds.size() && lost_mass > kLostMassBounds[bucket]) ++bucket;
  lost_mass_counts[bucket].Add(1);
  lost_mass_ppm.Add(static_cast<int64_t>(lost_mass * 1e6));
}

void StepTotals::Add(const StepTotals& other) {
  constexpr StepCounter StepTotals::*kCounters[] = {&StepTotals::steps,
                                                    &StepTotals::layers,
                                                    &StepTotals::progressive_layers,
                                                    &StepTotals::considered_pages,
                                                    &StepTotals::selected_pages,
                                                    &StepTotals::hits,
                                                    &StepTotals::misses,
                                                    &StepTotals::verified_units,
                                                    &StepTotals::missing_units,
                                                    &StepTotals::late_units,
                                                    &StepTotals::failed_units,
                                                    &StepTotals::checksum_failures,
                                                    &StepTotals::score_faults,
                                                    &StepTotals::bytes_scanned,
                                                    &StepTotals::bytes_attended,
                                                    &StepTotals::bytes_fetched,
                                                    &StepTotals::dense_equivalent_bytes,
                                                    &StepTotals::sparse_steps,
                                                    &StepTotals::dense_steps,
                                                    &StepTotals::lossy_steps,
                                                    &StepTotals::unsealed_pages,
                                                    &StepTotals::lost_mass_ppm};
  for (const auto counter : kCounters) (this->*counter).Add((other.*counter).value());
  for (size_t i = 0; i < nanoseconds.size(); ++i) {
    nanoseconds[i].Add(other.nanoseconds[i].value());
    step_seconds[i].Add(other.step_seconds[i]);
  }
  for (size_t i = 0; i < lost_mass_counts.size(); ++i)
    lost_mass_counts[i].Add(other.lost_mass_counts[i].value());
}

}  // namespace kvd
