// Units on their way in: stored where their ticket says, acknowledged one by one, and refused for
// anyone else's reservation.

#include "service/ingest_server.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "absl/time/clock.h"
#include "proto/ingest_channel.h"
#include "tests/support/data_plane.h"

namespace kvd {
namespace {

class IngestServerTest : public testing::Test {
 protected:
  void SetUp() override {
    TestDaemon::Options options;
    options.bytes = 64 << 20;
    daemon_ = std::make_unique<TestDaemon>(options);
    offer_ = daemon_->Attach();
    slot_ = ShapeOf(offer_).slot;
    UcxOptions ucx;
    ucx.devices = "lo";
    worker_ = *UcxWorker::Make(ucx);
    channel_ = Connect(offer_);
  }
  void TearDown() override {
    channel_.reset();
    worker_.reset();
  }
  std::unique_ptr<IngestChannel> Connect(const locks_kvd::v1::AttachReply& offer) {
    auto channel =
        IngestChannel::Connect(worker_.get(), offer.ucx().worker_address(), IncarnationOf(offer),
                               TokenOf(offer), slot_.unit_bytes, absl::Seconds(5));
    EXPECT_TRUE(channel.ok()) << channel.status();
    return *std::move(channel);
  }
  // All units of `page`; their bytes stay in bytes_.
  std::vector<IngestUnit> Units(uint64_t ticket, uint64_t page) {
    std::vector<IngestUnit> units;
    for (int layer = 0; layer < slot_.num_layers; ++layer) {
      for (int head = 0; head < slot_.shard_heads; ++head) {
        bytes_.push_back(
            std::make_unique<std::vector<uint8_t>>(UnitBytes(slot_, page, 1, layer, head)));
        units.push_back({ticket, static_cast<uint16_t>(layer), static_cast<uint16_t>(head),
                         bytes_.back()->data()});
      }
    }
    return units;
  }
  void ExpectSealedRight(const locks_kvd::v1::AttachReply& offer, uint64_t ticket, uint64_t page) {
    const auto sealed = daemon_->arena->Seal(daemon_->Session(offer).id, Ticket{ticket});
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    for (int layer = 0; layer < slot_.num_layers; ++layer) {
      for (int head = 0; head < slot_.shard_heads; ++head) {
        const std::vector<uint8_t> expected = UnitBytes(slot_, page, 1, layer, head);
        EXPECT_EQ(std::memcmp(daemon_->arena->memory().unit(sealed->location.slot, layer, head),
                              expected.data(), expected.size()),
                  0);
      }
    }
  }

