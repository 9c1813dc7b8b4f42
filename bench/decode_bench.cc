// The sparse decode step with its pages in another process's GPU memory, beside the same step with
// all of them in the worker's: times, fetches, opening, memory.
//
// usage: decode_bench [--shape=llama|hk4] [--tokens=32K,128K] [--batch=1,4] [--steps=32]
// [--budget=125]
//          [--scan=auto|full|progressive] [--mode=captured|host] [--path=peer|ucx]
//          [--pool=both|peer|local] [--drift=.99]
//          [--gpu=0] [--daemon_gpu=0] [--own_namespaces] [--fetches] [--json=FILE] [--commit=HASH]
// Starts a locks-kvd of its own (beside this program, or of its build) whose arena is on
// --daemon_gpu, fills it with synthetic pages (synthetic_pages.h) and decodes --batch sequences of
// --tokens each: once with queries that stay (page cache warm), once with queries that drift. Then
// the daemon ends, and the same step runs over pages in the worker. Checked: every output of two
// steps is the same both ways; sampled heads of the second way equal attention in double precision
// over the very units that were read; those units are the host's; no unit is missing.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "bench/decode_cases.h"
#include "bench/decode_fetch.h"
#include "bench/decode_pool.h"
#include "bench/report.h"
#include "proto/status.h"
#include "tests/support/gpu.h"

ABSL_FLAG(
    std::string, shape, "llama",
    "llama: 32 layers, 8 KV heads, group 4; hk4: 40 layers, 4 KV heads, group 8; D 128, bf16");
ABSL_FLAG(std::vector<std::string>, tokens, std::vector<std::string>({"32K"}), "lengths");
ABSL_FLAG(std::vector<std::string>, batch, std::vector<std::string>({"1"}), "numbers of sequences");
ABSL_FLAG(std::string, most_tokens, "",
          "leaves out what needs more tokens in all; empty: leaves out nothing");
ABSL_FLAG(int, steps, 32, "steps of each timed loop");
ABSL_FLAG(int, budget, 125, "K: 125, with sink, window and tail, is 2,048 attended tokens");
ABSL_FLAG(std::string, scan, "auto", "auto, full or progressive");
ABSL_FLAG(std::string, mode, "captured", "captured or host");
ABSL_FLAG(std::string, path, "peer", "peer or ucx");
ABSL_FLAG(std::string, pool, "both",
          "peer: pages in the daemon; local: all KV in the worker; both: one after the other");
ABSL_FLAG(
    double, drift, .99,
    "correlation of a query with the step before's; at 128K tokens .98 misses the page cache as "
    "often as a real trace does (cache_bench)");
ABSL_FLAG(int, gpu, 0, "the worker's");
ABSL_FLAG(int, daemon_gpu, 0, "the daemon's");
ABSL_FLAG(bool, own_namespaces, false,
          "the daemon in PID, IPC and mount namespaces of its own (root)");
ABSL_FLAG(bool, fetches, false, "also fetches, opening and copies");
ABSL_FLAG(int, fill_threads, 8, "threads that put the pages");
ABSL_FLAG(std::string, json, "", "write the figures to this file");
ABSL_FLAG(std::string, commit, "", "commit of the programs, where there is no checkout");

