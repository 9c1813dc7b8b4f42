// Times the GPU kernels next to what the card's memory gives to plain read and copy kernels in the
// same run. usage: gpu_kernel_bench [--only=REGEX] [--json=FILE] [--commit=HASH]
//
// Method: D 128, B 16, R 8, Hk 8, G 4, bf16. Each kernel is launched over several sets of buffers,
// more bytes together than the L2 holds, in one CUDA graph; a figure is the median over replays of
// the time a launch takes, gaps included. Results are checked against kvd::ref; a wrong one ends
// the program with status 1.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "bench/gpu_bandwidth.h"
#include "bench/gpu_select_bench.h"
#include "bench/gpu_summarize_bench.h"
#include "bench/gpu_timing.h"
#include "bench/report.h"
#include "kernels/attend.h"
#include "kernels/checksum.h"
#include "kernels/gather.h"
#include "kernels/rotate.h"
#include "kernels/score.h"
#include "kernels/summarize.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

ABSL_FLAG(std::string, only, "",
          "measure only figures in whose name this regular expression is found");
ABSL_FLAG(std::string, json, "", "file to write the figures to; empty: none");
ABSL_FLAG(std::string, commit, "", "commit that this program was built from; empty: ask git");

namespace kvd::bench {

bool IsWanted(const std::string& name) {
  static const std::regex only(absl::GetFlag(FLAGS_only));
  return std::regex_search(name, only);
}

namespace {

using kvd::testing::DeviceArray;

constexpr int kDim = 128, kTokens = 16, kRank = 8, kKvHeads = 8, kGroup = 4;
constexpr float kScale = 0.08838834764831845f;  // 128^-1/2
constexpr SummaryLayout kLayout = MakeSummaryLayout(kDim, kTokens, kRank);
constexpr size_t kUnitBytes = MakeUnitLayout(kDim, kTokens).bytes;
constexpr size_t kRotateBytes = size_t{2} << 30;  // many times the L2, as the layers of a step

int num_wrong = 0;

void Expect(bool right, const std::string& what) {
  if (right) return;
  ++num_wrong;
  std::fprintf(stderr, "WRONG: %s\n", what.c_str());
}

int NumSets(size_t bytes) {
  return static_cast<int>(std::clamp<size_t>(kRotateBytes / bytes + 1, 2, 64));
}
int NumLaunches(int sets) { return (20 + sets - 1) / sets * sets; }

// --- bandwidth -----------------------------------------------------------------------------------

// Bytes a microsecond of the better plain read kernel at this size.
double ReadRate(size_t bytes, bool print = true) {
  bytes = (bytes + 16383) / 16384 * 16384;
  const int sets = NumSets(bytes);
  DeviceArray<uint8_t> data(bytes * static_cast<size_t>(sets));
  data.Poison(0x5A);
  DeviceArray<uint32_t> sink(1);
  double best = 0;
  for (const ReadKind kind : {ReadKind::kVectorLoads, ReadKind::kBulkCopies}) {
    const double us = MedianUs(NumLaunches(sets), [&](int i, cudaStream_t stream) {
      KVD_CUDA_OK(LaunchRead(kind, data.data() + static_cast<size_t>(i % sets) * bytes, bytes,
                             sink.data(), stream));
    });
    if (print)
      std::printf("  read %zu MiB, %s: %.1f us\n", bytes >> 20,
                  kind == ReadKind::kVectorLoads ? "loads" : "bulk", us);
    best = std::max(best, static_cast<double>(bytes) / us);
  }
  return best;
}

// Microseconds of a plain copy of `bytes` bytes.
double CopyUs(size_t bytes) {
  const int sets = NumSets(bytes);
  DeviceArray<uint8_t> from(bytes * static_cast<size_t>(sets)),
      to(bytes * static_cast<size_t>(sets));
  from.Poison(0x5A);
  return MedianUs(NumLaunches(sets), [&](int i, cudaStream_t stream) {
    const size_t at = static_cast<size_t>(i % sets) * bytes;
    KVD_CUDA_OK(LaunchCopy(from.data() + at, bytes, to.data() + at, stream));
  });
}

// --- score ---------------------------------------------------------------------------------------

// Records of random units, repeated over every mirror: record i of a mirror is number i %
// kNumRecords here.
struct Records {
  static constexpr int kNumRecords = 4093;
  std::vector<uint8_t> coarse, fine;
  Records() : coarse(kNumRecords * kLayout.coarse_bytes), fine(kNumRecords * kLayout.fine_bytes) {
    const int64_t count = int64_t{kTokens} * kDim;
    std::vector<uint8_t> unit(kUnitBytes);
    for (int64_t i = 0; i < kNumRecords; ++i) {
      const auto keys =
          kvd::testing::RandomKv(count, KvDtype::kBf16, 1.0f, static_cast<uint64_t>(i));
      std::memcpy(unit.data(), keys.data(), keys.size() * 2);
      ref::Summarize({kDim, kTokens, kRank, KvDtype::kBf16, true, Encoder::kE0, unit.data(),
                      nullptr, coarse.data() + i * kLayout.coarse_bytes,
                      fine.data() + i * kLayout.fine_bytes});
    }
  }
};

// `num` elements, the pattern again and again.
DeviceArray<uint8_t> Repeat(const std::vector<uint8_t>& pattern, size_t size) {
  DeviceArray<uint8_t> out(std::max(size, pattern.size()));
  out.Upload(pattern);
  for (size_t done = pattern.size(); done < size; done *= 2)
    KVD_CUDA_OK(cudaMemcpy(out.data() + done, out.data(), std::min(done, size - done),
                           cudaMemcpyDeviceToDevice));
  KVD_CUDA_OK(cudaDeviceSynchronize());
  return out;
}

enum class Scan { kFull, kCoarse, kRefine };

struct ScoreCase {
  int sequences, thousand_tokens;
  int kv_heads = kKvHeads, group = kGroup;
  int pages() const { return thousand_tokens * 1024 / kTokens; }
};

// Several mirrors of the case's sequences, and what a scan of them must give.
class ScoreBench {
 public:
  ScoreBench(const Records& records, const ScoreCase& shape, int sets)
      : sequences_(shape.sequences),
        pages_(shape.pages()),
        kv_heads_(shape.kv_heads),
        group_(shape.group),
        sets_(sets),
        coarse_(Repeat(records.coarse, NumRecords() * kLayout.coarse_bytes)),
        fine_(Repeat(records.fine, NumRecords() * kLayout.fine_bytes)),
        query_(kvd::testing::RandomKv(int64_t{sequences_} * kv_heads_ * group_ * kDim,
                                      KvDtype::kBf16, 1.0f, 7)),
        d_query_(query_),
        coarse_bases_(Bases(coarse_, kLayout.coarse_bytes)),
        fine_bases_(Bases(fine_, kLayout.fine_bytes)),
        capacity_(std::vector<int64_t>(static_cast<size_t>(sequences_), pages_)),
        num_pages_(std::vector<int32_t>(static_cast<size_t>(sequences_), pages_)),
        lse_(static_cast<size_t>(sequences_ * kv_heads_ * group_) * static_cast<size_t>(pages_)) {
    lse_.Poison();
  }

