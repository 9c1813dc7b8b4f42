// Both ends of a communicator with every fault of the stand-in: who waits is let go, and what the
// library may still touch is kept until it cannot.

#include "service/move_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "tests/service/stand_in_communicator.h"
#include "tests/support/eventually.h"

namespace kvd {
namespace {

using testing::Eventually;
using ::testing::HasSubstr;
using testing::StandInLibrary;

absl::Status Always() { return absl::OkStatus(); }

class MoveLinkTest : public ::testing::Test {
 protected:
  std::unique_ptr<MoveLink> Link(const std::shared_ptr<const StandInLibrary>& library, MoveEnd end,
                                 absl::Duration watchdog = absl::Seconds(30)) {
    return std::make_unique<MoveLink>(MoveLink::Options{.library = library,
                                                        .id = id_,
                                                        .end = end,
                                                        .place = {},
                                                        .watchdog = watchdog,
                                                        .memory = memory_});
  }
  // Two ends that have joined; the one that is to fail has the short watchdog.
  void JoinBoth(absl::Duration from = absl::Seconds(30), absl::Duration to = absl::Seconds(30)) {
    source_ = Link(from_, MoveEnd::kSource, from);
    destination_ = Link(to_, MoveEnd::kDestination, to);
    ASSERT_TRUE(source_->Wait(Always).ok());
    ASSERT_TRUE(destination_->Wait(Always).ok());
  }
  std::vector<MovePiece> Out() { return {{sent_.data(), 3000}, {sent_.data() + 3000, 1096}}; }
  std::vector<MovePiece> In() { return {{got_.data(), 3000}, {got_.data() + 3000, 1096}}; }

  std::shared_ptr<StandInLibrary> from_ = std::make_shared<StandInLibrary>("a");
  std::shared_ptr<StandInLibrary> to_ = std::make_shared<StandInLibrary>("b");
  const std::string id_ = *from_->MakeId();
  std::shared_ptr<int> memory_ = std::make_shared<int>(0);
  std::vector<uint8_t> sent_ = [] {
    std::vector<uint8_t> bytes(4096);
    std::iota(bytes.begin(), bytes.end(), uint8_t{1});
    return bytes;
  }();
  std::vector<uint8_t> got_ = std::vector<uint8_t>(4096);
  std::unique_ptr<MoveLink> source_;
  std::unique_ptr<MoveLink> destination_;
};

TEST_F(MoveLinkTest, MovesBatchAfterBatchAndFinishes) {
  to_->faults.slow_looks = 3;
  JoinBoth();
  for (int batch = 0; batch < 3; ++batch) {
    std::fill(got_.begin(), got_.end(), uint8_t{0});
    ++sent_[0];
    destination_->Receive(In(), nullptr);
    source_->Send(Out(), nullptr);
    ASSERT_TRUE(source_->Wait(Always).ok());
    ASSERT_TRUE(destination_->Wait(Always).ok());
    EXPECT_EQ(got_, sent_);
  }
  source_->Finish();
  destination_->Finish();
  EXPECT_TRUE(source_->Wait(Always).ok());
  EXPECT_TRUE(destination_->Wait(Always).ok());
  source_.reset();
  destination_.reset();
  EXPECT_EQ(from_->counts.finished + to_->counts.finished, 2);
  EXPECT_EQ(from_->counts.aborted + to_->counts.aborted, 0);
  EXPECT_EQ(from_->counts.alive + to_->counts.alive, 0);
  EXPECT_EQ(memory_.use_count(), 1);
}

TEST_F(MoveLinkTest, TheWatchdogEndsAJoinThatNeverEnds) {
  from_->faults.never_joins = true;
  source_ = Link(from_, MoveEnd::kSource, absl::Milliseconds(50));
  const absl::Status status = source_->Wait(Always);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("joining the communicator: the watchdog ended it after 50 ms"));
  EXPECT_TRUE(Eventually([&] { return source_->ended(); }));
  EXPECT_EQ(from_->counts.aborted, 1);
  EXPECT_EQ(from_->counts.alive, 0);
}

TEST_F(MoveLinkTest, TheWatchdogEndsATransferAndItsMemoryIsKeptUntilTheLibraryIsQuiet) {
  to_->faults.never_moves = true;
  to_->faults.never_quiet = true;
  JoinBoth(absl::Seconds(30), absl::Seconds(1));
  auto keep = std::make_shared<int>(0);
  destination_->Receive(In(), keep);
  source_->Send(Out(), nullptr);
  EXPECT_EQ(destination_->Wait(Always).code(), absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(Eventually([&] { return to_->counts.aborted == 1; }));
  // The library has let go of nothing yet.
  EXPECT_FALSE(destination_->ended());
  EXPECT_EQ(keep.use_count(), 2);
  // The other end learns nothing from it; it is told.
  EXPECT_TRUE(source_->Problem().ok());
  source_->Abort(absl::UnavailableError("the other end has aborted"));
  EXPECT_EQ(source_->Wait(Always).code(), absl::StatusCode::kUnavailable);
  to_->faults.never_quiet = false;
  EXPECT_TRUE(Eventually([&] { return destination_->ended() && keep.use_count() == 1; }));
}

TEST_F(MoveLinkTest, AnErrorOfTheLibraryEndsTheStep) {
  JoinBoth();
  from_->faults.fails = true;
  destination_->Receive(In(), nullptr);
  source_->Send(Out(), nullptr);
  const absl::Status status = source_->Wait(Always);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("sending a batch: stand-in: remote error"));
  EXPECT_TRUE(Eventually([&] { return source_->ended(); }));
}

TEST_F(MoveLinkTest, WhoWaitsCanStopAndThatAborts) {
  JoinBoth();
  destination_->Receive(In(), nullptr);
  int asked = 0;
  const absl::Status status = destination_->Wait(
      [&] { return ++asked < 3 ? absl::OkStatus() : absl::CancelledError("the caller has gone"); });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Eventually([&] { return to_->counts.aborted == 1 && destination_->ended(); }));
}

TEST_F(MoveLinkTest, ACallThatDoesNotComeBackHoldsNobodyButItsThread) {
  from_->faults.stuck = true;
  source_ = Link(from_, MoveEnd::kSource, absl::Milliseconds(50));
  const absl::Status status = source_->Wait(Always);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the library does not come back from a call"));
  EXPECT_FALSE(source_->ended());
  from_->faults.stuck = false;
  EXPECT_TRUE(Eventually([&] { return source_->ended(); }));
}

TEST_F(MoveLinkTest, AnIdThatIsNoneIsRefused) {
  MoveLink::Options options;
  options.library = from_;
  options.id = "\x7f garbage";
  MoveLink link(options);
  EXPECT_EQ(link.Wait(Always).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Eventually([&] { return link.ended(); }));
}

// What is still under way when the daemon ends: its memory outlives everything, even once the
// library lets go.
TEST_F(MoveLinkTest, WhatNeverEndsIsLeftAloneWithItsMemory) {
  to_->faults.never_quiet = true;
  JoinBoth();
  auto keep = std::make_shared<int>(0);
  static std::vector<uint8_t>* const outlives = new std::vector<uint8_t>(4096);
  destination_->Receive({{outlives->data(), 4096}}, keep);
  destination_.reset();  // takes kEndLimit
  EXPECT_EQ(keep.use_count(), 2);
  to_->faults.never_quiet = false;
  ASSERT_TRUE(Eventually([&] { return to_->counts.alive == 0; }));
  EXPECT_EQ(keep.use_count(), 2);
  EXPECT_GE(memory_.use_count(), 2);
}

}  // namespace
}  // namespace kvd
