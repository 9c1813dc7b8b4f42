// Goal: select on the GPU chooses what the reference chooses. Method: select_parity.h.

#include "tests/kernels/select_parity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "kernels/select.h"

namespace kvd {
namespace {

TEST_F(SelectParityTest, ChoosesWhatTheReferenceChooses) {
  for (const CombineRule rule : {CombineRule::kShare, CombineRule::kPeak}) {
    for (int group = 1; group <= 16; ++group) {
      for (const int pages : {1, 65, 700, 5000}) {
        SelectProblem p;
        p.rule = rule;
        p.heads = 2;
        p.group = group;
        p.num_pages = {pages, pages / 2, (pages + 1) / 3};
        p.stride = (pages + 3) / 4 * 4 + group % 3 * 4;
        p.num_select = pages == 5000 ? 126 : 7;
        const SelectProblem problem = Random(p, 2.0f, static_cast<uint64_t>(pages * 31 + group));
        EXPECT_EQ(CountWrong(problem, Gpu(problem), Ref(problem)), 0)
            << "group " << group << ", pages " << pages;
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
  for (const LongCase& c : {LongCase{8, 4, 65536, 126, 65536, 2.0f},
                            LongCase{2, 4, 70000, 126, 70004, 2.0f},
                            LongCase{32, 4, 65536, 126, 65536, 1.5f},
                            LongCase{3, 4, 65536, 4096, 65536, 1.0f},
                            {70, 4, 16384, 126, 16384, 2.0f},
                            {60, 4, 8190, 126, 8196, 2.0f},
                            LongCase{140, 8, 1024, 30, 1024, 2.0f},
                            LongCase{1, 16, 40000, 64, 40960, 2.0f},
                            LongCase{2, 2, 300000, 512, 300000, 2.0f},
                            LongCase{1, 1, 1 << 20, 2000, 1 << 20, 2.0f},
                            LongCase{1, 2, 900000, 126, 1 << 20, .01f},
                            LongCase{1, 4, 65536, 70000, 65536, 2.0f}}) {
    SelectProblem p;
    p.heads = c.heads;
    p.group = c.group;
    p.num_pages = {c.pages};
    p.stride = c.stride;
    p.num_select = c.num_select;
    const SelectProblem problem = Random(p, c.sigma, static_cast<uint64_t>(c.pages + c.heads));
    EXPECT_EQ(CountWrong(problem, Gpu(problem), Ref(problem)), 0)
        << c.heads << " x " << c.group << " x " << c.pages;
  }
}

TEST_F(SelectParityTest, WrongAnswersAreRejected) {
  SelectProblem p;
  p.heads = 2;
  p.num_pages = {3000, 2000};
  p.num_select = 20;
  p = Random(p, 2.0f, 5);
  const SelectResult want = Ref(p), got = Gpu(p);
  ASSERT_EQ(CountWrong(p, got, want), 0);
  SelectResult wrong = got;
  for (int32_t page = 1; page < 3000;
       ++page) {  // a page that was not chosen in place of the last that was
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
         {std::pair(100, 30), {5000, 126}, {8192, 4096}, {65536, 126}, {65536, 4096}, {70000, 1}}) {
      SelectProblem p;
      p.heads = 3;
      p.group = 2;
      p.num_pages = {pages};
      p.num_select = num_select;
      p.n_sink = 3;
      p = Random(p, 1.0f, 9);
      std::mt19937_64 random(static_cast<uint64_t>(values));
      for (size_t row = 0; row < p.Rows(); ++row) {
        for (int page = 0; page < pages; ++page) {
          const auto x =
              static_cast<float>(static_cast<int>(random() % static_cast<uint64_t>(values)) -
                                 2 * static_cast<int>(row));
          for (size_t g = 0; g < 2; ++g)
            p.lse[(row * 2 + g) * static_cast<size_t>(p.stride) + static_cast<size_t>(page)] = x;
        }
      }
      const SelectResult got = Gpu(p), want = Ref(p);
      EXPECT_EQ(got.pages, want.pages)
          << values << " values, " << pages << " pages, K " << num_select;
      EXPECT_EQ(CountWrong(p, got, want), 0);
    }
  }
}

TEST_F(SelectParityTest, PagesFarBelowThePeakAreStillRanked) {
  for (const size_t pages : {size_t{4000}, size_t{9000}}) {
    for (const float depth : {90.0f, 200.0f, 5000.0f}) {
      SelectProblem p;
      p.num_pages = {static_cast<int32_t>(pages)};
      p.num_select = 50;
      p = Random(p, 1.0f, 3);
      for (size_t i = 0; i < p.lse.size(); ++i)
        p.lse[i] = -depth - .25f * static_cast<float>(i % pages * 7919 % pages);
      for (size_t g = 0; g < 4; ++g) p.lse[g * pages] = 0, p.lse[g * pages + 500] = -1;
      const SelectResult got = Gpu(p), want = Ref(p);
      EXPECT_EQ(got.pages, want.pages) << pages << ", " << depth;
      EXPECT_EQ(CountWrong(p, got, want), 0);
    }
  }
}

TEST_F(SelectParityTest, NaNAndHeadsWithoutMassAreHandled) {
  for (const int stride : {8192, 20000, 20004}) {
    const int pages = std::min(stride, 20000);
    SelectProblem p;
    p.heads = 4;
    p.group = 3;
    p.num_pages = {pages};
    p.stride = stride;
    p = Random(p, 2.0f, 17);
    const auto at = [&](size_t row, size_t g, size_t page) -> float& {
      return p.lse[(row * 3 + g) * static_cast<size_t>(stride) + page];
    };
    std::mt19937_64 random(1);
    for (int i = 0; i < 300; ++i)
      at(0, random() % 3, random() % static_cast<size_t>(pages)) = std::nanf("");
    for (size_t page = 0; page < static_cast<size_t>(pages); ++page) {
      at(1, 1, page) = -kInfinity;                                    // a head without mass
      for (size_t g = 0; g < 3; ++g) at(2, g, page) = -kInfinity;     // a row without mass
      for (size_t g = 0; g < 3; ++g) at(3, g, page) = std::nanf("");  // and one of NaN alone
    }
    for (const CombineRule rule : {CombineRule::kShare, CombineRule::kPeak}) {
      p.rule = rule;
      const SelectResult got = Gpu(p), want = Ref(p);
      EXPECT_EQ(CountWrong(p, got, want), 0);
      EXPECT_EQ(got.num_faults, want.num_faults);
      EXPECT_GT(got.num_faults, 3 * static_cast<uint64_t>(pages));
      EXPECT_EQ(got.pages, want.pages);
      EXPECT_EQ(got.threshold[2], -kInfinity);
    }
  }
}

TEST_F(SelectParityTest, SelectableBitsAndCandidatesRestrictTheChoice) {
  for (const CombineRule rule : {CombineRule::kShare, CombineRule::kPeak}) {
    SelectProblem p;
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
    p.selectable[1].clear();  // a null pointer: all
    std::fill(p.selectable[2].begin(), p.selectable[2].end(),
              uint64_t{0});  // nothing may be chosen
    const SelectResult bits = Gpu(p), want_bits = Ref(p);
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
    const SelectResult both = Gpu(p);
    EXPECT_EQ(CountWrong(p, both, Ref(p)), 0);
    EXPECT_NE(both.pages, bits.pages);
    EXPECT_EQ(both.log_norm, bits.log_norm);
  }
}

TEST_F(SelectParityTest, EdgesOfLengthAndCount) {
  for (const int num_select : {0, 1, 5, 5000}) {
    for (const int64_t stride : {4, 640, 5000}) {
      SelectProblem p;
      p.heads = 2;
      p.num_select = num_select;
      p.stride = stride;
      for (const int pages : {0, 1, 2, 3, 4, 64, 127, 128, 129, 640, 4999})
        if (pages <= stride) p.num_pages.push_back(pages);
      const SelectProblem problem = Random(p, 2.0f, 29);
      EXPECT_EQ(CountWrong(problem, Gpu(problem), Ref(problem)), 0) << num_select << ", " << stride;
    }
  }
}

TEST_F(SelectParityTest, ARowsBitsDoNotDependOnTheBatch) {
  SelectProblem p;
  p.heads = 4;
  p.num_pages.assign(12, 9000);
  p.num_pages[3] = 8200;
  p = Random(p, 2.0f, 31);
  const SelectResult all = Gpu(p);
  const SelectResult again = Gpu(p);
  EXPECT_EQ(all.pages, again.pages);
  EXPECT_EQ(all.log_norm, again.log_norm);
  EXPECT_EQ(all.threshold, again.threshold);
  for (const size_t sequence :
       {size_t{0}, size_t{3}, size_t{11}}) {  // alone: more CTAs a row, longer stride
    SelectProblem one = p;
    one.num_pages = {p.num_pages[sequence]};
    one.stride = 20000;
    one.lse.assign(static_cast<size_t>(16 * one.stride), 1e9f);
    for (size_t i = 0; i < 16; ++i)
      std::copy_n(p.lse.begin() + static_cast<std::ptrdiff_t>((sequence * 16 + i) * 9000),
                  one.num_pages[0], one.lse.begin() + static_cast<std::ptrdiff_t>(i) * 20000);
    const SelectResult alone = Gpu(one);
    EXPECT_TRUE(std::equal(alone.pages.begin(), alone.pages.end(),
                           all.pages.begin() + static_cast<std::ptrdiff_t>(sequence * 4 * 126)));
    EXPECT_TRUE(std::equal(alone.log_norm.begin(), alone.log_norm.end(),
                           all.log_norm.begin() + static_cast<std::ptrdiff_t>(sequence * 16)));
    EXPECT_TRUE(std::equal(alone.threshold.begin(), alone.threshold.end(),
                           all.threshold.begin() + static_cast<std::ptrdiff_t>(sequence * 4)));
  }
}

// The same rows where the stride allows so many pages that other kernels select among them.
SelectProblem Spread(const SelectProblem& p, int64_t stride) {
  SelectProblem far = p;
  far.stride = stride;
  far.lse.assign(p.Rows() * static_cast<size_t>(p.group * stride), 1e9f);
  for (size_t i = 0; i < p.Rows() * static_cast<size_t>(p.group); ++i)
    std::copy_n(p.lse.begin() + static_cast<std::ptrdiff_t>(i) * p.stride, p.stride,
                far.lse.begin() + static_cast<std::ptrdiff_t>(i) * stride);
  return far;
}

TEST_F(SelectParityTest, ARowsBitsDoNotDependOnTheStride) {
  for (const auto& [group, pages, num_select] : {std::tuple(1, 8192, 126),
                                                 {1, 3, 2},
                                                 {2, 8190, 4096},
                                                 {3, 4097, 126},
                                                 {4, 8192, 126},
                                                 {4, 8191, 9000},
                                                 {4, 4096, 2000},
                                                 {4, 1023, 126},
                                                 {4, 130, 7},
                                                 {5, 6001, 126},
                                                 {8, 4096, 126},
                                                 {8, 3000, 1},
                                                 {9, 500, 126},
                                                 {16, 2048, 126},
                                                 {16, 2045, 1000}}) {
    for (const CombineRule rule : {CombineRule::kShare, CombineRule::kPeak}) {
      SelectProblem p;
      p.rule = rule;
      p.heads = 2;
      p.group = group;
      p.num_pages = {pages, (pages + 1) / 2, 1};
      p.num_select = num_select;
      p = Random(p, 2.0f, static_cast<uint64_t>(pages + group));
      std::mt19937_64 random(4);
      for (int i = 0; i < 5; ++i) p.lse[random() % p.lse.size()] = std::nanf("");
      p.selectable.resize(3);
      p.selectable[1].assign(static_cast<size_t>(p.num_pages[1] + 63) / 64, 0x7FFFFFFFFFFFFFF5);
      for (const bool listed : {false, true}) {
        for (size_t row = 0; listed && row < p.Rows(); ++row) {
          p.candidates.emplace_back();
          for (int32_t page = 0; page < p.num_pages[row / 2];
               page += 1 + static_cast<int32_t>(random() % 5))
            p.candidates.back().push_back(page);
        }
        const SelectProblem far = Spread(p, 70000);
        const SelectResult near = Gpu(p), want = Gpu(far);
        EXPECT_EQ(near.pages, want.pages) << group << ", " << pages << ", " << listed;
        EXPECT_EQ(near.log_norm, want.log_norm) << group << ", " << pages;
        EXPECT_EQ(near.threshold, want.threshold) << group << ", " << pages;
        EXPECT_EQ(near.num_selected, want.num_selected);
        EXPECT_EQ(near.num_faults, want.num_faults);
        EXPECT_EQ(CountWrong(p, near, Ref(p)), 0) << group << ", " << pages << ", " << listed;
      }
    }
  }
}

TEST_F(SelectParityTest, AGraphFollowsAGrowingNumberOfPages) {
  SelectProblem p;
  p.heads = 2;
  p.num_select = 60;
  for (const int longest : {8000, 20000}) {
    p.num_pages = {longest, longest};
    p.stride = 0;
    p = Random(p, 2.0f, 37);
    OnDevice device(p);
    std::vector<int32_t> last;
    for (const int pages : {0, 3, 62, 100, 4000, 8000, 10000, 16385, 20000}) {
      if (pages > longest) continue;
      SelectProblem now = p;
      now.num_pages = {pages, pages / 2};
      device.SetNumPages(now.num_pages);
      const SelectResult got = device.Run();
      EXPECT_EQ(CountWrong(now, got, Ref(now)), 0) << pages;
      EXPECT_NE(got.pages, last);
      last = got.pages;
    }
  }
}

// What the CTAs of a row told each other in one launch must be gone in the next but one. Odd rounds
// have few different values: the bin of the K-th is then cut again and again.
TEST_F(SelectParityTest, ReplaysOverManyPagesLeaveNothingBehind) {
  SelectProblem p;
  p.heads = 2;
  p.group = 2;
  p.num_pages = {90000, 70000};
  p.n_sink = 3;
  p = Random(p, 2.0f, 41);
  OnDevice device(p);
  std::vector<int32_t> last;
  for (int round = 0; round < 7; ++round) {
    SelectProblem now = p;
    now.num_pages = {90000 - 13000 * round, round == 4 ? 0 : 7000 * round + 1};
    now = Random(now, 2.0f, static_cast<uint64_t>(50 + round));
    for (size_t row = 0; round % 2 == 1 && row < now.Rows(); ++row) {
      float* first = now.lse.data() + row * 2 * static_cast<size_t>(now.stride);
      for (int64_t page = 0; page < now.stride; ++page) first[page] = std::round(first[page]);
      std::copy_n(first, now.stride, first + now.stride);  // equal in any arithmetic
    }
    device.SetLse(now.lse);
    device.SetNumPages(now.num_pages);
    const SelectResult got = device.Run(), want = Ref(now);
    EXPECT_EQ(CountWrong(now, got, want), 0) << round;
    if (round % 2 == 1) {
      EXPECT_EQ(got.pages, want.pages) << round;
    }
    EXPECT_NE(got.pages, last);
    last = got.pages;
  }
}

TEST_F(SelectParityTest, BadArgumentsAreRefused) {
  SelectProblem p;
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
  EXPECT_TRUE(
      refused([](SelectArgs* a) { a->lse = reinterpret_cast<const float*>(uintptr_t{4}); }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->scratch = nullptr; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->scratch = reinterpret_cast<void*>(uintptr_t{64}); }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->num_kv_heads = 65536; }));
  EXPECT_TRUE(refused([](SelectArgs* a) { a->rule = static_cast<CombineRule>(7); }));
}

}  // namespace
}  // namespace kvd
