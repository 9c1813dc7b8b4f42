// The demo's decode worker: opens the prompt in the pool, replays the trace's decode steps through
// the client library, and compares every layer and step with full attention.
//
// usage: demo_decode --trace=FILE --metric=FILE --daemons=HOST:PORT,... --path=shared|ucx
// [--json=FILE] [--plot=FILE]
//        demo_decode ... --kill_pid=PID     kills that daemon half-way; the worker must finish
// Exits 0 only if every check held.

#include <signal.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "bench/arms.h"
#include "bench/demo_common.h"
#include "bench/plot.h"
#include "bench/report.h"
#include "bench/synthetic_trace.h"
#include "client/kv_client.h"
#include "proto/status.h"

ABSL_FLAG(std::string, trace, "", "KV trace, or \"synthetic\"");
ABSL_FLAG(std::string, metric, "", "query metric of the daemons; empty if they have none");
ABSL_FLAG(std::string, daemons, "", "comma-separated host:port of the daemons");
ABSL_FLAG(std::string, path, "", "path that every daemon must be reached by: shared or ucx");
ABSL_FLAG(int, kill_pid, 0, "process to kill half-way through the decode");
ABSL_FLAG(std::string, json, "", "write the table and every check to this file");
ABSL_FLAG(std::string, plot, "", "write the plot of recall over budget to this SVG file");

namespace kvd::bench {
namespace {

constexpr AlwaysKept kKept;
// Largest difference between the step's output and attention recomputed from the trace, relative to
// the output's largest component: fp32 sums in another order. A wrong byte is far outside.
constexpr double kOutputTolerance = 1e-4;

// Streams and their truths, [layer * Hk + head] and [step].
struct Reference {
  std::vector<Stream> streams;
  std::vector<std::vector<Truth>> truths;
};

void Progress(const std::string& what, int done, int all) {
  std::fprintf(stderr, "\rdemo_decode: %-40s %3d%%", what.c_str(),
               all > 0 ? 100 * done / all : 100);
  if (done == all) std::fprintf(stderr, "\n");
}

Reference ComputeReference(const KvTrace& trace, RecallTable* table) {
  Reference reference;
  const int streams = trace.num_layers * trace.num_kv_heads;
  reference.streams.reserve(static_cast<size_t>(streams));  // arms refer to them
  for (int i = 0; i < streams; ++i) {
    const int layer = i / trace.num_kv_heads;
    reference.streams.push_back(
        Stream::Make(trace, layer, i % trace.num_kv_heads, kDemoPageTokens));
    const Stream& stream = reference.streams.back();
    std::vector<Arm> arms = BaselineArms(stream, kKept);
    for (Arm& arm : LocksArms(stream, nullptr, kKept, 1024, false)) arms.push_back(std::move(arm));
    std::vector<Truth> truths;
    for (int step = 0; step < trace.num_steps; ++step) {
      truths.push_back(ComputeTruth(stream, step));
      for (const Arm& arm : arms) {
        for (const int budget : kBudgets) {
          const int k = SelectedPages(budget, kDemoPageTokens, kKept);
          table->Add(
              arm.name, budget, layer,
              Evaluate(stream, step, truths.back(), arm.select(step, truths.back(), k), kKept));
        }
      }
    }
    reference.truths.push_back(std::move(truths));
    Progress("full attention and the other selectors", i + 1, streams);
  }
  return reference;
}

// What one decode of the trace came to.
struct RunFigures {
  double worst_output_difference = 0;  // relative, over all runs without a loss
  double worst_dense_difference = 0;   // against full attention
  int num_compared = 0;
  int num_with_loss = 0;  // (layer, step) in which a unit did not arrive
  int num_lagging = 0;    // steps that found a page not sealed yet
  int missing_pages = 0;
  double lost_mass = 0;  // largest estimate of a head
  double step_us[kNumStages] = {};
  int64_t hits = 0, misses = 0, verified = 0, checksum_failures = 0;
  double scanned = 0, attended = 0, fetched = 0, dense = 0;  // bytes a step
  double hit_rate() const {
    return hits + misses > 0 ? static_cast<double>(hits) / static_cast<double>(hits + misses) : 0;
  }
};

double RelativeDifference(std::span<const float> got, std::span<const float> want) {
  double worst = 0, largest = 1e-20;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - want[i]);
    worst = std::max(worst, std::isnan(difference) ? 1e30 : difference);
    largest = std::max(largest, std::abs(static_cast<double>(want[i])));
  }
  return worst / largest;
}

