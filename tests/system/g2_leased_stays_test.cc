// G2: a leased page is neither evicted nor reused, whoever wants its slot.

#include <gtest/gtest.h>

#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

constexpr uint64_t kSlots = 40;

TEST(LeasedStaysTest, FullArenaOfLeasesRefusesPutsAndKeepsEveryByte) {
  ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
  DaemonSpec spec;
  spec.geometry = SmallGeometry();
  spec.session_ttl_ms = 10000;
  spec.arena_bytes = MakeSlotLayout(spec.geometry).slot_bytes() * kSlots;
  auto daemon = DaemonProcess::Start(spec);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  auto holder = SystemWorker::Make(OptionsFor({(*daemon)->address()}, PathKind::kShared));
  auto other = SystemWorker::Make(OptionsFor({(*daemon)->address()}, PathKind::kUcx));
  ASSERT_TRUE(holder.ok() && other.ok()) << holder.status() << other.status();

  const auto versions = VersionsOf(0, 2 * kSlots, 1);
  PutReport held = (*holder)->Put(versions);
  const auto pages = NewPages(versions, held);
  ASSERT_GT(pages.size(), kSlots / 2);
  ASSERT_LE(pages.size(), kSlots);
  EXPECT_EQ(held.first_failure.code(), absl::StatusCode::kResourceExhausted) << held.first_failure;

  const auto wanted = VersionsOf(1000, 8, 2);
  for (int i = 0; i < 20; ++i) {
    for (SystemWorker* worker : {holder->get(), other->get()}) {
      const PutReport refused = worker->Put(wanted);
      EXPECT_EQ(refused.num_failed, 8);
      EXPECT_EQ(refused.first_failure.code(), absl::StatusCode::kResourceExhausted)
          << refused.first_failure;
    }
  }
  const auto units = static_cast<int64_t>(pages.size() * (*holder)->shape().units_per_page());
  const std::shared_ptr<Attachment> holding = (*holder)->attachment();
  const Fetched kept = (*holder)->Fetch(*holding->fetcher, pages, absl::Seconds(10));
  EXPECT_EQ(kept.num_exact, units);
  EXPECT_EQ(kept.num_wrong, 0);
  // Over ucx a session is served what it leases, and nothing else.
  const Fetched foreign =
      (*other)->Fetch(*(*other)->attachment()->fetcher, pages, absl::Seconds(10));
  EXPECT_EQ(foreign.num_missing, units);

  // It was the leases that held them: without them the same put succeeds, at their cost.
  held.leases.clear();
  const PutReport taken = (*other)->Put(wanted);
  EXPECT_EQ(taken.num_new, 8) << taken.first_failure;
  const Fetched after = (*holder)->Fetch(*holding->fetcher, pages, absl::Seconds(10));
  EXPECT_GT(after.num_missing, 0);
  EXPECT_EQ(after.num_wrong, 0);
}

}  // namespace
}  // namespace kvd::testing
