#include "proto/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kernels/checksum.h"

namespace kvd {
namespace {

PageKey KeyOf(uint64_t i) {
  const uint64_t words[2] = {Mix64(i), Mix64(i + 12345)};
  PageKey key;
  std::memcpy(key.data(), words, sizeof(words));
  return key;
}

std::vector<std::string> Members(int count) {
  std::vector<std::string> members;
  for (int i = 0; i < count; ++i) members.push_back("kv-" + std::to_string(i) + ".kv:7411");
  return members;
}

TEST(PlacementTest, EachMemberGetsAboutItsShare) {
  const std::vector<std::string> members = Members(8);
  std::vector<int> counts(8);
  for (uint64_t i = 0; i < 8000; ++i) ++counts[static_cast<size_t>(OwnerOf(KeyOf(i), members))];
  // Binomial with mean 1000 and deviation 30: five deviations.
  for (const int count : counts) EXPECT_NEAR(count, 1000, 150);
}

TEST(PlacementTest, AMemberThatLeavesMovesOnlyItsOwnPages) {
  const std::vector<std::string> all = Members(5);
  std::vector<std::string> rest = all;
  rest.erase(rest.begin() + 2);
  int moved = 0;
  for (uint64_t i = 0; i < 5000; ++i) {
    const std::string& before = all[static_cast<size_t>(OwnerOf(KeyOf(i), all))];
    const std::string& after = rest[static_cast<size_t>(OwnerOf(KeyOf(i), rest))];
    if (before == all[2]) {
      ++moved;
    } else {
      EXPECT_EQ(before, after);
    }
  }
  EXPECT_NEAR(moved, 1000, 150);
}

TEST(PlacementTest, TheOrderOfTheListDoesNotMatter) {
  std::vector<std::string> members = Members(7);
  std::vector<std::string> shuffled = members;
  std::reverse(shuffled.begin(), shuffled.end());
  for (uint64_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(members[static_cast<size_t>(OwnerOf(KeyOf(i), members))],
              shuffled[static_cast<size_t>(OwnerOf(KeyOf(i), shuffled))]);
  }
}

TEST(PlacementTest, AStripeStaysTogetherAndStripesSpread) {
  const std::vector<std::string> members = Members(4);
  std::vector<PageKey> keys;
  for (uint64_t i = 0; i < 100 * kStripePages + 5; ++i) keys.push_back(KeyOf(i));
  const std::vector<int> owners = PlacePages(keys, members);
  std::vector<int> stripes(4);
  for (size_t page = 0; page < keys.size(); ++page) {
    const size_t first = page / kStripePages * kStripePages;
    EXPECT_EQ(owners[page], OwnerOf(keys[first], members));
    if (page == first) ++stripes[static_cast<size_t>(owners[page])];
  }
  for (const int count : stripes) EXPECT_GT(count, 5);
}

TEST(PlacementTest, OneMemberOwnsEverything) {
  EXPECT_EQ(OwnerOf(KeyOf(3), Members(1)), 0);
  EXPECT_TRUE(PlacePages({}, Members(3)).empty());
}

}  // namespace
}  // namespace kvd
