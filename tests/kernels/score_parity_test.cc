// Goal: the score kernels give what the reference gives, on every geometry, and the same bits
// whoever asks.
// Method: records that the encoder built from random, spread and adversarial pages; lse compared
// with kvd::ref within the tolerance of kernels/README.md.

#include "tests/kernels/score_parity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace kvd {
namespace {

using kvd::testing::Batch;
using kvd::testing::Built;
using kvd::testing::DeviceArray;
using kvd::testing::Geometry;
using kvd::testing::Graph;
using kvd::testing::Name;
using kvd::testing::SameBits;

// Places where `got` is not `want`: a NaN, a value beyond a page list's end that is not -inf, or
// one that is off by more than 1e-3, or 3e-5 of what its logits are made of.
int CountWrong(const Batch& batch, const std::vector<float>& got, const std::vector<float>& want,
               int group) {
  int wrong = 0;
  size_t at = 0;
  for (int s = 0; s < static_cast<int>(batch.num_pages().size()); ++s) {
    for (int head = 0; head < Batch::kHeads * group; ++head) {
      for (int64_t p = 0; p < batch.stride(); ++p, ++at) {
        const double g = double{got[at]}, w = double{want[at]};
        if (g == w) continue;  // -inf too
        const bool close =
            std::abs(g - w) <= 1e-3 ||
            (p < batch.num_pages()[static_cast<size_t>(s)] &&
             std::abs(g - w) <= 3e-5 * batch.Magnitude(s, head, static_cast<int>(p)));
        if (close) continue;
        if (++wrong <= 3)
          std::printf("sequence %d head %d page %d: got %.9g, want %.9g\n", s, head,
                      static_cast<int>(p), g, w);
      }
    }
  }
  return wrong;
}

enum class Scan { kFull, kCoarse };

std::vector<float> RunRef(const Batch& batch, Scan scan) {
  std::vector<float> lse(batch.LseSize());
  scan == Scan::kFull ? ref::ScoreFull(batch.HostArgs(lse.data()))
                      : ref::ScoreCoarse(batch.HostArgs(lse.data()));
  return lse;
}

std::vector<float> RunGpu(const Batch& batch, Scan scan) {
  DeviceArray<float> lse(batch.LseSize());
  lse.Poison();
  const ScoreArgs args = batch.DeviceArgs(lse.data());
  KVD_CUDA_OK(scan == Scan::kFull ? LaunchScoreFull(args, nullptr)
                                  : LaunchScoreCoarse(args, nullptr));
  return lse.Download();
}

class ScoreParityTest : public ::testing::TestWithParam<Geometry> {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};

TEST_P(ScoreParityTest, FullAndCoarseScansEqualTheReference) {
  const Batch batch(GetParam(), {37, 0, 70, 8, 1}, false);
  for (const Scan scan : {Scan::kFull, Scan::kCoarse}) {
    const std::vector<float> want = RunRef(batch, scan), got = RunGpu(batch, scan);
    EXPECT_EQ(CountWrong(batch, got, want, GetParam().group), 0)
        << (scan == Scan::kFull ? "full" : "coarse");
    EXPECT_TRUE(SameBits(got, RunGpu(batch, scan))) << "a repeat gave other bits";
  }
}

TEST_P(ScoreParityTest, ExtremePagesSaturateAndLeaveTheirNeighboursBits) {
  const Batch batch(GetParam(), {64, 21}, true);
  const Batch mild(GetParam(), {64, 21}, false);
  for (const Scan scan : {Scan::kFull, Scan::kCoarse}) {
    const std::vector<float> want = RunRef(batch, scan), got = RunGpu(batch, scan),
                             plain = RunGpu(mild, scan);
    EXPECT_EQ(CountWrong(batch, got, want, GetParam().group), 0);
    int moved = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_FALSE(std::isnan(got[i]));
      const auto page = static_cast<int64_t>(i) % batch.stride();
      if (page % 3 != 1 && std::memcmp(&got[i], &plain[i], 4) != 0) ++moved;
    }
    EXPECT_EQ(moved, 0) << "pages whose result depends on their neighbours";
  }
}