// Decodes the whole trace with one budget and scan.
class Decode {
 public:
  Decode(const KvTrace& trace, const Reference& reference, KvClient* client)
      : trace_(trace), reference_(reference), client_(client) {}

  // Recalls go to `table` under `arm` (null: not wanted).
  absl::StatusOr<RunFigures> Run(int num_select, ScanMode scan, RecallTable* table,
                                 const std::string& arm, int budget, int kill_pid) {
    SequenceOptions options;
    options.max_tokens = trace_.num_tokens + trace_.num_steps;
    options.step.budget = num_select;
    options.step.n_sink = kKept.n_sink;
    options.step.n_win = kKept.n_win;
    options.step.scan = scan;
    options.step.verify = VerifyPolicy::kChecksum;
    options.step.loss = kill_pid > 0 ? LossPolicy::kGoOn : LossPolicy::kFail;
    const std::vector<PageKey> keys = client_->PageKeys(trace_.prompt_tokens);
    KVD_ASSIGN_OR_RETURN(sequence_, client_->OpenSequence(keys, options));
    if (sequence_->num_open_pages() != static_cast<int>(keys.size()))
      return absl::NotFoundError(absl::StrCat("expected ", keys.size(), " resident pages, got ",
                                              sequence_->num_open_pages(), ": run demo_put first"));
    const auto rest = static_cast<int>(trace_.num_tokens % kDemoPageTokens);
    KVD_RETURN_IF_ERROR(sequence_->AppendTail(DemoLayers(trace_), trace_.num_tokens - rest, rest));
    figures_ = {};
    for (int step = 0; step < trace_.num_steps; ++step) {
      if (kill_pid > 0 && step == trace_.num_steps / 2) kill(kill_pid, SIGKILL);
      for (int layer = 0; layer < trace_.num_layers; ++layer)
        KVD_RETURN_IF_ERROR(RunLayer(step, layer, table, arm, budget));
      // A completed page is sealed beside the decode; here the decode is much faster than a
      // model's.
      if ((trace_.num_tokens + step + 1) % kDemoPageTokens == 0)
        absl::SleepFor(absl::Milliseconds(100));
    }
    Finish();
    return figures_;
  }

 private:
  absl::Status RunLayer(int step, int layer, RecallTable* table, const std::string& arm,
                        int budget) {
    const KvTrace::Layer& data = trace_.layers[static_cast<size_t>(layer)];
    const auto dim = static_cast<size_t>(trace_.head_dim);
    const auto q_row = static_cast<size_t>(trace_.num_q_heads) * dim,
               kv_row = static_cast<size_t>(trace_.num_kv_heads) * dim;
    const auto at = static_cast<size_t>(step);
    std::vector<float> o(q_row), lse(static_cast<size_t>(trace_.num_q_heads));
    KVD_RETURN_IF_ERROR(
        sequence_->Run(layer,
                       {data.step_q.data() + at * q_row, data.step_k.data() + at * kv_row,
                        data.step_v.data() + at * kv_row},
                       {o.data(), lse.data()}));
    const LayerResult& result = sequence_->result();
    const UnitCounts& units = result.units;
    if (units.missing + units.late + units.failed > 0) ++figures_.num_with_loss;
    for (const float mass : result.lost_mass)
      figures_.lost_mass = std::max(figures_.lost_mass, static_cast<double>(mass));
    if (layer == 0)
      figures_.num_lagging += reference_.truths[0][at].num_pages != result.selection.num_pages;
    const bool lossless = units.missing + units.late + units.failed == 0;
    for (int head = 0; head < trace_.num_kv_heads; ++head) {
      const auto stream_idx = static_cast<size_t>(layer * trace_.num_kv_heads + head);
      const Stream& stream = reference_.streams[stream_idx];
      const Truth& truth = reference_.truths[stream_idx][at];
      // Pages that are complete but not sealed yet are attended from the tail.
      const AlwaysKept kept = {kKept.n_sink,
                               kKept.n_win + truth.num_pages - result.selection.num_pages};
      const size_t group_values = static_cast<size_t>(trace_.group()) * dim;
      const std::span<const float> got(o.data() + static_cast<size_t>(head) * group_values,
                                       group_values);
      std::vector<float> want;
      const Kept evaluated =
          Evaluate(stream, step, truth, result.selection.pages_of(head), kept, &want);
      // A step that attends an unsealed page locally has another selectable set: it is left out of
      // the recalls.
      if (table && truth.num_pages == result.selection.num_pages)
        table->Add(arm, budget, layer, evaluated);
      if (!lossless) continue;
      figures_.worst_output_difference =
          std::max(figures_.worst_output_difference, RelativeDifference(got, want));
      figures_.worst_dense_difference =
          std::max(figures_.worst_dense_difference, RelativeDifference(got, truth.o));
      ++figures_.num_compared;
    }
    return absl::OkStatus();
  }

