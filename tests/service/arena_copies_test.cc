// Copies of sealed pages: proved, never built again, and invisible to the order of eviction.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/placement.h"
#include "tests/service/arena_fixture.h"

namespace kvd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr SessionId kWorker{1};
constexpr SessionId kMover{2};

class ArenaCopiesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (std::unique_ptr<Arena>* arena : {&from_, &to_}) {
      *arena = testing::MakeArena(testing::TinyOptions(4, &clock_));
      (*arena)->BeginSession(kWorker);
    }
    to_->BeginSession(kMover, SessionKind::kMover);
  }

  // Reserves a copy of `page` and writes its units and records, as the ingest server does.
  Ticket WriteCopy(const SealedCopy& page, bool with_records = true) {
    const auto reserved = to_->Reserve(kMover, {&page.page.key, 1}, {&page.page_idx, 1},
                                       page.page.shard, {&page.word, 1});
    EXPECT_EQ(reserved->pages[0].state, ReserveOutcome::State::kNew);
    const Ticket ticket = reserved->pages[0].ticket;
    absl::StatusOr<ReservationPin> pin = to_->PinReservation(kMover, ticket);
    const SlotLayout& slot = from_->memory().shape().slot;
    for (int layer = 0; layer < slot.num_layers; ++layer) {
      for (int head = 0; head < slot.shard_heads; ++head) {
        std::memcpy(pin->unit(layer, head), from_->memory().unit(page.location.slot, layer, head),
                    slot.unit_bytes);
        pin->MarkReceived(layer, head);
      }
    }
    if (with_records) {
      std::memcpy(pin->records(), from_->memory().summary(page.location.slot),
                  slot.summary_bytes());
      pin->MarkRecordsReceived();
    }
    return ticket;
  }
  SealedCopy PutAndList(int page) {
    testing::PutPage(from_.get(), kWorker, page);
    for (const SealedCopy& copy : from_->SealedPages()) {
      if (copy.page.key == testing::KeyOf(page)) return copy;
    }
    ADD_FAILURE() << "page " << page << " is not listed";
    return {};
  }
  uint64_t ChecksumOf(const SealedCopy& page) {
    return from_->memory().header(page.location.slot)->summary_checksum;
  }

  TestClock clock_;
  std::unique_ptr<Arena> from_;
  std::unique_ptr<Arena> to_;
};

TEST_F(ArenaCopiesTest, ACopyIsTheSameBytesAndRecordsAndIsFoundByItsKey) {
  const SealedCopy page = PutAndList(3);
  EXPECT_EQ(page.page_idx, 3u);
  EXPECT_EQ(page.word, PlacementWord(testing::KeyOf(3)));
  const auto sealed = to_->SealCopy(kMover, WriteCopy(page), ChecksumOf(page));
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  const SlotLayout& slot = from_->memory().shape().slot;
  EXPECT_EQ(std::memcmp(to_->memory().slot_base(sealed->location.slot),
                        from_->memory().slot_base(page.location.slot), slot.slot_bytes()),
            0);
  EXPECT_EQ(std::memcmp(to_->memory().summary(sealed->location.slot),
                        from_->memory().summary(page.location.slot), slot.summary_bytes()),
            0);
  const std::vector<PageKey> keys = {testing::KeyOf(3)};
  const std::vector<uint32_t> shards = {0};
  EXPECT_THAT(to_->MatchPrefix(kWorker, 1, keys, shards)->locations, ElementsAre(sealed->location));
}

TEST_F(ArenaCopiesTest, WordsOfTheStripeTravelWithThePage) {
  const PageKey key = testing::KeyOf(1);
  const uint32_t page_idx = 33;
  const uint64_t word = 0x1234;
  const auto reserved = from_->Reserve(kWorker, {&key, 1}, {&page_idx, 1}, 0, {&word, 1});
  testing::WritePage(from_.get(), kWorker, reserved->pages[0].ticket, 1);
  ASSERT_TRUE(from_->Seal(kWorker, reserved->pages[0].ticket).ok());
  ASSERT_THAT(from_->SealedPages(), SizeIs(1));
  EXPECT_EQ(from_->SealedPages()[0].word, word);
}

