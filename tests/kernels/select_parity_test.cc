// Goal: select on the GPU chooses what the reference chooses. Method: the same lse through both. Where no two scores
// are nearly equal the lists must be equal; else a page that only one of them chose must have a score within
// kNearTie of the threshold (both round exp and log, differently). Exact ties are always told by the lists.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "kernels/select.h"
#include "tests/support/gpu.h"
#include "tests/support/oracle.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kNearTie = 1e-5;  // nats, plus 2e-6 of the lse's magnitude

class SelectParityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

// A batch. lse, selectable and candidates are empty or full; `fill` makes lse.
struct Problem {
  int heads = 1, group = 4, num_select = 126, n_sink = 1, n_win = 1;
  CombineRule rule = CombineRule::kShare;
  std::vector<int32_t> num_pages;  // one a sequence
  int64_t stride = 0;
  std::vector<float> lse;
  std::vector<std::vector<uint64_t>> selectable;  // a sequence each; empty: all pages
  std::vector<std::vector<int32_t>> candidates;   // a row each

  size_t Sequences() const { return num_pages.size(); }
  size_t Rows() const { return num_pages.size() * static_cast<size_t>(heads); }
  const float* Lse(size_t row, int g) const { return lse.data() + (static_cast<int64_t>(row) * group + g) * stride; }
};

struct Result {
  std::vector<int32_t> pages, num_selected;
  std::vector<float> threshold, log_norm;
  uint64_t num_faults = 0;
};

// Normal lse with a mean of its own for every row of lse, so that no head or sequence passes for another. What stands
// after a sequence's pages would win if it were read.
Problem Random(Problem p, float sigma, uint64_t seed) {
  std::mt19937_64 random(seed);
  if (p.stride == 0) p.stride = (*std::max_element(p.num_pages.begin(), p.num_pages.end()) + 3) / 4 * 4;
  p.lse.assign(p.Rows() * static_cast<size_t>(p.group * p.stride), 1e9f);
  for (size_t i = 0; i < p.Rows() * static_cast<size_t>(p.group); ++i) {
    const int num = p.num_pages[i / static_cast<size_t>(p.heads * p.group)];
    std::normal_distribution<float> normal(static_cast<float>(random() % 41) - 20, sigma);
    for (int page = 0; page < num; ++page)
      p.lse[i * static_cast<size_t>(p.stride) + static_cast<size_t>(page)] = normal(random);
  }
  return p;
}

size_t MaxCandidates(const Problem& p) {
  size_t max = p.candidates.empty() ? 0 : 1;
  for (const auto& list : p.candidates) max = std::max(max, list.size());
  return max;
}