  ScoreArgs Args(int set) const {
    const size_t at = static_cast<size_t>(set) * static_cast<size_t>(sequences_);
    return {sequences_,
            kv_heads_,
            group_,
            kDim,
            kTokens,
            kRank,
            KvDtype::kBf16,
            kScale,
            0,
            d_query_.data(),
            coarse_bases_.data() + at,
            fine_bases_.data() + at,
            capacity_.data(),
            num_pages_.data(),
            pages_,
            lse_.data(),
            true};
  }

  // Every result of the last launch against the reference's for the same record and queries.
  void Check(const Records& records, Scan scan, int set, const std::string& what) const {
    const std::vector<float> got = lse_.Download();
    std::vector<float> want(Records::kNumRecords * static_cast<size_t>(group_));
    const uint8_t *coarse = records.coarse.data(), *fine = records.fine.data();
    const int64_t capacity = Records::kNumRecords;
    const int32_t count = Records::kNumRecords;
    int64_t wrong = 0;
    for (int row = 0; row < sequences_ * kv_heads_; ++row) {
      const ScoreArgs args = {1,
                              1,
                              group_,
                              kDim,
                              kTokens,
                              kRank,
                              KvDtype::kBf16,
                              kScale,
                              0,
                              query_.data() + row * group_ * kDim,
                              &coarse,
                              &fine,
                              &capacity,
                              &count,
                              Records::kNumRecords,
                              want.data(),
                              true};
      scan == Scan::kCoarse ? ref::ScoreCoarse(args) : ref::ScoreFull(args);
      const size_t first = (static_cast<size_t>(set) * static_cast<size_t>(sequences_ * kv_heads_) +
                            static_cast<size_t>(row)) *
                           static_cast<size_t>(pages_);
      for (int g = 0; g < group_; ++g) {
        for (size_t p = 0; p < static_cast<size_t>(pages_); ++p) {
          const float w = want[static_cast<size_t>(g * Records::kNumRecords) +
                               (first + p) % Records::kNumRecords];
          const float v =
              got[(static_cast<size_t>(row * group_ + g)) * static_cast<size_t>(pages_) + p];
          if (scan != Scan::kRefine || p % 32 == 0) wrong += !(std::abs(v - w) <= 1e-3f);
        }
      }
    }
    Expect(wrong == 0, absl::StrCat(what, ": ", wrong, " results differ from the reference"));
  }

