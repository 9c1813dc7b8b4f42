// Goal: every target that this CPU can run, the scalar one included, gives the results of the
// mathematics. Method: each primitive and each kernel against plain loops or the oracle, once per
// target.
#include "kernels/simd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/attend.h"
#include "kernels/dtype.h"
#include "kernels/score.h"
#include "tests/support/kv_data.h"
#include "tests/support/oracle.h"
#include "tests/support/records.h"

namespace kvd {
namespace {

using kvd::testing::RandomKv;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class SimdTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { simd::UseTarget(GetParam()); }
  void TearDown() override { simd::UseTarget(0); }
};
INSTANTIATE_TEST_SUITE_P(Targets, SimdTest, ::testing::Range(0, simd::NumTargets()));

TEST(SimdTargetTest, TheLastTargetIsScalarAndTheFirstIsTheDefault) {
  const std::string best = simd::TargetName();
  simd::UseTarget(simd::NumTargets() - 1);
  EXPECT_STREQ(simd::TargetName(), "SCALAR");
  EXPECT_EQ(simd::NumLanes(), 1);
  simd::UseTarget(0);
  EXPECT_EQ(simd::TargetName(), best);
}

TEST_P(SimdTest, ExpIsAccurateToAMillionthAndOneAtZero) {
  for (float shift : {0.0f, 5.0f, -30.0f}) {
    std::vector<float> x;
    for (int i = 0; i < 16 * 500; ++i) x.push_back(shift - 86.0f * static_cast<float>(i) / 8000);
    const std::vector<float> before = x;
    const float sum = simd::ExpInPlace(x.data(), static_cast<int>(x.size()), shift);
    double truth_sum = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const float difference = before[i] - shift;
      const double truth = std::exp(static_cast<double>(difference));
      // The argument's own rounding, |x| * 2^-24, comes on top of the polynomial's error.
      EXPECT_NEAR(x[i], truth, truth * (3e-7 + std::fabs(difference) * 1.2e-7));
      truth_sum += truth;
    }
    EXPECT_NEAR(sum, truth_sum, 5e-6 * truth_sum);  // 8,000 terms in one running sum
    EXPECT_EQ(x[0], 1.0f);
  }
  std::vector<float> far(16, -kInfinity);
  far[3] = -1000;
  far[4] = 0;
  EXPECT_EQ(simd::ExpInPlace(far.data(), 16, 0), 1.0f);
  EXPECT_EQ(far[2], 0.0f);
  EXPECT_EQ(far[3], 0.0f);
}

TEST_P(SimdTest, TransposePutsWordWOfRowIInLaneI) {
  const int lanes = simd::NumLanes();
  for (size_t bytes : {size_t{16}, size_t{48}, size_t{240}}) {
    std::vector<std::vector<int32_t>> rows;
    std::vector<const uint8_t*> pointers;
    for (int i = 0; i < lanes; ++i) {
      rows.emplace_back(bytes / 4);
      for (size_t w = 0; w < bytes / 4; ++w) rows.back()[w] = i * 1000 + static_cast<int32_t>(w);
    }
    for (auto& row : rows) pointers.push_back(reinterpret_cast<const uint8_t*>(row.data()));
    alignas(64) int32_t words[60 * simd::kMaxLanes];
    simd::Transpose(pointers.data(), bytes, words);
    for (int w = 0; w < static_cast<int>(bytes / 4); ++w) {
      for (int i = 0; i < lanes; ++i) EXPECT_EQ(words[w * lanes + i], i * 1000 + w);
    }
  }
}

// Codes of one lane array: lane i's word w holds dims 8w to 8w + 7, the first in the lowest nibble.
std::vector<int32_t> RandomWords(int num_words, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> words(static_cast<size_t>(num_words * simd::kMaxLanes) + 16);
  for (int32_t& word : words) word = static_cast<int32_t>(random());
  return words;
}
const int32_t* Aligned(const std::vector<int32_t>& words) {
  return reinterpret_cast<const int32_t*>((reinterpret_cast<uintptr_t>(words.data()) + 63) / 64 *
                                          64);
}