SelectArgs ArgsOf(const Problem& p) {
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

void FlattenCandidates(const Problem& p, std::vector<int32_t>* lists, std::vector<int32_t>* counts) {
  const size_t max = MaxCandidates(p);
  lists->assign(p.Rows() * max, -1);
  for (size_t row = 0; row < p.candidates.size(); ++row) {
    std::copy(p.candidates[row].begin(), p.candidates[row].end(),
              lists->begin() + static_cast<std::ptrdiff_t>(row * max));
    counts->push_back(static_cast<int32_t>(p.candidates[row].size()));
  }
}

Result Ref(const Problem& p) {
  const size_t rows = p.Rows();
  Result r = {std::vector<int32_t>(rows * static_cast<size_t>(p.num_select)), std::vector<int32_t>(rows),
              std::vector<float>(rows), std::vector<float>(rows * static_cast<size_t>(p.group)), 0};
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
  args.scratch = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  ref::Select(args);
  return r;
}

// A problem on the device and a graph that solves it.
class OnDevice {
 public:
  explicit OnDevice(const Problem& p)
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
    scratch_.Poison();
    graph_ = std::make_unique<Graph>([&](cudaStream_t stream) { KVD_CUDA_OK(LaunchSelect(args_, stream)); });
  }

  Result Run() {
    pages_.Poison();
    num_selected_.Poison();
    threshold_.Poison();
    log_norm_.Poison();
    num_faults_.Poison(0);
    KVD_CUDA_OK(cudaDeviceSynchronize());
    graph_->Replay();
    return {pages_.Download(), num_selected_.Download(), threshold_.Download(), log_norm_.Download(),
            num_faults_.Download()[0]};
  }
  void SetNumPages(const std::vector<int32_t>& num_pages) { num_pages_.Upload(num_pages); }

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

Result Gpu(const Problem& p) { return OnDevice(p).Run(); }

// ln score of a page in double, from the reference's norms.
double Score(const Problem& p, const Result& want, size_t row, int page) {
  double score = -HUGE_VAL;
  for (int g = 0; g < p.group; ++g) {
    const float x = p.Lse(row, g)[page],
                z = want.log_norm[row * static_cast<size_t>(p.group) + static_cast<size_t>(g)];
    if (!std::isnan(x) && z != -kInfinity) score = kvd::testing::LogAddExp(score, double{x} - double{z});
  }
  return score - std::log(p.group);
}

bool IsNear(float got, float want, double magnitude) {
  return got == want || std::abs(double{got} - double{want}) <= kNearTie + 2e-6 * magnitude;
}

// Rows that are wrong; the first few are printed. Pages of `kPeak` are compared exactly.
int CountWrong(const Problem& p, const Result& got, const Result& want) {
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
    const auto num = static_cast<std::ptrdiff_t>(std::clamp<int64_t>(got.num_selected[row], 0, p.num_select));
    bad |= !std::is_sorted(a, a + num, std::less_equal<>()) ||
           !std::all_of(a + num, a + k, [](int32_t x) { return x == -1; });
    std::vector<int32_t> differ;
    if (!bad) std::set_symmetric_difference(a, a + num, b, b + num, std::back_inserter(differ));
    for (const int32_t page : differ) {
      bad |= p.rule == CombineRule::kPeak || page < 0 || page >= p.num_pages[row / static_cast<size_t>(p.heads)] ||
             !(std::abs(Score(p, want, row, page) - double{want.threshold[row]}) <= kNearTie + 2e-6 * magnitude);
    }
    if (bad && ++wrong <= 3)
      std::printf("row %zu of %zu: num %d want %d, threshold %.9g want %.9g, Z %.9g want %.9g, %zu pages differ\n",
                  row, p.Rows(), got.num_selected[row], want.num_selected[row], double{got.threshold[row]},
                  double{want.threshold[row]}, double{got.log_norm[row * group]}, double{want.log_norm[row * group]},
                  differ.size());
  }
  return wrong;
}

TEST_F(SelectParityTest, ChoosesWhatTheReferenceChooses) {
  for (const CombineRule rule : {CombineRule::kShare, CombineRule::kPeak}) {
    for (int group = 1; group <= 16; ++group) {
      for (const int pages : {1, 65, 700, 5000}) {
        Problem p;
        p.rule = rule;
        p.heads = 2;
        p.group = group;
        p.num_pages = {pages, pages / 2, (pages + 1) / 3};
        p.stride = (pages + 3) / 4 * 4 + group % 3 * 4;
        p.num_select = pages == 5000 ? 126 : 7;
        const Problem problem = Random(p, 2.0f, static_cast<uint64_t>(pages * 31 + group));
        EXPECT_EQ(CountWrong(problem, Gpu(problem), Ref(problem)), 0) << "group " << group << ", pages " << pages;
      }
    }
  }
}

struct LongCase {
  int heads, group, pages, num_select;
  int64_t stride;
  float sigma;
};

