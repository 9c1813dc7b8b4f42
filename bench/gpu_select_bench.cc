#include "bench/gpu_select_bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/gpu_timing.h"
#include "kernels/resolve.h"
#include "kernels/select.h"
#include "tests/support/gpu.h"

namespace kvd::bench {
namespace {

using kvd::testing::DeviceArray;

constexpr int kGroup = 4;

// --- select --------------------------------------------------------------------------------------

struct SelectCase {
  int rows;
  int pages;
  int num_select;
  bool from_l2;  // the same lse every time, as score has just left it; else more than the L2 holds
};

// lse of rows * G heads, the pattern of `kPattern` heads again and again.
constexpr int kPattern = 12;
std::vector<float> RandomLse(int pages) {
  std::mt19937_64 random(13);
  std::vector<float> lse(static_cast<size_t>(kPattern) * static_cast<size_t>(pages));
  for (float& x : lse) x = std::normal_distribution<float>(0, 2)(random);
  return lse;
}

// The results of the last launch against the reference's on the same rows; exact lists but for near
// ties.
int CountWrongRows(const SelectCase& c, const std::vector<float>& pattern, size_t first_head,
                   const std::vector<int32_t>& pages, const std::vector<float>& threshold) {
  int wrong = 0;
  const auto k = static_cast<size_t>(c.num_select);
  std::vector<uint64_t> scratch(SelectScratchBytes(c.pages) / 8 + 9);
  for (int row = 0; row < std::min(c.rows, 8); ++row) {
    std::vector<float> lse;
    for (int g = 0; g < kGroup; ++g) {
      const auto from =
          pattern.begin() + static_cast<std::ptrdiff_t>(
                                (first_head + static_cast<size_t>(row * kGroup + g)) % kPattern) *
                                c.pages;
      lse.insert(lse.end(), from, from + c.pages);
    }
    std::vector<int32_t> want(k);
    int32_t count = 0;
    float want_threshold = 0, log_norm[kGroup];
    SelectArgs args = {1,
                       1,
                       kGroup,
                       CombineRule::kShare,
                       1,
                       1,
                       c.num_select,
                       lse.data(),
                       c.pages,
                       &c.pages,
                       nullptr,
                       0,
                       nullptr,
                       nullptr,
                       want.data(),
                       &count,
                       &want_threshold,
                       log_norm,
                       nullptr,
                       nullptr};
    args.scratch =
        reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
    ref::Select(args);
    const auto got = pages.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(row) * k);
    std::vector<int32_t> differ;
    std::set_symmetric_difference(want.begin(), want.end(), got,
                                  got + static_cast<std::ptrdiff_t>(k), std::back_inserter(differ));
    wrong += differ.size() > 2 ||
             !(std::abs(threshold[static_cast<size_t>(row)] - want_threshold) <= 1e-5f);
  }
  return wrong;
}

// A case's buffers: several sets of lse, and what a launch writes.
struct SelectBuffers {
  SelectBuffers(const SelectCase& c, int max_candidates)
      : shape(c),
        set_heads(static_cast<size_t>(c.rows) * kGroup),
        row_floats(static_cast<size_t>(c.pages)),
        sets(std::clamp<size_t>(
            (c.from_l2 ? 0 : size_t{400} << 20) / (set_heads * row_floats * sizeof(float)) + 1, 1,
            64)),
        pattern(RandomLse(c.pages)),
        lse(std::max<size_t>(sets * set_heads, kPattern) * row_floats),
        num_pages(std::vector<int32_t>(static_cast<size_t>(c.rows), c.pages)),
        pages(static_cast<size_t>(c.rows) * static_cast<size_t>(c.num_select)),
        num_selected(static_cast<size_t>(c.rows)),
        candidates(static_cast<size_t>(c.rows) * static_cast<size_t>(max_candidates)),
        num_candidates(static_cast<size_t>(c.rows)),
        threshold(static_cast<size_t>(c.rows)),
        log_norm(set_heads),
        scratch(SelectGpuScratchBytes(c.rows, kGroup, c.pages)) {
    lse.Upload(pattern);
    scratch.Poison(0);
    const size_t heads = sets * set_heads;
    for (size_t done = kPattern; done < heads; done *= 2)
      KVD_CUDA_OK(cudaMemcpy(lse.data() + done * row_floats, lse.data(),
                             std::min(done, heads - done) * row_floats * sizeof(float),
                             cudaMemcpyDeviceToDevice));
  }

