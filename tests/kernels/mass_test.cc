// Goal: the mass figures are the shares of their definition. Method: random pages and sets against
// sums in double precision; the empty cases.
#include "kernels/mass.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/softmax.h"
#include "tests/support/oracle.h"

namespace kvd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  std::vector<float> lse;
  std::vector<uint64_t> attended, missing;
};
Case RandomCase(int num_pages, uint64_t seed) {
  std::mt19937_64 random(seed);
  Case c;
  for (int i = 0; i < num_pages; ++i)
    c.lse.push_back(std::normal_distribution<float>(5, 4)(random));
  for (int w = 0; w < (num_pages + 63) / 64; ++w) {
    c.attended.push_back(random() & random());
    c.missing.push_back(random() & random());
  }
  return c;
}

TEST(MassTest, FiguresAreTheSharesOfTheirDefinition) {
  for (int num_pages : {1, 64, 100, 4096, 4097, 20000}) {
    const Case c = RandomCase(num_pages, 3);
    for (float lse_attended : {12.5f, -3.0f, -kInfinity}) {
      double unread = -HUGE_VAL, lost = -HUGE_VAL;
      for (size_t i = 0; i < c.lse.size(); ++i) {
        if ((c.attended[i / 64] >> (i % 64) & 1) != 0) continue;
        unread = kvd::testing::LogAddExp(unread, c.lse[i]);
        if ((c.missing[i / 64] >> (i % 64) & 1) != 0)
          lost = kvd::testing::LogAddExp(lost, c.lse[i]);
      }
      const double whole = kvd::testing::LogAddExp(unread, lse_attended);
      const double unread_share = unread == -HUGE_VAL ? 0 : std::exp(unread - whole);
      const double lost_share = lost == -HUGE_VAL ? 0 : std::exp(lost - whole);
      const MassFigures m = ref::EstimateMass(
          {num_pages, c.lse.data(), lse_attended, c.attended.data(), c.missing.data()});
      EXPECT_NEAR(m.unread, unread_share, 2e-5 * unread_share);
      EXPECT_NEAR(m.lost, lost_share, 2e-5 * lost_share);
      EXPECT_LE(m.lost, m.unread);
      const MassFigures whole_pool =
          ref::EstimateMass({num_pages, c.lse.data(), lse_attended, c.attended.data(), nullptr});
      EXPECT_EQ(whole_pool.unread, m.unread);
      EXPECT_EQ(whole_pool.lost, 0.0f);
    }
  }
}

TEST(MassTest, NothingUnreadIsZeroAndNothingReadIsOne) {
  Case c = RandomCase(70, 1);
  c.attended.assign(2, ~uint64_t{0});
  MassFigures m = ref::EstimateMass({70, c.lse.data(), 3, c.attended.data(), c.missing.data()});
  EXPECT_EQ(m.unread, 0.0f);
  EXPECT_EQ(m.lost, 0.0f);
  c.attended.assign(2, 0);
  m = ref::EstimateMass({70, c.lse.data(), -kInfinity, c.attended.data(), nullptr});
  EXPECT_NEAR(m.unread, 1, 1e-6);
  m = ref::EstimateMass({0, nullptr, -kInfinity, nullptr, nullptr});
  EXPECT_EQ(m.unread, 0.0f);
}

TEST(MassTest, PagesThatAreAttendedAreNeverLost) {
  const Case c = RandomCase(128, 2);
  const std::vector<uint64_t> all(2, ~uint64_t{0});
  const MassFigures m = ref::EstimateMass({128, c.lse.data(), 8, c.attended.data(), all.data()});
  EXPECT_EQ(m.lost, m.unread);
}

TEST(SoftmaxTest, EmptyPartsMakeNoNaN) {
  EXPECT_EQ(LogAddExp(kEmptyLse, kEmptyLse), kEmptyLse);
  EXPECT_EQ(LogAddExp(2, kEmptyLse), 2.0f);
  EXPECT_EQ(LogAddExp(kEmptyLse, 2), 2.0f);
  EXPECT_NEAR(LogAddExp(1, 1), 1 + std::log(2.0f), 1e-6);
  EXPECT_NEAR(LogAddExp(-300, 300), 300, 1e-6);
  const MergeWeights none = MergeLse(kEmptyLse, kEmptyLse);
  EXPECT_EQ(none.weight1, 0.0f);
  EXPECT_EQ(none.weight2, 0.0f);
  const MergeWeights one = MergeLse(kEmptyLse, -7);
  EXPECT_EQ(one.weight1, 0.0f);
  EXPECT_EQ(one.weight2, 1.0f);
  SoftmaxState state;
  EXPECT_EQ(Lse(state), kEmptyLse);
  EXPECT_EQ(Rescale(&state, 3), 0.0f);
  state.sum += 1;
  EXPECT_EQ(Rescale(&state, 2), 1.0f);
  EXPECT_EQ(Lse(state), 3.0f);
}

}  // namespace
}  // namespace kvd
