// Goal: the two selects of a progressive scan list and choose what two of the reference do, though
// the second reads the candidates alone. Method: select_parity.h; between the two, the candidates
// get values of another array, as refine would give them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "kernels/score.h"
#include "kernels/select.h"
#include "kernels/summarize.h"
#include "tests/kernels/select_parity.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

// What the two selects gave. `refined`: the second's problem, with the first's lists as candidates.
struct Progressive {
  std::vector<float> coarse_norm;
  SelectProblem refined;
  SelectResult among;
};

Progressive RunProgressive(const SelectProblem& coarse, int num_chosen,
                           const std::vector<float>& fine) {
  const size_t rows = coarse.Rows(), group = static_cast<size_t>(coarse.group);
  const auto max = static_cast<size_t>(num_chosen + coarse.n_sink + coarse.n_win);
  DeviceArray<float> lse(coarse.lse);
  const DeviceArray<int32_t> num_pages(coarse.num_pages), lists(rows * max), counts(rows),
      pages(rows * static_cast<size_t>(coarse.num_select)), num_selected(rows);
  const DeviceArray<float> threshold(rows), log_norm(rows * group);
  const DeviceArray<uint64_t> num_faults(std::vector<uint64_t>{0});
  DeviceArray<uint8_t> scratch(
      SelectGpuScratchBytes(static_cast<int64_t>(rows), coarse.group, coarse.stride));
  scratch.Poison(0);
  std::vector<DeviceArray<uint64_t>> bits;
  std::vector<const uint64_t*> tables;
  for (const auto& words : coarse.selectable) {
    bits.emplace_back(words);
    tables.push_back(words.empty() ? nullptr : bits.back().data());
  }
  const DeviceArray<const uint64_t*> selectable(tables);
  SelectArgs args = ArgsOf(coarse);
  args.lse = lse.data();
  args.num_pages = num_pages.data();
  args.selectable = tables.empty() ? nullptr : selectable.data();
  args.num_select = num_chosen;
  args.log_norm = log_norm.data();
  args.scratch = scratch.data();
  KVD_CUDA_OK(
      LaunchSelectCandidates(args, {static_cast<int>(max), lists.data(), counts.data()}, nullptr));
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
    const int sinks = std::min(coarse.n_sink, num_pages),
              window = std::max(sinks, num_pages - coarse.n_win);
    std::vector<int32_t> list = got.refined.candidates[row];
    const auto k = static_cast<size_t>(num_chosen);
    const std::ptrdiff_t num = std::ssize(list) - sinks - (num_pages - window);
    if (num < 0 || num > num_chosen) return -1;
    for (int i = 0; i < sinks; ++i) wrong += list[static_cast<size_t>(i)] != i;
    for (int p = window; p < num_pages; ++p)
      wrong += list[list.size() - static_cast<size_t>(num_pages - p)] != p;
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
constexpr ListCase kCases[] = {{8, 4, 65536, 2016, 126, 2.0f},   {2, 4, 70001, 2016, 126, 2.0f},
                               {3, 4, 8192, 1024, 64, 2.0f},     {2, 8, 20000, 2016, 126, 1.5f},
                               {2, 1, 300000, 1500, 90, 2.0f},   {1, 16, 30000, 1024, 64, 2.0f},
                               {2, 3, 1 << 20, 7000, 400, 2.0f}, {2, 5, 40000, 12000, 1000, 1.0f},
                               {2, 4, 700, 5000, 126, 2.0f}};

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
    EXPECT_EQ(CountWrong(got.refined, got.among, Ref(got.refined)), 0)
        << c.group << ", " << c.pages;
    EXPECT_NE(got.among.log_norm, got.coarse_norm);
  }
}

// A CTA then keeps fewer values than it has room for.
TEST_F(SelectListsParityTest, AShortRowBesideALongOneIsRight) {
  SelectProblem coarse = CoarseOf({2, 4, 65536, 2016, 126, 2.0f});
  coarse.num_pages = {65536, 3000, 700};
  coarse = Random(coarse, 2.0f, 9);
  const Progressive got = RunProgressive(coarse, 2016, Refine(coarse, 0, .5f));
  EXPECT_EQ(CountWrongLists(coarse, 2016, got), 0);
  EXPECT_EQ(CountWrong(got.refined, got.among, Ref(got.refined)), 0);
}