// Integer queries, so that every sum is exact and every target must give it.
TEST_P(SimdTest, DotsOfCodesAreExactForEveryGroup) {
  constexpr int kDim = 96, kWords = kDim / 8, kRows = 8;
  const int lanes = simd::NumLanes();
  std::vector<std::vector<int32_t>> storage;
  std::vector<const int32_t*> rows;
  for (uint64_t r = 0; r < kRows; ++r) storage.push_back(RandomWords(kWords, r + 1));
  for (const auto& words : storage) rows.push_back(Aligned(words));
  const auto nibble = [&](int r, int lane, int d) {
    return static_cast<int>(
        static_cast<uint32_t>(rows[static_cast<size_t>(r)][d / 8 * lanes + lane]) >> (d % 8 * 4) &
        15);
  };
  const auto twos = [](int n) { return n < 8 ? n : n - 16; };
  const std::vector<uint8_t> ahead_bytes(256);
  const std::vector<const uint8_t*> ahead_rows(simd::kMaxLanes, ahead_bytes.data());
  const simd::Prefetch ahead = {ahead_rows.data(), ahead_bytes.size()};
  auto query = std::make_unique<simd::LaneQuery>();
  alignas(64) static float z[kRows * simd::kMaxGroup * simd::kMaxLanes];
  for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16}) {
    for (int group = 1; group <= simd::kMaxGroup; ++group) {
      std::vector<uint16_t> q;
      for (int i = 0; i < group * kDim; ++i)
        q.push_back(ToKv(dtype, static_cast<float>((i * 7 + i / 5) % 3 - 1)));
      simd::PrepareQuery(q.data(), group, kDim, dtype, 1.0f, query.get());
      const auto expect = [&](int g, int lane, const std::function<int(int)>& code, float got,
                              const char* what) {
        float sum = 0;
        for (int d = 0; d < kDim; ++d)
          sum += FromKv(dtype, q[static_cast<size_t>(g * kDim + d)]) * static_cast<float>(code(d));
        EXPECT_EQ(got, sum) << what << " group " << group << " head " << g << " lane " << lane;
      };
      const auto at = [&](int r, int g, int lane) { return z[(r * group + g) * lanes + lane]; };
      simd::CoarseDots(rows.data(), *query, ahead, z);
      for (int g = 0; g < group; ++g) {
        for (int lane = 0; lane < lanes; ++lane) {
          expect(
              g, lane, [&](int d) { return nibble(0, lane, d) - 8; }, at(0, g, lane),
              "high nibbles");
          for (int r : {1, 2})
            expect(
                g, lane, [&](int d) { return twos(nibble(r, lane, d)); }, at(r, g, lane), "mode");
        }
      }
      simd::ModeDots(rows.data(), kRows, *query, ahead, z);
      for (int r = 0; r < kRows; ++r) {
        expect(
            group - 1, r % lanes, [&](int d) { return twos(nibble(r, r % lanes, d)); },
            at(r, group - 1, r % lanes), "modes");
      }
      simd::CentroidDots(rows[0], rows[1], *query, ahead, z);
      for (int lane = 0; lane < lanes; ++lane) {
        expect(
            group - 1, lane,
            [&](int d) { return 16 * (nibble(0, lane, d) - 8) + nibble(1, lane, d); },
            at(0, group - 1, lane), "centroid");
      }
    }
  }
}

TEST_P(SimdTest, MaskedMaxAndSumLeaveOutWhatTheBitsLeaveOut) {
  std::mt19937 random(5);
  for (int count : {1, 15, 63, 64, 65, 200}) {
    std::vector<float> x(static_cast<size_t>(count));
    std::vector<uint64_t> bits((x.size() + 63) / 64);
    for (float& v : x) v = std::uniform_real_distribution<float>(-20, 20)(random);
    for (uint64_t& w : bits) w = (uint64_t{random()} << 32) | random();
    if (count > 15) x[11] = std::nanf("");
    if (count > 15) bits[0] |= 1 << 11;
    const uint64_t* all = nullptr;
    for (const uint64_t* include : {static_cast<const uint64_t*>(bits.data()), all}) {
      float max = -kInfinity;
      double sum = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const bool in = include == nullptr || (include[i / 64] >> (i % 64) & 1) != 0;
        if (in && !std::isnan(x[i])) {
          max = std::max(max, x[i]);
          sum += std::exp(static_cast<double>(x[i]) - 20);
        }
      }
      const simd::MaxResult result = simd::MaskedMax(x.data(), count, include);
      EXPECT_EQ(result.max, max);
      EXPECT_EQ(result.num_faults, count > 15 ? 1u : 0u);
      EXPECT_NEAR(simd::MaskedSumExp(x.data(), count, include, 20), sum, 3e-6 * sum);
    }
  }
}