TEST_F(SelectParityTest, LongRowsAreRight) {
  for (const LongCase& c : {LongCase{8, 4, 65536, 126, 65536, 2.0f}, LongCase{2, 4, 70000, 126, 70004, 2.0f},
                            LongCase{32, 4, 65536, 126, 65536, 1.5f}, LongCase{3, 4, 65536, 4096, 65536, 1.0f},
                            LongCase{70, 4, 16384, 126, 16384, 2.0f}, LongCase{140, 8, 1024, 30, 1024, 2.0f},
                            LongCase{1, 16, 40000, 64, 40960, 2.0f}, LongCase{2, 2, 300000, 512, 300000, 2.0f},
                            LongCase{1, 1, 1 << 20, 2000, 1 << 20, 2.0f}, LongCase{1, 2, 900000, 126, 1 << 20, .01f},
                            LongCase{1, 4, 65536, 70000, 65536, 2.0f}}) {
    Problem p;
    p.heads = c.heads;
    p.group = c.group;
    p.num_pages = {c.pages};
    p.stride = c.stride;
    p.num_select = c.num_select;
    const Problem problem = Random(p, c.sigma, static_cast<uint64_t>(c.pages + c.heads));
    EXPECT_EQ(CountWrong(problem, Gpu(problem), Ref(problem)), 0) << c.heads << " x " << c.group << " x " << c.pages;
  }
}

TEST_F(SelectParityTest, WrongAnswersAreRejected) {
  Problem p;
  p.heads = 2;
  p.num_pages = {3000, 2000};
  p.num_select = 20;
  p = Random(p, 2.0f, 5);
  const Result want = Ref(p), got = Gpu(p);
  ASSERT_EQ(CountWrong(p, got, want), 0);
  Result wrong = got;
  for (int32_t page = 1; page < 3000; ++page) {  // a page that was not chosen in place of the last that was
    if (std::find(got.pages.begin(), got.pages.begin() + 20, page) == got.pages.begin() + 20) {
      wrong.pages[19] = page;
      break;
    }
  }
  std::sort(wrong.pages.begin(), wrong.pages.begin() + 20);
  EXPECT_EQ(CountWrong(p, wrong, want), 1);
  wrong = got;
  std::swap(wrong.pages[0], wrong.pages[1]);
  EXPECT_EQ(CountWrong(p, wrong, want), 1);
  wrong = got;
  std::swap_ranges(wrong.pages.begin(), wrong.pages.begin() + 20,
                   wrong.pages.begin() + 20);  // the lists of two heads
  EXPECT_EQ(CountWrong(p, wrong, want), 2);
  wrong = got;
  std::swap(wrong.log_norm[0], wrong.log_norm[1]);
  EXPECT_EQ(CountWrong(p, wrong, want), 1);
  wrong = got;
  wrong.num_faults += 1;
  EXPECT_EQ(CountWrong(p, wrong, want), 1);
}

// Few different values, the same in every head, so that equal pages are equal in any arithmetic.
TEST_F(SelectParityTest, TiesGoToTheLowestPage) {
  for (const int values : {1, 2, 3, 50}) {
    for (const auto& [pages, num_select] :
         {std::pair(100, 30), {5000, 126}, {65536, 126}, {65536, 4096}, {70000, 1}}) {
      Problem p;
      p.heads = 3;
      p.group = 2;
      p.num_pages = {pages};
      p.num_select = num_select;
      p.n_sink = 3;
      p = Random(p, 1.0f, 9);
      std::mt19937_64 random(static_cast<uint64_t>(values));
      for (size_t row = 0; row < p.Rows(); ++row) {
        for (int page = 0; page < pages; ++page) {
          const auto x = static_cast<float>(static_cast<int>(random() % static_cast<uint64_t>(values)) -
                                            2 * static_cast<int>(row));
          for (size_t g = 0; g < 2; ++g)
            p.lse[(row * 2 + g) * static_cast<size_t>(p.stride) + static_cast<size_t>(page)] = x;
        }
      }
      const Result got = Gpu(p), want = Ref(p);
      EXPECT_EQ(got.pages, want.pages) << values << " values, " << pages << " pages, K " << num_select;
      EXPECT_EQ(CountWrong(p, got, want), 0);
    }
  }
}