namespace kvd::bench {
namespace {

constexpr int kPageTokens = 16;

KvGeometry GeometryOf(const std::string& shape) {
  const bool llama = shape == "llama";
  return {.num_layers = llama ? 32 : 40,
          .num_q_heads = 32,
          .num_kv_heads = llama ? 8 : 4,
          .num_shards = 1,
          .head_dim = 128,
          .page_tokens = kPageTokens,
          .rank = 8,
          .dtype = KvDtype::kBf16,
          .rotated = true,
          .softmax_scale = 0.088388f,
          .logit_softcap = 0};
}

// "32K", "1M", "4096"; 0 if it is none.
int64_t TokensOf(std::string text) {
  int64_t unit = 1;
  if (!text.empty() && (text.back() == 'K' || text.back() == 'M')) {
    unit = text.back() == 'K' ? 1024 : 1024 * 1024;
    text.pop_back();
  }
  int64_t count = 0;
  return absl::SimpleAtoi(text, &count) && count > 0 ? count * unit : 0;
}

struct Plan {
  KvGeometry geometry;
  StepOptionsOfBench options;
  PathKind path = PathKind::kPeer;
  std::vector<DecodeCase> cases;
  int num_pages = 0;  // of the prompt: enough for the largest case
};

absl::StatusOr<Plan> MakePlan() {
  Plan plan;
  const std::string shape = absl::GetFlag(FLAGS_shape);
  const std::map<std::string, ScanMode> scans = {{"auto", ScanMode::kAuto},
                                                 {"full", ScanMode::kFull},
                                                 {"progressive", ScanMode::kProgressive}};
  const std::map<std::string, BatchMode> modes = {{"captured", BatchMode::kCaptured},
                                                  {"host", BatchMode::kHostDriven}};
  const std::map<std::string, PathKind> paths = {{"peer", PathKind::kPeer},
                                                 {"ucx", PathKind::kUcx}};
  const auto scan = scans.find(absl::GetFlag(FLAGS_scan));
  const auto mode = modes.find(absl::GetFlag(FLAGS_mode));
  const auto path = paths.find(absl::GetFlag(FLAGS_path));
  const std::string pool = absl::GetFlag(FLAGS_pool);
  if ((shape != "llama" && shape != "hk4") || scan == scans.end() || mode == modes.end() ||
      path == paths.end() || (pool != "both" && pool != "peer" && pool != "local")) {
    return absl::InvalidArgumentError(
        "--shape, --scan, --mode, --path or --pool has none of its values: see --help");
  }
  if (pool == "local" && scan->second == ScanMode::kAuto)
    return absl::InvalidArgumentError("--pool=local needs --scan=full or progressive");
  plan.geometry = GeometryOf(shape);
  plan.options = {.mode = mode->second,
                  .step = {},
                  .steps = absl::GetFlag(FLAGS_steps),
                  .drift = static_cast<float>(absl::GetFlag(FLAGS_drift))};
  plan.options.step.budget = absl::GetFlag(FLAGS_budget);
  plan.options.step.scan = scan->second;
  plan.options.step.fetch_timeout = absl::Seconds(5);
  plan.path = path->second;
  const int64_t most = absl::GetFlag(FLAGS_most_tokens).empty()
                           ? INT64_MAX
                           : TokensOf(absl::GetFlag(FLAGS_most_tokens));
  for (const std::string& length : absl::GetFlag(FLAGS_tokens)) {
    for (const std::string& batch : absl::GetFlag(FLAGS_batch)) {
      const int64_t tokens = TokensOf(length);
      int count = 0;
      if (tokens < 1024 || tokens % kPageTokens != 0 || !absl::SimpleAtoi(batch, &count) ||
          count < 1) {
        return absl::InvalidArgumentError(absl::StrCat("--tokens=", length, " --batch=", batch,
                                                       ": expected numbers such as 32K and 4"));
      }
      if (tokens * count > most) continue;
      const auto pages = static_cast<int>(tokens / kPageTokens);
      plan.cases.push_back({absl::StrCat(shape, " ", count, " x ", length), count, pages});
      plan.num_pages = std::max(plan.num_pages, pages * count);
    }
  }
  return plan;
}

// Bytes of KV and records that a dense step reads, over those of the sparse one.
double BytesRatio(const Plan& plan, const DecodeCase& c, ScanMode scan) {
  const SummaryLayout record = MakeSummaryLayout(plan.geometry);
  const double unit = static_cast<double>(MakeSlotLayout(plan.geometry).unit_bytes);
  const double attended = (plan.options.step.budget + 3) * unit;
  const double dense = c.num_pages * unit;
  if (scan == ScanMode::kFull)
    return dense / (c.num_pages * static_cast<double>(record.record_bytes()) + attended);
  const double candidates = std::min(plan.options.step.candidates() + 2, c.num_pages);
  return dense / (c.num_pages * static_cast<double>(record.coarse_bytes) +
                  candidates * record.record_bytes() + attended);
}

void AddLoop(const std::string& name, const LoopFigures& loop, Report* report) {
  report->Add({absl::StrCat(name, ", step"), loop.step_us, "us", 0, 0});
  report->Add({absl::StrCat(name, ", layers alone"), loop.graph_us, "us", 0, 0});
  report->Add({absl::StrCat(name, ", host"), loop.host_us, "us", 0, 0});
}

void AddPoolCase(const Plan& plan, const DecodeCase& c, const CaseFigures& figures,
                 Report* report) {
  AddLoop(absl::StrCat(c.name, ", pool, warm"), figures.warm, report);
  AddLoop(absl::StrCat(c.name, ", pool, drifting"), figures.drifting, report);
  report->Add({absl::StrCat(c.name, ", hit rate, drifting"), figures.drifting.hit_rate, "", 0, 0});
  report->Add({absl::StrCat(c.name, ", open a sequence"), figures.open_ms, "ms", 0, 0});
  const double formula = figures.formula_bytes / (1 << 20),
               over = figures.counted_bytes / figures.formula_bytes;
  report->Add({absl::StrCat(c.name, ", worker's memory by its own count"),
               figures.counted_bytes / (1 << 20), "MiB", formula, 0});
  report->Add({absl::StrCat(c.name, ", worker's memory by the driver"),
               figures.gpu_bytes / (1 << 20), "MiB", formula, 0});
  report->Add(
      {absl::StrCat(c.name, ", worker's memory over records and cache"), over, "times", 1, over});
  report->Add({absl::StrCat(c.name, ", scan is progressive"),
               figures.scan == ScanMode::kProgressive ? 1.0 : 0.0, "", 0, 0});
  const double bytes = BytesRatio(plan, c, figures.scan);
  report->Add({absl::StrCat(c.name, ", KV bytes dense over sparse"), bytes, "times", 0, bytes});
  const uint64_t failed = figures.warm.failed + figures.drifting.failed;
  report->Check(absl::StrCat(c.name, ": every unit was there"), failed == 0,
                absl::StrCat(failed, " were not"));
}

// Over TCP alone, which goes through pinned memory; then as UCX likes it best, if that is another
// way.
absl::Status MeasureUcx(const Plan& plan, const DecodePool& pool, double copy, Report* report) {
  const std::string shape = absl::GetFlag(FLAGS_shape) + ": ";
  for (const char* transports : {"tcp", ""}) {
    KVD_ASSIGN_OR_RETURN(auto session,
                         PoolSession::Attach(pool.OptionsFor(PathKind::kUcx), transports));
    const std::string memory = session->attachment()->path.memory;
    std::fprintf(stderr, "decode_bench: ucx %s, transports '%s': %s\n",
                 UcxWorker::Version().c_str(), transports, memory.c_str());
    const bool between_gpus = absl::StartsWith(memory, "between GPU memories");
    if (*transports == '\0' && !between_gpus) continue;
    KVD_ASSIGN_OR_RETURN(const MatchedPages leased, pool.Lease(*session, plan.num_pages));
    const std::string what =
        shape + (between_gpus ? "ucx path with CUDA, cuda_ipc: request, gather, reply"
                              : "ucx path to the GPU");
    for (const int units : {512, 8192}) {
      KVD_ASSIGN_OR_RETURN(const double us, FetcherUs(*session, pool, plan.num_pages, units, 20));
      const double rate = units * 8192 / us / 1e3;
      report->Add({absl::StrCat(what, ", list of ", units, " units"), us, "us",
                   units * 8192 / copy / 1e3, 0});
      report->Add(
          {absl::StrCat(what, ", rate, ", units, " units"), rate, "GB/s", copy, rate / copy});
    }
  }
  return absl::OkStatus();
}

absl::Status MeasureFetches(const Plan& plan, const DecodePool& pool, Report* report) {
  const int gpu = absl::GetFlag(FLAGS_gpu), daemon_gpu = absl::GetFlag(FLAGS_daemon_gpu);
  const double copy = CopyGbPerS(gpu, daemon_gpu);
  const std::string shape = absl::GetFlag(FLAGS_shape) + ": ";
  report->Add({shape + "copy from the daemon's GPU, 1 GiB", copy, "GB/s", 0, 0});
  KVD_ASSIGN_OR_RETURN(auto peer, PoolSession::Attach(pool.OptionsFor(PathKind::kPeer)));
  const int heads = plan.geometry.num_kv_heads, pages = plan.num_pages;
  KVD_ASSIGN_OR_RETURN(const double layer_us,
                       FetchPagesUs(*peer, pool, pages, 128 / heads, plan.geometry.num_layers));
  report->Add(
      {shape + "fetch 128 units a layer, in a graph", layer_us, "us", 128 * 8192 / copy / 1e3, 0});
  KVD_ASSIGN_OR_RETURN(const double cold_us, FetchPagesUs(*peer, pool, pages, 128, 32));
  const double cold = 128.0 * heads * 8192 / cold_us / 1e3;
  report->Add({shape + "fetch 128 units a head, 32 layers", cold, "GB/s", copy, cold / copy});
  // As many units in one list: what no decode step knows ahead, but a prefetch does.
  constexpr int kColdUnits = 32 * 8 * 128;
  KVD_ASSIGN_OR_RETURN(const double all_us, GatherUs(*peer, pool, pages, kColdUnits));
  const double all = kColdUnits * 8192.0 / all_us / 1e3;
  report->Add(
      {shape + "gather 32768 units, one list on the device", all, "GB/s", copy, all / copy});
  for (const int units : {512, 8192}) {
    KVD_ASSIGN_OR_RETURN(const double us, GatherUs(*peer, pool, pages, units));
    report->Add({absl::StrCat(shape, "gather ", units, " units, list on the device"), us, "us",
                 units * 8192 / copy / 1e3, 0});
    KVD_ASSIGN_OR_RETURN(const double list_us, FetcherUs(*peer, pool, pages, units, 50));
    report->Add({absl::StrCat(shape, "peer path, list of ", units, " units from the host"), list_us,
                 "us", 0, 0});
  }
  KVD_ASSIGN_OR_RETURN(const OpenFigures open, pool.MeasureOpen(*peer, pages));
  const double mirror = open.mirror_bytes / open.mirror_ms / 1e6;
  report->Add({absl::StrCat(shape, "open: hash ", pages, " pages"), open.hash_ms, "ms", 0, 0});
  report->Add(
      {absl::StrCat(shape, "open: match and lease ", pages, " pages"), open.match_ms, "ms", 0, 0});
  report->Add({absl::StrCat(shape, "open: hash, match and lease ", pages, " pages"),
               open.hash_ms + open.match_ms, "ms", 0, 0});
  report->Add({absl::StrCat(shape, "open: fill the mirror of ", pages, " pages"), mirror, "GB/s",
               copy, mirror / copy});
  return MeasureUcx(plan, pool, copy, report);
}

absl::Status Save(const Report& report) {
  const std::string json = absl::GetFlag(FLAGS_json);
  return json.empty() ? absl::OkStatus() : report.WriteJson(json);
}

// Results of the cases by position; those that could not run are reported and left out.
absl::Status RunPool(const Plan& plan, std::map<size_t, CaseFigures>* results, Report* report) {
  KVD_ASSIGN_OR_RETURN(auto pool,
                       DecodePool::Start({.geometry = plan.geometry,
                                          .num_pages = plan.num_pages,
                                          .spare_pages = 1024,
                                          .worker_gpu = absl::GetFlag(FLAGS_gpu),
                                          .daemon_gpu = absl::GetFlag(FLAGS_daemon_gpu),
                                          .own_namespaces = absl::GetFlag(FLAGS_own_namespaces),
                                          .fill_threads = absl::GetFlag(FLAGS_fill_threads)}));
  KVD_RETURN_IF_ERROR(pool->Fill());
  report->Add(
      {absl::GetFlag(FLAGS_shape) + ": put over loopback", pool->fill_gb_per_s(), "GB/s", 0, 0});
  KVD_ASSIGN_OR_RETURN(auto client, KvClient::Make(pool->OptionsFor(plan.path)));
  for (size_t i = 0; i < plan.cases.size(); ++i) {
    std::fprintf(stderr, "decode_bench: %s, pool\n", plan.cases[i].name.c_str());
    auto figures = RunPoolCase(plan.cases[i], plan.options, *pool, *client);
    report->Check(absl::StrCat(plan.cases[i].name, ": pool"), figures.ok(),
                  figures.status().ToString());
    if (!figures.ok()) continue;
    AddPoolCase(plan, plan.cases[i], *figures, report);
    (*results)[i] = *std::move(figures);
  }
  client.reset();
  KVD_RETURN_IF_ERROR(Save(*report));  // what follows may end the process
  return absl::GetFlag(FLAGS_fetches) ? MeasureFetches(plan, *pool, report) : absl::OkStatus();
}

absl::Status RunLocal(const Plan& plan, const std::map<size_t, CaseFigures>& pool, Report* report) {
  KVD_ASSIGN_OR_RETURN(WorkerShape shape, WorkerShape::Make(plan.geometry, {}));
  shape.place = OnGpu(absl::GetFlag(FLAGS_gpu));
  for (size_t i = 0; i < plan.cases.size(); ++i) {
    const DecodeCase& c = plan.cases[i];
    const auto in_pool = pool.find(i);
    StepOptionsOfBench options = plan.options;
    options.mode = BatchMode::kCaptured;
    if (in_pool != pool.end()) options.step.scan = in_pool->second.scan;  // the same step
    if (options.step.scan == ScanMode::kAuto) continue;                   // its pool case failed
    std::fprintf(stderr, "decode_bench: %s, local\n", c.name.c_str());
    std::vector<std::string> problems;
    const auto figures = RunLocalCase(c, options, shape, &problems);
    report->Check(absl::StrCat(c.name, ": local"), figures.ok(), figures.status().ToString());
    if (!figures.ok()) continue;
    report->Check(absl::StrCat(c.name, ": local step is exact"), problems.empty(),
                  problems.empty() ? "" : problems[0]);
    AddLoop(absl::StrCat(c.name, ", local"), figures->warm, report);
    if (in_pool == pool.end()) continue;
    const std::string apart = CompareOutputs(in_pool->second, *figures);
    report->Check(absl::StrCat(c.name, ": pool and local agree"), apart.empty(), apart);
    const double over = in_pool->second.warm.step_us / figures->warm.step_us;
    report->Add({absl::StrCat(c.name, ", pool over local, warm"), over, "times", 1, over});
  }
  return absl::OkStatus();
}

int Main() {
  if (const std::string why = testing::WhyNoGpu(); !why.empty()) {
    std::fprintf(stderr, "decode_bench: %s\n", why.c_str());
    return 2;
  }
  const auto plan = MakePlan();
  if (!plan.ok()) {
    std::fprintf(stderr, "decode_bench: %s\n", plan.status().ToString().c_str());
    return 2;
  }
  KVD_CUDA_OK(cudaSetDevice(absl::GetFlag(FLAGS_gpu)));
  Report report("decode_bench");
  cudaDeviceProp properties = {};
  KVD_CUDA_OK(cudaGetDeviceProperties(&properties, absl::GetFlag(FLAGS_gpu)));
  const bool same = absl::GetFlag(FLAGS_gpu) == absl::GetFlag(FLAGS_daemon_gpu);
  report.SetMachine(
      absl::StrCat(properties.name, same ? ", both processes on one" : ", the daemon on another"));
  if (!absl::GetFlag(FLAGS_commit).empty()) report.SetCommit(absl::GetFlag(FLAGS_commit));
  std::map<size_t, CaseFigures> in_pool;
  const std::string pool = absl::GetFlag(FLAGS_pool);
  if (pool != "local") {
    const absl::Status status = RunPool(*plan, &in_pool, &report);
    report.Check("the pool", status.ok(), status.ToString());
    (void)Save(report);
  }
  if (pool != "peer") {
    const absl::Status status = RunLocal(*plan, in_pool, &report);
    report.Check("the worker alone", status.ok(), status.ToString());
  }
  return report.Finish(absl::GetFlag(FLAGS_json));
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "decode_bench [--shape=llama|hk4] [--tokens=32K,128K] [--batch=1,4] [--fetches] "
      "[--json=FILE]: see decode_bench.cc");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
