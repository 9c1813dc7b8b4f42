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

}  // namespace kvd
