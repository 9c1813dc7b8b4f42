#include "service/page_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tests/service/model_seed.h"

namespace kvd {
namespace {

PageId Page(int i, uint32_t shard = 0) {
  PageId id;
  id.key[0] = static_cast<uint8_t>(i);
  id.key[15] = static_cast<uint8_t>(i * 7);
  id.shard = shard;
  return id;
}

TEST(PageTableTest, CanarySlotIsSealedFromTheStartAndNeverGivenAway) {
  PageTable table(4);
  EXPECT_EQ(table.slot(kCanarySlot).state, SlotState::kSealed);
  EXPECT_EQ(table.slot(kCanarySlot).generation, kCanaryGeneration);
  EXPECT_EQ(table.count(SlotState::kFree), 3u);
  for (int i = 1; i <= 3; ++i) EXPECT_NE(table.Reserve(Page(i), 0), kCanarySlot);
  EXPECT_EQ(table.Reserve(Page(9), 0), std::nullopt);
  EXPECT_EQ(table.Find(PageId{}), std::nullopt);
}

TEST(PageTableTest, GenerationIsEvenOnlyWhileSealedAndOnlyGrows) {
  PageTable table(2);
  const uint32_t slot = *table.Reserve(Page(1), 3);
  EXPECT_EQ(table.slot(slot).generation, 1u);
  EXPECT_EQ(table.Seal(slot), 2u);
  EXPECT_EQ(table.Evict(slot), 3u);
  EXPECT_EQ(table.Find(Page(1)), std::nullopt);
  EXPECT_EQ(table.Reserve(Page(2), 0), slot);
  EXPECT_EQ(table.slot(slot).generation, 3u)
      << "a slot that is reserved again keeps its odd generation";
  EXPECT_EQ(table.Seal(slot), 4u);
}

TEST(PageTableTest, RefusedSealLeavesTheGenerationAlone) {
  PageTable table(2);
  const uint32_t slot = *table.Reserve(Page(1), 0);
  table.Free(slot);
  EXPECT_EQ(table.slot(slot).generation, 1u);
  EXPECT_EQ(table.Find(Page(1)), std::nullopt);
  EXPECT_EQ(table.Reserve(Page(1), 0), slot);
}

TEST(PageTableTest, SkippedSealPassesOverTheEvenGenerationAndStaysReserved) {
  PageTable table(2);
  const uint32_t slot = *table.Reserve(Page(1), 0);
  EXPECT_EQ(table.SkipSeal(slot), 3u);
  EXPECT_EQ(table.slot(slot).state, SlotState::kReserved);
  table.Free(slot);
  EXPECT_EQ(table.Reserve(Page(2), 0), slot);
  EXPECT_EQ(table.Seal(slot), 4u) << "nobody who saw generation 2 may take this page for it";
}

TEST(PageTableTest, ShardsOfAPageAreDifferentPages) {
  PageTable table(4);
  const uint32_t a = *table.Reserve(Page(1, 0), 0);
  const uint32_t b = *table.Reserve(Page(1, 1), 0);
  EXPECT_NE(a, b);
  EXPECT_EQ(table.Find(Page(1, 1)), b);
}

TEST(PageTableTest, QuarantinedSlotComesBackOnlyWhenItsTimeHasCome) {
  PageTable table(2);
  const uint32_t slot = *table.Reserve(Page(1), 0);
  table.Quarantine(slot, absl::Seconds(10));
  EXPECT_EQ(table.Find(Page(1)), std::nullopt);
  EXPECT_EQ(table.Reserve(Page(2), 0), std::nullopt);
  EXPECT_EQ(table.FreeExpired(absl::Seconds(10) - absl::Nanoseconds(1)), 0u);
  EXPECT_EQ(table.Reserve(Page(2), 0), std::nullopt);
  EXPECT_EQ(table.FreeExpired(absl::Seconds(10)), 1u);
  EXPECT_EQ(table.Reserve(Page(2), 0), slot);
}

// Random operations against a plain map; every invariant after every step.
TEST(PageTableTest, AgreesWithAModelUnderRandomOperations) {
  std::mt19937_64 random(testing::ModelSeed());
  constexpr uint32_t kSlots = 7;
  PageTable table(kSlots);
  struct ModelSlot {
    SlotState state = SlotState::kFree;
    uint64_t generation = 1;
    int page = -1;
    absl::Duration until{};
  };
  std::map<uint32_t, ModelSlot> model;
  for (uint32_t slot = 1; slot < kSlots; ++slot) model[slot] = {};
  absl::Duration now = absl::ZeroDuration();
  for (int step = 0; step < 20000; ++step) {
    const auto slot = static_cast<uint32_t>(1 + random() % (kSlots - 1));
    const int page = static_cast<int>(random() % 12);
    ModelSlot& m = model[slot];
    switch (random() % 6) {
      case 0: {
        if (table.Find(Page(page)).has_value()) break;
        const std::optional<uint32_t> got = table.Reserve(Page(page), 5);
        if (!got.has_value()) break;
        ASSERT_EQ(model.at(*got).state, SlotState::kFree);
        model[*got].state = SlotState::kReserved;
        model[*got].page = page;
        break;
      }
      case 1:
        if (m.state != SlotState::kReserved) break;
        ASSERT_EQ(table.Seal(slot), ++m.generation);
        m.state = SlotState::kSealed;
        break;
      case 2:
        if (m.state != SlotState::kSealed) break;
        ASSERT_EQ(table.Evict(slot), ++m.generation);
        m = {.generation = m.generation};
        break;
      case 3:
        if (m.state != SlotState::kReserved) break;
        table.Free(slot);
        m = {.generation = m.generation};
        break;
      case 4:
        if (m.state != SlotState::kReserved) break;
        table.Quarantine(slot, now + absl::Seconds(5));
        m = {.state = SlotState::kQuarantined,
             .generation = m.generation,
             .until = now + absl::Seconds(5)};
        break;
      default:
        now += absl::Seconds(random() % 3);
        table.FreeExpired(now);
        for (auto& [unused, each] : model) {
          if (each.state == SlotState::kQuarantined && each.until <= now)
            each.state = SlotState::kFree;
        }
    }
    std::map<SlotState, uint32_t> counts;
    std::map<int, uint32_t> slot_by_page;
    for (const auto& [i, each] : model) {
      ASSERT_EQ(table.slot(i).state, each.state) << "step " << step;
      ASSERT_EQ(table.slot(i).generation, each.generation) << "step " << step;
      ASSERT_EQ(each.generation % 2 == 0, each.state == SlotState::kSealed);
      ++counts[each.state];
      if (each.page < 0) continue;
      ASSERT_TRUE(slot_by_page.emplace(each.page, i).second) << "two slots, one page";
    }
    for (const SlotState state :
         {SlotState::kFree, SlotState::kReserved, SlotState::kSealed, SlotState::kQuarantined}) {
      ASSERT_EQ(table.count(state), counts[state]) << "step " << step;
    }
    for (int p = 0; p < 12; ++p) {
      const auto it = slot_by_page.find(p);
      ASSERT_EQ(table.Find(Page(p)),
                it == slot_by_page.end() ? std::nullopt : std::optional<uint32_t>(it->second));
    }
    ASSERT_EQ(table.slot(kCanarySlot).generation, kCanaryGeneration);
  }
}

}  // namespace
}  // namespace kvd
