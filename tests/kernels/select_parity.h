// What the parity tests of select share: a problem, both ways to solve it, and the comparison.
//
// The same lse goes through both. Where no two scores are nearly equal the lists must be equal;
// else a page that only one of them chose must have a score within kNearTie of the threshold (both
// round exp and log, differently). Exact ties are always told by the lists.

#ifndef LOCKS_KVD_TESTS_KERNELS_SELECT_PARITY_H_
#define LOCKS_KVD_TESTS_KERNELS_SELECT_PARITY_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/select.h"
#include "tests/support/gpu.h"
#include "tests/support/oracle.h"

namespace kvd {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr double kNearTie = 1e-5;  // nats, plus 2e-6 of the lse's magnitude

class SelectParityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};

// A batch. lse, selectable and candidates are empty or full; `fill` makes lse.
struct SelectProblem {
  int heads = 1, group = 4, num_select = 126, n_sink = 1, n_win = 1;
  CombineRule rule = CombineRule::kShare;
  std::vector<int32_t> num_pages;  // one a sequence
  int64_t stride = 0;
  std::vector<float> lse;
  std::vector<std::vector<uint64_t>> selectable;  // a sequence each; empty: all pages
  std::vector<std::vector<int32_t>> candidates;   // a row each

  size_t Sequences() const { return num_pages.size(); }
  size_t Rows() const { return num_pages.size() * static_cast<size_t>(heads); }
  const float* Lse(size_t row, int g) const {
    return lse.data() + (static_cast<int64_t>(row) * group + g) * stride;
  }
};

struct SelectResult {
  std::vector<int32_t> pages, num_selected;
  std::vector<float> threshold, log_norm;
  uint64_t num_faults = 0;
};

// Normal lse with a mean of its own for every row of lse, so that no head or sequence passes for
// another. What stands after a sequence's pages would win if it were read.
inline SelectProblem Random(SelectProblem p, float sigma, uint64_t seed) {
  std::mt19937_64 random(seed);
  if (p.stride == 0)
    p.stride = (*std::max_element(p.num_pages.begin(), p.num_pages.end()) + 3) / 4 * 4;
  p.lse.assign(p.Rows() * static_cast<size_t>(p.group * p.stride), 1e9f);
  for (size_t i = 0; i < p.Rows() * static_cast<size_t>(p.group); ++i) {
    const int num = p.num_pages[i / static_cast<size_t>(p.heads * p.group)];
    std::normal_distribution<float> normal(static_cast<float>(random() % 41) - 20, sigma);
    for (int page = 0; page < num; ++page)
      p.lse[i * static_cast<size_t>(p.stride) + static_cast<size_t>(page)] = normal(random);
  }
  return p;
}

inline size_t MaxCandidates(const SelectProblem& p) {
  size_t max = p.candidates.empty() ? 0 : 1;
  for (const auto& list : p.candidates) max = std::max(max, list.size());
  return max;
}

inline SelectArgs ArgsOf(const SelectProblem& p) {
  SelectArgs args = {};
  args.num_sequences = static_cast<int>(p.Sequences());
  args.num_kv_heads = p.heads;
  args.group = p.group;
  args.rule = p.rule;
  args.n_sink = p.n_sink;
  args.n_win = p.n_win;
  args.num_select = p.num_select;
  args.lse_stride = p.stride;
  args.max_candidates = static_cast<int>(MaxCandidates(p));
  return args;
}

inline void FlattenCandidates(const SelectProblem& p, std::vector<int32_t>* lists,
                              std::vector<int32_t>* counts) {
  const size_t max = MaxCandidates(p);
  lists->assign(p.Rows() * max, -1);
  for (size_t row = 0; row < p.candidates.size(); ++row) {
    std::copy(p.candidates[row].begin(), p.candidates[row].end(),
              lists->begin() + static_cast<std::ptrdiff_t>(row * max));
    counts->push_back(static_cast<int32_t>(p.candidates[row].size()));
  }
}

