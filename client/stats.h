// What decode steps did: figures of the last layer, and totals since the step was planned.
//
// Thread safety: LayerResult is a plain value of the step's thread. Totals have one writer (that
// thread) and any number of readers: each counter is a relaxed atomic, so a reader sees no torn
// value, and counters of one step may be seen apart.

#ifndef LOCKS_KVD_CLIENT_STATS_H_
#define LOCKS_KVD_CLIENT_STATS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/strings/string_view.h"
#include "client/fetcher.h"
#include "client/selector.h"
#include "proto/metrics_text.h"

namespace kvd {

enum class Stage { kAppend, kScore, kResolve, kFetch, kAttend, kMass };
inline constexpr int kNumStages = 6;
absl::string_view StageName(Stage stage);

// What the units asked for came to.
struct UnitCounts {
  int64_t hits = 0;               // found in the page cache
  int64_t misses = 0;             // fetched or tried
  int64_t verified = 0;           // arrived and proved
  int64_t missing = 0;            // proved gone: generation changed or lease lost
  int64_t late = 0;               // the fetch's deadline passed
  int64_t failed = 0;             // the daemon's list failed otherwise
  int64_t checksum_failures = 0;  // arrived with wrong bytes (VerifyPolicy::kChecksum)
};

// Figures of one DecodeStep::Run. Spans view the step's memory and are valid until its next Run.
struct LayerResult {
  Selection selection;
  UnitCounts units;
  int64_t bytes_scanned = 0;   // records
  int64_t bytes_attended = 0;  // units, local ones included; tail rows as they are filled
  int64_t bytes_fetched = 0;   // that travelled
  std::array<double, kNumStages> seconds = {};
  std::span<const float> unread_mass;  // [query heads] estimated; empty if not computed in this Run
  std::span<const float> lost_mass;    // the part of it on missing pages
  int num_missing_pages = 0;           // sealed pages that cannot be chosen

  double& seconds_of(Stage stage) { return seconds[static_cast<size_t>(stage)]; }
  double seconds_of(Stage stage) const { return seconds[static_cast<size_t>(stage)]; }
};

// A counter with one writer.
class StepCounter {
 public:
  void Add(int64_t n) {
    value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  void Set(int64_t n) { value_.store(n, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

// Latencies with one writer.
class StepHistogram {
 public:
  void Observe(int64_t ns) {
    counts_[LatencyBucket(ns)].Add(1);
    sum_ns_.Add(ns);
  }
  void Add(const StepHistogram& other);
  LatencyCounts counts() const;
  double sum_seconds() const { return static_cast<double>(sum_ns_.value()) * 1e-9; }

 private:
  std::array<StepCounter, kLatencyBounds.size() + 1> counts_;
  StepCounter sum_ns_;
};

// What came of the lists that steps fetched over one path. A unit counts once.
struct PathTotals {
  StepCounter verified;        // came and were proved
  StepCounter corrupt;         // came with a wrong checksum
  StepCounter missing;         // the generation changed, or the lease is lost
  StepCounter late;            // the list's deadline passed
  StepCounter failed;          // the list failed otherwise
  StepCounter aborted;         // of these, because the session was lost
  StepCounter bytes;           // that travelled
  StepHistogram seconds;       // that a step spent on a list: starting it, and waiting for it
  StepHistogram post_seconds;  // of these, starting it; the mapped paths copy then

  void Add(const PathTotals& other);
};
inline constexpr size_t kNumPaths = static_cast<size_t>(PathKind::kUcx) + 1;
using FetchTotals = std::array<PathTotals, kNumPaths>;

// Upper bounds of the estimated mass on missing pages.
inline constexpr std::array<double, 10> kLostMassBounds = {0.001, 0.002, 0.005, 0.01, 0.02,
                                                           0.05,  0.1,   0.2,   0.5,  1};

// Totals of one DecodeStep. `dense_equivalent_bytes` is what full attention would have read.
struct StepTotals {
  StepCounter steps;
  StepCounter layers;
  StepCounter progressive_layers;
  StepCounter considered_pages;  // that a layer and head chose from
  StepCounter selected_pages;
  StepCounter hits;
  StepCounter misses;
  StepCounter verified_units;
  StepCounter missing_units;
  StepCounter late_units;
  StepCounter failed_units;
  StepCounter checksum_failures;
  StepCounter score_faults;
  StepCounter bytes_scanned;
  StepCounter bytes_attended;
  StepCounter bytes_fetched;
  StepCounter dense_equivalent_bytes;
  std::array<StepCounter, kNumStages> nanoseconds;

  // One event a step.
  StepCounter sparse_steps;    // some page was left out in some layer
  StepCounter dense_steps;     // none was
  StepCounter lossy_steps;     // some page was missing
  StepCounter unsealed_pages;  // level: complete pages that wait for their seal
  std::array<StepHistogram, kNumStages> step_seconds;  // over its layers
  std::array<StepCounter, kLostMassBounds.size() + 1> lost_mass_counts;
  StepCounter lost_mass_ppm;  // sum, in millionths

  void Add(const LayerResult& result);
  // Ends a step: `ns` of each stage; `lost_mass` is the mean over layers and query heads of the
  // layers that had missing pages, below 0 if none had.
  void AddStep(const std::array<int64_t, kNumStages>& ns, bool sparse, double lost_mass);
  // What AddStep does with a step's lost mass, at least 0.
  void AddLostMass(double lost_mass);
  // Adds another step's totals; its level as well.
  void Add(const StepTotals& other);
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_STATS_H_
