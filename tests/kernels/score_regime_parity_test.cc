// Goal: the score kernels are right on keys and queries like a model's, by the truth. Method:
// records of every synthetic regime, as the daemon would build them, against the double-precision
// oracle, within the limits of the method (kernels/README.md, "Tolerances"): two regimes on every
// geometry, every regime at head dims 64 and 128.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/built_geometries.h"
#include "kernels/score.h"
#include "tests/kernels/summarize_parity.h"

namespace kvd::testing {
namespace {

constexpr int kPages = 48;

class ScoreRegimeParityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

std::string Name(const Format& f, int group, Regime regime) {
  return "D" + std::to_string(f.head_dim) + " B" + std::to_string(f.page_tokens) + " R" +
         std::to_string(f.rank) + " G" + std::to_string(group) + " regime " +
         std::to_string(static_cast<int>(regime));
}

// [G, P] of either scan on the GPU; `query` is rotated.
std::vector<float> RunGpu(const Format& f, int group, const std::vector<Record>& records,
                          const std::vector<uint16_t>& query, float scale, bool coarse_only) {
  std::vector<uint8_t> coarse, fine;
  for (const Record& r : records) {
    coarse.insert(coarse.end(), r.coarse.begin(), r.coarse.end());
    fine.insert(fine.end(), r.fine.begin(), r.fine.end());
  }
  const DeviceArray<uint8_t> d_coarse(coarse), d_fine(fine);
  const DeviceArray<uint16_t> d_query(query);
  const DeviceArray<const uint8_t*> coarse_base(std::vector<const uint8_t*>{d_coarse.data()}),
      fine_base(std::vector<const uint8_t*>{d_fine.data()});
  const DeviceArray<int64_t> capacity(std::vector<int64_t>{kPages});
  const DeviceArray<int32_t> count(std::vector<int32_t>{kPages});
  DeviceArray<float> lse(static_cast<size_t>(group) * kPages);
  lse.Poison();
  const ScoreArgs args = {1,
                          1,
                          group,
                          f.head_dim,
                          f.page_tokens,
                          f.rank,
                          f.dtype,
                          scale,
                          0,
                          d_query.data(),
                          coarse_base.data(),
                          fine_base.data(),
                          capacity.data(),
                          count.data(),
                          kPages,
                          lse.data()};
  KVD_CUDA_OK(coarse_only ? LaunchScoreCoarse(args, nullptr) : LaunchScoreFull(args, nullptr));
  return lse.Download();
}

std::vector<double> Truth(const Format& f, int group, const std::vector<Record>& records,
                          const std::vector<uint16_t>& query, float scale, bool coarse_only) {
  std::vector<double> lse;
  for (int g = 0; g < group; ++g) {
    for (const Record& r : records)
      lse.push_back(OracleRecordLse(query.data() + g * f.head_dim, r.coarse.data(),
                                    coarse_only ? nullptr : r.fine.data(), f.head_dim,
                                    f.page_tokens, f.rank, f.dtype, double{scale}, 0));
  }
  return lse;
}

// Whether every lse is within 1e-3, relative 3e-5 above 32, and the rms of what is below 32 within
// 1e-4.
bool Close(const std::vector<float>& got, const std::vector<double>& want) {
  double sum2 = 0, count = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(double{got[i]} - want[i]), magnitude = std::abs(want[i]);
    if (!(error <= std::max(1e-3, 3e-5 * magnitude))) return false;
    if (magnitude > 32) continue;
    sum2 += error * error;
    ++count;
  }
  return sum2 <= 1e-8 * count;
}

void Check(const Format& f, int group, Regime regime) {
  SCOPED_TRACE(Name(f, group, regime));
  const Head head(regime, f, group, kPages);
  const std::vector<uint16_t> plain(head.head.query.begin(),
                                    head.head.query.begin() + group * f.head_dim);
  std::vector<uint16_t> query(plain.size());
  RotateQuery(plain.data(), group, f.head_dim, f.dtype, query.data());
  const std::vector<Record> records = head.Reference(f, Encoder::kE1S);
  for (const bool coarse_only : {false, true}) {
    const std::vector<float> got =
        RunGpu(f, group, records, query, head.head.softmax_scale, coarse_only);
    const std::vector<double> want =
        Truth(f, group, records, query, head.head.softmax_scale, coarse_only);
    EXPECT_TRUE(Close(got, want)) << (coarse_only ? "coarse" : "full");
    EXPECT_EQ(got, RunGpu(f, group, records, query, head.head.softmax_scale, coarse_only))
        << "a repeat gave other bits";

    std::vector<float> wrong = got;
    std::rotate(wrong.begin(), wrong.begin() + 1, wrong.begin() + kPages);
    EXPECT_FALSE(Close(wrong, want)) << "shifted pages were not noticed";
    if (group > 1) {
      wrong = got;
      std::swap_ranges(wrong.begin(), wrong.begin() + kPages, wrong.begin() + kPages);
      EXPECT_FALSE(Close(wrong, want)) << "swapped heads were not noticed";
    }
    std::vector<Record> dropped = records;
    const uint32_t at = MakeSummaryLayout(f.head_dim, f.page_tokens, f.rank).coarse[kCoarseScales];
    for (Record& r : dropped) std::fill_n(r.coarse.begin() + at, 2, uint8_t{0});
    EXPECT_FALSE(
        Close(RunGpu(f, group, dropped, query, head.head.softmax_scale, coarse_only), want))
        << "a dropped scale was not noticed";
  }
}

TEST_F(ScoreRegimeParityTest, EveryRegimeIsScoredRightAtHeadDims64And128) {
  for (const Regime regime :
       {Regime::kDiffuse, Regime::kNeedle, Regime::kOutlierToken, Regime::kOutlierChannels,
        Regime::kSink, Regime::kHeadOffset, Regime::kWalk}) {
    Check({128, 16, 8}, 4, regime);
    Check({128, 16, 8, KvDtype::kFp16}, 8, regime);
    Check({64, 16, 8}, 3, regime);
  }
}

TEST_F(ScoreRegimeParityTest, TwoRegimesAreScoredRightOnEveryGeometry) {
  for (const int dim : {64, 96, 128, 256}) {
    for (const int tokens : {16, 32}) {
      for (const int rank : {4, 8}) {
        if (!IsBuilt(dim, tokens, rank)) continue;
        for (const int group : {1, 4, 7, 12, 16}) {
          const Format f = {dim, tokens, rank, group % 2 == 0 ? KvDtype::kBf16 : KvDtype::kFp16};
          Check(f, group, Regime::kDiffuse);
          Check(f, group, Regime::kNeedle);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvd::testing
