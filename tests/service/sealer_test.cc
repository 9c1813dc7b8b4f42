#include "service/sealer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "tests/service/arena_fixture.h"

namespace kvd {
namespace {

TEST(SealerTest, EveryItemOfEveryBatchRunsOnce) {
  Sealer sealer(3);
  std::vector<std::thread> callers;
  std::atomic<int> runs{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      std::vector<std::atomic<int>> hits(50);
      sealer.Run(hits.size(), [&](size_t i) { ++hits[i]; });
      for (const auto& hit : hits) EXPECT_EQ(hit, 1);
      runs += 50;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(runs, 200);
  sealer.Run(0, [](size_t) { FAIL(); });
}

TEST(SealerTest, SmallBatchDoesNotWaitForAllOfALargeOne) {
  Sealer sealer(1);
  absl::Notification begun;
  absl::Notification small_queued;
  std::atomic<int> large_done{0};
  int large_done_when_small_ran = -1;
  std::thread large([&] {
    sealer.Run(100, [&](size_t i) {
      if (i == 0) {
        begun.Notify();
        small_queued.WaitForNotification();
      }
      ++large_done;
    });
  });
  begun.WaitForNotification();
  std::thread small(
      [&] { sealer.Run(1, [&](size_t) { large_done_when_small_ran = large_done; }); });
  absl::SleepFor(absl::Milliseconds(50));  // lets the small batch queue up behind the large one
  small_queued.Notify();
  small.join();
  large.join();
  EXPECT_LT(large_done_when_small_ran, 100);
}

TEST(SealerTest, RecordsOfAPageAreThoseOfItsUnits) {
  const KvGeometry g = testing::TinyGeometry();
  const SlotLayout slot = MakeSlotLayout(g);
  std::vector<uint8_t> units(slot.slot_bytes());
  for (int layer = 0; layer < g.num_layers; ++layer) {
    const auto bytes = testing::UnitBytes(g, 1, 0, layer, 0);
    std::copy(bytes.begin(), bytes.end(),
              units.begin() + static_cast<long>(slot.unit_offset(layer, 0)));
  }
  std::vector<uint8_t> records(slot.summary_bytes(), 0xEE);
  const QueryMetric none;
  const SummarizeJob job = {&g, Encoder::kE1, &none, units.data(), records.data(), 1, 0};
  const auto checksum = SummarizePage(job);
  ASSERT_TRUE(checksum.ok());
  EXPECT_EQ(*checksum, Checksum64(records.data(), records.size()));
  std::vector<uint8_t> coarse(slot.coarse_bytes, 0xEE);
  std::vector<uint8_t> fine(slot.fine_bytes, 0xEE);
  ref::Summarize({g.head_dim, g.page_tokens, g.rank, g.dtype, g.rotated, Encoder::kE1,
                  units.data() + slot.unit_offset(1, 0), nullptr, coarse.data(), fine.data()});
  EXPECT_EQ(std::memcmp(coarse.data(), records.data() + slot.coarse_offset(1, 0), coarse.size()),
            0);
  EXPECT_EQ(std::memcmp(fine.data(), records.data() + slot.fine_offset(1, 0), fine.size()), 0);
  EXPECT_NE(std::memcmp(coarse.data(), records.data() + slot.coarse_offset(0, 0), coarse.size()),
            0);
}

}  // namespace
}  // namespace kvd
