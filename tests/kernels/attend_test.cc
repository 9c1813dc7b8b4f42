// Goal: attention over a list of units is exact, in one pass or in any split of it. Method: random
// units, scattered in memory, against the double-precision oracle; wrong inputs that must be
// rejected.
#include "kernels/attend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "kernels/dtype.h"
#include "tests/support/kv_data.h"
#include "tests/support/oracle.h"

namespace kvd {
namespace {

using kvd::testing::RandomKv;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Geometry {
  int head_dim = 128, page_tokens = 16, group = 4;
  KvDtype dtype = KvDtype::kBf16;
  float softcap = 0;
};

struct Output {
  std::vector<float> o, lse;
};

// N = 2 sequences of 2 KV heads, each with a list of its own, partly filled tails and empty units
// included.
class Lists {
 public:
  static constexpr int kLists = 4, kMaxUnits = 12;

  explicit Lists(const Geometry& g) : geometry(g) {
    const int64_t unit_values = int64_t{2} * g.page_tokens * g.head_dim;
    memory = RandomKv(kLists * kMaxUnits * unit_values, g.dtype, 1.2f, 5);
    query = RandomKv(int64_t{kLists} * g.group * g.head_dim, g.dtype, 1.2f, 6);
    num_units = {12, 7, 0, 1};
    std::vector<int> order(kLists * kMaxUnits);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(3));
    for (int i : order) {
      units.push_back(
          {reinterpret_cast<const uint8_t*>(memory.data() + i * unit_values), g.page_tokens});
    }
    units[kMaxUnits - 1].num_tokens = 5;
    units[3].num_tokens = 0;
    units[kMaxUnits + 6].num_tokens = 1;
    units[3 * kMaxUnits].num_tokens = g.page_tokens - 1;
  }

  Output Attend() const {
    const Geometry& g = geometry;
    Output out{std::vector<float>(static_cast<size_t>(kLists * g.group * g.head_dim), 7),
               std::vector<float>(static_cast<size_t>(kLists * g.group), 7)};
    ref::Attend({2, 2, g.group, g.head_dim, g.page_tokens, g.dtype, scale(), g.softcap,
                 query.data(), kMaxUnits, units.data(), num_units.data(), out.o.data(),
                 out.lse.data()});
    return out;
  }

  // Largest error in units of the tolerance.
  double WorstError(const Output& out) const {
    const Geometry& g = geometry;
    const auto dim = static_cast<size_t>(g.head_dim);
    double worst = 0;
    for (size_t list = 0; list < kLists; ++list) {
      std::vector<uint16_t> keys, values;
      for (size_t u = 0; u < static_cast<size_t>(num_units[list]); ++u) {
        const UnitRef& unit = units[list * kMaxUnits + u];
        const auto* k = reinterpret_cast<const uint16_t*>(unit.unit);
        const auto count = static_cast<size_t>(unit.num_tokens) * dim;
        keys.insert(keys.end(), k, k + count);
        values.insert(values.end(), k + g.page_tokens * g.head_dim,
                      k + g.page_tokens * g.head_dim + count);
      }
      if (keys.empty()) continue;
      for (size_t h = list * static_cast<size_t>(g.group);
           h < (list + 1) * static_cast<size_t>(g.group); ++h) {
        const auto truth =
            kvd::testing::OracleAttend(query.data() + h * dim, keys.data(), values.data(),
                                       static_cast<int64_t>(keys.size() / dim), g.head_dim, g.dtype,
                                       double{scale()}, double{g.softcap});
        double largest = 0;
        for (double x : truth.o) largest = std::max(largest, std::fabs(x));
        worst = std::max(worst, std::fabs(out.lse[h] - truth.lse) / 1e-5);
        for (size_t d = 0; d < dim; ++d) {
          worst = std::max(worst, std::fabs(out.o[h * dim + d] - truth.o[d]) / (2e-5 * largest));
        }
      }
    }
    return worst;
  }

  float scale() const { return 1.5f / std::sqrt(static_cast<float>(geometry.head_dim)); }

