// Goal: score rotates queries as RotateQuery does, bit for bit. Method: the same scan of queries
// that were rotated before.

#include <algorithm>
#include <string>
#include <vector>

#include "tests/kernels/score_parity.h"

namespace kvd {
namespace {

using kvd::testing::Batch;
using kvd::testing::Built;
using kvd::testing::DeviceArray;
using kvd::testing::Geometry;
using kvd::testing::Name;
using kvd::testing::SameBits;

// Full, coarse and refining scans of a batch: bit for bit those of queries that were rotated
// before.
void ExpectRotated(const Batch& batch) {
  constexpr int kMax = 24;
  std::vector<int32_t> candidates, counts;
  for (const int pages : batch.num_pages()) {
    for (int head = 0; head < Batch::kHeads; ++head) {
      counts.push_back(std::min(pages / 3, kMax));
      for (int i = 0; i < kMax; ++i) candidates.push_back(i < counts.back() ? 3 * i : -1);
    }
  }
  const DeviceArray<int32_t> d_candidates(candidates), d_counts(counts);
  DeviceArray<float> lse(batch.LseSize());
  for (const int scan : {0, 1, 2}) {  // full, coarse, refine
    const auto run = [&](const ScoreArgs& args) {
      lse.Poison();
      if (scan == 0) KVD_CUDA_OK(LaunchScoreFull(args, nullptr));
      if (scan == 1) KVD_CUDA_OK(LaunchScoreCoarse(args, nullptr));
      if (scan == 2)
        KVD_CUDA_OK(LaunchScoreRefine({args, kMax, d_candidates.data(), d_counts.data()}, nullptr));
      return lse.Download();
    };
    const ScoreArgs plain = batch.PlainArgs(lse.data());
    const std::vector<float> want = run(batch.DeviceArgs(lse.data()));
    EXPECT_TRUE(SameBits(run(plain), want)) << scan;
    ScoreArgs wrong = plain;
    wrong.rotate_query = false;
    EXPECT_FALSE(SameBits(run(wrong), want)) << scan << ": they were not rotated";
    wrong = batch.DeviceArgs(lse.data());
    wrong.rotate_query = true;
    EXPECT_FALSE(SameBits(run(wrong), want)) << scan << ": they were rotated twice";
  }
}

class ScoreRotationTest : public ::testing::TestWithParam<Geometry> {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};

TEST_P(ScoreRotationTest, QueriesThatScoreRotatesGiveTheBitsOfQueriesRotatedBefore) {
  ExpectRotated(Batch(GetParam(), {123}, false));
  ExpectRotated(Batch(GetParam(), {21, 0, 9}, false));
}

// Every head dim, both dtypes and all groups: how a lane holds its queries differs by all three.
std::vector<Geometry> AllGroups() {
  std::vector<Geometry> all;
  for (const int dim : {64, 96, 128, 256}) {
    for (int group = 1; group <= 16; ++group) {
      for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16})
        all.push_back({dim, 16, 8, group, dtype});
    }
  }
  for (const Geometry& g :
       {Geometry{128, 32, 4, 4}, {64, 32, 8, 7}, {96, 32, 4, 9}, {256, 32, 8, 16}})
    all.push_back(g);
  return Built(all);
}
INSTANTIATE_TEST_SUITE_P(AllGroups, ScoreRotationTest, ::testing::ValuesIn(AllGroups()), Name);

// More pieces than there are warps at once: most meet a second row.
TEST(ScoreRotationOfManyRowsTest, QueriesOfARowThatAWarpComesToLaterAreRotatedToo) {
  if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
  ExpectRotated(Batch({128, 16, 8, 4}, std::vector<int>(70, 123), false));
  ExpectRotated(Batch({64, 16, 8, 12, KvDtype::kFp16}, std::vector<int>(70, 123), false));
}

}  // namespace
}  // namespace kvd
