// G8: a drain loses no request, a daemon that joins gets its share, and with two replicas a
// daemon's death costs neither a page nor a step.

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "tests/support/path_parameter.h"
#include "tests/system/pool_under_load.h"

namespace kvd::testing {
namespace {

class MovesTest : public ::testing::TestWithParam<PathKind>, public PoolUnderLoad {
 protected:
  void SetUp() override {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    path_ = GetParam();
  }
};

TEST_P(MovesTest, DrainGivesEveryPageAwayAndNoRequestUnderLoadFails) {
  for (int i = 0; i < 3; ++i) StartDaemon();
  WriteMembers({0, 1, 2});
  Connect();
  PutAll();
  ASSERT_EQ(PagesAt(0) + PagesAt(1) + PagesAt(2), kAll);
  const uint32_t there = PagesAt(0);
  ASSERT_GT(there, 0u);
  Load load;
  StartLoad(&load);
  const auto status = daemons_[0]->Stop(absl::Seconds(60));
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(*status, 0) << daemons_[0]->LogTail();
  absl::SleepFor(absl::Milliseconds(300));
  ExpectClean(load);
  EXPECT_EQ(PagesAt(1) + PagesAt(2), kAll);
}

TEST_P(MovesTest, ADaemonThatJoinsGetsItsShareAndNoRequestUnderLoadFails) {
  for (int i = 0; i < 2; ++i) StartDaemon();
  WriteMembers({0, 1});
  Connect();
  PutAll();
  Load load;
  StartLoad(&load);
  StartDaemon();
  WriteMembers({0, 1, 2});
  // What moves is what the new one owns now: rendezvous hashing moves nothing else.
  const std::vector<PlacedMember> members = {{"d0", 1}, {"d1", 1}, {"d2", 1}};
  const Placement placement(members);
  uint32_t share = 0;
  for (const auto& keys : keys_) {
    for (const int owner : PlacePages(keys, placement)) share += owner == 2 ? 1 : 0;
  }
  ASSERT_GT(share, 0u);
  EXPECT_TRUE(WaitFor([&] { return PagesAt(2) == share; })) << PagesAt(2) << " of " << share;
  absl::SleepFor(absl::Milliseconds(300));
  ExpectClean(load);
  // The former owners let go of what nobody leases, in the rounds that follow.
  EXPECT_EQ(PagesAt(2), share);
  for (const auto& keys : keys_) EXPECT_EQ(client_->FetchPages(keys)->num_pages, kPages);
}

TEST_P(MovesTest, AnOpenSequenceFollowsItsPagesAndTheDrainEndsClean) {
  for (int i = 0; i < 2; ++i) StartDaemon();
  WriteMembers({0, 1});
  Connect();
  PutAll();
  auto sequence =
      Open({.budget = 200, .verify = VerifyPolicy::kChecksum, .loss = LossPolicy::kFail});
  ASSERT_NE(sequence, nullptr);
  double worst = 0;
  ASSERT_TRUE(DecodeToken(*sequence, data_, &worst).ok());
  absl::StatusOr<int> exit_status = absl::InternalError("not asked yet");
  std::atomic<bool> stopped{false};
  std::thread stopping([&] {
    exit_status = daemons_[0]->Stop(absl::Seconds(60));
    stopped = true;
  });
  int num_steps = 0;
  for (; num_steps < kDecoded - 1 && (!stopped || num_steps < 5); ++num_steps) {
    const absl::Status step = DecodeToken(*sequence, data_, &worst);
    ASSERT_TRUE(step.ok()) << step;
    ASSERT_EQ(sequence->result().num_missing_pages, 0);
    absl::SleepFor(absl::Milliseconds(20));
  }
  stopping.join();
  ASSERT_TRUE(exit_status.ok()) << exit_status.status();
  EXPECT_EQ(*exit_status, 0);
  EXPECT_LT(worst, 1e-4);
  EXPECT_GE(PagesAt(1), kAll);
}

TEST_P(MovesTest, WithTwoReplicasADaemonsDeathCostsNeitherAPageNorAStep) {
  for (int i = 0; i < 3; ++i) StartDaemon(/*replicas=*/2);
  WriteMembers({0, 1, 2});
  Connect();
  PutAll();
  ASSERT_TRUE(WaitFor([&] { return PagesAt(0) + PagesAt(1) + PagesAt(2) == 2 * kAll; }))
      << PagesAt(0) << " " << PagesAt(1) << " " << PagesAt(2);
  auto sequence = Open({.budget = 200,
                        .cache_ratio = 1,
                        .verify = VerifyPolicy::kChecksum,
                        .loss = LossPolicy::kFail,
                        .fetch_timeout = absl::Seconds(4)});
  ASSERT_NE(sequence, nullptr);
  daemons_[0]->Kill();
  double worst = 0;
  for (int step = 0; step < 20; ++step) {
    const absl::Status status = DecodeToken(*sequence, data_, &worst);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(sequence->result().num_missing_pages, 0) << step;
  }
  EXPECT_LT(worst, 1e-4);
  for (const auto& keys : keys_) {
    ASSERT_TRUE(WaitFor([&] {
      const auto fetched = client_->FetchPages(keys);
      return fetched.ok() && fetched->num_pages == kPages && fetched->units == expected_;
    }));
  }
  // Once it is no member any more, the two that are left bring every page back to two holders.
  WriteMembers({1, 2});
  EXPECT_TRUE(WaitFor([&] { return PagesAt(1) + PagesAt(2) >= 2 * kAll; }))
      << PagesAt(1) << " " << PagesAt(2);
}

// Destinations that are full, of another model, or not there at all: the drain goes to whoever
// takes pages, says once what it met, and ends.
TEST_P(MovesTest, DrainGetsByDestinationsThatTakeNothing) {
  StartDaemon();
  WriteMembers({0});
  Connect();
  PutAll();
  StartDaemon(1, uint64_t{64} << 20, "another");
  StartDaemon(1, MakeSlotLayout(geometry_).slot_bytes() * 40);  // a few pages
  StartDaemon();
  StartDaemon();
  WriteMembers({0, 1, 2, 3, 4});
  daemons_[4]->Kill();
  ASSERT_TRUE(WaitFor([&] {
    return daemons_[0]->LogTail().find("\"members\":\"5\"") != std::string::npos &&
           client_->Daemons().size() == 5 && client_->Daemons()[3].attached;
  }));
  Load load;
  StartLoad(&load);
  const auto status = daemons_[0]->Stop(absl::Seconds(60));
  ASSERT_TRUE(status.ok()) << status.status();
  load.Stop();
  EXPECT_EQ(load.num_failed, 0) << load.first_failure;
  EXPECT_EQ(load.num_wrong, 0);
  const std::string log = daemons_[0]->LogTail();
  EXPECT_NE(log.find("has no such arena"), std::string::npos) << log;
  EXPECT_EQ(PagesAt(1), 0u);
  // What the small one could not keep is gone like any evicted page; nothing else is.
  EXPECT_GT(PagesAt(3), kAll / 2);
}

INSTANTIATE_TEST_SUITE_P(Paths, MovesTest, ::testing::Values(PathKind::kShared, PathKind::kUcx),
                         PathParameterName);

}  // namespace
}  // namespace kvd::testing