  void Finish() {
    const StepTotals& totals = sequence_->totals();
    const double steps = static_cast<double>(totals.steps.value());
    figures_.missing_pages = static_cast<int>(sequence_->MissingPages().size());
    figures_.hits = totals.hits.value();
    figures_.misses = totals.misses.value();
    figures_.verified = totals.verified_units.value();
    figures_.checksum_failures = totals.checksum_failures.value();
    figures_.scanned = static_cast<double>(totals.bytes_scanned.value()) / steps;
    figures_.attended = static_cast<double>(totals.bytes_attended.value()) / steps;
    figures_.fetched = static_cast<double>(totals.bytes_fetched.value()) / steps;
    figures_.dense = static_cast<double>(totals.dense_equivalent_bytes.value()) / steps;
    for (size_t s = 0; s < kNumStages; ++s)
      figures_.step_us[s] = static_cast<double>(totals.nanoseconds[s].value()) / steps / 1e3;
  }

  const KvTrace& trace_;
  const Reference& reference_;
  KvClient* client_;
  std::unique_ptr<Sequence> sequence_;
  RunFigures figures_;
};

void CheckRun(const std::string& name, const RunFigures& run, Report* report) {
  report->Check(absl::StrCat(name, ": outputs equal attention over the chosen pages"),
                run.worst_output_difference <= kOutputTolerance && run.num_compared > 0,
                absl::StrFormat("largest relative difference %.2e over %d comparisons, limit %.0e",
                                run.worst_output_difference, run.num_compared, kOutputTolerance));
  report->Check(
      absl::StrCat(name, ": no wrong bytes"), run.checksum_failures == 0,
      absl::StrCat(run.checksum_failures, " of ", run.verified, " units failed their checksum"));
}

void AddRunFigures(const std::string& name, const RunFigures& run, Report* report) {
  report->Add({name + "/bytes_dense", run.dense, "B/step", 0, 0});
  report->Add({name + "/bytes_scanned", run.scanned, "B/step", run.dense, 0});
  report->Add({name + "/bytes_attended", run.attended, "B/step", run.dense, 0});
  report->Add({name + "/bytes_fetched", run.fetched, "B/step", run.dense, 0});
  report->Add({name + "/hit_rate", run.hit_rate(), "share", 0, 0});
  report->Add({name + "/units_verified", static_cast<double>(run.verified), "units", 0, 0});
  report->Add({name + "/wrong_bytes", static_cast<double>(run.checksum_failures), "units", 0, 0});
  for (int s = 0; s < kNumStages; ++s)
    report->Add({absl::StrCat(name, "/us_", std::string(StageName(static_cast<Stage>(s)))),
                 run.step_us[s], "us/step", 0, 0});
}