  int sets() const { return sets_; }

 private:
  size_t NumRecords() const {
    return static_cast<size_t>(sets_) * static_cast<size_t>(sequences_ * kv_heads_) *
           static_cast<size_t>(pages_);
  }
  DeviceArray<const uint8_t*> Bases(const DeviceArray<uint8_t>& data, size_t record_bytes) const {
    std::vector<const uint8_t*> bases;
    for (int i = 0; i < sets_ * sequences_; ++i)
      bases.push_back(data.data() + static_cast<size_t>(i * kv_heads_) *
                                        static_cast<size_t>(pages_) * record_bytes);
    return DeviceArray<const uint8_t*>(bases);
  }

  int sequences_, pages_, kv_heads_, group_, sets_;
  DeviceArray<uint8_t> coarse_, fine_;
  std::vector<uint16_t> query_;
  DeviceArray<uint16_t> d_query_;
  DeviceArray<const uint8_t*> coarse_bases_, fine_bases_;
  DeviceArray<int64_t> capacity_;
  DeviceArray<int32_t> num_pages_;
  DeviceArray<float> lse_;
};

void AddScore(const Records& records, Scan scan, const ScoreCase& shape, Report* report) {
  std::string name = absl::StrCat(scan == Scan::kFull ? "score full" : "score coarse", ", ",
                                  shape.sequences, " x ", shape.thousand_tokens, "K tokens");
  if (shape.kv_heads != kKvHeads)
    absl::StrAppend(&name, ", Hk ", shape.kv_heads, " G ", shape.group);
  if (!IsWanted(name)) return;
  const size_t part = scan == Scan::kCoarse ? kLayout.coarse_bytes : kLayout.record_bytes();
  const size_t bytes = static_cast<size_t>(shape.sequences * shape.kv_heads) *
                       static_cast<size_t>(shape.pages()) * part;
  const ScoreBench bench(records, shape, NumSets(bytes));
  const auto launch = [&](int i, cudaStream_t stream) {
    const ScoreArgs args = bench.Args(i % bench.sets());
    KVD_CUDA_OK(scan == Scan::kFull ? LaunchScoreFull(args, stream)
                                    : LaunchScoreCoarse(args, stream));
  };
  const int launches = NumLaunches(bench.sets());
  const double us = MedianUs(launches, launch);
  bench.Check(records, scan, (launches - 1) % bench.sets(), name);
  const double rate = static_cast<double>(bytes) / us, read = ReadRate(bytes);
  report->Add({name, us, "us", static_cast<double>(bytes) / read, rate / read});
}

// The full estimate of every 32nd page of 1M tokens, as after a coarse scan.
void AddRefine(const Records& records, Report* report) {
  const std::string name = "score refine, 8 x 2048 of 1M tokens";
  if (!IsWanted(name)) return;
  constexpr int kPages = 65536, kCandidates = kPages / 32;
  const ScoreBench bench(records, {1, kPages * kTokens / 1024}, 2);
  std::vector<int32_t> candidates;
  for (int i = 0; i < kKvHeads * kCandidates; ++i) candidates.push_back(i % kCandidates * 32);
  const DeviceArray<int32_t> d_candidates(candidates);
  const DeviceArray<int32_t> counts(std::vector<int32_t>(kKvHeads, kCandidates));
  const double us = MedianUs(20, [&](int i, cudaStream_t stream) {
    KVD_CUDA_OK(LaunchScoreRefine(
        {bench.Args(i % 2), kCandidates, d_candidates.data(), counts.data()}, stream));
  });
  bench.Check(records, Scan::kRefine, 1, "refine");
  const double bytes = double{kKvHeads} * kCandidates * kLayout.record_bytes();
  report->Add({name, us, "us", bytes / ReadRate(size_t{419} << 20, false), 0});
}

// --- units ---------------------------------------------------------------------------------------

void AddGather(size_t num_units, Report* report) {
  const std::string name = absl::StrCat("gather ", num_units, " units of 8 KiB, local");
  if (!IsWanted(name)) return;
  const size_t bytes = num_units * kUnitBytes;
  const int sets = NumSets(bytes);
  const size_t total = num_units * static_cast<size_t>(sets);
  std::mt19937_64 random(11);
  std::vector<uint8_t> pattern((size_t{1} << 20) - 16);
  for (uint8_t& b : pattern) b = static_cast<uint8_t>(random());
  const DeviceArray<uint8_t> arena = Repeat(pattern, total * kUnitBytes);
  const DeviceArray<uint8_t> out(total * kUnitBytes);
  DeviceArray<uint8_t> valid(total);
  std::vector<uint64_t> headers(total * 8, 2);
  const DeviceArray<uint64_t> d_headers(headers);
  std::vector<size_t> order(total);
  for (size_t i = 0; i < total; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::vector<GatherUnit> units;
  for (size_t i = 0; i < total; ++i)
    units.push_back({arena.data() + order[i] * kUnitBytes,
                     reinterpret_cast<const PageHeader*>(d_headers.data() + order[i] * 8), 2,
                     out.data() + i * kUnitBytes});
  const DeviceArray<GatherUnit> d_units(units);
  const double us = MedianUs(NumLaunches(sets), [&](int i, cudaStream_t stream) {
    const size_t first = static_cast<size_t>(i % sets) * num_units;
    KVD_CUDA_OK(LaunchGatherUnits(d_units.data() + first, static_cast<int64_t>(num_units),
                                  kUnitBytes, valid.data() + first, stream));
  });
  const std::vector<uint8_t> flags = valid.Download();
  Expect(std::all_of(flags.begin(), flags.end(), [](uint8_t f) { return f == 1; }),
         "gather: a sealed unit was refused");
  // Both ends by checksum, on the device: its own test holds it to the host's.
  std::vector<const uint8_t*> ends;
  for (const GatherUnit& unit : units) ends.push_back(unit.source);
  for (const GatherUnit& unit : units) ends.push_back(unit.destination);
  const DeviceArray<const uint8_t*> d_ends(ends);
  const DeviceArray<uint64_t> sums(ends.size());
  KVD_CUDA_OK(LaunchChecksum64(d_ends.data(), static_cast<int64_t>(ends.size()), kUnitBytes,
                               sums.data(), nullptr));
  const std::vector<uint64_t> got = sums.Download();
  Expect(std::equal(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(total),
                    got.begin() + static_cast<std::ptrdiff_t>(total)),
         "gather: bytes differ");
  const double copy = CopyUs(bytes);
  report->Add({name, us, "us", copy, copy / us});
}

void AddAttend(int sequences, Report* report) {
  const std::string name = absl::StrCat("attend ", sequences, " x 2048 tokens");
  if (!IsWanted(name)) return;
  constexpr int kUnits = 128;
  const size_t per_set = static_cast<size_t>(sequences) * kKvHeads * kUnits;
  const int sets = NumSets(per_set * kUnitBytes);
  const size_t total = per_set * static_cast<size_t>(sets);
  const auto values = kvd::testing::RandomKv(int64_t{512} * static_cast<int64_t>(kUnitBytes / 2),
                                             KvDtype::kBf16, 1.0f, 3);
  std::vector<uint8_t> pattern(values.size() * 2);
  std::memcpy(pattern.data(), values.data(), pattern.size());
  const DeviceArray<uint8_t> units = Repeat(pattern, total * kUnitBytes);
  std::vector<UnitRef> refs, host_refs;
  for (size_t i = 0; i < total; ++i) {
    const size_t unit = i * 7919 % total;
    refs.push_back({units.data() + unit * kUnitBytes, kTokens});
    host_refs.push_back({pattern.data() + unit % 512 * kUnitBytes, kTokens});
  }
  const auto rows = static_cast<size_t>(sequences) * kKvHeads;
  const auto query =
      kvd::testing::RandomKv(static_cast<int64_t>(rows) * kGroup * kDim, KvDtype::kBf16, 2.0f, 4);
  const std::vector<int32_t> counts(rows, kUnits);
  const DeviceArray<UnitRef> d_refs(refs);
  const DeviceArray<uint16_t> d_query(query);
  const DeviceArray<int32_t> d_counts(counts);
  const DeviceArray<float> o(rows * kGroup * kDim), lse(rows * kGroup);
  const auto args = [&](const uint16_t* q, const UnitRef* list, const int32_t* num, float* out,
                        float* out_lse) {
    return AttendArgs{sequences, kKvHeads, kGroup, kDim, kTokens, KvDtype::kBf16, kScale, 0,
                      q,         kUnits,   list,   num,  out,     out_lse};
  };
  const int launches = NumLaunches(sets);
  const double us = MedianUs(launches, [&](int i, cudaStream_t stream) {
    KVD_CUDA_OK(
        LaunchAttend(args(d_query.data(), d_refs.data() + static_cast<size_t>(i % sets) * per_set,
                          d_counts.data(), o.data(), lse.data()),
                     stream));
  });
  std::vector<float> want_o(o.size()), want_lse(lse.size());
  ref::Attend(args(query.data(),
                   host_refs.data() + static_cast<size_t>((launches - 1) % sets) * per_set,
                   counts.data(), want_o.data(), want_lse.data()));
  const std::vector<float> got_o = o.Download(), got_lse = lse.Download();
  float worst = 0;
  for (size_t i = 0; i < got_o.size(); ++i) worst = std::max(worst, std::abs(got_o[i] - want_o[i]));
  for (size_t i = 0; i < got_lse.size(); ++i)
    worst = std::max(worst, std::abs(got_lse[i] - want_lse[i]));
  Expect(worst <= 1e-4f, absl::StrCat("attend: off by ", worst));
  const double bytes = static_cast<double>(per_set * kUnitBytes);
  const double limit = bytes / ReadRate(per_set * kUnitBytes, false);
  report->Add({name, us, "us", limit, limit / us});
}

void AddSmall(Report* report) {
  const DeviceArray<uint16_t> query(
      kvd::testing::RandomKv(kKvHeads * kGroup * kDim, KvDtype::kBf16, 1.0f, 1));
  const DeviceArray<uint16_t> out(query.size());
  report->Add({"rotate 32 queries",
               MedianUs(40,
                        [&](int, cudaStream_t stream) {
                          KVD_CUDA_OK(LaunchRotateQuery(query.data(), kKvHeads * kGroup, kDim,
                                                        KvDtype::kBf16, out.data(), stream));
                        }),
               "us", 0, 0});
}

int Main() {
  if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty()) {
    std::fprintf(stderr, "gpu_kernel_bench: %s\n", reason.c_str());
    return 1;
  }
  cudaDeviceProp device = {};
  KVD_CUDA_OK(cudaGetDeviceProperties(&device, 0));
  Report report("gpu_kernel_bench");
  report.SetMachine(absl::StrCat(device.name, ", ", device.multiProcessorCount, " SMs, ",
                                 device.l2CacheSize >> 20, " MiB L2"));
  if (const std::string commit = absl::GetFlag(FLAGS_commit); !commit.empty())
    report.SetCommit(commit);
  const Records records;
  if (IsWanted("plain read, 1 GiB"))
    report.Add({"plain read, 1 GiB", ReadRate(size_t{1} << 30) / 1000, "GB/s", 0, 0});
  if (IsWanted("plain copy, 1 GiB, read + written"))
    report.Add({"plain copy, 1 GiB, read + written",
                2 * double{1 << 30} / CopyUs(size_t{1} << 30) / 1000, "GB/s", 0, 0});
  for (const ScoreCase& shape : {ScoreCase{1, 16},
                                 {1, 128},
                                 {1, 256},
                                 {1, 1024},
                                 {1, 4096},
                                 {8, 128},
                                 {32, 32},
                                 {1, 128, 4, 8},
                                 {1, 1024, 4, 8},
                                 {1, 1024, 4, 16}}) {
    AddScore(records, Scan::kFull, shape, &report);
    AddScore(records, Scan::kCoarse, shape, &report);
  }
  AddRefine(records, &report);
  AddGather(512, &report);
  AddGather(8192, &report);
  AddAttend(1, &report);
  AddAttend(8, &report);
  AddAttend(32, &report);
  num_wrong += AddSelectAndResolve(&report);
  if (IsWanted("summarize")) num_wrong += AddSummarize(ReadRate(size_t{1} << 30, false), &report);
  if (IsWanted("rotate 32 queries")) AddSmall(&report);
  report.Check("every output", num_wrong == 0, absl::StrCat(num_wrong, " are wrong"));
  return report.Finish(absl::GetFlag(FLAGS_json));
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
