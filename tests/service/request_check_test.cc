#include "service/request_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/service/arena_fixture.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;

class RequestCheckTest : public ::testing::Test {
 protected:
  TestClock clock_;
  std::unique_ptr<Arena> arena_ = testing::MakeArena(testing::TinyOptions(2, &clock_));
};

TEST_F(RequestCheckTest, KeysAreAViewOfTheMessageInOrder) {
  locks_kvd::v1::PageList pages;
  for (const int page : {3, 4}) {
    const PageKey key = testing::KeyOf(page);
    pages.mutable_keys()->append(reinterpret_cast<const char*>(key.data()), key.size());
    pages.add_page_idx(static_cast<uint32_t>(page));
  }
  const auto keys = ParseKeys(pages);
  ASSERT_TRUE(keys.ok());
  ASSERT_EQ(keys->size(), 2u);
  EXPECT_EQ((*keys)[0], testing::KeyOf(3));
  EXPECT_EQ((*keys)[1], testing::KeyOf(4));
  pages.mutable_keys()->pop_back();
  EXPECT_THAT(ParseKeys(pages).status().message(), HasSubstr("multiple of 16 bytes, got 31"));
}

TEST_F(RequestCheckTest, AnswerOfMatchIsBoundedByPagesTimesShards) {
  RepeatedU32 shards;
  shards.Add(0);
  shards.Add(1);
  EXPECT_TRUE(CheckShards(*arena_, shards, 262144).ok());
  EXPECT_EQ(CheckShards(*arena_, shards, 262145).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(RequestCheckTest, LastSlotIsInRangeAndTheNextIsNot) {
  RepeatedU32 slots;
  RepeatedU64 generations;
  slots.Add(2);
  generations.Add(4);
  const auto good = ParseLocations(*arena_, slots, generations);
  ASSERT_TRUE(good.ok());
  EXPECT_EQ((*good)[0], (PageLocation{2, 4}));
  slots.Set(0, 3);
  EXPECT_THAT(ParseLocations(*arena_, slots, generations).status().message(),
              HasSubstr("slots[0]: expected below 3, got 3"));
}

TEST_F(RequestCheckTest, CountsUpToTheCapPass) {
  EXPECT_TRUE(CheckCount("tickets", 131072).ok());
  EXPECT_THAT(CheckCount("tickets", 131073).message(),
              HasSubstr("tickets: expected at most 131072"));
}

}  // namespace
}  // namespace kvd