  Geometry geometry;
  std::vector<uint16_t> memory, query;
  std::vector<UnitRef> units;  // [kLists, kMaxUnits]
  std::vector<int32_t> num_units;
};

class AttendTest : public ::testing::TestWithParam<Geometry> {};

std::string Name(const ::testing::TestParamInfo<Geometry>& info) {
  const Geometry& g = info.param;
  return "D" + std::to_string(g.head_dim) + "_B" + std::to_string(g.page_tokens) + "_G" +
         std::to_string(g.group) + (g.dtype == KvDtype::kBf16 ? "_bf16" : "_fp16") +
         (g.softcap > 0 ? "_softcap" : "");
}

TEST_P(AttendTest, IsWithinToleranceOfTheOracle) {
  const Lists lists(GetParam());
  EXPECT_LE(lists.WorstError(lists.Attend()), 1);
}

TEST_P(AttendTest, AnEmptyListGivesZeroAndMinusInfinity) {
  const Lists lists(GetParam());
  const Output out = lists.Attend();
  const auto group = static_cast<size_t>(GetParam().group),
             dim = static_cast<size_t>(GetParam().head_dim);
  for (size_t h = 2 * group; h < 3 * group; ++h) {
    EXPECT_EQ(out.lse[h], -kInfinity);
    for (size_t d = 0; d < dim; ++d) EXPECT_EQ(out.o[h * dim + d], 0.0f);
  }
}

std::vector<Geometry> Geometries() {
  std::vector<Geometry> all;
  for (int d : {64, 96, 128, 256}) {
    for (int b : {16, 32}) all.push_back({d, b, 4});
  }
  for (int g : {1, 2, 3, 5, 7, 12, 16}) all.push_back({128, 16, g});
  all.push_back({96, 32, 6, KvDtype::kFp16});
  all.push_back({128, 16, 4, KvDtype::kBf16, 5});
  all.push_back({256, 16, 16, KvDtype::kFp16, 30});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Geometries, AttendTest, ::testing::ValuesIn(Geometries()), Name);

TEST(AttendPropertiesTest, WrongInputsAreRejectedByTheSameComparison) {
  const Lists lists(Geometry{});
  const Output out = lists.Attend();
  ASSERT_LE(lists.WorstError(out), 1);
  Lists swapped = lists;  // two heads
  std::swap_ranges(swapped.query.begin(), swapped.query.begin() + 128, swapped.query.begin() + 128);
  EXPECT_GT(swapped.WorstError(out), 10);
  Lists other_page = lists;
  other_page.units[4].unit = lists.units[20].unit;
  EXPECT_GT(other_page.WorstError(out), 10);
  Lists longer_tail = lists;
  longer_tail.units[11].num_tokens = 6;
  EXPECT_GT(longer_tail.WorstError(out), 10);
  Lists changed_value(Geometry{});  // one element of one value row
  const auto* unit = reinterpret_cast<const uint16_t*>(changed_value.units[0].unit);
  changed_value.memory[static_cast<size_t>(unit - changed_value.memory.data()) + 18 * 128 + 40] =
      ToBf16(20);
  EXPECT_GT(changed_value.WorstError(out), 10);
}

TEST(AttendPropertiesTest, WhatStandsBehindTheTailIsNeverUsed) {
  Lists lists(Geometry{});
  const Output out = lists.Attend();
  const auto* tail = reinterpret_cast<const uint16_t*>(lists.units[11].unit);
  uint16_t* memory = lists.memory.data() + (tail - lists.memory.data());
  for (int i = 5 * 128; i < 16 * 128; ++i) memory[i] = memory[16 * 128 + i] = 0x7FC0;  // NaN
  const Output again = lists.Attend();
  EXPECT_EQ(out.o, again.o);
  EXPECT_EQ(out.lse, again.lse);
}

TEST(AttendPropertiesTest, EqualInputsGiveEqualBitsWhateverThePosition) {
  Lists lists(Geometry{});
  for (size_t u = 0; u < Lists::kMaxUnits; ++u)
    lists.units[3 * Lists::kMaxUnits + u] = lists.units[u];
  lists.num_units[3] = lists.num_units[0];
  std::copy_n(lists.query.begin(), 4 * 128, lists.query.begin() + 3 * 4 * 128);
  const Output out = lists.Attend();
  EXPECT_TRUE(std::equal(out.o.begin(), out.o.begin() + 4 * 128, out.o.begin() + 3 * 4 * 128));
}

// Splits list 0 in three parts by `part`, attends each, merges in the given order.
Output MergedParts(const Lists& lists, const std::vector<int>& order) {
  std::vector<Output> parts;
  for (int part : order) {
    Lists piece = lists;
    piece.num_units = {0, 0, 0, 0};
    for (size_t u = 0; u < Lists::kMaxUnits; ++u) {
      if (static_cast<int>(u * u) % 3 == part)
        piece.units[static_cast<size_t>(piece.num_units[0]++)] = lists.units[u];
    }
    parts.push_back(piece.Attend());
  }
  Output merged = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    ref::MergeAttention({static_cast<int64_t>(merged.lse.size()), 128, merged.o.data(),
                         merged.lse.data(), parts[i].o.data(), parts[i].lse.data(), merged.o.data(),
                         merged.lse.data()});
  }
  return merged;
}