// Recall rules that hold on real keys; synthetic ones are not a model.
void CheckRecall(const RecallTable& table, bool with_metric, Report* report) {
  for (const int budget : kBudgets) {
    const RecallTable::Row locks = table.Get("locks full", budget),
                           oracle = table.Get("oracle", budget);
    for (const char* rival : {"quest/", "centroid/"}) {
      const RecallTable::Row other = table.Get(table.Best(rival, budget), budget);
      report->Check(absl::StrCat("b ", budget, ": above ", rival, " at its best combine"),
                    locks.mass > other.mass && locks.selectable > other.selectable,
                    absl::StrFormat("mass %.4f against %.4f, selectable %.4f against %.4f",
                                    locks.mass, other.mass, locks.selectable, other.selectable));
    }
    if (budget < 128 || !with_metric) continue;
    report->Check(
        absl::StrCat(
            "b ", budget,
            ": .99 of the oracle's mass, .98 of its selectable recall, no layer under .90"),
        locks.mass >= 0.99 * oracle.mass && locks.selectable >= 0.98 * oracle.selectable &&
            locks.worst_layer >= 0.9,
        absl::StrFormat("%.4f, %.4f, %.4f", locks.mass / oracle.mass,
                        locks.selectable / oracle.selectable, locks.worst_layer));
  }
}

void PrintRunHeader() {
  std::printf("%6s %-12s %5s %9s %9s %9s %7s %6s %9s %6s %8s | %s\n", "b", "scan", "K", "dense kB",
              "sparse kB", "fetch kB", "ratio", "hits", "verified", "wrong", "o err",
              "us a step: append score resolve fetch attend");
}

void PrintRun(int budget, const char* scan, int k, const RunFigures& run, double output_error) {
  const double sparse = run.scanned + run.attended;
  std::printf(
      "%6d %-12s %5d %9.1f %9.1f %9.1f %7.2f %6.3f %9lld %6lld %8.4f | %.0f %.0f %.0f %.0f %.0f\n",
      budget, scan, k, run.dense / 1e3, sparse / 1e3, run.fetched / 1e3, run.dense / sparse,
      run.hit_rate(), static_cast<long long>(run.verified),
      static_cast<long long>(run.checksum_failures), output_error, run.step_us[0], run.step_us[1],
      run.step_us[2], run.step_us[3], run.step_us[4]);
}

absl::Status RunAll(const KvTrace& trace, KvClient* client, Report* report) {
  RecallTable table(trace.num_layers);
  const Reference reference = ComputeReference(trace, &table);
  Decode decode(trace, reference, client);
  PrintRunHeader();
  for (const int budget : kBudgets) {
    const int k = SelectedPages(budget, kDemoPageTokens, kKept);
    for (const bool full : {true, false}) {
      const std::string arm = full ? "locks full" : "locks progressive";
      KVD_ASSIGN_OR_RETURN(
          const RunFigures run,
          decode.Run(k, full ? ScanMode::kFull : ScanMode::kProgressive, &table, arm, budget, 0));
      const std::string name = absl::StrCat("demo/", full ? "full" : "progressive", "/b", budget);
      CheckRun(name, run, report);
      AddRunFigures(name, run, report);
      PrintRun(budget, full ? "full" : "progressive", k, run, table.Get(arm, budget).output_error);
      if (run.num_lagging > 0)
        std::printf(
            "       %d steps found a page that was not sealed yet and attended it locally\n",
            run.num_lagging);
    }
  }
  const int all_pages = static_cast<int>((trace.num_tokens + trace.num_steps) / kDemoPageTokens);
  KVD_ASSIGN_OR_RETURN(const RunFigures dense,
                       decode.Run(all_pages, ScanMode::kFull, nullptr, "", 0, 0));
  CheckRun("demo/all pages", dense, report);
  report->Check("all pages chosen equals full attention",
                dense.worst_dense_difference <= kOutputTolerance,
                absl::StrFormat("largest relative difference %.2e", dense.worst_dense_difference));

  std::printf("\n");
  PrintRecallTable(table);
  AddRecallFigures(table, "recall/", report);
  if (trace.model != "synthetic") CheckRecall(table, !absl::GetFlag(FLAGS_metric).empty(), report);
  if (absl::GetFlag(FLAGS_plot).empty()) return absl::OkStatus();
  std::vector<PlotSeries> series;
  for (const char* arm : {"oracle", "locks full", "locks progressive", "locks-E1", "locks-E0",
                          "quest/", "centroid/"}) {
    PlotSeries line = {arm, {}};
    for (const int budget : kBudgets)
      line.points.emplace_back(budget, table.Get(table.Best(arm, budget), budget).selectable);
    series.push_back(std::move(line));
  }
  return WriteRecallPlot(absl::GetFlag(FLAGS_plot),
                         absl::StrCat("Selectable attention mass kept, ", trace.model), series);
}

