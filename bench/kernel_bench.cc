// The reference kernels of the decode step on one core, each beside what the core's memory gives.
//
// usage: kernel_bench [--repetitions N] [--json FILE]
// Medians over repetitions. The limit of a figure is a plain read (or memcpy) of the same bytes in
// the same run: sums of vector loads over buffers larger than the last cache. Every kernel's output
// is checked on samples; a wrong one fails the program.

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "bench/report.h"
#include "kernels/attend.h"
#include "kernels/gather.h"
#include "kernels/score.h"
#include "kernels/select.h"
#include "kernels/simd.h"
#include "tests/support/kv_data.h"
#include "tests/support/oracle.h"
#include "tests/support/records.h"

ABSL_FLAG(int, repetitions, 9, "how often each figure is taken; the median counts");
ABSL_FLAG(std::string, json, "", "write the figures to this file");

namespace kvd::bench {
namespace {

using kvd::testing::RandomKv;
using kvd::testing::RandomRecords;

constexpr int kHeadDim = 128, kPageTokens = 16, kRank = 8;
constexpr float kScale = .088388348f;

// Time of this thread alone: another process on the core does not count.
double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Median seconds of each of `bodies`, taken in turns so that all see the same state of the machine.
std::vector<double> MedianSeconds(const std::vector<std::function<void()>>& bodies) {
  std::vector<std::vector<double>> seconds(bodies.size());
  for (int r = 0; r < absl::GetFlag(FLAGS_repetitions); ++r) {
    for (size_t i = 0; i < bodies.size(); ++i) {
      const double start = CpuSeconds();
      bodies[i]();
      seconds[i].push_back(CpuSeconds() - start);
    }
  }
  std::vector<double> medians;
  for (const auto& s : seconds) medians.push_back(Median(s));
  return medians;
}

// Plain read: four independent sums of vector loads. The result goes where the compiler must
// produce it.
volatile uint64_t g_sink;
void PlainRead(const uint8_t* data, size_t bytes) {
  using Vector = uint64_t __attribute__((vector_size(16), aligned(1), may_alias));
  Vector a = {}, b = {}, c = {}, d = {};
  for (size_t i = 0; i + 64 <= bytes; i += 64) {
    const auto* v = reinterpret_cast<const Vector*>(data + i);
    a += v[0];
    b += v[1];
    c += v[2];
    d += v[3];
  }
  const Vector sum = (a + b) + (c + d);
  g_sink = sum[0] + sum[1];
}

// --- score
// -----------------------------------------------------------------------------------------

double WorstScoreError(const ScoreArgs& a, RandomRecords& records, bool full) {
  double worst = 0;
  for (int64_t p = 0; p < a.num_pages[0]; p += 9973) {
    for (int g = 0; g < a.group; ++g) {
      const double truth = kvd::testing::OracleRecordLse(
          a.query + g * kHeadDim, records.coarse_at(p), full ? records.fine_at(p) : nullptr,
          kHeadDim, kPageTokens, kRank, a.dtype, double{a.softmax_scale}, 0);
      const double error = std::fabs(a.lse[g * a.lse_stride + p] - truth);
      worst = std::max(worst, error / kvd::testing::LseTolerance(truth));
    }
  }
  return worst;
}

void BenchScore(bool full, Report* report) {
  // 105 MB of whole records, 126 MB of coarse parts.
  const int32_t num_pages = full ? 1 << 17 : 1 << 19;
  RandomRecords records = kvd::testing::MakeRandomRecords({.count = num_pages});
  const char* scan = full ? "full" : "coarse";
  for (int group : {1, 4, 8}) {
    const std::vector<uint16_t> query = RandomKv(group * kHeadDim, KvDtype::kBf16, 1, 3);
    std::vector<float> lse(static_cast<size_t>(group) * static_cast<size_t>(num_pages));
    const uint8_t *coarse = records.coarse.data(), *fine = records.fine.data();
    const int64_t capacity = num_pages;
    const ScoreArgs args = {
        1,         1,         group,        kHeadDim, kPageTokens, kRank,     KvDtype::kBf16,
        kScale,    0,         query.data(), &coarse,  &fine,       &capacity, &num_pages,
        num_pages, lse.data()};
    const std::vector<double> seconds =
        MedianSeconds({[&] {
                         PlainRead(coarse, records.coarse.size());
                         if (full) PlainRead(fine, records.fine.size());
                       },
                       [&] { full ? ref::ScoreFull(args) : ref::ScoreCoarse(args); }});
    const auto bytes =
        static_cast<double>(records.coarse.size() + (full ? records.fine.size() : 0));
    const std::string name = absl::StrCat("score/", scan, "/D128_B16_R8_G", group);
    const double rate = bytes / seconds[1] / 1e9, limit = bytes / seconds[0] / 1e9;
    report->Add({name, rate, "GB/s", limit, rate / limit});
    report->Add({name + "/page", seconds[1] / num_pages * 1e9, "ns", 0, 0});
    const double worst = WorstScoreError(args, records, full);
    report->Check(name, worst <= 1, absl::StrCat("error is ", worst, " of the tolerance"));
  }
}

// --- attend
// ----------------------------------------------------------------------------------------

void BenchAttend(Report* report) {
  constexpr int kUnits = 126, kGroup = 4, kLists = 256;
  constexpr size_t kUnitBytes = MakeUnitLayout(kHeadDim, kPageTokens).bytes;
  constexpr int kPool = 1 << 15;  // 256 MiB of units
  const std::vector<uint16_t> pool =
      RandomKv(int64_t{kPool} * static_cast<int64_t>(kUnitBytes / 2), KvDtype::kBf16, 1, 4);
  const std::vector<uint16_t> query = RandomKv(kGroup * kHeadDim, KvDtype::kBf16, 1, 5);
  std::mt19937 random(6);
  std::vector<UnitRef> units(kUnits * kLists);
  for (UnitRef& unit : units) {
    unit = {reinterpret_cast<const uint8_t*>(pool.data()) + random() % kPool * kUnitBytes,
            kPageTokens};
  }
  std::vector<float> o(kGroup * kHeadDim), lse(kGroup);
  const int32_t num_units = kUnits;
  const std::vector<double> seconds =
      MedianSeconds({[&] {
                       for (const UnitRef& unit : units) PlainRead(unit.unit, kUnitBytes);
                     },
                     [&] {
                       for (int list = 0; list < kLists; ++list) {
                         ref::Attend({1, 1, kGroup, kHeadDim, kPageTokens, KvDtype::kBf16, kScale,
                                      0, query.data(), kUnits, units.data() + list * kUnits,
                                      &num_units, o.data(), lse.data()});
                       }
                     }});
  const double bytes = double{kUnitBytes} * kUnits * kLists;
  const double rate = bytes / seconds[1] / 1e9, limit = bytes / seconds[0] / 1e9;
  report->Add({"attend/K126_D128_B16_G4", rate, "GB/s", limit, rate / limit});
  report->Add({"attend/K126_D128_B16_G4/list", seconds[1] / kLists * 1e6, "us", 0, 0});

  std::vector<uint16_t> keys, values;  // of the last list
  for (int u = kUnits * (kLists - 1); u < kUnits * kLists; ++u) {
    const auto* k = reinterpret_cast<const uint16_t*>(units[static_cast<size_t>(u)].unit);
    keys.insert(keys.end(), k, k + kPageTokens * kHeadDim);
    values.insert(values.end(), k + kPageTokens * kHeadDim, k + 2 * kPageTokens * kHeadDim);
  }
  const auto truth =
      kvd::testing::OracleAttend(query.data(), keys.data(), values.data(), kUnits * kPageTokens,
                                 kHeadDim, KvDtype::kBf16, double{kScale}, 0);
  double worst = std::fabs(lse[0] - truth.lse) / 1e-5, largest = 0;
  for (double x : truth.o) largest = std::max(largest, std::fabs(x));
  for (size_t d = 0; d < kHeadDim; ++d)
    worst = std::max(worst, std::fabs(o[d] - truth.o[d]) / (2e-5 * largest));
  report->Check("attend", worst <= 1, absl::StrCat("error is ", worst, " of the tolerance"));
}

// --- gather
// ----------------------------------------------------------------------------------------

void BenchGather(Report* report) {
  constexpr size_t kUnitBytes = 8192, kArenaBytes = size_t{1} << 30, kUnits = 512;
  std::vector<uint64_t> arena(kArenaBytes / 8), out(kUnits * kUnitBytes / 8);
  for (size_t i = 0; i < arena.size(); ++i) arena[i] = i * 0x9E3779B97F4A7C15u;
  PageHeader header = {};
  header.generation.store(2);
  std::mt19937 random(7);
  std::vector<GatherUnit> units(kUnits);
  std::vector<uint8_t> valid(kUnits);
  // A new list each time: the same 4 MiB would stay in the cache.
  const auto choose = [&] {
    for (size_t i = 0; i < kUnits; ++i) {
      units[i] = {reinterpret_cast<const uint8_t*>(arena.data()) +
                      random() % (kArenaBytes / kUnitBytes) * kUnitBytes,
                  &header, 2, reinterpret_cast<uint8_t*>(out.data()) + i * kUnitBytes};
    }
  };
  std::vector<double> copy, gather;
  int64_t num_valid = kUnits;
  for (int r = 0; r < 20 * absl::GetFlag(FLAGS_repetitions); ++r) {
    choose();
    double start = CpuSeconds();
    for (const GatherUnit& unit : units) std::memcpy(unit.destination, unit.source, kUnitBytes);
    copy.push_back(CpuSeconds() - start);
    choose();
    start = CpuSeconds();
    num_valid =
        std::min(num_valid, ref::GatherUnits(units.data(), kUnits, kUnitBytes, valid.data()));
    gather.push_back(CpuSeconds() - start);
  }
  bool equal = num_valid == kUnits;
  for (const GatherUnit& unit : units)
    equal = equal && std::memcmp(unit.destination, unit.source, kUnitBytes) == 0;
  const double bytes = double{kUnits * kUnitBytes};
  const double rate = bytes / Median(gather) / 1e9, limit = bytes / Median(copy) / 1e9;
  report->Add({"gather/512x8KiB_of_1GiB", rate, "GB/s", limit, rate / limit});
  report->Check("gather", equal, "bytes differ from the source, or a sealed unit was refused");
}

// --- select
// ----------------------------------------------------------------------------------------

void BenchSelect(Report* report) {
  constexpr int kPages = 65536, kSelect = 126, kHeads = 4, kGroup = 4;
  std::mt19937 random(8);
  std::vector<float> lse(size_t{kPages} * kHeads * kGroup);
  for (float& x : lse) x = std::normal_distribution<float>(0, 3)(random);
  const int32_t num_pages = kPages;
  std::vector<int32_t> pages(kHeads * kSelect), num_selected(kHeads);
  std::vector<float> threshold(kHeads), log_norm(kHeads * kGroup);
  std::vector<uint64_t> scratch(SelectScratchBytes(kPages) / 8 + 1);
  const std::vector<double> seconds = MedianSeconds({[&] {
    ref::Select({1,
                 kHeads,
                 kGroup,
                 CombineRule::kShare,
                 1,
                 1,
                 kSelect,
                 lse.data(),
                 kPages,
                 &num_pages,
                 nullptr,
                 0,
                 nullptr,
                 nullptr,
                 pages.data(),
                 num_selected.data(),
                 threshold.data(),
                 log_norm.data(),
                 nullptr,
                 scratch.data()});
  }});
  report->Add({"select/P65536_K126_G4/head", seconds[0] / kHeads * 1e3, "ms", 0, 0});
  report->Add({"select/P65536_K126_G4/4_heads", seconds[0] * 1e3, "ms", 2, seconds[0] * 1e3 / 2});

  // head 0: every chosen page reaches the threshold, no other selectable one passes it
  bool right = true;
  for (int p = 1; p < kPages - 1; ++p) {
    double score = -HUGE_VAL;
    for (int g = 0; g < kGroup; ++g) {
      score = kvd::testing::LogAddExp(
          score, lse[static_cast<size_t>(g * kPages + p)] - log_norm[static_cast<size_t>(g)]);
    }
    const double margin = score - std::log(kGroup) - threshold[0];
    const bool chosen = std::binary_search(pages.begin(), pages.begin() + kSelect, p);
    right = right && (chosen ? margin > -1e-4 : margin < 1e-4);
  }
  report->Check("select", right && num_selected[0] == kSelect,
                "a page on the wrong side of the threshold");
}

int Main() {
  Report report(absl::StrCat("kernel_bench (", simd::TargetName(), ", one core)"));
  BenchScore(true, &report);
  BenchScore(false, &report);
  BenchAttend(&report);
  BenchGather(&report);
  BenchSelect(&report);
  return report.Finish(absl::GetFlag(FLAGS_json));
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "The CPU kernels of the decode step beside a plain read of the same bytes.");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
