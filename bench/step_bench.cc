// The whole attention step of one layer with all KV in the GPU's own memory: score, select, append,
// attend 2,048 tokens, by either scan of the records. What dense attention over the same tokens and
// the LOCKS authors' step (bench/peers) are compared with.
//
// usage: step_bench [--only=REGEX] [--json=FILE] [--commit=HASH]
// A figure is microseconds of a layer in a CUDA graph of 32; a few layers' records take turns, more
// than the L2 holds.
// Checked: sampled heads of every case equal attention in double precision over the very units that
// were read.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <regex>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "bench/gpu_timing.h"
#include "bench/local_step.h"
#include "bench/report.h"
#include "client/batch_scan.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

ABSL_FLAG(std::string, only, "", "cases whose name this regular expression finds; empty: all");
ABSL_FLAG(std::string, json, "", "write the figures to this file");
ABSL_FLAG(std::string, commit, "", "commit of the program, where there is no checkout");

namespace kvd::bench {
namespace {

using testing::DeviceArray;

constexpr int kPageTokens = 16, kHeadDim = 128, kQueryHeads = 32, kBudget = 125,
              kLayersOfGraph = 32;
constexpr size_t kPastL2 = size_t{1} << 30;  // bytes of records of the layers that take turns

struct Case {
  std::string shape;  // as bench/peers and decode_bench name it
  int kv_heads;
  int batch;
  int thousand_tokens;
  std::string name() const {
    const bool millions = thousand_tokens % 1024 == 0;
    return absl::StrCat(shape, " ", batch, " x ",
                        millions ? thousand_tokens / 1024 : thousand_tokens, millions ? "M" : "K");
  }
};

std::vector<Case> Cases() {
  return {{"llama", 8, 1, 16},   {"llama", 8, 1, 32},   {"llama", 8, 1, 128}, {"llama", 8, 1, 256},
          {"llama", 8, 1, 1024}, {"llama", 8, 1, 4096}, {"llama", 8, 8, 32},  {"llama", 8, 8, 128},
          {"hk4", 4, 1, 128},    {"hk4", 4, 1, 1024}};
}

KvGeometry GeometryOf(const Case& c) {
  KvGeometry geometry = {.num_layers = 1,
                         .num_q_heads = kQueryHeads,
                         .num_kv_heads = c.kv_heads,
                         .num_shards = 1,
                         .head_dim = kHeadDim,
                         .page_tokens = kPageTokens,
                         .rank = 8,
                         .dtype = KvDtype::kBf16,
                         .rotated = true,
                         .softmax_scale = 0.088388f,
                         .logit_softcap = 0};
  const size_t records = static_cast<size_t>(c.batch) * static_cast<size_t>(c.thousand_tokens) *
                         1024 / kPageTokens * static_cast<size_t>(c.kv_heads) *
                         MakeSummaryLayout(geometry).record_bytes();
  geometry.num_layers = std::min(kLayersOfGraph, static_cast<int>(kPastL2 / records) + 2);
  return geometry;
}

// Inputs and outputs of the layers that take turns, [L][N, heads, D].
struct Tensors {
  Tensors(const WorkerShape& shape, int batch)
      : q_values(static_cast<size_t>(batch * shape.num_q_heads() * kHeadDim)),
        kv_values(static_cast<size_t>(batch * shape.num_heads() * kHeadDim)),
        lse_values(static_cast<size_t>(batch * shape.num_q_heads())),
        query(Random(q_values * Layers(shape), 1)),
        q(query),
        k(Random(kv_values * Layers(shape), 2)),
        v(Random(kv_values * Layers(shape), 3)),
        o(q_values * Layers(shape)),
        lse(lse_values * Layers(shape)) {}
  static size_t Layers(const WorkerShape& shape) { return static_cast<size_t>(shape.num_layers()); }
  static std::vector<uint16_t> Random(size_t count, uint32_t seed) {
    return testing::RandomKv(static_cast<int64_t>(count), KvDtype::kBf16, 1.0f, seed);
  }
  const size_t q_values, kv_values, lse_values;  // of one layer
  const std::vector<uint16_t> query;
  DeviceArray<uint16_t> q, k, v;
  DeviceArray<float> o, lse;
};

// A few heads of the last step that each layer ran, and of the last selection. The problem, or
// empty.
std::string CheckStep(const LocalStep& step, const WorkerShape& shape, const Case& c,
                      const Tensors& t) {
  const std::vector<float> o = t.o.Download(), lse = t.lse.Download();
  for (int i = 0; i < 6; ++i) {
    const int layer = i * 7 % shape.num_layers(), head = i * 3 % shape.num_heads();
    const auto slice = [layer](const auto& all, size_t size) {
      const auto from =
          all.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(layer) * size);
      return std::vector(from, from + static_cast<std::ptrdiff_t>(size));
    };
    std::string problem = step.Check(i % c.batch, layer, head, slice(t.query, t.q_values),
                                     slice(o, t.q_values), slice(lse, t.lse_values));
    if (problem.empty() && step.options().step.scan == ScanMode::kFull)
      problem = step.CheckSelection(i % c.batch, head);
    if (!problem.empty()) return problem;
  }
  return "";
}

// Microseconds of a layer of `num_layers` in a graph, and checks what they give.
double MeasureScan(const Case& c, const WorkerShape& shape, ScanMode scan, int num_layers,
                   Report* report) {
  BatchOptions options = {.max_sequences = c.batch,
                          .max_tokens = int64_t{c.thousand_tokens} * 1024 + kPageTokens,
                          .mode = BatchMode::kCaptured,
                          .step = {}};
  options.step.budget = kBudget;
  options.step.scan = scan;
  auto step = LocalStep::Make(shape, options, c.thousand_tokens * 1024 / kPageTokens);
  const std::string name =
      absl::StrCat(c.name(), scan == ScanMode::kFull ? ", full" : ", progressive");
  if (!step.ok()) {
    report->Check(name, false, step.status().ToString());
    return 0;
  }
  Tensors t(shape, c.batch);
  t.o.Poison(0xFF);  // NaN
  t.lse.Poison(0xFF);
  const testing::Stream stream;
  absl::Status status = (*step)->BeginStep(stream.get());
  stream.Wait();
  const double us = MedianUs(num_layers, [&](int i, cudaStream_t on) {
    const int layer = i % shape.num_layers();
    const auto l = static_cast<size_t>(layer);
    status.Update((*step)->Run(
        layer,
        {t.q.data() + l * t.q_values, t.k.data() + l * t.kv_values, t.v.data() + l * t.kv_values},
        {t.o.data() + l * t.q_values, t.lse.data() + l * t.lse_values}, on));
  });
  if (num_layers < shape.num_layers()) return us;
  const std::string problem = status.ok() ? CheckStep(**step, shape, c, t) : status.ToString();
  report->Check(absl::StrCat(name, ": is exact over what it read"), problem.empty(), problem);
  return us;
}

void MeasureCase(const Case& c, Report* report) {
  auto shape = WorkerShape::Make(GeometryOf(c), {});
  if (!shape.ok()) return report->Check(c.name(), false, shape.status().ToString());
  shape->place = OnGpu(0);
  const std::string name = absl::StrCat(c.name(), ", step of a layer");
  const double full = MeasureScan(c, *shape, ScanMode::kFull, kLayersOfGraph, report);
  report->Add({name + ", full scan", full, "us", 0, 0});
  const double single = MeasureScan(c, *shape, ScanMode::kFull, 1, report);
  report->Add(
      {name + ", graph of 32 over 32 single ones", full / single, "times", 1, full / single});
  const int64_t pages = int64_t{c.thousand_tokens} * 1024 / kPageTokens;
  StepOptions options;
  options.budget = kBudget;
  double progressive = 0;
  if (options.candidates() < pages) {
    progressive = MeasureScan(c, *shape, ScanMode::kProgressive, kLayersOfGraph, report);
    report->Add({name + ", progressive scan", progressive, "us", full, progressive / full});
  }
  const ScanMode planned =
      ChooseBatchScan(*shape, c.batch, pages, options.candidates(), ScanMode::kAuto);
  report->Add({name, planned == ScanMode::kFull ? full : progressive, "us", 0, 0});
}

int Main() {
  if (const std::string why = testing::WhyNoGpu(); !why.empty()) {
    std::fprintf(stderr, "step_bench: %s\n", why.c_str());
    return 2;
  }
  Report report("step_bench");
  cudaDeviceProp properties = {};
  KVD_CUDA_OK(cudaGetDeviceProperties(&properties, 0));
  report.SetMachine(properties.name);
  if (!absl::GetFlag(FLAGS_commit).empty()) report.SetCommit(absl::GetFlag(FLAGS_commit));
  const std::regex only(absl::GetFlag(FLAGS_only));
  for (const Case& c : Cases()) {
    if (!std::regex_search(c.name(), only)) continue;
    std::fprintf(stderr, "step_bench: %s\n", c.name().c_str());
    MeasureCase(c, &report);
  }
  return report.Finish(absl::GetFlag(FLAGS_json));
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "step_bench [--only=REGEX] [--json=FILE] [--commit=HASH]: see step_bench.cc");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