absl::Status RunKilled(const KvTrace& trace, KvClient* client, int pid, Report* report) {
  RecallTable table(trace.num_layers);
  const Reference reference = ComputeReference(trace, &table);
  Decode decode(trace, reference, client);
  KVD_ASSIGN_OR_RETURN(const RunFigures run, decode.Run(SelectedPages(512, kDemoPageTokens, kKept),
                                                        ScanMode::kFull, nullptr, "", 512, pid));
  std::printf(
      "killed process %d half-way: the worker finished; %d pages reported missing, %d layer runs "
      "met the loss, largest "
      "estimated lost mass of a head %.3f, %lld units verified, %lld wrong\n",
      pid, run.missing_pages, run.num_with_loss, run.lost_mass,
      static_cast<long long>(run.verified), static_cast<long long>(run.checksum_failures));
  CheckRun("demo/killed", run, report);
  report->Check("the lost daemon's pages are reported", run.missing_pages > 0,
                absl::StrCat(run.missing_pages, " missing pages"));
  report->Check("the lost mass is estimated", run.lost_mass > 0 && run.lost_mass < 1,
                absl::StrCat(run.lost_mass));
  return absl::OkStatus();
}

absl::Status Main(Report* report) {
  KVD_ASSIGN_OR_RETURN(const KvTrace trace, LoadTrace(absl::GetFlag(FLAGS_trace)));
  ClientOptions options = DemoClientOptions(trace, absl::GetFlag(FLAGS_daemons), "demo_decode");
  const std::string path = absl::GetFlag(FLAGS_path);
  if (path != "shared" && path != "ucx")
    return absl::InvalidArgumentError(
        absl::StrCat("--path: expected shared or ucx, got '", path, "'"));
  options.required_path = path == "shared" ? PathKind::kShared : PathKind::kUcx;
  options.best_path = options.required_path;
  options.on_event = [](const ClientEvent& event) {
    std::fprintf(stderr, "\ndemo_decode: %s %s: %s\n", std::string(EventName(event.kind)).c_str(),
                 event.daemon.c_str(), event.detail.c_str());
  };
  KVD_ASSIGN_OR_RETURN(const auto client, KvClient::Make(options));
  for (const DaemonView& daemon : client->Daemons()) {
    report->Check(
        absl::StrCat("path to ", daemon.address),
        daemon.attached && PathName(daemon.path.path) == path,
        absl::StrCat("expected ", path, ", got ", std::string(PathName(daemon.path.path))));
    std::printf("daemon %s: path %s, canary %.2f GB/s\n", daemon.address.c_str(),
                std::string(PathName(daemon.path.path)).c_str(),
                daemon.path.canary_bytes_per_second / 1e9);
  }
  if (absl::GetFlag(FLAGS_kill_pid) > 0)
    return RunKilled(trace, client.get(), absl::GetFlag(FLAGS_kill_pid), report);
  return RunAll(trace, client.get(), report);
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "demo_decode --trace=FILE --metric=FILE --daemons=HOST:PORT,... --path=shared|ucx");
  absl::ParseCommandLine(argc, argv);
  kvd::bench::Report report("demo_decode");
  const absl::Status status = kvd::bench::Main(&report);
  report.Check("the decode ran to its end", status.ok(), status.ToString());
  const std::string json = absl::GetFlag(FLAGS_json);
  if (!json.empty()) {
    if (const absl::Status written = report.WriteJson(json); !written.ok()) {
      std::fprintf(stderr, "demo_decode: %s\n", written.ToString().c_str());
      return 1;
    }
  }
  std::printf("demo_decode: %s\n", report.all_ok() ? "every check held" : "A CHECK FAILED");
  return report.all_ok() ? 0 : 1;
}