TEST_P(ScoreParityTest, WrongAnswersAreRejected) {
  const Batch batch(GetParam(), {37, 12}, false);
  const int group = GetParam().group;
  const std::vector<float> want = RunRef(batch, Scan::kFull), got = RunGpu(batch, Scan::kFull);
  const auto stride = static_cast<std::ptrdiff_t>(batch.stride());
  std::vector<float> swapped = got;  // the first head of either KV head
  std::swap_ranges(swapped.begin(), swapped.begin() + stride, swapped.begin() + group * stride);
  EXPECT_GT(CountWrong(batch, swapped, want, group), 20);
  std::vector<float> shifted = got;
  std::rotate(shifted.begin(), shifted.begin() + 1, shifted.begin() + 37);
  EXPECT_GT(CountWrong(batch, shifted, want, group), 20);
  EXPECT_GT(CountWrong(batch, RunGpu(batch, Scan::kCoarse), want, group), 20)
      << "the fine part was dropped";
  Batch dropped(GetParam(), {37, 12}, false);
  dropped.DropCentroidScale(5);
  const std::vector<float> without = RunRef(dropped, Scan::kFull);
  int wrong = 0;
  for (int g = 0; g < group; ++g) {
    const auto at = static_cast<size_t>(g * stride + 5);
    wrong += !(std::abs(got[at] - without[at]) <= 1e-3f);
  }
  EXPECT_EQ(wrong, group) << "a scale was dropped";
}

TEST_P(ScoreParityTest, RefineGivesTheBitsOfTheFullScan) {
  const Batch batch(GetParam(), {70, 9}, true);
  constexpr int kMax = 40;
  std::vector<int32_t> candidates(4 * kMax, -1), counts;
  for (int row = 0; row < 4; ++row) {
    int count = 0;
    for (int p = row % 2; p < batch.num_pages()[static_cast<size_t>(row / 2)]; p += 2 + row % 2)
      candidates[static_cast<size_t>(row * kMax + count++)] = p;
    counts.push_back(row == 3 ? 0 : count);
  }
  DeviceArray<int32_t> d_candidates(candidates), d_counts(counts);
  DeviceArray<float> lse(batch.LseSize());
  lse.Poison();
  const std::vector<float> before = lse.Download();
  KVD_CUDA_OK(LaunchScoreRefine(
      {batch.DeviceArgs(lse.data()), kMax, d_candidates.data(), d_counts.data()}, nullptr));
  const std::vector<float> got = lse.Download(), full = RunGpu(batch, Scan::kFull);
  std::vector<float> want = before;
  for (int row = 0; row < 4; ++row) {
    for (int i = 0; i < counts[static_cast<size_t>(row)]; ++i) {
      for (int g = 0; g < GetParam().group; ++g) {
        const auto at = static_cast<size_t>((row * GetParam().group + g) * batch.stride() +
                                            candidates[static_cast<size_t>(row * kMax + i)]);
        want[at] = full[at];
      }
    }
  }
  EXPECT_TRUE(SameBits(got, want));
}

INSTANTIATE_TEST_SUITE_P(Geometries, ScoreParityTest,
                         ::testing::ValuesIn(Built({{128, 16, 8, 4},
                                                    {128, 16, 8, 1, KvDtype::kFp16},
                                                    {128, 16, 8, 8},
                                                    {128, 16, 8, 5, KvDtype::kFp16},
                                                    {128, 16, 8, 12},
                                                    {128, 16, 8, 16, KvDtype::kFp16},
                                                    {128, 16, 8, 4, KvDtype::kBf16, 30.0f},
                                                    {128, 16, 8, 7, KvDtype::kBf16, 50.0f},
                                                    {64, 16, 8, 3},
                                                    {64, 16, 8, 2, KvDtype::kFp16},
                                                    {64, 16, 8, 6},
                                                    {64, 16, 8, 16},
                                                    {64, 16, 8, 9, KvDtype::kFp16, 20.0f},
                                                    {128, 16, 4, 8},
                                                    {128, 32, 8, 12},
                                                    {128, 32, 4, 5, KvDtype::kFp16},
                                                    {64, 16, 4, 16},
                                                    {64, 32, 8, 7},
                                                    {64, 32, 4, 2},
                                                    {96, 16, 8, 6},
                                                    {96, 16, 4, 4},
                                                    {96, 32, 8, 16, KvDtype::kFp16},
                                                    {96, 32, 4, 9},
                                                    {256, 16, 8, 4},
                                                    {256, 16, 4, 10, KvDtype::kFp16},
                                                    {256, 32, 8, 16},
                                                    {256, 32, 4, 4},
                                                    {256, 16, 8, 12, KvDtype::kBf16, 50.0f}})),
                         Name);

class ScoreGraphTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};

TEST_F(ScoreGraphTest, ACapturedScanFollowsLengthsThatChangeBetweenReplays) {
  Batch batch({128, 16, 8, 4}, {90, 40, 64}, false);
  DeviceArray<float> lse(batch.LseSize());
  const Graph graph([&](cudaStream_t stream) {
    KVD_CUDA_OK(LaunchScoreFull(batch.DeviceArgs(lse.data()), stream));
  });
  for (const auto& [first, second] : {std::pair(90, 40), {3, 40}, {0, 0}, {90, 17}}) {
    batch.SetLength(0, first);
    batch.SetLength(1, second);
    lse.Poison();
    graph.Replay();
    EXPECT_EQ(CountWrong(batch, lse.Download(), RunRef(batch, Scan::kFull), 4), 0)
        << first << ' ' << second;
  }
}

// More sequences than a warp has lanes, and a batch that is mostly padding.
TEST_F(ScoreGraphTest, ASequenceHasTheSameBitsWhereverItStandsInTheBatch) {
  std::vector<int> lengths(75, 0);
  for (size_t i = 0; i < lengths.size(); i += 3) lengths[i] = static_cast<int>(i) % 13 + 1;
  const Batch batch({64, 16, 8, 4}, lengths, false);
  const std::vector<float> got = RunGpu(batch, Scan::kFull);
  EXPECT_EQ(CountWrong(batch, got, RunRef(batch, Scan::kFull), 4), 0);
  // The same records and queries again, alone: one sequence a launch.
  DeviceArray<float> alone(batch.LseSize());
  alone.Poison();
  for (int s = 0; s < 75; ++s) {
    ScoreArgs args = batch.DeviceArgs(alone.data() + s * Batch::kHeads * 4 * batch.stride());
    args.num_sequences = 1;
    args.query += s * Batch::kHeads * 4 * 64;
    args.coarse += s;
    args.fine += s;
    args.page_capacity += s;
    args.num_pages += s;
    KVD_CUDA_OK(LaunchScoreFull(args, nullptr));
  }
  EXPECT_TRUE(SameBits(alone.Download(), got));
}

TEST_F(ScoreGraphTest, GeometriesBeyondTheLimitsAreRefused) {
  const Batch batch({64, 16, 8, 4}, {3}, false);
  DeviceArray<float> lse(batch.LseSize());
  const ScoreArgs good = batch.DeviceArgs(lse.data());
  ScoreArgs bad = good;
  bad.head_dim = 80;
  EXPECT_EQ(LaunchScoreFull(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.group = 17;
  EXPECT_EQ(LaunchScoreCoarse(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.rank = 6;
  EXPECT_EQ(LaunchScoreFull(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.page_tokens = 8;
  EXPECT_EQ(LaunchScoreFull(bad, nullptr), cudaErrorInvalidValue);
}

TEST(BuiltGeometriesTest, AGeometryThatIsNotBuiltIsRefusedAndTheOptionNamed) {
  if (kAllGeometries) GTEST_SKIP() << "this build has all of them";
  ScoreArgs score = {1,       1,       4,       96,      16,      8, KvDtype::kBf16, 1, 0,
                     nullptr, nullptr, nullptr, nullptr, nullptr, 8, nullptr};
  EXPECT_EQ(LaunchScoreFull(score, nullptr), cudaErrorNotSupported);
  score.head_dim = 128;
  score.page_tokens = 32;
  EXPECT_EQ(LaunchScoreCoarse(score, nullptr), cudaErrorNotSupported);
  score.page_tokens = 16;
  score.rank = 4;
  EXPECT_EQ(LaunchScoreRefine({score, 8, nullptr, nullptr}, nullptr), cudaErrorNotSupported);
  KvGeometry geometry;
  geometry.head_dim = 128;
  EXPECT_EQ(GpuProblem(geometry), nullptr);
  geometry.head_dim = 256;
  ASSERT_NE(GpuProblem(geometry), nullptr);
  EXPECT_NE(std::string(GpuProblem(geometry)).find("KVD_ALL_GEOMETRIES"), std::string::npos);
}

}  // namespace
}  // namespace kvd
