// Goal: exactly min(K, selectable) pages, the best of the group's shares, ties to the lowest page,
// whatever the spread of the scores. Method: constructed ties and extremes with exact expectations;
// random lse against the definition in double precision.
#include "kernels/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "tests/support/oracle.h"

namespace kvd {
namespace {

using kvd::testing::LogAddExp;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One sequence and KV head.
struct Problem {
  int group = 1;
  int num_pages = 0;
  int num_select = 1;
  int n_sink = 0, n_win = 0;
  CombineRule rule = CombineRule::kShare;
  std::vector<float> lse;            // [G, num_pages]
  std::vector<uint64_t> selectable;  // empty: all
  std::vector<int32_t> candidates;
  bool use_candidates = false;
};
struct Result {
  std::vector<int32_t> pages;  // those selected
  float threshold;
  std::vector<float> log_norm;
  uint64_t num_faults = 0;
};

Result Choose(const Problem& p) {
  const int64_t stride = p.num_pages + 5;
  std::vector<float> lse(static_cast<size_t>(p.group * stride), 1e9f);  // what must not be read
  for (int g = 0; g < p.group; ++g) {
    std::copy_n(p.lse.begin() + g * p.num_pages, p.num_pages, lse.begin() + g * stride);
  }
  const int32_t num_pages = p.num_pages;
  const uint64_t* selectable = p.selectable.data();
  const auto num_candidates = static_cast<int32_t>(p.candidates.size());
  std::vector<int32_t> pages(static_cast<size_t>(p.num_select), 12345);
  int32_t num_selected = -1;
  Result r{{}, 0, std::vector<float>(static_cast<size_t>(p.group)), 0};
  const size_t bytes = SelectScratchBytes(stride);
  void* scratch = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  std::vector<int32_t> candidates = p.candidates;
  if (p.use_candidates) candidates.resize(candidates.size() + 1, -1);
  ref::Select({1,
               1,
               p.group,
               p.rule,
               p.n_sink,
               p.n_win,
               p.num_select,
               lse.data(),
               stride,
               &num_pages,
               p.selectable.empty() ? nullptr : &selectable,
               p.use_candidates ? static_cast<int>(candidates.size()) : 0,
               candidates.data(),
               &num_candidates,
               pages.data(),
               &num_selected,
               &r.threshold,
               r.log_norm.data(),
               &r.num_faults,
               scratch});
  std::free(scratch);
  for (size_t i = static_cast<size_t>(num_selected); i < pages.size(); ++i) EXPECT_EQ(pages[i], -1);
  pages.resize(static_cast<size_t>(num_selected));
  EXPECT_TRUE(
      std::is_sorted(pages.begin(), pages.end(), std::less_equal<>()));  // ascending, distinct
  r.pages = pages;
  return r;
}

using Pages = std::vector<int32_t>;

std::vector<float> RandomLse(int count, float sigma, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> lse(static_cast<size_t>(count));
  for (float& x : lse) x = std::normal_distribution<float>(0, sigma)(random);
  return lse;
}

// ln score of each page by its definition, in double.
std::vector<double> Scores(const Problem& p) {
  std::vector<double> score(static_cast<size_t>(p.num_pages), -HUGE_VAL);
  for (int g = 0; g < p.group; ++g) {
    const float* row = p.lse.data() + g * p.num_pages;
    double norm = -HUGE_VAL;
    for (int i = 0; i < p.num_pages; ++i) {
      if (p.rule == CombineRule::kShare) norm = LogAddExp(norm, row[i]);
      if (p.rule == CombineRule::kPeak && i < p.num_pages - p.n_win)
        norm = std::max<double>(norm, row[i]);
    }
    for (int i = 0; i < p.num_pages; ++i) {
      auto& s = score[static_cast<size_t>(i)];
      s = LogAddExp(s, row[i] - norm);
    }
  }
  if (p.rule == CombineRule::kShare) {
    for (double& s : score) s -= std::log(p.group);
  }
  return score;
}

TEST(SelectTest, ChoosesTheBestPagesByTheDefinitionOfEachRule) {
  for (CombineRule rule : {CombineRule::kShare, CombineRule::kPeak}) {
    for (int group : {1, 3, 4, 7, 16}) {
      for (int num_pages : {40, 64, 700, 3000}) {
        for (int k : {1, 17, 126}) {
          Problem p{group, num_pages, k,    1, 2, rule, RandomLse(group * num_pages, 3, 9),
                    {},    {},        false};
          p.lse[0] = 12;  // a sink that would win if it could be chosen
          const Result r = Choose(p);
          const std::vector<double> score = Scores(p);
          const int selectable = num_pages - 3;
          ASSERT_EQ(r.pages.size(), static_cast<size_t>(std::min(k, selectable)));
          double weakest = HUGE_VAL;
          for (int32_t page : r.pages)
            weakest = std::min(weakest, score[static_cast<size_t>(page)]);
          EXPECT_NEAR(r.threshold, weakest, 2e-5);
          for (int32_t i = 0; i < num_pages; ++i) {
            const bool chosen = std::binary_search(r.pages.begin(), r.pages.end(), i);
            if (i < 1 || i >= num_pages - 2) {
              EXPECT_FALSE(chosen) << i;
            } else if (!chosen) {
              EXPECT_LE(score[static_cast<size_t>(i)], weakest + 2e-5);
            }
          }
        }
      }
    }
  }
}

TEST(SelectTest, ShareAndPeakDifferWhereOneHeadIsAllSink) {
  // Head 0 spends nearly everything on the sink; its shares of other pages must not weigh like head
  // 1's.
  Problem p{2,  6,  1,    1, 0, CombineRule::kShare, {20, 5, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0},
            {}, {}, false};
  EXPECT_EQ(Choose(p).pages, Pages{2});
  std::swap_ranges(p.lse.begin(), p.lse.begin() + 6,
                   p.lse.begin() + 6);  // the order of heads is no matter
  EXPECT_EQ(Choose(p).pages, Pages{2});
}

TEST(SelectTest, LogNormCoversAllPagesAndSharesSumToOne) {
  Problem p{4, 333, 5, 1, 1, CombineRule::kShare, RandomLse(4 * 333, 4, 3), {}, {}, false};
  const Result r = Choose(p);
  for (int g = 0; g < 4; ++g) {
    double sum = 0;
    for (int i = 0; i < 333; ++i) {
      sum += std::exp(static_cast<double>(p.lse[static_cast<size_t>(g * 333 + i)]) -
                      r.log_norm[static_cast<size_t>(g)]);
    }
    EXPECT_NEAR(sum, 1, 2e-5);
  }
  const std::vector<double> score = Scores(p);
  double mean = 0;
  for (double s : score) mean += std::exp(s);
  EXPECT_NEAR(mean, 1, 1e-5);
}

TEST(SelectTest, TiesGoToTheLowestPage) {
  for (int num_pages : {10, 64, 65, 5000}) {
    for (int k : {1, 3, 7}) {
      Problem p{3,
                num_pages,
                k,
                1,
                1,
                CombineRule::kShare,
                std::vector<float>(static_cast<size_t>(3 * num_pages), 2.5f),
                {},
                {},
                false};
      Pages expected(static_cast<size_t>(k));
      std::iota(expected.begin(), expected.end(), 1);
      EXPECT_EQ(Choose(p).pages, expected) << num_pages;
    }
  }
  Problem p{1, 200, 3, 0, 0, CombineRule::kShare, std::vector<float>(200, 0), {}, {}, false};
  p.lse[150] = p.lse[199] = 1;
  p.lse[90] = p.lse[100] = .5f;
  EXPECT_EQ(Choose(p).pages, (Pages{90, 150, 199}));
}

TEST(SelectTest, ScoresThatAreEqualInBf16AreToldApart) {
  Problem p{1, 300, 1, 0, 0, CombineRule::kShare, std::vector<float>(300, 1.0f), {}, {}, false};
  p.lse[211] = std::nextafter(1.0f, 2.0f);
  p.lse[250] = 1.0f + 0x1p-9f;  // rounds to 1 in bf16
  EXPECT_EQ(Choose(p).pages, Pages{250});
  p.lse[250] = 1.0f;
  p.num_select = 2;
  EXPECT_EQ(Choose(p).pages.size(), 2u);
}

// exp() of these scores is 0 in fp32: a comparison of masses would tie them all.
TEST(SelectTest, PagesHundredsOfNatsBelowThePeakAreStillRanked) {
  for (float depth : {90.0f, 200.0f, 5000.0f}) {
    Problem p{4, 1000, 5, 1, 0, CombineRule::kShare, std::vector<float>(4000), {}, {}, false};
    for (size_t g = 0; g < 4; ++g) {
      for (size_t i = 0; i < 1000; ++i)
        p.lse[g * 1000 + i] = -depth - static_cast<float>((i * 7919) % 1000);
      p.lse[g * 1000] = 0;
      p.lse[g * 1000 + 500] = -1;  // the only page near the peak
    }
    const Result r = Choose(p);
    std::vector<std::pair<int, int32_t>> order;
    for (int32_t i = 1; i < 1000; ++i) order.emplace_back(i == 500 ? -1 : (i * 7919) % 1000, i);
    std::sort(order.begin(), order.end());
    Pages expected;
    for (size_t i = 0; i < 5; ++i) expected.push_back(order[i].second);
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(r.pages, expected);
  }
}

TEST(SelectTest, NaNCountsAsMinusInfinityAndAsAFault) {
  Problem p{2, 100, 99, 0, 0, CombineRule::kShare, RandomLse(200, 1, 4), {}, {}, false};
  p.lse[10] = p.lse[110] = p.lse[20] = std::nanf("");  // page 10 in both heads, page 20 in one
  const Result r = Choose(p);
  EXPECT_EQ(r.num_faults, 3u);
  ASSERT_EQ(r.pages.size(), 99u);
  EXPECT_FALSE(std::binary_search(r.pages.begin(), r.pages.end(), 10));
  EXPECT_TRUE(std::isfinite(r.log_norm[0]) && std::isfinite(r.log_norm[1]));
  p.num_select = 100;  // the count is kept: then even that page is taken
  EXPECT_EQ(Choose(p).pages.size(), 100u);
  EXPECT_EQ(Choose(p).threshold, -kInfinity);
}

TEST(SelectTest, PagesThatAreNotResidentAreNotChosenButStayInTheNorm) {
  Problem p{2, 130, 4, 1, 1, CombineRule::kShare, RandomLse(260, 2, 5), {}, {}, false};
  const Result all = Choose(p);
  p.selectable.assign(3, ~uint64_t{0});
  EXPECT_EQ(Choose(p).pages, all.pages);
  for (int32_t page : all.pages)
    p.selectable[static_cast<size_t>(page / 64)] ^= uint64_t{1} << (page % 64);
  const Result rest = Choose(p);
  EXPECT_EQ(rest.log_norm, all.log_norm);
  EXPECT_LE(rest.threshold, all.threshold);
  for (int32_t page : all.pages)
    EXPECT_FALSE(std::binary_search(rest.pages.begin(), rest.pages.end(), page));
}

TEST(SelectTest, CandidatesRestrictTheChoiceAndACoveringListChangesNothing) {
  Problem p{3, 500, 12, 1, 1, CombineRule::kShare, RandomLse(1500, 2, 6), {}, {}, false};
  const Result all = Choose(p);
  p.use_candidates = true;
  p.candidates.resize(500);
  std::iota(p.candidates.begin(), p.candidates.end(), 0);
  const Result covered = Choose(p);
  EXPECT_EQ(covered.pages, all.pages);
  EXPECT_EQ(covered.threshold, all.threshold);

  p.candidates = {0, 3, 64, 130, 499};  // the sink and the window stay out
  EXPECT_EQ(Choose(p).pages, (Pages{3, 64, 130}));
  EXPECT_EQ(Choose(p).log_norm, all.log_norm);
  p.candidates.clear();
  EXPECT_TRUE(Choose(p).pages.empty());
}

TEST(SelectTest, EdgesOfLengthAndCount) {
  EXPECT_TRUE(Choose({2, 0, 3, 1, 1, CombineRule::kShare, {}, {}, {}, false}).pages.empty());
  EXPECT_EQ(Choose({2, 0, 3, 1, 1, CombineRule::kShare, {}, {}, {}, false}).log_norm[1],
            -kInfinity);
  for (int num_pages : {1, 2}) {  // nothing but sink and window
    const Result r = Choose(
        {1, num_pages, 3, 1, 1, CombineRule::kShare, RandomLse(num_pages, 1, 1), {}, {}, false});
    EXPECT_TRUE(r.pages.empty());
    EXPECT_EQ(r.threshold, kInfinity);
    EXPECT_TRUE(std::isfinite(r.log_norm[0]));
  }
  EXPECT_EQ(Choose({1, 3, 3, 1, 1, CombineRule::kShare, RandomLse(3, 1, 1), {}, {}, false}).pages,
            Pages{1});
  EXPECT_TRUE(Choose({1, 30, 0, 1, 1, CombineRule::kShare, RandomLse(30, 1, 1), {}, {}, false})
                  .pages.empty());
  Pages expected(198);
  std::iota(expected.begin(), expected.end(),
            1);  // K of at least the selectable pages takes all of them
  EXPECT_EQ(
      Choose({4, 200, 1000, 1, 1, CombineRule::kShare, RandomLse(800, 5, 2), {}, {}, false}).pages,
      expected);
}

TEST(SelectTest, AHeadWithoutAnyMassLeavesTheOthersInCharge) {
  Problem p{2, 80, 2, 0, 0, CombineRule::kShare, RandomLse(160, 2, 8), {}, {}, false};
  std::fill(p.lse.begin(), p.lse.begin() + 80, -kInfinity);
  const Result r = Choose(p);
  EXPECT_EQ(r.log_norm[0], -kInfinity);
  p.group = 1;
  p.lse.erase(p.lse.begin(), p.lse.begin() + 80);
  EXPECT_EQ(r.pages, Choose(p).pages);
}

// A batch with lists of its own for every sequence and head: none may see another's data.
TEST(SelectTest, EverySequenceAndHeadGetsItsOwnList) {
  constexpr int kSequences = 3, kHeads = 2, kGroup = 2, kSelect = 4, kStride = 90;
  const int32_t num_pages[] = {90, 0, 33};
  const std::vector<float> lse = RandomLse(kSequences * kHeads * kGroup * kStride, 3, 11);
  std::vector<int32_t> pages(kSequences * kHeads * kSelect), num_selected(kSequences * kHeads);
  std::vector<float> threshold(kSequences * kHeads), log_norm(kSequences * kHeads * kGroup);
  std::vector<uint64_t> scratch(SelectScratchBytes(kStride) / 8 + 1);
  ref::Select({kSequences,
               kHeads,
               kGroup,
               CombineRule::kShare,
               1,
               1,
               kSelect,
               lse.data(),
               kStride,
               num_pages,
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
  for (int list = 0; list < kSequences * kHeads; ++list) {
    const int n = num_pages[list / kHeads];
    Problem p{kGroup, n, kSelect, 1, 1, CombineRule::kShare, {}, {}, {}, false};
    for (int g = 0; g < kGroup; ++g) {
      const auto row = lse.begin() + (list * kGroup + g) * kStride;
      p.lse.insert(p.lse.end(), row, row + n);
    }
    const Result alone = Choose(p);
    EXPECT_EQ(num_selected[static_cast<size_t>(list)], static_cast<int32_t>(alone.pages.size()));
    EXPECT_TRUE(std::equal(alone.pages.begin(), alone.pages.end(), pages.begin() + list * kSelect));
    EXPECT_EQ(threshold[static_cast<size_t>(list)], alone.threshold);
  }
}

}  // namespace
}  // namespace kvd