TEST(MergeAttentionTest, AnySplitInAnyOrderEqualsOnePass) {
  const Lists lists(Geometry{});
  const Output whole = lists.Attend();
  for (const std::vector<int>& order :
       {std::vector<int>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {  // part 2 is empty
    const Output merged = MergedParts(lists, order);
    for (size_t h = 0; h < 4; ++h) {
      float largest = 0;
      for (size_t d = 0; d < 128; ++d) largest = std::max(largest, std::fabs(whole.o[h * 128 + d]));
      EXPECT_NEAR(merged.lse[h], whole.lse[h], 2e-6 * std::max(1.0f, std::fabs(whole.lse[h])));
      for (size_t d = 0; d < 128; ++d)
        EXPECT_NEAR(merged.o[h * 128 + d], whole.o[h * 128 + d], 2e-6 * std::max(1.0f, largest));
    }
  }
}

TEST(MergeAttentionTest, IsAssociativeAndCommutative) {
  constexpr int64_t kRows = 200, kDim = 64;
  std::mt19937 random(9);
  std::vector<std::vector<float>> o(3, std::vector<float>(kRows * kDim)),
      lse(3, std::vector<float>(kRows));
  for (size_t i = 0; i < 3; ++i) {
    for (float& x : o[i]) x = std::uniform_real_distribution<float>(-1, 1)(random);
    for (float& x : lse[i]) x = std::uniform_real_distribution<float>(-4, 4)(random);
  }
  lse[1][3] = -kInfinity;
  const auto merge = [](const Output& a, const Output& b) {
    Output out{std::vector<float>(a.o.size()), std::vector<float>(a.lse.size())};
    ref::MergeAttention({kRows, kDim, a.o.data(), a.lse.data(), b.o.data(), b.lse.data(),
                         out.o.data(), out.lse.data()});
    return out;
  };
  const Output a{o[0], lse[0]}, b{o[1], lse[1]}, c{o[2], lse[2]};
  const Output left = merge(merge(a, b), c), right = merge(a, merge(b, c)),
               turned = merge(c, merge(b, a));
  for (size_t i = 0; i < left.o.size(); ++i) {
    EXPECT_NEAR(left.o[i], right.o[i], 2e-6);
    EXPECT_NEAR(left.o[i], turned.o[i], 2e-6);
  }
  for (size_t i = 0; i < left.lse.size(); ++i) EXPECT_NEAR(left.lse[i], right.lse[i], 2e-6);
}

TEST(MergeAttentionTest, AnEmptyPartLeavesTheOtherAsItIs) {
  const std::vector<float> o1 = {1, 2, 3, 4, 5, 6}, lse1 = {3, -kInfinity, -kInfinity};
  const std::vector<float> o2 = {0, 0, 7, 8, 0, 0}, lse2 = {-kInfinity, 1, -kInfinity};
  std::vector<float> zeroed = o1;
  zeroed[2] = zeroed[3] = zeroed[4] = zeroed[5] = 0;  // an empty part has o = 0
  std::vector<float> o(6), lse(3);
  ref::MergeAttention(
      {3, 2, zeroed.data(), lse1.data(), o2.data(), lse2.data(), o.data(), lse.data()});
  EXPECT_EQ(o, (std::vector<float>{1, 2, 7, 8, 0, 0}));
  EXPECT_EQ(lse, (std::vector<float>{3, 1, -kInfinity}));
}

}  // namespace
}  // namespace kvd
