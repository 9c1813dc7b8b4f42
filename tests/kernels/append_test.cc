// Goal: a new token's key and value land in their row of the right unit and nowhere else.
#include "kernels/append.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvd {
namespace {

TEST(AppendTest, WritesTheTokensRowOfEachHeadsUnitAndNothingElse) {
  for (int head_dim : {64, 96}) {
    constexpr int kSequences = 3, kHeads = 2, kTokens = 16;
    const auto row = static_cast<size_t>(head_dim);
    std::vector<uint16_t> k, v;
    for (int i = 0; i < kSequences * kHeads * head_dim; ++i) {
      k.push_back(static_cast<uint16_t>(i + 1));
      v.push_back(static_cast<uint16_t>(i + 20001));
    }
    std::vector<std::vector<uint16_t>> units(kSequences * kHeads,
                                             std::vector<uint16_t>(2 * kTokens * row, 0xABCD));
    std::vector<uint8_t*> tails;
    for (auto& unit : units) tails.push_back(reinterpret_cast<uint8_t*>(unit.data()));
    const std::vector<int32_t> token = {0, 7, 15};
    ref::Append(
        {kSequences, kHeads, head_dim, kTokens, k.data(), v.data(), tails.data(), token.data()});
    for (size_t u = 0; u < units.size(); ++u) {
      const auto t = static_cast<size_t>(token[u / kHeads]);
      for (size_t i = 0; i < units[u].size(); ++i) {
        uint16_t expected = 0xABCD;
        if (i / row == t) expected = k[u * row + i % row];
        if (i / row == kTokens + t) expected = v[u * row + i % row];
        EXPECT_EQ(units[u][i], expected) << u << " " << i;
      }
    }
  }
}

TEST(AppendDeathTest, ATokenOutsideOfTheUnitEndsTheProcess) {
  std::vector<uint16_t> unit(2 * 16 * 64), row(64);
  auto* tail = reinterpret_cast<uint8_t*>(unit.data());
  const int32_t token = 16;
  EXPECT_DEATH(ref::Append({1, 1, 64, 16, row.data(), row.data(), &tail, &token}), "check failed");
}

}  // namespace
}  // namespace kvd