TEST_F(SelectParityTest, PagesFarBelowThePeakAreStillRanked) {
  for (const float depth : {90.0f, 200.0f, 5000.0f}) {
    Problem p;
    p.num_pages = {9000};
    p.num_select = 50;
    p = Random(p, 1.0f, 3);
    for (size_t i = 0; i < p.lse.size(); ++i) p.lse[i] = -depth - .25f * static_cast<float>(i % 9000 * 7919 % 9000);
    for (size_t g = 0; g < 4; ++g) p.lse[g * 9000] = 0, p.lse[g * 9000 + 500] = -1;
    const Result got = Gpu(p), want = Ref(p);
    EXPECT_EQ(got.pages, want.pages) << depth;
    EXPECT_EQ(CountWrong(p, got, want), 0);
  }
}

TEST_F(SelectParityTest, NaNAndHeadsWithoutMassAreHandled) {
  for (const int stride : {20000, 20004}) {
    Problem p;
    p.heads = 4;
    p.group = 3;
    p.num_pages = {20000};
    p.stride = stride;
    p = Random(p, 2.0f, 17);
    const auto at = [&](size_t row, size_t g, size_t page) -> float& {
      return p.lse[(row * 3 + g) * static_cast<size_t>(stride) + page];
    };
    std::mt19937_64 random(1);
    for (int i = 0; i < 300; ++i) at(0, random() % 3, random() % 20000) = std::nanf("");
    for (size_t page = 0; page < 20000; ++page) {
      at(1, 1, page) = -kInfinity;                                    // a head without mass
      for (size_t g = 0; g < 3; ++g) at(2, g, page) = -kInfinity;     // a row without mass
      for (size_t g = 0; g < 3; ++g) at(3, g, page) = std::nanf("");  // and one of NaN alone
    }
    for (const CombineRule rule : {CombineRule::kShare, CombineRule::kPeak}) {
      p.rule = rule;
      const Result got = Gpu(p), want = Ref(p);
      EXPECT_EQ(CountWrong(p, got, want), 0);
      EXPECT_EQ(got.num_faults, want.num_faults);
      EXPECT_GT(got.num_faults, 60000u);
      EXPECT_EQ(got.pages, want.pages);
      EXPECT_EQ(got.threshold[2], -kInfinity);
    }
  }
}

TEST_F(SelectParityTest, SelectableBitsAndCandidatesRestrictTheChoice) {
  for (const CombineRule rule : {CombineRule::kShare, CombineRule::kPeak}) {
    Problem p;
    p.rule = rule;
    p.heads = 2;
    p.num_pages = {10000, 64, 700, 9999};
    p.num_select = 40;
    p = Random(p, 2.0f, 23);
    std::mt19937_64 random(2);
    for (const int pages : p.num_pages) {
      p.selectable.emplace_back(static_cast<size_t>(pages + 63) / 64);
      for (uint64_t& word : p.selectable.back()) word = random() & random();
    }
    p.selectable[1].clear();                                                 // a null pointer: all
    std::fill(p.selectable[2].begin(), p.selectable[2].end(), uint64_t{0});  // nothing may be chosen
    const Result bits = Gpu(p), want_bits = Ref(p);
    EXPECT_EQ(CountWrong(p, bits, want_bits), 0);
    EXPECT_EQ(bits.num_selected[4], 0);
    EXPECT_EQ(bits.threshold[4], kInfinity);

    for (size_t row = 0; row < p.Rows(); ++row) {
      std::set<int32_t> list;
      const auto pages = static_cast<uint64_t>(p.num_pages[row / 2]);
      while (list.size() < pages / 6) list.insert(static_cast<int32_t>(random() % pages));
      p.candidates.emplace_back(list.begin(), list.end());
    }
    p.candidates[3].clear();
    const Result both = Gpu(p);
    EXPECT_EQ(CountWrong(p, both, Ref(p)), 0);
    EXPECT_NE(both.pages, bits.pages);
    EXPECT_EQ(both.log_norm, bits.log_norm);
  }
}

