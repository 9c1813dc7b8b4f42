// How much attention each way of choosing pages keeps, on a KV trace of a real model.
//
// usage: mass_bench --trace FILE [--metric FILE] [--foreign FILE,...] [--json FILE]
// For each budget of attended tokens and each arm: mass and selectable recall, their ratio to the
// oracle's, the worst layer's ratio, and the output error. With --foreign the pages of other texts
// are added as distractors, and the progressive scan's recall is compared with the full one's.

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "bench/arms.h"
#include "bench/report.h"
#include "bench/synthetic_trace.h"
#include "kernels/query_metric.h"

ABSL_FLAG(std::string, trace, "", "KV trace (bench/trace/dump_trace.py trace), or \"synthetic\"");
ABSL_FLAG(std::string, metric, "",
          "query metric; without it the E1S arms are left out, and that is said");
ABSL_FLAG(std::string, foreign, "",
          "comma-separated traces of other texts, whose pages are added as distractors");
ABSL_FLAG(int, page_tokens, 16, "tokens a page: 16 or 32");
ABSL_FLAG(int, step_stride, 1, "use every n-th decode step");
ABSL_FLAG(int, min_candidates, 512,
          "floor of the progressive scan's candidates (C = max(16 K, floor))");
ABSL_FLAG(std::string, json, "", "write the figures to this file");

namespace kvd::bench {
namespace {

constexpr AlwaysKept kKept;

void RunStream(const Stream& stream, const float* metric, int layer, bool ablations,
               RecallTable* table) {
  std::vector<Arm> arms = BaselineArms(stream, kKept);
  for (Arm& arm : LocksArms(stream, metric, kKept, absl::GetFlag(FLAGS_min_candidates), ablations))
    arms.push_back(std::move(arm));
  for (int step = 0; step < stream.num_steps; step += absl::GetFlag(FLAGS_step_stride)) {
    const Truth truth = ComputeTruth(stream, step);
    for (const Arm& arm : arms) {
      for (const int budget : kBudgets) {
        const int k = SelectedPages(budget, stream.page_tokens, kKept);
        table->Add(arm.name, budget, layer,
                   Evaluate(stream, step, truth, arm.select(step, truth, k), kKept));
      }
    }
  }
}

// What the progressive scan keeps of the full one's recall.
void AddProgressiveFigures(const RecallTable& table, const std::string& prefix, Report* report) {
  if (!table.Has("locks-E1S-progressive", kBudgets[0])) return;
  for (const int budget : kBudgets) {
    const RecallTable::Row full = table.Get("locks-E1S", budget),
                           part = table.Get("locks-E1S-progressive", budget);
    report->Add({absl::StrCat(prefix, "progressive_over_full/b", budget, "/selectable"),
                 part.selectable, "share", full.selectable, part.selectable / full.selectable});
    std::printf("progressive over full scan, b %d: mass %.4f, selectable %.4f\n", budget,
                part.mass / full.mass, part.selectable / full.selectable);
  }
}

int Fail(const std::string& message) {
  std::fprintf(stderr, "mass_bench: %s\n", message.c_str());
  return 2;
}

int Main() {
  const auto trace = LoadTrace(absl::GetFlag(FLAGS_trace));
  if (!trace.ok()) return Fail(std::string(trace.status().message()));
  const int page_tokens = absl::GetFlag(FLAGS_page_tokens);
  std::vector<KvTrace> foreign;
  for (const auto path : absl::StrSplit(absl::GetFlag(FLAGS_foreign), ',', absl::SkipEmpty())) {
    auto other = KvTrace::Load(std::string(path));
    if (!other.ok()) return Fail(std::string(other.status().message()));
    if (other->layer_ids != trace->layer_ids || other->head_dim != trace->head_dim)
      return Fail(absl::StrCat("--foreign ", std::string(path),
                               ": other layers or head dim than the trace"));
    foreign.push_back(*std::move(other));
  }
  QueryMetric metric;
  if (absl::GetFlag(FLAGS_metric).empty()) {
    std::printf("no --metric: the E1S arms are left out\n");
  } else if (const std::string problem = QueryMetric::Load(
                 absl::GetFlag(FLAGS_metric), trace->geometry(page_tokens, 8), &metric);
             !problem.empty()) {
    return Fail(problem);
  }

  RecallTable table(trace->num_layers);
  for (int layer = 0; layer < trace->num_layers; ++layer) {
    for (int head = 0; head < trace->num_kv_heads; ++head) {
      const Stream stream = Stream::Make(*trace, layer, head, page_tokens, foreign);
      if (layer == 0 && head == 0)
        std::printf("%s, text %s: %d layers, Hk %d, G %d, D %d, %d pages, %d steps\n",
                    trace->model.c_str(), trace->text.c_str(), trace->num_layers,
                    trace->num_kv_heads, trace->group(), trace->head_dim, stream.prompt_pages,
                    stream.num_steps);
      RunStream(stream, metric.empty() ? nullptr : metric.at(layer, head), layer, foreign.empty(),
                &table);
      std::fprintf(stderr, "\rmass_bench: layer %d of %d, head %d of %d", layer + 1,
                   trace->num_layers, head + 1, trace->num_kv_heads);
    }
  }
  std::fprintf(stderr, "\n");
  PrintRecallTable(table);
  Report report("mass_bench");
  const std::string prefix = foreign.empty() ? "mass/" : "mass_distractors/";
  AddRecallFigures(table, prefix, &report);
  AddProgressiveFigures(table, prefix, &report);
  if (absl::GetFlag(FLAGS_json).empty()) return 0;
  const absl::Status written = report.WriteJson(absl::GetFlag(FLAGS_json));
  if (!written.ok()) std::fprintf(stderr, "mass_bench: %s\n", written.ToString().c_str());
  return written.ok() ? 0 : 1;
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "mass_bench --trace FILE [--metric FILE] [--foreign FILE,...] [--json FILE]");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
