// What a worker's page cache hits: LRU, CLOCK and the best that any policy can do, on the pages
// that a real model's queries choose step by step; and the queries of decode_bench (a random walk)
// beside it.
//
// usage: cache_bench --trace FILE [--metric FILE] [--foreign FILE,...] [--json FILE]
// For each stream (layer, KV head) the product's full scan chooses K pages a step. Churn: the share
// of a step's pages that the step before did not choose. Hit rate: of all steps but the first,
// whose pages are new to every policy. LRU is the product's own (kernels/resolve.h). OPT evicts
// what is needed again last, which needs the future. Beside them, the pages of decode_bench with
// queries that drift: which correlation has the real trace's churn.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/cache_policies.h"
#include "bench/report.h"
#include "bench/selectors.h"
#include "bench/synthetic_pages.h"
#include "bench/synthetic_trace.h"
#include "kernels/dtype.h"
#include "kernels/query_metric.h"

ABSL_FLAG(std::string, trace, "", "KV trace (bench/trace/dump_trace.py trace), or \"synthetic\"");
ABSL_FLAG(std::string, metric, "", "query metric; without it the encoder is E1");
ABSL_FLAG(std::string, foreign, "",
          "comma-separated traces of other texts, whose pages are added as distractors");
ABSL_FLAG(std::vector<std::string>, drift,
          std::vector<std::string>({".8", ".9", ".95", ".98", ".99"}),
          "correlations of decode_bench's queries");
ABSL_FLAG(std::vector<std::string>, drift_pages, std::vector<std::string>({"2048", "8192"}),
          "pages of its prompt");
ABSL_FLAG(int, drift_heads, 4, "KV heads of it");
ABSL_FLAG(std::string, json, "", "write the figures to this file");

namespace kvd::bench {
namespace {

constexpr AlwaysKept kKept;
constexpr int kChosen[] = {61, 125};  // K of 1,024 and 2,048 attended tokens
constexpr int kRatios[] = {2, 3, 4};  // slots a chosen page
constexpr int kStrides[] = {1, 2, 4};
constexpr int kDriftSteps = 64;

// Sums over streams.
struct Tally {
  double fresh = 0;   // pages that the step before did not choose
  double chosen = 0;  // pages of all steps but the first
  double hits[kNumPolicies] = {};