  std::unique_ptr<TestDaemon> daemon_;
  locks_kvd::v1::AttachReply offer_;
  SlotLayout slot_;
  std::unique_ptr<UcxWorker> worker_;
  std::unique_ptr<IngestChannel> channel_;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> bytes_;
};

TEST_F(IngestServerTest, UnitsOfManyPagesArriveInAnyOrderAndSealRight) {
  std::vector<uint64_t> tickets;
  std::vector<IngestUnit> units;
  for (uint64_t page = 0; page < 200; ++page) {  // several messages
    tickets.push_back(daemon_->Reserve(offer_, page));
    for (const IngestUnit& unit : Units(tickets.back(), page)) units.push_back(unit);
  }
  std::reverse(units.begin(), units.end());
  ASSERT_TRUE(channel_->Send(units, absl::Seconds(10)).ok());
  for (uint64_t page = 0; page < tickets.size(); ++page)
    ExpectSealedRight(offer_, tickets[page], page);
  EXPECT_EQ(daemon_->ingests->num_bytes(), units.size() * slot_.unit_bytes);
}

TEST_F(IngestServerTest, NothingToSendIsOk) {
  EXPECT_TRUE(channel_->Send({}, absl::Seconds(1)).ok());
}

TEST_F(IngestServerTest, UnknownTicketsAreNamedAndOthersAreStored) {
  const uint64_t ticket = daemon_->Reserve(offer_, 1);
  std::vector<IngestUnit> units = Units(ticket, 1);
  units.insert(units.begin() + 3, units[0]);
  units[3].ticket = ticket + (uint64_t{1} << 32);
  const absl::Status status = channel_->Send(units, absl::Seconds(5));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("1 of 9 units"), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find(std::to_string(units[3].ticket)), absl::string_view::npos)
      << status;
  ExpectSealedRight(offer_, ticket, 1);
  EXPECT_EQ(daemon_->ingests->num_refused_units(), 1u);
}

TEST_F(IngestServerTest, AnotherSessionsReservationIsOutOfReach) {
  const uint64_t ticket = daemon_->Reserve(offer_, 1);
  ASSERT_TRUE(channel_->Send(Units(ticket, 1), absl::Seconds(5)).ok());
  const locks_kvd::v1::AttachReply thief = daemon_->Attach();
  std::vector<IngestUnit> units = Units(ticket, 666);
  EXPECT_EQ(Connect(thief)->Send(units, absl::Seconds(5)).code(),
            absl::StatusCode::kFailedPrecondition);
  ExpectSealedRight(offer_, ticket, 1);
}

TEST_F(IngestServerTest, UnitsOutOfRangeOrAfterTheSealAreRefused) {
  const uint64_t ticket = daemon_->Reserve(offer_, 1);
  std::vector<IngestUnit> units = Units(ticket, 1);
  IngestUnit bad = units[0];
  bad.layer = 4;
  EXPECT_EQ(channel_->Send({&bad, 1}, absl::Seconds(5)).code(),
            absl::StatusCode::kFailedPrecondition);
  bad = units[0];
  bad.head = 2;
  EXPECT_EQ(channel_->Send({&bad, 1}, absl::Seconds(5)).code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(channel_->Send(units, absl::Seconds(5)).ok());
  ExpectSealedRight(offer_, ticket, 1);
  const std::vector<uint8_t> other = UnitBytes(slot_, 9, 9, 0, 0);
  bad = units[0];
  bad.bytes = other.data();
  EXPECT_FALSE(channel_->Send({&bad, 1}, absl::Seconds(5)).ok());
  EXPECT_NE(std::memcmp(daemon_->arena->memory().unit(static_cast<uint32_t>(ticket), 0, 0),
                        other.data(), other.size()),
            0);
}

TEST_F(IngestServerTest, AnEndedSessionIsAborted) {
  const uint64_t ticket = daemon_->Reserve(offer_, 1);
  const std::vector<IngestUnit> units = Units(ticket, 1);
  ASSERT_TRUE(daemon_->sessions->Detach(TokenOf(offer_), daemon_->incarnation).ok());
  EXPECT_EQ(channel_->Send(units, absl::Seconds(5)).code(), absl::StatusCode::kAborted);
}

TEST_F(IngestServerTest, AWrongUnitSizeIsInvalid) {
  auto channel =
      IngestChannel::Connect(worker_.get(), offer_.ucx().worker_address(), IncarnationOf(offer_),
                             TokenOf(offer_), slot_.unit_bytes - 8, absl::Seconds(5));
  ASSERT_TRUE(channel.ok());
  const uint64_t ticket = daemon_->Reserve(offer_, 1);
  EXPECT_EQ((*channel)->Send(Units(ticket, 1), absl::Seconds(5)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(daemon_->ingests->num_malformed(), 1u);
}

TEST_F(IngestServerTest, ShutdownEndsASend) {
  channel_->Shutdown();
  const uint64_t ticket = daemon_->Reserve(offer_, 1);
  EXPECT_EQ(channel_->Send(Units(ticket, 1), absl::Seconds(5)).code(), absl::StatusCode::kAborted);
}

TEST_F(IngestServerTest, ManyThreadsAndSessionsSendAtOnce) {
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const locks_kvd::v1::AttachReply offer = daemon_->Attach();
      const std::unique_ptr<IngestChannel> channel = Connect(offer);
      for (uint64_t page = 100 * t; page < 100 * t + 20; ++page) {
        const uint64_t ticket = daemon_->Reserve(offer, page);
        std::vector<std::vector<uint8_t>> bytes;
        std::vector<IngestUnit> units;
        for (size_t i = 0; i < slot_.num_units(); ++i) {
          bytes.push_back(
              UnitBytes(slot_, page, 1, static_cast<int>(i) / 2, static_cast<int>(i) % 2));
        }
        for (size_t i = 0; i < slot_.num_units(); ++i) {
          units.push_back({ticket, static_cast<uint16_t>(i / 2), static_cast<uint16_t>(i % 2),
                           bytes[i].data()});
        }
        ASSERT_TRUE(channel->Send(units, absl::Seconds(10)).ok());
        ExpectSealedRight(offer, ticket, page);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(IngestToAFrozenDaemonTest, MeetsTheDeadlineAndTheCallersMemoryIsItsOwnAgain) {
  ChildDaemon child(1);
  UcxOptions options;
  options.devices = "lo";
  const std::unique_ptr<UcxWorker> worker = *UcxWorker::Make(options);
  const SlotLayout slot = ShapeOf(child.offer).slot;
  auto channel = IngestChannel::Connect(worker.get(), child.offer.ucx().worker_address(),
                                        IncarnationOf(child.offer), TokenOf(child.offer),
                                        slot.unit_bytes, absl::Seconds(5));
  ASSERT_TRUE(channel.ok()) << channel.status();
  child.Signal(SIGSTOP);
  auto bytes = std::make_unique<std::vector<uint8_t>>(slot.unit_bytes, 1);
  const std::vector<IngestUnit> units(1000, {7, 0, 0, bytes->data()});
  const absl::Time start = absl::Now();
  EXPECT_EQ((*channel)->Send(units, absl::Milliseconds(200)).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  bytes.reset();  // under asan, a later read of it would be seen
  child.Signal(SIGCONT);
  absl::SleepFor(absl::Milliseconds(100));
  const std::vector<uint8_t> more(slot.unit_bytes, 1);
  const IngestUnit unit = {7, 0, 0, more.data()};
  EXPECT_EQ((*channel)->Send({&unit, 1}, absl::Seconds(5)).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(IngestToADeadDaemonTest, IsUnavailableOrLateButEnds) {
  ChildDaemon child(1);
  UcxOptions options;
  options.devices = "lo";
  const std::unique_ptr<UcxWorker> worker = *UcxWorker::Make(options);
  const SlotLayout slot = ShapeOf(child.offer).slot;
  auto channel = IngestChannel::Connect(worker.get(), child.offer.ucx().worker_address(),
                                        IncarnationOf(child.offer), TokenOf(child.offer),
                                        slot.unit_bytes, absl::Seconds(5));
  ASSERT_TRUE(channel.ok()) << channel.status();
  child.Kill();
  const std::vector<uint8_t> bytes(slot.unit_bytes, 1);
  const IngestUnit unit = {7, 0, 0, bytes.data()};
  const absl::Status status = (*channel)->Send({&unit, 1}, absl::Seconds(1));
  EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) << status;
}

}  // namespace
}  // namespace kvd

int main(int argc, char** argv) {
  kvd::RunAsChildDaemonIfAsked(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