TEST_F(SelectParityTest, EdgesOfLengthAndCount) {
  for (const int num_select : {0, 1, 5, 5000}) {
    for (const int64_t stride : {4, 640, 5000}) {
      Problem p;
      p.heads = 2;
      p.num_select = num_select;
      p.stride = stride;
      for (const int pages : {0, 1, 2, 3, 4, 64, 127, 128, 129, 640, 4999})
        if (pages <= stride) p.num_pages.push_back(pages);
      const Problem problem = Random(p, 2.0f, 29);
      EXPECT_EQ(CountWrong(problem, Gpu(problem), Ref(problem)), 0) << num_select << ", " << stride;
    }
  }
}

TEST_F(SelectParityTest, ARowsBitsDoNotDependOnTheBatch) {
  Problem p;
  p.heads = 4;
  p.num_pages.assign(12, 9000);
  p.num_pages[3] = 8200;
  p = Random(p, 2.0f, 31);
  const Result all = Gpu(p);
  const Result again = Gpu(p);
  EXPECT_EQ(all.pages, again.pages);
  EXPECT_EQ(all.log_norm, again.log_norm);
  EXPECT_EQ(all.threshold, again.threshold);
  for (const size_t sequence : {size_t{0}, size_t{3}, size_t{11}}) {  // alone: more CTAs a row, longer stride
    Problem one = p;
    one.num_pages = {p.num_pages[sequence]};
    one.stride = 20000;
    one.lse.assign(static_cast<size_t>(16 * one.stride), 1e9f);
    for (size_t i = 0; i < 16; ++i)
      std::copy_n(p.lse.begin() + static_cast<std::ptrdiff_t>((sequence * 16 + i) * 9000), one.num_pages[0],
                  one.lse.begin() + static_cast<std::ptrdiff_t>(i) * 20000);
    const Result alone = Gpu(one);
    EXPECT_TRUE(std::equal(alone.pages.begin(), alone.pages.end(),
                           all.pages.begin() + static_cast<std::ptrdiff_t>(sequence * 4 * 126)));
    EXPECT_TRUE(std::equal(alone.log_norm.begin(), alone.log_norm.end(),
                           all.log_norm.begin() + static_cast<std::ptrdiff_t>(sequence * 16)));
    EXPECT_TRUE(std::equal(alone.threshold.begin(), alone.threshold.end(),
                           all.threshold.begin() + static_cast<std::ptrdiff_t>(sequence * 4)));
  }
}

TEST_F(SelectParityTest, AGraphFollowsAGrowingNumberOfPages) {
  Problem p;
  p.heads = 2;
  p.num_pages = {20000, 20000};
  p.num_select = 60;
  p = Random(p, 2.0f, 37);
  OnDevice device(p);
  std::vector<int32_t> last;
  for (const int pages : {0, 3, 62, 100, 4000, 10000, 16385, 20000}) {
    Problem now = p;
    now.num_pages = {pages, pages / 2};
    device.SetNumPages(now.num_pages);
    const Result got = device.Run();
    EXPECT_EQ(CountWrong(now, got, Ref(now)), 0) << pages;
    EXPECT_NE(got.pages, last);
    last = got.pages;
  }
}

TEST_F(SelectParityTest, BadArgumentsAreRefused) {
  Problem p;
  p.num_pages = {10};
  p.stride = 12;
  const auto refused = [&](auto change) {
    SelectArgs args = ArgsOf(p);
    args.scratch = reinterpret_cast<void*>(uintptr_t{128});
    change(&args);
    return LaunchSelect(args, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused([](SelectArgs* a) { a->group = 17; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->group = 0; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->num_select = -1; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->n_win = -1; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->lse_stride = kMaxPages + 1; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->lse_stride = 10; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->lse = reinterpret_cast<const float*>(uintptr_t{4}); }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->scratch = nullptr; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->scratch = reinterpret_cast<void*>(uintptr_t{64}); }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->num_kv_heads = 65536; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->rule = static_cast<CombineRule>(7); }));
}

}  // namespace
}  // namespace kvd