  void Add(const std::vector<std::vector<int32_t>>& steps, int num_pages, int num_slots) {
    for (size_t t = 1; t < steps.size(); ++t) {
      chosen += static_cast<double>(steps[t].size());
      for (const int32_t page : steps[t])
        fresh += std::binary_search(steps[t - 1].begin(), steps[t - 1].end(), page) ? 0 : 1;
    }
    for (int p = 0; p < kNumPolicies; ++p)
      hits[p] += static_cast<double>(HitsOf(static_cast<Policy>(p), steps, num_pages, num_slots));
  }
};

// The chosen pages of each step of a stream.
std::vector<std::vector<int32_t>> Choose(const Stream& stream, const LocksSelector& selector,
                                         int k) {
  std::vector<std::vector<int32_t>> steps;
  for (int step = 0; step < stream.num_steps; ++step) {
    steps.push_back(selector.SelectFull(stream, step, k, kKept));
    std::sort(steps.back().begin(), steps.back().end());
  }
  return steps;
}

void AddFigures(const std::string& name, const Tally& tally, int ratio, Report* report) {
  const double best = tally.hits[static_cast<int>(Policy::kOpt)];
  report->Check(
      absl::StrCat(name, "/ratio", ratio, ": OPT is a bound"),
      best >= tally.hits[0] && best >= tally.hits[1] && best + tally.fresh >= tally.chosen,
      absl::StrCat(tally.hits[0], ", ", tally.hits[1], ", ", best, " hits"));
  const double churn = tally.fresh / tally.chosen;
  if (ratio == kRatios[0]) report->Add({name + "/churn", churn, "share", 0, 0});
  std::string line;
  for (int p = 0; p < kNumPolicies; ++p) {
    const double rate = tally.hits[p] / tally.chosen;
    report->Add({absl::StrCat(name, "/ratio", ratio, "/", PolicyName(static_cast<Policy>(p))), rate,
                 "hit rate", 0, 0});
    absl::StrAppendFormat(&line, "  %s %.4f", std::string(PolicyName(static_cast<Policy>(p))),
                          rate);
  }
  std::printf("%-36s ratio %d  churn %.4f %s\n", name.c_str(), ratio, churn, line.c_str());
}

std::vector<std::vector<int32_t>> EveryNth(const std::vector<std::vector<int32_t>>& steps,
                                           int stride) {
  std::vector<std::vector<int32_t>> some;
  for (size_t i = 0; i < steps.size(); i += static_cast<size_t>(stride)) some.push_back(steps[i]);
  return some;
}

// A stream of decode_bench: synthetic pages, and a query that is a random walk of correlation
// `drift`.
Stream DriftStream(int num_pages, uint32_t head, double drift) {
  Stream stream;
  stream.head_dim = 128;
  stream.group = 4;
  stream.page_tokens = 16;
  stream.softmax_scale = 0.088388f;
  stream.num_steps = kDriftSteps;
  stream.prompt_pages = num_pages;
  const int all = num_pages + kDriftSteps / stream.page_tokens + 1;
  stream.units.resize(static_cast<size_t>(all) * stream.unit_bytes());
  for (int p = 0; p < all; ++p) {
    FillSyntheticUnit(SyntheticUnit(static_cast<uint32_t>(p), 0, head), 128, 16,
                      reinterpret_cast<uint16_t*>(stream.units.data() +
                                                  static_cast<size_t>(p) * stream.unit_bytes()));
  }
  std::mt19937 random(head + 1);
  std::normal_distribution<float> normal;
  std::vector<float> state(static_cast<size_t>(stream.group * stream.head_dim));
  for (float& x : state) x = normal(random);
  const auto rho = static_cast<float>(drift);
  for (int step = 0; step < stream.num_steps; ++step) {
    for (float& x : state) {
      if (step > 0) x = rho * x + std::sqrt(1 - rho * rho) * normal(random);
      stream.query.push_back(NoiseToBf16(x));
    }
  }
  return stream;
}

int Fail(const std::string& message) {
  std::fprintf(stderr, "cache_bench: %s\n", message.c_str());
  return 2;
}

std::string AddTrace(Report* report) {
  const auto trace = LoadTrace(absl::GetFlag(FLAGS_trace));
  if (!trace.ok()) return std::string(trace.status().message());
  std::vector<KvTrace> foreign;
  for (const auto path : absl::StrSplit(absl::GetFlag(FLAGS_foreign), ',', absl::SkipEmpty())) {
    auto other = KvTrace::Load(std::string(path));
    if (!other.ok()) return std::string(other.status().message());
    if (other->layer_ids != trace->layer_ids || other->head_dim != trace->head_dim)
      return absl::StrCat("--foreign ", std::string(path),
                          ": other layers or head dim than the trace");
    foreign.push_back(*std::move(other));
  }
  QueryMetric metric;
  if (!absl::GetFlag(FLAGS_metric).empty()) {
    const std::string problem =
        QueryMetric::Load(absl::GetFlag(FLAGS_metric), trace->geometry(16, 8), &metric);
    if (!problem.empty()) return problem;
  }
  // [texts: own alone, with the others][K][stride][ratio]
  std::map<std::string, std::map<int, Tally>> tallies;
  for (const bool extended : {false, true}) {
    if (extended && foreign.empty()) continue;
    for (int layer = 0; layer < trace->num_layers; ++layer) {
      for (int head = 0; head < trace->num_kv_heads; ++head) {
        const Stream stream =
            Stream::Make(*trace, layer, head, 16, extended ? foreign : std::vector<KvTrace>());
        const LocksOptions options = {.encoder = metric.empty() ? Encoder::kE1 : Encoder::kE1S};
        const LocksSelector selector(stream, options,
                                     metric.empty() ? nullptr : metric.at(layer, head));
        for (const int k : kChosen) {
          const auto steps = Choose(stream, selector, k);
          for (const int stride : kStrides) {
            const std::string name =
                absl::StrCat("trace/P", stream.prompt_pages, "/K", k, "/stride", stride);
            for (const int ratio : kRatios)
              tallies[name][ratio].Add(EveryNth(steps, stride), stream.num_pages(stream.num_steps),
                                       ratio * k);
          }
        }
        std::fprintf(stderr, "\rcache_bench: layer %d of %d", layer + 1, trace->num_layers);
      }
    }
  }
  std::fprintf(stderr, "\n");
  for (const auto& [name, by_ratio] : tallies)
    for (const auto& [ratio, tally] : by_ratio) AddFigures(name, tally, ratio, report);
  return "";
}

std::string AddDrift(Report* report) {
  for (const std::string& pages_text : absl::GetFlag(FLAGS_drift_pages)) {
    int pages = 0;
    if (!absl::SimpleAtoi(pages_text, &pages) || pages < 1024)
      return "--drift_pages: expected numbers from 1024 on";
    for (const std::string& drift_text : absl::GetFlag(FLAGS_drift)) {
      double drift = 0;
      if (!absl::SimpleAtod(drift_text, &drift) || drift < 0 || drift > 1)
        return "--drift: expected numbers from 0 to 1";
      Tally tally[std::size(kRatios)];
      for (int head = 0; head < absl::GetFlag(FLAGS_drift_heads); ++head) {
        const Stream stream = DriftStream(pages, static_cast<uint32_t>(head), drift);
        const LocksSelector selector(stream, {.encoder = Encoder::kE1}, nullptr);
        const auto steps = Choose(stream, selector, kChosen[1]);
        for (size_t r = 0; r < std::size(kRatios); ++r)
          tally[r].Add(steps, stream.num_pages(stream.num_steps), kRatios[r] * kChosen[1]);
      }
      for (size_t r = 0; r < std::size(kRatios); ++r)
        AddFigures(absl::StrCat("drift", drift, "/P", pages, "/K", kChosen[1]), tally[r],
                   kRatios[r], report);
    }
  }
  return "";
}

int Main() {
  Report report("cache_bench");
  if (const std::string problem = AddTrace(&report); !problem.empty()) return Fail(problem);
  if (const std::string problem = AddDrift(&report); !problem.empty()) return Fail(problem);
  if (absl::GetFlag(FLAGS_json).empty()) return report.all_ok() ? 0 : 1;
  const absl::Status written = report.WriteJson(absl::GetFlag(FLAGS_json));
  if (!written.ok()) return Fail(std::string(written.message()));
  return report.all_ok() ? 0 : 1;
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "cache_bench --trace FILE [--metric FILE] [--foreign FILE,...] [--json FILE]");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
