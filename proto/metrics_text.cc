#include "proto/metrics_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

std::string Escaped(absl::string_view value) {
  return absl::StrReplaceAll(value, {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}});
}

// Whole numbers below 10^15 stay whole.
std::string Number(double value) { return absl::StrFormat("%.15g", value); }

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

MetricsText::MetricsText(const char* prefix, std::span<const MetricInfo> table)
    : prefix_(prefix), table_(table) {
  for (const MetricInfo& info : table) families_.push_back({LabelNames(info.labels), ""});
}

size_t MetricsText::Find(absl::string_view name, MetricType type, size_t num_labels) const {
  size_t i = 0;
  while (i < table_.size() && name != table_[i].name) ++i;
  KVD_CHECK(i < table_.size() && table_[i].type == type);
  KVD_CHECK(families_[i].labels.size() == num_labels);
  return i;
}

void MetricsText::Line(size_t family, absl::string_view suffix, LabelValues labels,
                       absl::string_view le, absl::string_view value) {
  std::string& out = families_[family].series;
  absl::StrAppend(&out, prefix_, table_[family].name, suffix);
  char before = '{';
  auto name = families_[family].labels.begin();
  for (const absl::string_view label : labels) {
    absl::StrAppend(&out, absl::string_view(&before, 1), *name++, "=\"", Escaped(label), "\"");
    before = ',';
  }
  if (!le.empty()) {
    absl::StrAppend(&out, absl::string_view(&before, 1), "le=\"", le, "\"");
    before = ',';
  }
  absl::StrAppend(&out, before == ',' ? "} " : " ", value, "\n");
}

void MetricsText::Count(absl::string_view name, LabelValues labels, uint64_t value) {
  Line(Find(name, MetricType::kCounter, labels.size()), "", labels, "", absl::StrCat(value));
}

void MetricsText::Level(absl::string_view name, LabelValues labels, double value) {
  Line(Find(name, MetricType::kGauge, labels.size()), "", labels, "", Number(value));
}

void MetricsText::Histogram(absl::string_view name, LabelValues labels,
                            std::span<const double> bounds, std::span<const uint64_t> counts,
                            double sum) {
  KVD_CHECK(counts.size() == bounds.size() + 1);
  const size_t family = Find(name, MetricType::kHistogram, labels.size());
  uint64_t cumulative = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    cumulative += counts[i];
    const std::string le = i < bounds.size() ? absl::StrFormat("%g", bounds[i]) : "+Inf";
    Line(family, "_bucket", labels, le, absl::StrCat(cumulative));
  }
  Line(family, "_sum", labels, "", Number(sum));
  Line(family, "_count", labels, "", absl::StrCat(cumulative));
}

void MetricsText::Latency(absl::string_view name, LabelValues labels,
                          const LatencyHistogram& histogram) {
  Histogram(name, labels, kLatencyBounds, histogram.counts(), histogram.sum_seconds());
}

std::string MetricsText::Text() const {
  std::string text;
  for (size_t i = 0; i < table_.size(); ++i) {
    if (families_[i].series.empty()) continue;
    const MetricInfo& info = table_[i];
    absl::StrAppend(&text, "# HELP ", prefix_, info.name, " ", info.help, "\n");
    absl::StrAppend(&text, "# TYPE ", prefix_, info.name, " ", TypeName(info.type), "\n");
    absl::StrAppend(&text, families_[i].series);
  }
  return text;
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
