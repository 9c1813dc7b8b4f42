// Goal: the two selects of a progressive scan list and choose what two of the reference do, though
// the second reads the candidates alone. Method: select_parity.h; between the two, the candidates
// get values of another array, as refine would give them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernels/select.h"
#include "tests/kernels/select_parity.h"

namespace kvd {
namespace {

// What the two selects gave. `refined`: the second's problem, with the first's lists as candidates.
struct Progressive {
  std::vector<float> coarse_norm;
  SelectProblem refined;
  SelectResult among;
};

Progressive RunProgressive(const SelectProblem& coarse, int num_chosen, const std::vector<float>& fine) {
  const size_t rows = coarse.Rows(), group = static_cast<size_t>(coarse.group);
  const auto max = static_cast<size_t>(num_chosen + coarse.n_sink + coarse.n_win);
  DeviceArray<float> lse(coarse.lse);
  const DeviceArray<int32_t> num_pages(coarse.num_pages), lists(rows * max), counts(rows),
      pages(rows * static_cast<size_t>(coarse.num_select)), num_selected(rows);
  const DeviceArray<float> threshold(rows), log_norm(rows * group);
  const DeviceArray<uint64_t> num_faults(std::vector<uint64_t>{0});
  DeviceArray<uint8_t> scratch(SelectGpuScratchBytes(static_cast<int64_t>(rows), coarse.group, coarse.stride));
  scratch.Poison();
  SelectArgs args = ArgsOf(coarse);
  args.lse = lse.data();
  args.num_pages = num_pages.data();
  args.num_select = num_chosen;
  args.log_norm = log_norm.data();
  args.scratch = scratch.data();
  KVD_CUDA_OK(LaunchSelectCandidates(args, {static_cast<int>(max), lists.data(), counts.data()}, nullptr));
  Progressive out;
  out.coarse_norm = log_norm.Download();
  out.refined = coarse;
  const std::vector<int32_t> listed = lists.Download(), num = counts.Download();
  for (size_t row = 0; row < rows; ++row) {
    const auto first = listed.begin() + static_cast<std::ptrdiff_t>(row * max);
    out.refined.candidates.emplace_back(first, first + num[row]);
    for (size_t g = 0; g < group; ++g) {
      const size_t at = (row * group + g) * static_cast<size_t>(coarse.stride);
      for (const int32_t page : out.refined.candidates.back())
        out.refined.lse[at + static_cast<size_t>(page)] = fine[at + static_cast<size_t>(page)];
    }
  }
  lse.Upload(out.refined.lse);
  args.num_select = coarse.num_select;
  args.max_candidates = static_cast<int>(max);
  args.candidates = lists.data();
  args.num_candidates = counts.data();
  args.pages = pages.data();
  args.num_selected = num_selected.data();
  args.threshold = threshold.data();
  args.num_faults = num_faults.data();
  KVD_CUDA_OK(LaunchSelectAmong(args, nullptr));
  out.among = {pages.Download(), num_selected.Download(), threshold.Download(), log_norm.Download(),
               num_faults.Download()[0]};
  return out;
}

// Lists that differ from the reference's: sinks, the best pages, window.
int CountWrongLists(const SelectProblem& coarse, int num_chosen, const Progressive& got) {
  SelectProblem choose = coarse;
  choose.num_select = num_chosen;
  const SelectResult want = Ref(choose);
  SelectResult chosen = want;
  chosen.log_norm = got.coarse_norm;
  int wrong = 0;
  for (size_t row = 0; row < coarse.Rows(); ++row) {
    const int num_pages = coarse.num_pages[row / static_cast<size_t>(coarse.heads)];
    const int sinks = std::min(coarse.n_sink, num_pages), window = std::max(sinks, num_pages - coarse.n_win);
    std::vector<int32_t> list = got.refined.candidates[row];
    const auto k = static_cast<size_t>(num_chosen);
    const std::ptrdiff_t num = std::ssize(list) - sinks - (num_pages - window);
    if (num < 0 || num > num_chosen) return -1;
    for (int i = 0; i < sinks; ++i) wrong += list[static_cast<size_t>(i)] != i;
    for (int p = window; p < num_pages; ++p) wrong += list[list.size() - static_cast<size_t>(num_pages - p)] != p;
    chosen.num_selected[row] = static_cast<int32_t>(num);
    const auto pages = chosen.pages.begin() + static_cast<std::ptrdiff_t>(row * k);
    std::fill(std::copy_n(list.begin() + sinks, num, pages), pages + num_chosen, -1);
  }
  return wrong + CountWrong(choose, chosen, want);
}

// `coarse` with something added to every value.
std::vector<float> Refine(const SelectProblem& coarse, float shift, float sigma) {
  std::mt19937_64 random(77);
  std::normal_distribution<float> normal(shift, sigma);
  std::vector<float> fine = coarse.lse;
  for (float& x : fine) x += normal(random);
  return fine;
}

struct ListCase {
  int heads, group, pages, num_chosen, num_select;
  float sigma;
};
constexpr ListCase kCases[] = {
    {8, 4, 65536, 2016, 126, 2.0f},   {2, 4, 70001, 2016, 126, 2.0f},   {3, 4, 8192, 1024, 64, 2.0f},
    {2, 8, 20000, 2016, 126, 1.5f},   {2, 1, 300000, 1500, 90, 2.0f},   {1, 16, 30000, 1024, 64, 2.0f},
    {2, 3, 1 << 20, 7000, 400, 2.0f}, {2, 5, 40000, 12000, 1000, 1.0f}, {2, 4, 700, 5000, 126, 2.0f}};

SelectProblem CoarseOf(const ListCase& c) {
  SelectProblem p;
  p.heads = c.heads;
  p.group = c.group;
  p.num_pages = {c.pages, c.pages / 3, 0, 2};
  p.num_select = c.num_select;
  p.n_sink = 2;
  p.n_win = 3;
  return Random(p, c.sigma, static_cast<uint64_t>(c.pages));
}

class SelectListsParityTest : public SelectParityTest {};

TEST_F(SelectListsParityTest, BothSelectsAreRight) {
  for (const ListCase& c : kCases) {
    const SelectProblem coarse = CoarseOf(c);
    const Progressive got = RunProgressive(coarse, c.num_chosen, Refine(coarse, 0, .5f));
    EXPECT_EQ(CountWrongLists(coarse, c.num_chosen, got), 0) << c.group << ", " << c.pages;
    EXPECT_EQ(CountWrong(got.refined, got.among, Ref(got.refined)), 0) << c.group << ", " << c.pages;
    EXPECT_NE(got.among.log_norm, got.coarse_norm);
  }
}

// Shifts of -3 and -9 leave less than an eighth of most norms: the row is read again.
TEST_F(SelectListsParityTest, CandidatesThatRefineMovesFarAreRight) {
  for (const ListCase& c : {kCases[0], kCases[1], kCases[3], kCases[7]}) {
    for (const float shift : {-60.0f, -9.0f, -3.0f, -2.0f, 3.0f, 30.0f, 200.0f}) {
      const SelectProblem coarse = CoarseOf({c.heads, c.group, c.pages, c.num_chosen, c.num_select, 4.0f});
      const Progressive got = RunProgressive(coarse, c.num_chosen, Refine(coarse, shift, 1.0f));
      EXPECT_EQ(CountWrong(got.refined, got.among, Ref(got.refined)), 0) << c.pages << ", shift " << shift;
    }
  }
}

TEST_F(SelectListsParityTest, HeadsWithoutMassAndNaNsAreHandled) {
  for (const int pages : {40000, 80000}) {
    SelectProblem coarse = CoarseOf({2, 3, pages, 1000, 100, 2.0f});
    std::vector<float> fine = Refine(coarse, 0, .5f);
    const auto stride = static_cast<size_t>(coarse.stride);
    std::mt19937_64 random(5);
    for (int i = 0; i < 500; ++i) coarse.lse[random() % stride] = std::nanf("");
    std::fill_n(coarse.lse.begin() + static_cast<std::ptrdiff_t>(4 * stride), stride,
                -kInfinity);  // a head of row 1
    for (size_t i = 0; i < fine.size(); ++i)
      if (std::isinf(coarse.lse[i])) fine[i] = i % 2 == 0 ? -kInfinity : -50;
    for (int i = 0; i < 3000; ++i) fine[random() % (3 * stride)] = std::nanf("");
    const Progressive got = RunProgressive(coarse, 1000, fine);
    SelectResult among = got.among;
    const SelectResult want = Ref(got.refined);
    EXPECT_GT(among.num_faults, 0u);
    EXPECT_LT(among.num_faults, want.num_faults);  // of the candidates only
    among.num_faults = want.num_faults;
    EXPECT_EQ(CountWrong(got.refined, among, want), 0) << pages;
  }
}

TEST_F(SelectListsParityTest, MassOfOtherPagesThanTheCandidatesCounts) {
  const SelectProblem coarse = CoarseOf(kCases[0]);
  const Progressive got = RunProgressive(coarse, 2016, Refine(coarse, 0, .5f));
  const SelectResult want = Ref(got.refined);
  SelectProblem alone = got.refined;  // the candidates as if they were all there is
  for (size_t i = 0; i < alone.Rows() * 4; ++i) {
    std::vector<bool> listed(static_cast<size_t>(alone.stride));
    for (const int32_t page : alone.candidates[i / 4]) listed[static_cast<size_t>(page)] = true;
    for (size_t page = 0; page < listed.size(); ++page)
      if (!listed[page]) alone.lse[i * listed.size() + page] = -kInfinity;
  }
  SelectResult wrong = got.among;
  wrong.log_norm = Ref(alone).log_norm;
  EXPECT_GE(CountWrong(got.refined, wrong, want), 8);
  wrong.log_norm = got.coarse_norm;
  EXPECT_GE(CountWrong(got.refined, wrong, want), 8);
}

TEST_F(SelectListsParityTest, ARowsBitsDoNotDependOnTheBatch) {
  for (const int pages : {30000, 70000}) {
    SelectProblem all = CoarseOf({4, 4, pages, 1000, 126, 2.0f});
    all.num_pages.assign(12, pages);  // 48 rows: other clusters than for 4
    all = Random(all, 3.0f, 8);
    for (const float shift : {0.0f, -6.0f}) {
      const std::vector<float> fine = Refine(all, shift, 1.0f);
      const Progressive batch = RunProgressive(all, 1000, fine), again = RunProgressive(all, 1000, fine);
      EXPECT_EQ(batch.among.log_norm, again.among.log_norm);
      EXPECT_EQ(batch.among.threshold, again.among.threshold);
      const auto size = static_cast<std::ptrdiff_t>(16 * all.stride);
      for (const std::ptrdiff_t n : {0, 11}) {
        SelectProblem one = all;
        one.num_pages = {pages};
        one.lse.assign(all.lse.begin() + n * size, all.lse.begin() + (n + 1) * size);
        const Progressive alone = RunProgressive(one, 1000, {fine.begin() + n * size, fine.begin() + (n + 1) * size});
        EXPECT_TRUE(
            std::equal(alone.among.pages.begin(), alone.among.pages.end(), batch.among.pages.begin() + n * 4 * 126));
        EXPECT_TRUE(std::equal(alone.among.log_norm.begin(), alone.among.log_norm.end(),
                               batch.among.log_norm.begin() + n * 16));
        EXPECT_TRUE(std::equal(alone.among.threshold.begin(), alone.among.threshold.end(),
                               batch.among.threshold.begin() + n * 4));
        EXPECT_TRUE(std::equal(alone.refined.candidates.begin(), alone.refined.candidates.end(),
                               batch.refined.candidates.begin() + n * 4));
      }
    }
  }
}

TEST_F(SelectListsParityTest, BadArgumentsAreRefused) {
  SelectProblem p;
  p.num_pages = {10};
  p.stride = 12;
  SelectArgs args = ArgsOf(p);
  args.scratch = reinterpret_cast<void*>(uintptr_t{128});
  int32_t list = 0;
  EXPECT_EQ(LaunchSelectCandidates(args, {args.num_select + args.n_sink + args.n_win - 1, &list, &list}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(LaunchSelectCandidates(args, {1 << 20, nullptr, &list}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(LaunchSelectAmong(args, nullptr), cudaErrorInvalidValue);  // no candidates
  args.max_candidates = 5;
  EXPECT_EQ(LaunchSelectCandidates(args, {1 << 20, &list, &list}, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace kvd