TEST_F(ArenaCopiesTest, DamagedCopiesAreRefusedAndNeverVisible) {
  const SealedCopy page = PutAndList(0);
  const std::vector<PageKey> keys = {testing::KeyOf(0)};
  const std::vector<uint32_t> shards = {0};
  EXPECT_EQ(to_->SealCopy(kMover, WriteCopy(page), ChecksumOf(page) ^ 1).status().code(),
            absl::StatusCode::kDataLoss);
  const Ticket flipped = WriteCopy(page);
  to_->PinReservation(kMover, flipped)->unit(1, 0)[100] ^= 4;
  const auto refused = to_->SealCopy(kMover, flipped, ChecksumOf(page));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(refused.status().message(), HasSubstr("layer 1, head 0"));
  const Ticket record = WriteCopy(page);
  to_->PinReservation(kMover, record)->records()[5] ^= 4;
  EXPECT_EQ(to_->SealCopy(kMover, record, ChecksumOf(page)).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(to_->SealCopy(kMover, WriteCopy(page, /*with_records=*/false), ChecksumOf(page))
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(to_->MatchPrefix(kWorker, 1, keys, shards)->pages, SizeIs(0));
  EXPECT_EQ(to_->Stats().slots_free, 4u) << "every refused reservation was given back";
  EXPECT_TRUE(to_->SealCopy(kMover, WriteCopy(page), ChecksumOf(page)).ok());
}

TEST_F(ArenaCopiesTest, AWorkerHasNoPlaceForRecordsAndAMoverLeasesNothingThatIsThere) {
  const auto reserved = testing::ReserveOne(to_.get(), kWorker, 7);
  EXPECT_EQ(to_->PinReservation(kWorker, reserved.ticket)->records(), nullptr);
  testing::WritePage(to_.get(), kWorker, reserved.ticket, 7);
  ASSERT_TRUE(to_->Seal(kWorker, reserved.ticket).ok());
  EXPECT_EQ(testing::ReserveOne(to_.get(), kMover, 7).state, ReserveOutcome::State::kHit);
  EXPECT_EQ(to_->num_leases(kMover), 0u);
}

TEST_F(ArenaCopiesTest, CopyingKeepsAPageAndItsTurnInTheOrderOfEviction) {
  std::vector<PageLocation> pages;
  for (int page = 0; page < 4; ++page) {
    pages.push_back(testing::PutPage(from_.get(), kWorker, page));
    clock_.Advance(absl::Seconds(1));
    ASSERT_TRUE(from_->Release(kWorker, {&pages.back(), 1}).ok());
  }
  const std::vector<SealedCopy> all = from_->SealedPages();
  EXPECT_THAT(from_->BeginCopying(all), ElementsAre(true, true, true, true));
  EXPECT_EQ(testing::ReserveOne(from_.get(), kWorker, 9).state, ReserveOutcome::State::kFull);
  EXPECT_EQ(from_->DropIdle(pages), 0u);
  clock_.Advance(absl::Seconds(1));
  from_->EndCopying();
  // The oldest goes first, as if nothing had been copied.
  EXPECT_EQ(testing::ReserveOne(from_.get(), kWorker, 9).slot, pages[0].slot);
  EXPECT_THAT(from_->BeginCopying(all), ElementsAre(false, true, true, true))
      << "the first is gone";
  from_->EndCopying();
}

TEST_F(ArenaCopiesTest, OnlyWhatNobodyLeasesIsDropped) {
  const PageLocation leased = testing::PutPage(from_.get(), kWorker, 0);
  const PageLocation idle = testing::PutPage(from_.get(), kWorker, 1);
  ASSERT_TRUE(from_->Release(kWorker, {&idle, 1}).ok());
  EXPECT_EQ(from_->DropIdle(std::vector{leased, idle}), 1u);
  EXPECT_THAT(from_->SealedPages(), SizeIs(1));
  EXPECT_EQ(from_->Stats().evicted_pages, 0u) << "moved, not evicted";
}

}  // namespace
}  // namespace kvd
