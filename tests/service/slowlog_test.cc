#include "service/slowlog.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"

namespace kvd {
namespace {

FetchEvent Event(uint64_t session, absl::Duration total, WireStatus status = WireStatus::kOk) {
  FetchEvent event;
  event.status = status;
  event.session = SessionId{session};
  event.total = total;
  return event;
}

TEST(SlowlogTest, KeepsWhatIsSlowOrFailedAndNothingElse) {
  Slowlog log(absl::Milliseconds(10));
  log.Note(Event(1, absl::Milliseconds(9)));
  EXPECT_EQ(log.num_seen(), 0u);
  EXPECT_TRUE(log.Newest(10).empty());
  log.Note(Event(2, absl::Milliseconds(10)));
  log.Note(Event(3, absl::ZeroDuration(), WireStatus::kExhausted));
  const auto newest = log.Newest(10);
  ASSERT_EQ(newest.size(), 2u);
  EXPECT_EQ(newest[0].event.session, SessionId{3}) << "newest first";
  EXPECT_EQ(newest[1].event.session, SessionId{2});
  EXPECT_LE(absl::Now() - newest[0].ended, absl::Minutes(1));
  EXPECT_EQ(log.Newest(1).size(), 1u);
}

TEST(SlowlogTest, TheRingForgetsTheOldest) {
  Slowlog log(absl::ZeroDuration());
  const uint64_t count = Slowlog::kEntries + 7;
  for (uint64_t i = 1; i <= count; ++i) log.Note(Event(i, absl::Milliseconds(1)));
  const auto newest = log.Newest(Slowlog::kEntries + 100);
  ASSERT_EQ(newest.size(), Slowlog::kEntries);
  EXPECT_EQ(newest.front().event.session, SessionId{count});
  EXPECT_EQ(newest.back().event.session, SessionId{8});
  EXPECT_EQ(log.num_seen(), count);
}

TEST(SlowlogTest, ReadersAndWritersDoNotDisturbEachOther) {
  Slowlog log(absl::ZeroDuration());
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop.load()) {
      for (const Slowlog::Entry& entry : log.Newest(Slowlog::kEntries)) {
        ASSERT_EQ(entry.event.total, absl::Milliseconds(static_cast<int64_t>(entry.event.session)));
      }
    }
  });
  for (int64_t i = 1; i <= 20000; ++i) {
    log.Note(Event(static_cast<uint64_t>(i), absl::Milliseconds(i)));
  }
  stop = true;
  reader.join();
  EXPECT_EQ(log.num_seen(), 20000u) << "what a reader kept from being stored is counted";
}

}  // namespace
}  // namespace kvd