  SelectArgs Args(size_t set) const {
    SelectArgs args = {};
    args.num_sequences = shape.rows;
    args.num_kv_heads = 1;
    args.group = kGroup;
    args.n_sink = 1;
    args.n_win = 1;
    args.num_select = shape.num_select;
    args.lse = lse.data() + set * set_heads * row_floats;
    args.lse_stride = shape.pages;
    args.num_pages = num_pages.data();
    args.pages = pages.data();
    args.num_selected = num_selected.data();
    args.threshold = threshold.data();
    args.log_norm = log_norm.data();
    args.scratch = scratch.data();
    return args;
  }

  int NumLaunches() const { return static_cast<int>((20 + sets - 1) / sets * sets); }

  // After a launch over `set`.
  int CountWrong(const std::string& name, size_t set) const {
    const int wrong =
        CountWrongRows(shape, pattern, set * set_heads, pages.Download(), threshold.Download());
    if (wrong != 0)
      std::fprintf(stderr, "WRONG: %s: %d rows differ from the reference\n", name.c_str(), wrong);
    return wrong;
  }

  SelectCase shape;
  size_t set_heads, row_floats, sets;
  std::vector<float> pattern;
  DeviceArray<float> lse;
  DeviceArray<int32_t> num_pages, pages, num_selected, candidates, num_candidates;
  DeviceArray<float> threshold, log_norm;
  DeviceArray<uint8_t> scratch;
};

int AddSelect(const SelectCase& c, Report* report) {
  const std::string name = absl::StrCat("select ", c.rows, " x ", c.pages, " pages, K ",
                                        c.num_select, c.from_l2 ? ", lse in L2" : "");
  if (!IsWanted(name)) return 0;
  const SelectBuffers buffers(c, 1);
  const int launches = buffers.NumLaunches();
  const double us = MedianUs(launches, [&](int i, cudaStream_t stream) {
    KVD_CUDA_OK(LaunchSelect(buffers.Args(static_cast<size_t>(i) % buffers.sets), stream));
  });
  report->Add({name, us, "us", 0, 0});
  return buffers.CountWrong(name, static_cast<size_t>(launches - 1) % buffers.sets);
}

// The two selects of a progressive scan, lse in L2. Nothing refines between them, so that the
// second must choose what one select over all pages does.
int AddProgressive(int pages, Report* report) {
  constexpr int kChosen = 2016, kMax = kChosen + 2;
  const SelectCase c = {8, pages, 126, true};
  const std::string name = absl::StrCat("select ", kChosen, " candidates of 8 x ", pages, " pages");
  if (!IsWanted(name)) return 0;
  const SelectBuffers buffers(c, kMax);
  SelectArgs first = buffers.Args(0), second = first;
  first.num_select = kChosen;
  second.max_candidates = kMax;
  second.candidates = buffers.candidates.data();
  second.num_candidates = buffers.num_candidates.data();
  const CandidateOut out = {kMax, buffers.candidates.data(), buffers.num_candidates.data()};
  report->Add({name,
               MedianUs(20,
                        [&](int, cudaStream_t stream) {
                          KVD_CUDA_OK(LaunchSelectCandidates(first, out, stream));
                        }),
               "us", 0, 0});
  report->Add(
      {absl::StrCat(name, ", then K 126 among them"),
       MedianUs(20,
                [&](int, cudaStream_t stream) { KVD_CUDA_OK(LaunchSelectAmong(second, stream)); }),
       "us", 0, 0});
  return buffers.CountWrong(name, 0);
}

// --- resolve -------------------------------------------------------------------------------------

struct ResolveCase {
  int rows;
  int num_select;
  int num_slots;
};

// A walk of selections: each takes over three quarters of the last.
std::vector<std::vector<int32_t>> Walk(int steps, int num_select, int num_pages) {
  std::mt19937 random(5);
  std::vector<std::vector<int32_t>> lists;
  std::set<int32_t> now;
  for (int s = 0; s < steps; ++s) {
    std::vector<int32_t> last(now.begin(), now.end());
    std::shuffle(last.begin(), last.end(), random);
    if (s > 0) last.resize(last.size() / 4 * 3);
    now = {last.begin(), last.end()};
    while (now.size() < static_cast<size_t>(num_select)) {
      const auto p = static_cast<uint32_t>(num_pages);
      now.insert(static_cast<int32_t>(std::min(random() % p, random() % p)));
    }
    lists.emplace_back(now.begin(), now.end());
  }
  return lists;
}

int AddResolve(const ResolveCase& c, Report* report) {
  const std::string name =
      absl::StrCat("resolve ", c.rows, " rows, K ", c.num_select, ", ", c.num_slots, " slots");
  if (!IsWanted(name)) return 0;
  constexpr int kSteps = 20, kPages = 8192;
  const auto rows = static_cast<size_t>(c.rows), k = static_cast<size_t>(c.num_select),
             slots_each = static_cast<size_t>(c.num_slots);
  const auto lists = Walk(kSteps, c.num_select, kPages);
  std::vector<int32_t> flat;
  for (const auto& list : lists)
    for (size_t row = 0; row < rows; ++row) flat.insert(flat.end(), list.begin(), list.end());
  const DeviceArray<int32_t> pages(flat), num_pages(std::vector<int32_t>(rows, c.num_select));
  const DeviceArray<int32_t> page_slot(std::vector<int32_t>(rows * kPages, -1)),
      slot_page(std::vector<int32_t>(rows * slots_each, -1));
  const DeviceArray<uint64_t> slot_step(std::vector<uint64_t>(rows * slots_each, 0));
  DeviceArray<uint64_t> steps(kSteps);
  const DeviceArray<int32_t> slots(rows * k), miss_idx(rows * k), num_misses(rows);
  std::vector<ResolveRow> table;
  for (size_t row = 0; row < rows; ++row)
    table.push_back({page_slot.data() + row * kPages, slot_page.data() + row * slots_each,
                     slot_step.data() + row * slots_each, c.num_slots});
  const DeviceArray<ResolveRow> d_table(table);
  std::vector<int32_t> want_page_slot(kPages, -1), want_slot_page(slots_each, -1), want_slots(k),
      want_misses(k);
  std::vector<uint64_t> want_step(slots_each, 0);
  uint64_t step = 0, misses = 0;
  const double us = MedianUs(
      kSteps,
      [&](int i, cudaStream_t stream) {
        KVD_CUDA_OK(
            LaunchResolve({c.rows, c.num_select, c.num_slots, d_table.data(),
                           pages.data() + static_cast<size_t>(i) * rows * k, num_pages.data(),
                           steps.data() + i, slots.data(), miss_idx.data(), num_misses.data()},
                          stream));
      },
      [&] {
        std::vector<uint64_t> next;
        for (const auto& list : lists) {
          next.push_back(++step);
          misses += static_cast<uint64_t>(ref::Resolve(
              {c.num_slots, step, list.data(), c.num_select, want_page_slot.data(),
               want_slot_page.data(), want_step.data(), want_slots.data(), want_misses.data()}));
        }
        steps.Upload(next);
        KVD_CUDA_OK(cudaDeviceSynchronize());
      });
  const std::vector<int32_t> got = slot_page.Download(), got_slots = slots.Download();
  int wrong = 0;
  for (size_t row = 0; row < rows; ++row) {
    wrong += !std::equal(want_slot_page.begin(), want_slot_page.end(),
                         got.begin() + static_cast<std::ptrdiff_t>(row * slots_each)) ||
             !std::equal(want_slots.begin(), want_slots.end(),
                         got_slots.begin() + static_cast<std::ptrdiff_t>(row * k));
  }
  if (wrong != 0)
    std::fprintf(stderr, "WRONG: %s: %d rows differ from the reference\n", name.c_str(), wrong);
  std::printf("  %s: %.1f%% misses\n", name.c_str(),
              100 * static_cast<double>(misses) / (static_cast<double>(step) * c.num_select));
  report->Add({name, us, "us", 0, 0});
  return wrong;
}

}  // namespace

int AddSelectAndResolve(Report* report) {
  int wrong = 0;
  for (const bool from_l2 : {false, true}) {
    for (const auto& [rows, pages, num_select] : {std::tuple(8, 1024, 126),
                                                  {8, 2048, 126},
                                                  {8, 4096, 126},
                                                  {8, 8192, 126},
                                                  {8, 32768, 126},
                                                  {8, 65536, 126},
                                                  {8, 65536, 4096},
                                                  {64, 8192, 126},
                                                  {32, 65536, 126}})
      wrong += AddSelect({rows, pages, num_select, from_l2}, report);
  }
  for (const int pages : {8192, 65536, 262144}) wrong += AddProgressive(pages, report);
  for (const ResolveCase& c : {ResolveCase{8, 126, 378}, {256, 126, 378}, {8, 1024, 4096}})
    wrong += AddResolve(c, report);
  return wrong;
}

}  // namespace kvd::bench