inline SelectResult Ref(const SelectProblem& p) {
  const size_t rows = p.Rows();
  SelectResult r = {std::vector<int32_t>(rows * static_cast<size_t>(p.num_select)),
                    std::vector<int32_t>(rows), std::vector<float>(rows),
                    std::vector<float>(rows * static_cast<size_t>(p.group)), 0};
  std::vector<const uint64_t*> bits;
  for (const auto& words : p.selectable) bits.push_back(words.empty() ? nullptr : words.data());
  std::vector<int32_t> lists, counts;
  FlattenCandidates(p, &lists, &counts);
  std::vector<uint64_t> scratch(SelectScratchBytes(p.stride) / 8 + 9);
  SelectArgs args = ArgsOf(p);
  args.lse = p.lse.data();
  args.num_pages = p.num_pages.data();
  args.selectable = bits.empty() ? nullptr : bits.data();
  args.candidates = lists.data();
  args.num_candidates = counts.data();
  args.pages = r.pages.data();
  args.num_selected = r.num_selected.data();
  args.threshold = r.threshold.data();
  args.log_norm = r.log_norm.data();
  args.num_faults = &r.num_faults;
  args.scratch =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  ref::Select(args);
  return r;
}

// A problem on the device and a graph that solves it.
class OnDevice {
 public:
  explicit OnDevice(const SelectProblem& p)
      : lse_(p.lse),
        num_pages_(p.num_pages),
        pages_(p.Rows() * static_cast<size_t>(p.num_select)),
        num_selected_(p.Rows()),
        threshold_(p.Rows()),
        log_norm_(p.Rows() * static_cast<size_t>(p.group)),
        num_faults_(std::vector<uint64_t>{0}),
        scratch_(SelectGpuScratchBytes(static_cast<int64_t>(p.Rows()), p.group, p.stride)),
        args_(ArgsOf(p)) {
    std::vector<uint64_t> bits;
    std::vector<const uint64_t*> tables;
    for (const auto& words : p.selectable) bits.insert(bits.end(), words.begin(), words.end());
    bits_ = std::make_unique<DeviceArray<uint64_t>>(bits);
    size_t at = 0;
    for (const auto& words : p.selectable) {
      tables.push_back(words.empty() ? nullptr : bits_->data() + at);
      at += words.size();
    }
    tables_ = std::make_unique<DeviceArray<const uint64_t*>>(tables);
    std::vector<int32_t> lists, counts;
    FlattenCandidates(p, &lists, &counts);
    lists_ = std::make_unique<DeviceArray<int32_t>>(lists);
    counts_ = std::make_unique<DeviceArray<int32_t>>(counts);
    args_.lse = lse_.data();
    args_.num_pages = num_pages_.data();
    args_.selectable = tables.empty() ? nullptr : tables_->data();
    args_.candidates = lists_->data();
    args_.num_candidates = counts_->data();
    args_.pages = pages_.data();
    args_.num_selected = num_selected_.data();
    args_.threshold = threshold_.data();
    args_.log_norm = log_norm_.data();
    args_.num_faults = num_faults_.data();
    args_.scratch = scratch_.data();
    scratch_.Poison(0);  // once, as select.h asks
    graph_ = std::make_unique<Graph>(
        [&](cudaStream_t stream) { KVD_CUDA_OK(LaunchSelect(args_, stream)); });
  }

  SelectResult Run() {
    pages_.Poison();
    num_selected_.Poison();
    threshold_.Poison();
    log_norm_.Poison();
    num_faults_.Poison(0);
    KVD_CUDA_OK(cudaDeviceSynchronize());
    graph_->Replay();
    return {pages_.Download(), num_selected_.Download(), threshold_.Download(),
            log_norm_.Download(), num_faults_.Download()[0]};
  }
  void SetNumPages(const std::vector<int32_t>& num_pages) { num_pages_.Upload(num_pages); }
  void SetLse(const std::vector<float>& lse) { lse_.Upload(lse); }