TEST_P(SimdTest, ScoreKeysAscendWithTheScoreAndComeBackFromTheKey) {
  constexpr int kPages = 130, kGroup = 3;
  std::mt19937 random(6);
  std::vector<float> lse(kPages * kGroup);
  for (float& v : lse) v = std::normal_distribution<float>(0, 30)(random);
  lse[7] = lse[kPages + 7] = lse[2 * kPages + 7] = std::nanf("");
  lse[9] = std::nanf("");
  const float norm[kGroup] = {40, -kInfinity, 60};  // the middle head has no mass at all
  std::vector<uint64_t> allowed = {~uint64_t{0} ^ 2, ~uint64_t{0}, 3};
  std::vector<uint32_t> keys(192), best(3);
  simd::ScoreKeys(lse.data(), kPages, kGroup, norm, kPages, allowed.data(), keys.data(),
                  best.data());
  for (size_t p = 0; p < kPages; ++p) {
    EXPECT_LE(keys[p], best[p / 64]);
    if (p == 1) {
      EXPECT_EQ(keys[p], 0u);
    } else if (p == 7) {
      EXPECT_EQ(simd::FromOrderedKey(keys[p]), -kInfinity);
      EXPECT_GT(keys[p], 0u);
    } else {
      const double a = p == 9 ? -1e300 : lse[p] - norm[0], b = lse[2 * kPages + p] - norm[2];
      EXPECT_NEAR(simd::FromOrderedKey(keys[p]), kvd::testing::LogAddExp(a, b), 2e-5) << p;
    }
  }
  EXPECT_EQ(keys[130], 0u);
  for (size_t p = 10; p + 1 < kPages; ++p) {
    EXPECT_EQ(keys[p] < keys[p + 1],
              simd::FromOrderedKey(keys[p]) < simd::FromOrderedKey(keys[p + 1]));
  }
}

TEST_P(SimdTest, ScoreIsWithinToleranceOfTheOracle) {
  for (KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16}) {
    for (float softcap : {0.0f, 15.0f}) {
      constexpr int kPages = 19, kGroup = 5;
      kvd::testing::RandomRecords r =
          kvd::testing::MakeRandomRecords({.head_dim = 96, .count = kPages});
      kvd::testing::PutBf16(r.mode_scale(4, 1), 2.0f);  // one page of large spread
      const std::vector<uint16_t> query = RandomKv(kGroup * 96, dtype, 1, 3);
      std::vector<float> lse(kGroup * kPages);
      const uint8_t *coarse = r.coarse.data(), *fine = r.fine.data();
      const int64_t capacity = kPages;
      const int32_t num_pages = kPages;
      const ScoreArgs args = {1,         1,          kGroup,  96,           16,      8,
                              dtype,     .1f,        softcap, query.data(), &coarse, &fine,
                              &capacity, &num_pages, kPages,  lse.data()};
      for (bool full : {true, false}) {
        full ? ref::ScoreFull(args) : ref::ScoreCoarse(args);
        for (int g = 0; g < kGroup; ++g) {
          for (int p = 0; p < kPages; ++p) {
            const double truth = kvd::testing::OracleRecordLse(
                query.data() + g * 96, r.coarse_at(p), full ? r.fine_at(p) : nullptr, 96, 16, 8,
                dtype, double{.1f}, double{softcap});
            EXPECT_NEAR(lse[static_cast<size_t>(g * kPages + p)], truth,
                        kvd::testing::LseTolerance(truth));
          }
        }
      }
    }
  }
}

TEST_P(SimdTest, AttendIsWithinToleranceOfTheOracle) {
  for (KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16}) {
    for (int head_dim : {64, 96}) {
      constexpr int kGroup = 6, kTokens = 29;  // one full unit and a tail
      const auto row = static_cast<size_t>(head_dim);
      std::vector<uint16_t> keys = RandomKv(32 * head_dim, dtype, 1, 1),
                            values = RandomKv(32 * head_dim, dtype, 1, 2);
      keys[5] = ToKv(dtype, 1e-7f);  // denormal in fp16
      values[6] = ToKv(dtype, -3e-6f);
      const std::vector<uint16_t> query = RandomKv(kGroup * head_dim, dtype, 1, 3);
      std::vector<uint16_t> units(64 * row);
      for (size_t u = 0; u < 2; ++u) {
        std::copy_n(keys.begin() + static_cast<std::ptrdiff_t>(u * 16 * row), 16 * row,
                    units.begin() + static_cast<std::ptrdiff_t>(u * 32 * row));
        std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(u * 16 * row), 16 * row,
                    units.begin() + static_cast<std::ptrdiff_t>((u * 32 + 16) * row));
      }
      const auto* bytes = reinterpret_cast<const uint8_t*>(units.data());
      const UnitRef refs[] = {{bytes, 16}, {bytes + 64 * row, kTokens - 16}};
      const int32_t num_units = 2;
      std::vector<float> o(kGroup * row), lse(kGroup);
      ref::Attend({1, 1, kGroup, head_dim, 16, dtype, .3f, 0, query.data(), 2, refs, &num_units,
                   o.data(), lse.data()});
      for (size_t g = 0; g < kGroup; ++g) {
        const auto truth =
            kvd::testing::OracleAttend(query.data() + g * row, keys.data(), values.data(), kTokens,
                                       head_dim, dtype, double{.3f}, 0);
        EXPECT_NEAR(lse[g], truth.lse, 1e-5);
        for (size_t d = 0; d < row; ++d) EXPECT_NEAR(o[g * row + d], truth.o[d], 2e-5);
      }
    }
  }
}

}  // namespace
}  // namespace kvd
