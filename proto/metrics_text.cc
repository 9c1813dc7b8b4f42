#include "proto/metrics_text.h"

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kernels/check.h"

namespace kvd {
namespace {

// kLatencyBounds in whole nanoseconds, so that an event on a bound is not lost to rounding.
constexpr std::array<int64_t, kLatencyBounds.size()> kBoundsNs = [] {
  std::array<int64_t, kLatencyBounds.size()> bounds{};
  for (size_t i = 0; i < bounds.size(); ++i)
    bounds[i] = static_cast<int64_t>(kLatencyBounds[i] * 1e9 + 0.5);
  return bounds;
}();

const char* TypeName(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return "counter";
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kHistogram:
      break;
  }
  return "histogram";
}

// "path=shared|ucx, size" -> {"path", "size"}.
std::vector<std::string> LabelNames(const char* labels) {
  std::vector<std::string> names;
  for (const absl::string_view label : absl::StrSplit(labels, ", ", absl::SkipEmpty()))
    names.emplace_back(label.substr(0, label.find('=')));
  return names;
}

prometheus::MetricType TypeOf(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return prometheus::MetricType::Counter;
    case MetricType::kGauge:
      return prometheus::MetricType::Gauge;
    case MetricType::kHistogram:
      break;
  }
  return prometheus::MetricType::Histogram;
}

}  // namespace

size_t LatencyBucket(int64_t ns) {
  size_t bucket = 0;
  while (bucket < kBoundsNs.size() && ns > kBoundsNs[bucket]) ++bucket;
  return bucket;
}

void LatencyHistogram::Observe(absl::Duration latency) {
  const int64_t ns = absl::ToInt64Nanoseconds(latency);
  counts_[LatencyBucket(ns)].fetch_add(1, std::memory_order_relaxed);
  sum_ns_.fetch_add(static_cast<uint64_t>(ns < 0 ? 0 : ns), std::memory_order_relaxed);
}

LatencyCounts LatencyHistogram::counts() const {
  LatencyCounts counts;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = counts_[i].load(std::memory_order_relaxed);
  return counts;
}

double LatencyHistogram::sum_seconds() const {
  return static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) * 1e-9;
}

struct MetricsText::Families {
  std::vector<prometheus::MetricFamily> list;    // parallel to the table
  std::vector<std::vector<std::string>> labels;  // names
};

struct MetricsText::Series {
  prometheus::ClientMetric& metric;
};

MetricsText::MetricsText(const char* prefix, std::span<const MetricInfo> table)
    : table_(table), families_(std::make_unique<Families>()) {
  for (const MetricInfo& info : table) {
    families_->list.push_back({absl::StrCat(prefix, info.name), info.help, TypeOf(info.type), {}});
    families_->labels.push_back(LabelNames(info.labels));
  }
}

MetricsText::~MetricsText() = default;

MetricsText::Series MetricsText::Add(absl::string_view name, MetricType type, LabelValues labels) {
  size_t i = 0;
  while (i < table_.size() && name != table_[i].name) ++i;
  KVD_CHECK(i < table_.size() && table_[i].type == type);
  const std::vector<std::string>& names = families_->labels[i];
  KVD_CHECK(names.size() == labels.size());
  prometheus::ClientMetric& metric = families_->list[i].metric.emplace_back();
  for (size_t n = 0; n < names.size(); ++n) {
    metric.label.push_back({names[n], std::string(labels.begin()[n])});
  }
  return {metric};
}

void MetricsText::Count(absl::string_view name, LabelValues labels, uint64_t value) {
  Add(name, MetricType::kCounter, labels).metric.counter.value = static_cast<double>(value);
}

void MetricsText::Level(absl::string_view name, LabelValues labels, double value) {
  Add(name, MetricType::kGauge, labels).metric.gauge.value = value;
}

void MetricsText::Histogram(absl::string_view name, LabelValues labels,
                            std::span<const double> bounds, std::span<const uint64_t> counts,
                            double sum) {
  KVD_CHECK(counts.size() == bounds.size() + 1);
  auto& histogram = Add(name, MetricType::kHistogram, labels).metric.histogram;
  uint64_t cumulative = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    cumulative += counts[i];
    const double bound = i < bounds.size() ? bounds[i] : std::numeric_limits<double>::infinity();
    histogram.bucket.push_back({cumulative, bound});
  }
  histogram.sample_count = cumulative;
  histogram.sample_sum = sum;
}

void MetricsText::Latency(absl::string_view name, LabelValues labels,
                          const LatencyHistogram& histogram) {
  Histogram(name, labels, kLatencyBounds, histogram.counts(), histogram.sum_seconds());
}

std::string MetricsText::Text() const {
  std::vector<prometheus::MetricFamily> filled;
  for (const prometheus::MetricFamily& family : families_->list) {
    if (!family.metric.empty()) filled.push_back(family);
  }
  return prometheus::TextSerializer().Serialize(filled);
}

std::string MetricsMarkdown(const char* prefix, std::span<const MetricInfo> table) {
  std::string text = "| name | type | labels | what |\n|---|---|---|---|\n";
  for (const MetricInfo& info : table) {
    const std::string labels =
        absl::StrReplaceAll(info.labels, {{", ", "; "}, {"=", ": "}, {"|", ", "}});
    absl::StrAppend(&text, "| `", prefix, info.name, "` | ", TypeName(info.type), " | ", labels,
                    " | ", info.help, " |\n");
  }
  return text;
}

}  // namespace kvd