// Shifts of -3 and -9 leave less than an eighth of most norms: the row is read again.
TEST_F(SelectListsParityTest, CandidatesThatRefineMovesFarAreRight) {
  for (const ListCase& c : {kCases[0], kCases[1], kCases[3], kCases[7]}) {
    for (const float shift : {-60.0f, -9.0f, -3.0f, -2.0f, 3.0f, 30.0f, 200.0f}) {
      const SelectProblem coarse =
          CoarseOf({c.heads, c.group, c.pages, c.num_chosen, c.num_select, 4.0f});
      const Progressive got = RunProgressive(coarse, c.num_chosen, Refine(coarse, shift, 1.0f));
      EXPECT_EQ(CountWrong(got.refined, got.among, Ref(got.refined)), 0)
          << c.pages << ", shift " << shift;
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

TEST_F(SelectListsParityTest, SelectableBitsAndRowsWithoutMassAreKeptToByBoth) {
  for (const int pages : {9000, 40000, 80000}) {
    SelectProblem coarse = CoarseOf({3, 4, pages, 1000, 100, 2.0f});
    std::mt19937_64 random(6);
    for (const int32_t num : coarse.num_pages) {
      coarse.selectable.emplace_back(static_cast<size_t>(num + 63) / 64);
      for (uint64_t& word : coarse.selectable.back()) word = random() & random();
    }
    std::fill(coarse.selectable[1].begin(), coarse.selectable[1].end(),
              uint64_t{0});  // nothing may be chosen
    std::vector<float> fine = Refine(coarse, 0, .5f);
    const auto row = static_cast<std::ptrdiff_t>(4 * coarse.stride);
    for (std::vector<float>* lse : {&coarse.lse, &fine})
      std::fill_n(lse->begin() + 2 * row, row, -kInfinity);
    const Progressive got = RunProgressive(coarse, 1000, fine);
    EXPECT_EQ(CountWrongLists(coarse, 1000, got), 0) << pages;
    EXPECT_EQ(CountWrong(got.refined, got.among, Ref(got.refined)), 0) << pages;
    EXPECT_EQ(got.refined.candidates[2].size(), 1005u);  // without mass, but not without pages
    EXPECT_EQ(got.refined.candidates[3].size(), 5u);     // sinks and window alone
    EXPECT_EQ(got.among.num_selected[2], 100);
    EXPECT_EQ(got.among.num_selected[3], 0);
    SelectProblem all = coarse;
    all.selectable.clear();
    EXPECT_NE(CountWrongLists(all, 1000, got), 0) << "the bits make no difference";
  }
}

// The authors' rule lists by its own scores; the second select then reads whole rows.
TEST_F(SelectListsParityTest, PeakListsAndChoosesByItsOwnScores) {
  for (const int pages : {3000, 70001}) {
    SelectProblem coarse = CoarseOf({2, 4, pages, 900, 60, 2.0f});
    coarse.rule = CombineRule::kPeak;
    const Progressive got = RunProgressive(coarse, 900, Refine(coarse, 0, .5f));
    EXPECT_EQ(CountWrongLists(coarse, 900, got), 0) << pages;
    EXPECT_EQ(CountWrong(got.refined, got.among, Ref(got.refined)), 0) << pages;
    SelectProblem share = got.refined;
    share.rule = CombineRule::kShare;
    EXPECT_NE(CountWrong(share, got.among, Ref(share)), 0) << "the rules choose alike";
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
      const Progressive batch = RunProgressive(all, 1000, fine),
                        again = RunProgressive(all, 1000, fine);
      EXPECT_EQ(batch.among.log_norm, again.among.log_norm);
      EXPECT_EQ(batch.among.threshold, again.among.threshold);
      const auto size = static_cast<std::ptrdiff_t>(16 * all.stride);
      for (const std::ptrdiff_t n : {0, 11}) {
        SelectProblem one = all;
        one.num_pages = {pages};
        one.lse.assign(all.lse.begin() + n * size, all.lse.begin() + (n + 1) * size);
        const Progressive alone =
            RunProgressive(one, 1000, {fine.begin() + n * size, fine.begin() + (n + 1) * size});
        EXPECT_TRUE(std::equal(alone.among.pages.begin(), alone.among.pages.end(),
                               batch.among.pages.begin() + n * 4 * 126));
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

// Records of 8 KV heads, each of many pages unlike the others: some hundred built ones in turn,
// their centroids' scales raised bit by bit.
class Records {
 public:
  static constexpr int kHeads = 8, kGroup = 4, kPages = 8192, kDim = 128, kTokens = 16, kRank = 8;
  Records()
      : coarse_(Bytes(kLayout.coarse_bytes, true)),
        fine_(Bytes(kLayout.fine_bytes, false)),
        coarse_at_(std::vector<const uint8_t*>{coarse_.data()}),
        fine_at_(std::vector<const uint8_t*>{fine_.data()}),
        capacity_(std::vector<int64_t>{kPages}),
        num_pages_(std::vector<int32_t>{kPages}),
        query_(size_t{kHeads * kGroup * kDim}) {}

  void SetQueries(uint64_t seed) {
    query_.Upload(kvd::testing::RandomKv(kHeads * kGroup * kDim, KvDtype::kBf16, 1.5f, seed));
  }
  ScoreArgs Args(float* lse) const {
    return {.num_sequences = 1,
            .num_kv_heads = kHeads,
            .group = kGroup,
            .head_dim = kDim,
            .page_tokens = kTokens,
            .rank = kRank,
            .dtype = KvDtype::kBf16,
            .softmax_scale = .0884f,
            .logit_softcap = 0,
            .query = query_.data(),
            .coarse = coarse_at_.data(),
            .fine = fine_at_.data(),
            .page_capacity = capacity_.data(),
            .num_pages = num_pages_.data(),
            .lse_stride = kPages,
            .lse = lse};
  }

 private:
  static constexpr SummaryLayout kLayout = MakeSummaryLayout(kDim, kTokens, kRank);

  static std::vector<uint8_t> Bytes(size_t record_bytes, bool coarse) {
    constexpr int kBuilt = 256;
    std::vector<uint8_t> all;
    all.reserve(size_t{kHeads * kPages} * record_bytes);
    for (int head = 0; head < kHeads; ++head) {
      std::vector<uint8_t> built;
      for (int i = 0; i < kBuilt; ++i) {
        const auto seed = static_cast<uint64_t>(head * kBuilt + i);
        const std::vector<uint16_t> keys =
            kvd::testing::RandomKv(kTokens * kDim, KvDtype::kBf16, 1.5f, seed);
        std::vector<uint8_t> unit(MakeUnitLayout(kDim, kTokens).bytes),
            parts[2] = {std::vector<uint8_t>(kLayout.coarse_bytes),
                        std::vector<uint8_t>(kLayout.fine_bytes)};
        std::memcpy(unit.data(), keys.data(), keys.size() * 2);
        ref::Summarize({kDim, kTokens, kRank, KvDtype::kBf16, false, Encoder::kE1, unit.data(),
                        nullptr, parts[0].data(), parts[1].data()});
        const auto& part = parts[coarse ? 0 : 1];
        built.insert(built.end(), part.begin(), part.end());
      }
      for (int page = 0; page < kPages; ++page) {
        const auto from = built.begin() + static_cast<std::ptrdiff_t>(
                                              static_cast<size_t>(page % kBuilt) * record_bytes);
        all.insert(all.end(), from, from + static_cast<std::ptrdiff_t>(record_bytes));
        if (!coarse) continue;
        uint8_t* at = all.data() + all.size() - record_bytes + kLayout.coarse[kCentroidScale];
        uint16_t scale = 0;
        std::memcpy(&scale, at, sizeof(scale));
        scale = static_cast<uint16_t>(scale + page / kBuilt);
        std::memcpy(at, &scale, sizeof(scale));
      }
    }
    return all;
  }

  DeviceArray<uint8_t> coarse_, fine_;
  DeviceArray<const uint8_t*> coarse_at_, fine_at_;
  DeviceArray<int64_t> capacity_;
  DeviceArray<int32_t> num_pages_;
  DeviceArray<uint16_t> query_;
};

// Nothing of one replay may be left over in the next: lists, shares, what CTAs told each other.
TEST_F(SelectListsParityTest, ACapturedChainWithTheRealRefineFollowsItsQueries) {
  constexpr int kChosen = 600, kSelect = 60;
  Records records;
  SelectProblem p;
  p.heads = Records::kHeads;
  p.num_pages = {Records::kPages};
  p.stride = Records::kPages;
  p.num_select = kSelect;
  const auto rows = static_cast<size_t>(p.heads);
  const size_t values = rows * static_cast<size_t>(p.group * p.stride);
  const auto max = static_cast<size_t>(kChosen + p.n_sink + p.n_win);
  DeviceArray<float> lse(values), want_coarse(values), want_full(values), threshold(rows),
      log_norm(rows * 4);
  DeviceArray<int32_t> num_pages(p.num_pages), lists(rows * max), counts(rows),
      pages(rows * kSelect), num_selected(rows);
  DeviceArray<uint8_t> scratch(SelectGpuScratchBytes(p.heads, p.group, p.stride));
  scratch.Poison(0);
  SelectArgs first = ArgsOf(p);
  first.num_select = kChosen;
  first.lse = lse.data();
  first.num_pages = num_pages.data();
  first.log_norm = log_norm.data();
  first.scratch = scratch.data();
  SelectArgs second = first;
  second.num_select = kSelect;
  second.max_candidates = static_cast<int>(max);
  second.candidates = lists.data();
  second.num_candidates = counts.data();
  second.pages = pages.data();
  second.num_selected = num_selected.data();
  second.threshold = threshold.data();
  const Graph chain([&](cudaStream_t stream) {
    KVD_CUDA_OK(LaunchScoreCoarse(records.Args(lse.data()), stream));
    KVD_CUDA_OK(LaunchSelectCandidates(first, {static_cast<int>(max), lists.data(), counts.data()},
                                       stream));
    KVD_CUDA_OK(LaunchScoreRefine(
        {records.Args(lse.data()), static_cast<int>(max), lists.data(), counts.data()}, stream));
    KVD_CUDA_OK(LaunchSelectAmong(second, stream));
  });
  std::vector<int32_t> last;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    records.SetQueries(1000 + seed);
    KVD_CUDA_OK(LaunchScoreCoarse(records.Args(want_coarse.data()), nullptr));
    KVD_CUDA_OK(LaunchScoreFull(records.Args(want_full.data()), nullptr));
    p.lse = want_coarse.Download();
    const std::vector<float> full = want_full.Download();
    chain.Replay();
    Progressive got;
    got.coarse_norm = Ref(p).log_norm;  // the chain's is overwritten by the second select
    got.refined = p;
    const std::vector<int32_t> listed = lists.Download(), num = counts.Download();
    for (size_t row = 0; row < rows; ++row) {
      const auto list = listed.begin() + static_cast<std::ptrdiff_t>(row * max);
      ASSERT_EQ(num[row], static_cast<int32_t>(max));
      got.refined.candidates.emplace_back(list, list + num[row]);
      for (size_t g = 0; g < 4; ++g)
        for (const int32_t page : got.refined.candidates.back()) {
          const size_t at =
              (row * 4 + g) * static_cast<size_t>(p.stride) + static_cast<size_t>(page);
          got.refined.lse[at] = full[at];
        }
    }
    EXPECT_EQ(CountWrongLists(p, kChosen, got), 0) << seed;
    EXPECT_EQ(lse.Download(), got.refined.lse) << seed;
    got.among = {pages.Download(), num_selected.Download(), threshold.Download(),
                 log_norm.Download(), 0};
    EXPECT_EQ(CountWrong(got.refined, got.among, Ref(got.refined)), 0) << seed;
    EXPECT_NE(got.among.pages, last);
    last = got.among.pages;
  }
}

TEST_F(SelectListsParityTest, BadArgumentsAreRefused) {
  SelectProblem p;
  p.num_pages = {10};
  p.stride = 12;
  SelectArgs args = ArgsOf(p);
  args.scratch = reinterpret_cast<void*>(uintptr_t{128});
  int32_t list = 0;
  EXPECT_EQ(LaunchSelectCandidates(
                args, {args.num_select + args.n_sink + args.n_win - 1, &list, &list}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(LaunchSelectCandidates(args, {1 << 20, nullptr, &list}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(LaunchSelectAmong(args, nullptr), cudaErrorInvalidValue);  // no candidates
  args.max_candidates = 5;
  EXPECT_EQ(LaunchSelectCandidates(args, {1 << 20, &list, &list}, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace kvd
