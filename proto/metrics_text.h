// Figures for Prometheus, as daemon and client library count and show them: counters, the latency
// buckets, and the text format (version 0.0.4) written from a table of families.
//
// Why a table: name, type, labels and meaning of each family stand in one place, from which the
// endpoint, deploy/docs/metrics.md and their test come. The text itself is written by
// prometheus-cpp; counting is ours, because its Histogram::Observe takes a mutex. Labels are
// bounded: no page keys, no sessions. Thread safety: Counter and LatencyHistogram are safe; a
// MetricsText belongs to one thread.

#ifndef LOCKS_KVD_PROTO_METRICS_TEXT_H_
#define LOCKS_KVD_PROTO_METRICS_TEXT_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvd {

// A count that only grows, for any number of writers: one relaxed addition.
class Counter {
 public:
  void Add(uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Upper bounds in seconds, the same for every latency; inclusive.
inline constexpr std::array<double, 23> kLatencyBounds = {
    1e-6,   2e-6, 3e-6, 5e-6, 7.5e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 5e-5, 7.5e-5, 1e-4,
    1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3,   2e-3, 5e-3,   1e-2, 5e-2, 0.1,  1};
// Events in the bucket of each bound, then those above all of them. Not cumulative.
using LatencyCounts = std::array<uint64_t, kLatencyBounds.size() + 1>;
// Position in LatencyCounts of a latency.
size_t LatencyBucket(int64_t ns);

// Latencies of any number of writers: two relaxed additions an event.
class LatencyHistogram {
 public:
  void Observe(absl::Duration latency);
  LatencyCounts counts() const;
  double sum_seconds() const;

 private:
  std::array<std::atomic<uint64_t>, kLatencyBounds.size() + 1> counts_{};
  std::atomic<uint64_t> sum_ns_{0};
};

enum class MetricType { kCounter, kGauge, kHistogram };

// A family as the contract has it.
struct MetricInfo {
  const char* name;  // without the prefix
  MetricType type;
  const char* labels;  // "path=shared|ucx, size": names, with the values where they are a fixed set
  const char* help;
};

// Writes one answer to a scrape.
class MetricsText {
 public:
  // Both outlive it. Families are written in the order of the table; one without series is left
  // out.
  MetricsText(const char* prefix, std::span<const MetricInfo> table);
  ~MetricsText();

  // Add one series to a family. `labels`: one value for each label of the family, in its order.
  // REQUIRES: the table has the family, with that type and that many labels.
  using LabelValues = std::initializer_list<absl::string_view>;
  void Count(absl::string_view name, LabelValues labels, uint64_t value);
  void Level(absl::string_view name, LabelValues labels, double value);
  // counts: one a bound, and one for what is above them all.
  void Histogram(absl::string_view name, LabelValues labels, std::span<const double> bounds,
                 std::span<const uint64_t> counts, double sum);
  void Latency(absl::string_view name, LabelValues labels, const LatencyHistogram& histogram);

  std::string Text() const;

 private:
  struct Families;  // of prometheus-cpp
  struct Series;
  Series Add(absl::string_view name, MetricType type, LabelValues labels);

  const std::span<const MetricInfo> table_;
  const std::unique_ptr<Families> families_;
};

// The table as deploy/docs/metrics.md shows it: a Markdown table, one line a family.
std::string MetricsMarkdown(const char* prefix, std::span<const MetricInfo> table);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_METRICS_TEXT_H_