 private:
  DeviceArray<float> lse_;
  DeviceArray<int32_t> num_pages_;
  std::unique_ptr<DeviceArray<uint64_t>> bits_;
  std::unique_ptr<DeviceArray<const uint64_t*>> tables_;
  std::unique_ptr<DeviceArray<int32_t>> lists_, counts_;
  DeviceArray<int32_t> pages_, num_selected_;
  DeviceArray<float> threshold_, log_norm_;
  DeviceArray<uint64_t> num_faults_;
  DeviceArray<uint8_t> scratch_;
  SelectArgs args_;
  std::unique_ptr<Graph> graph_;
};

inline SelectResult Gpu(const SelectProblem& p) { return OnDevice(p).Run(); }

// ln score of a page in double, from the reference's norms.
inline double Score(const SelectProblem& p, const SelectResult& want, size_t row, int page) {
  double score = -HUGE_VAL;
  for (int g = 0; g < p.group; ++g) {
    const float x = p.Lse(row, g)[page],
                z = want.log_norm[row * static_cast<size_t>(p.group) + static_cast<size_t>(g)];
    if (!std::isnan(x) && z != -kInfinity)
      score = kvd::testing::LogAddExp(score, double{x} - double{z});
  }
  return score - std::log(p.group);
}

inline bool IsNear(float got, float want, double magnitude) {
  return got == want || std::abs(double{got} - double{want}) <= kNearTie + 2e-6 * magnitude;
}

// Rows that are wrong; the first few are printed. Pages of `kPeak` are compared exactly.
inline int CountWrong(const SelectProblem& p, const SelectResult& got, const SelectResult& want) {
  int wrong = got.num_faults != want.num_faults ? 1 : 0;
  const auto k = static_cast<size_t>(p.num_select), group = static_cast<size_t>(p.group);
  for (size_t row = 0; row < p.Rows(); ++row) {
    double magnitude = 0;
    for (size_t g = 0; g < group; ++g)
      if (std::isfinite(want.log_norm[row * group + g]))
        magnitude = std::max(magnitude, std::abs(double{want.log_norm[row * group + g]}));
    bool bad = got.num_selected[row] != want.num_selected[row] ||
               !IsNear(got.threshold[row], want.threshold[row], magnitude);
    for (size_t g = 0; g < group; ++g)
      bad |= !IsNear(got.log_norm[row * group + g], want.log_norm[row * group + g], magnitude);
    const int32_t *a = got.pages.data() + row * k, *b = want.pages.data() + row * k;
    const auto num =
        static_cast<std::ptrdiff_t>(std::clamp<int64_t>(got.num_selected[row], 0, p.num_select));
    bad |= !std::is_sorted(a, a + num, std::less_equal<>()) ||
           !std::all_of(a + num, a + k, [](int32_t x) { return x == -1; });
    std::vector<int32_t> differ;
    if (!bad) std::set_symmetric_difference(a, a + num, b, b + num, std::back_inserter(differ));
    for (const int32_t page : differ) {
      bad |= p.rule == CombineRule::kPeak || page < 0 ||
             page >= p.num_pages[row / static_cast<size_t>(p.heads)] ||
             !(std::abs(Score(p, want, row, page) - double{want.threshold[row]}) <=
               kNearTie + 2e-6 * magnitude);
    }
    if (bad && ++wrong <= 3)
      std::printf(
          "row %zu of %zu: num %d want %d, threshold %.9g want %.9g, Z %.9g want %.9g, %zu pages "
          "differ\n",
          row, p.Rows(), got.num_selected[row], want.num_selected[row], double{got.threshold[row]},
          double{want.threshold[row]}, double{got.log_norm[row * group]},
          double{want.log_norm[row * group]}, differ.size());
  }
  return wrong;
}

}  // namespace kvd

#endif  // LOCKS_KVD_TESTS_KERNELS_SELECT_PARITY_H_
