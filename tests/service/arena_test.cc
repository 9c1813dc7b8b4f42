#include "service/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>

#include "absl/time/clock.h"
#include "kernels/built_geometries.h"
#include "tests/service/arena_fixture.h"

namespace kvd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using State = ReserveOutcome::State;

constexpr SessionId kA{1};
constexpr SessionId kB{2};
constexpr uint32_t kShard0[] = {0};
constexpr uint32_t kBothShards[] = {0, 1};

std::vector<PageKey> Keys(std::initializer_list<int> pages) {
  std::vector<PageKey> keys;
  for (const int page : pages) keys.push_back(testing::KeyOf(page));
  return keys;
}

class ArenaTest : public ::testing::Test {
 protected:
  void MakeArena(uint32_t slots) {
    arena_ = testing::MakeArena(testing::TinyOptions(slots, &clock_));
    arena_->BeginSession(kA);
    arena_->BeginSession(kB);
  }
  uint64_t Generation(uint32_t slot) const {
    return arena_->memory().header(slot)->generation.load(std::memory_order_acquire);
  }
  void Release(SessionId session, std::initializer_list<PageLocation> locations) {
    ASSERT_TRUE(arena_->Release(session, std::vector<PageLocation>(locations)).ok());
  }
  std::vector<uint8_t> Allowed(SessionId session, std::vector<FetchEntry> entries) const {
    std::vector<uint8_t> allowed(entries.size(), 9);
    EXPECT_TRUE(arena_->CheckFetch(session, entries, allowed).ok());
    return allowed;
  }

  TestClock clock_;
  std::unique_ptr<Arena> arena_;
};

TEST_F(ArenaTest, CanarySlotHoldsTheIncarnationsWordsAndIsPublished) {
  MakeArena(2);
  Incarnation incarnation;
  incarnation.fill(7);
  const uint8_t* bytes = arena_->memory().slot_base(kCanarySlot);
  for (uint64_t i = 0; i < arena_->memory().shape().slot.slot_bytes() / 8; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    ASSERT_EQ(word, CanaryWord(incarnation, i));
    incarnation[0] ^= 1;
    ASSERT_NE(word, CanaryWord(incarnation, i)) << "another incarnation has another canary";
    incarnation[0] ^= 1;
  }
  EXPECT_EQ(Generation(kCanarySlot), kCanaryGeneration);
  EXPECT_EQ(Generation(1), 1u);
  EXPECT_THAT(Allowed(kA, {{kCanarySlot, 0, 0, 2}, {1, 0, 0, 2}}), ElementsAre(1, 0));
}

TEST_F(ArenaTest, SealedPageIsPublishedWithKeyChecksumsAndEvenGeneration) {
  MakeArena(2);
  const PageLocation location = testing::PutPage(arena_.get(), kA, 5, 1);
  const PageHeader* header = arena_->memory().header(location.slot);
  EXPECT_EQ(location.generation, 2u);
  EXPECT_EQ(Generation(location.slot), 2u);
  EXPECT_EQ(std::memcmp(header->key, testing::KeyOf(5).data(), 16), 0);
  const SlotLayout& slot = arena_->memory().shape().slot;
  const uint8_t* records = arena_->memory().summary(location.slot);
  EXPECT_EQ(header->summary_checksum, Checksum64(records, slot.summary_bytes()));
  const SummaryLayout summary = MakeSummaryLayout(arena_->geometry());
  for (int layer = 0; layer < 2; ++layer) {
    uint64_t stored;
    std::memcpy(&stored, records + slot.coarse_offset(layer, 0) + summary.coarse[kUnitChecksum], 8);
    const auto expected = testing::UnitBytes(arena_->geometry(), 5, 0, layer, 0);
    EXPECT_EQ(std::memcmp(arena_->memory().unit(location.slot, layer, 0), expected.data(),
                          expected.size()),
              0);
    EXPECT_EQ(stored, Checksum64(expected.data(), expected.size()));
    const auto other = testing::UnitBytes(arena_->geometry(), 5, 0, 1 - layer, 0);
    EXPECT_NE(stored, Checksum64(other.data(), other.size()));
  }
}

TEST_F(ArenaTest, SealOfAnIncompletePageNamesWhatIsMissingAndGivesTheSlotBack) {
  MakeArena(1);
  const auto reserved = testing::ReserveOne(arena_.get(), kA, 1);
  ASSERT_TRUE(testing::WriteUnit(arena_.get(), kA, reserved.ticket, 1, 0, 0, 0).ok());
  const auto sealed = arena_->Seal(kA, reserved.ticket);
  EXPECT_EQ(sealed.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(sealed.status().message(),
              HasSubstr("1 of 2 units are missing, the first is layer 1, head 0"));
  EXPECT_EQ(Generation(reserved.slot), 1u);
  EXPECT_EQ(arena_->Seal(kA, reserved.ticket).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kA, 1).state, State::kNew);
}

TEST_F(ArenaTest, SealRefusesNanAndInfInKeysAndValuesNamingThem) {
  MakeArena(1);
  const KvGeometry& g = arena_->geometry();
  struct Case {
    int token;
    bool key;
    float value;
    const char* text;
  };
  for (const Case& c : {Case{3, true, std::numeric_limits<float>::quiet_NaN(), "token 3: K"},
                        Case{15, false, std::numeric_limits<float>::infinity(), "token 15: V"}}) {
    const auto reserved = testing::ReserveOne(arena_.get(), kA, 9);
    testing::WritePage(arena_.get(), kA, reserved.ticket, 9);
    {
      auto pin = arena_->PinReservation(kA, reserved.ticket);
      ASSERT_TRUE(pin.ok());
      const int index = (c.key ? 0 : g.page_tokens * g.head_dim) + c.token * g.head_dim + 7;
      const uint16_t bits = ToBf16(c.value);
      std::memcpy(pin->unit(1, 0) + 2 * index, &bits, 2);
      pin->MarkReceived(1, 0);
    }
    const auto sealed = arena_->Seal(kA, reserved.ticket);
    EXPECT_EQ(sealed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(sealed.status().message(), HasSubstr("page 9, layer 1, head 0"));
    EXPECT_THAT(sealed.status().message(), HasSubstr(c.text));
    EXPECT_EQ(Generation(reserved.slot), 1u) << "never visible";
  }
}

TEST_F(ArenaTest, RepeatedSealAnswersTheSameAndOnlyToItsSession) {
  MakeArena(2);
  const auto reserved = testing::ReserveOne(arena_.get(), kA, 1);
  testing::WritePage(arena_.get(), kA, reserved.ticket, 1);
  EXPECT_EQ(arena_->Seal(kB, reserved.ticket).status().code(), absl::StatusCode::kNotFound);
  const auto first = arena_->Seal(kA, reserved.ticket);
  const auto second = arena_->Seal(kA, reserved.ticket);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->location, second->location);
  EXPECT_EQ(arena_->Stats().sealed_pages, 1u);
  EXPECT_EQ(arena_->Seal(kB, reserved.ticket).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(arena_->PinReservation(kA, reserved.ticket).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(arena_->PinReservation(kB, reserved.ticket).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(ArenaTest, ReserveAnswersNewHitPendingAndFull) {
  MakeArena(2);
  const PageLocation sealed = testing::PutPage(arena_.get(), kA, 1);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kA, 2).state, State::kNew);
  const std::vector<PageKey> keys = Keys({1, 2, 3, 1});
  const std::vector<uint32_t> page_idx = {1, 2, 3, 1};
  const auto outcome = arena_->Reserve(kB, keys, page_idx, 0);
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->pages[0].state, State::kHit);
  EXPECT_EQ(outcome->pages[0].slot, sealed.slot);
  EXPECT_EQ(outcome->pages[0].generation, sealed.generation);
  EXPECT_EQ(outcome->pages[1].state, State::kPending);
  EXPECT_EQ(outcome->pages[2].state, State::kFull);
  EXPECT_EQ(outcome->pages[3].state, State::kFull) << "pages after a full one are not tried";
  EXPECT_THAT(outcome->full_reason,
              HasSubstr("arena acme/tiny is full: of 2 slots 1 are leased, 1 are being written"));
  EXPECT_THAT(Allowed(kB, {{sealed.slot, 0, 0, 2}}), ElementsAre(1)) << "a hit is leased";
}

TEST_F(ArenaTest, LeasedPagesAreNeverEvictedAndUnleasedOnesAreTailFirst) {
  MakeArena(3);
  const PageLocation p0 = testing::PutPage(arena_.get(), kA, 0);
  const PageLocation p1 = testing::PutPage(arena_.get(), kA, 1);
  const PageLocation p2 = testing::PutPage(arena_.get(), kA, 2);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 10).state, State::kFull);
  Release(kA, {p0, p1});
  const auto first = testing::ReserveOne(arena_.get(), kB, 10);
  EXPECT_EQ(first.slot, p1.slot) << "the deeper page of the two goes first";
  EXPECT_EQ(Generation(p1.slot), 3u) << "odd before anything can be written";
  EXPECT_EQ(Generation(p0.slot), 2u);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 11).slot, p0.slot);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 12).state, State::kFull);
  EXPECT_EQ(Generation(p2.slot), 2u);
  EXPECT_EQ(arena_->Stats().evicted_pages, 2u);
  EXPECT_EQ(arena_->Stats().sealed_never_matched, 2u);
}

TEST_F(ArenaTest, ASessionIsToldOnceOfEvictedPagesThatItHadReleased) {
  MakeArena(3);
  const PageLocation p0 = testing::PutPage(arena_.get(), kA, 0);
  const PageLocation p1 = testing::PutPage(arena_.get(), kA, 1);
  const PageLocation p2 = testing::PutPage(arena_.get(), kB, 2);
  ASSERT_TRUE(arena_->Lease(kB, std::vector<PageLocation>{p1}).ok());
  Release(kA, {p0, p1});
  EXPECT_TRUE(arena_->TakeEvictions(kA).pages.empty()) << "released, but still there";
  Release(kB, {p1});
  ASSERT_EQ(testing::ReserveOne(arena_.get(), kB, 10).slot, p1.slot);
  ASSERT_EQ(testing::ReserveOne(arena_.get(), kB, 11).slot, p0.slot);
  EXPECT_EQ(arena_->TakeEvictions(kA).pages, (std::vector<PageLocation>{p1, p0}));
  EXPECT_EQ(arena_->TakeEvictions(kB).pages, std::vector<PageLocation>{p1})
      << "p0 was never its own";
  EXPECT_TRUE(arena_->TakeEvictions(kA).pages.empty()) << "told once";
  Release(kB, {p2});
  testing::ReserveOne(arena_.get(), kA, 12);
  EXPECT_TRUE(arena_->TakeEvictions(kA).pages.empty());
  arena_->EndSession(kB, SessionEnd::kDetached);
  EXPECT_TRUE(arena_->TakeEvictions(kB).pages.empty())
      << "a session that has ended is told nothing";
}

TEST_F(ArenaTest, EvictionsBeyondWhatIsKeptAreReportedAsDropped) {
  MakeArena(1);
  for (size_t i = 0; i < Arena::kMaxEvictionsKept + 1; ++i) {
    const int page = static_cast<int>(i);
    Release(kA, {testing::PutPage(arena_.get(), kA, page)});
  }
  EXPECT_FALSE(arena_->TakeEvictions(kA).some_dropped) << "as many as are kept";
  for (size_t i = 0; i < Arena::kMaxEvictionsKept + 1; ++i) {
    Release(kA, {testing::PutPage(arena_.get(), kA, 5000 + static_cast<int>(i))});
  }
  const Evictions evictions = arena_->TakeEvictions(kA);
  EXPECT_EQ(evictions.pages.size(), Arena::kMaxEvictionsKept);
  EXPECT_TRUE(evictions.some_dropped);
}

TEST_F(ArenaTest, MatchLeasesTheLongestPrefixThatAllShardsHold) {
  MakeArena(8);
  for (int page = 0; page < 3; ++page) {
    testing::PutPage(arena_.get(), kA, page, 0);
    if (page != 1) testing::PutPage(arena_.get(), kA, page, 1);
  }
  const auto one = arena_->MatchPrefix(kB, 1, Keys({0, 1, 2, 3}), kShard0);
  ASSERT_TRUE(one.ok());
  EXPECT_THAT(one->pages, SizeIs(3));
  const auto both = arena_->MatchPrefix(kB, 2, Keys({0, 1, 2}), kBothShards);
  ASSERT_TRUE(both.ok());
  EXPECT_THAT(both->pages, SizeIs(1)) << "page 1 lacks a shard";
  EXPECT_EQ(arena_->num_leases(kB), 4u) << "a lease is a set: matching twice leases once";
  const auto none = arena_->MatchPrefix(kB, 3, Keys({3, 0}), kShard0);
  ASSERT_TRUE(none.ok());
  EXPECT_THAT(none->pages, SizeIs(0));
}

TEST_F(ArenaTest, MatchEachSkipsWhatIsMissing) {
  MakeArena(8);
  const PageLocation first = testing::PutPage(arena_.get(), kA, 0, 0);
  const PageLocation third = testing::PutPage(arena_.get(), kA, 2, 0);
  const auto found = arena_->MatchEach(kB, 1, Keys({0, 1, 2, 3}), kShard0);
  ASSERT_TRUE(found.ok());
  EXPECT_THAT(found->pages, ElementsAre(0, 2));
  EXPECT_THAT(found->locations, ElementsAre(first, third));
  EXPECT_EQ(arena_->num_leases(kB), 2u);
  // A late duplicate leases nothing, and does not show what came since.
  testing::PutPage(arena_.get(), kA, 1, 0);
  EXPECT_THAT(arena_->MatchEach(kB, 1, Keys({0, 1, 2, 3}), kShard0)->pages, ElementsAre(0, 2));
  EXPECT_EQ(arena_->num_leases(kB), 2u);
  EXPECT_THAT(arena_->MatchEach(kB, 2, Keys({0, 1, 2, 3}), kShard0)->pages, ElementsAre(0, 1, 2));
}

TEST_F(ArenaTest, PageThatIsBeingWrittenIsNoMatch) {
  MakeArena(2);
  const auto reserved = testing::ReserveOne(arena_.get(), kA, 0);
  testing::WritePage(arena_.get(), kA, reserved.ticket, 0);
  EXPECT_THAT(arena_->MatchPrefix(kB, 1, Keys({0}), kShard0)->pages, SizeIs(0));
  EXPECT_THAT(Allowed(kA, {{reserved.slot, 0, 0, 2}}), ElementsAre(0)) << "not even for its writer";
}

TEST_F(ArenaTest, LateDuplicateOfAMatchTakesNoLeaseBack) {
  MakeArena(2);
  const PageLocation p = testing::PutPage(arena_.get(), kA, 0);
  ASSERT_TRUE(arena_->MatchPrefix(kB, 77, Keys({0}), kShard0).ok());
  Release(kB, {p});
  const auto again = arena_->MatchPrefix(kB, 77, Keys({0}), kShard0);
  ASSERT_TRUE(again.ok());
  EXPECT_THAT(again->locations, ElementsAre(p)) << "the same answer";
  EXPECT_EQ(arena_->num_leases(kB), 0u) << "without a second lease";
  ASSERT_TRUE(arena_->MatchPrefix(kB, 78, Keys({0}), kShard0).ok());
  EXPECT_EQ(arena_->num_leases(kB), 1u);
}

TEST_F(ArenaTest, LeaseNeedsTheGenerationThatIsThere) {
  MakeArena(1);
  const PageLocation old = testing::PutPage(arena_.get(), kA, 0);
  EXPECT_THAT(*arena_->Lease(kB, std::vector{old, PageLocation{kCanarySlot, 2}}),
              ElementsAre(true, false));
  Release(kB, {old});
  Release(kA, {old});
  const PageLocation fresh = testing::PutPage(arena_.get(), kA, 1);
  ASSERT_EQ(fresh.slot, old.slot);
  EXPECT_THAT(*arena_->Lease(kB, std::vector{old}), ElementsAre(false));
  Release(kA, {old});
  EXPECT_EQ(arena_->num_leases(kA), 1u) << "a stale release ends no newer lease";
  EXPECT_THAT(*arena_->Lease(kB, std::vector{fresh}), ElementsAre(true));
}

TEST_F(ArenaTest, CapsOfASessionAreNamedAndLeaseNothing) {
  ArenaOptions options = testing::TinyOptions(8, &clock_);
  options.leases_per_session = 3;
  options.reservations_per_session = 2;
  arena_ = testing::MakeArena(std::move(options));
  arena_->BeginSession(kA);
  arena_->BeginSession(kB);
  for (int page = 0; page < 3; ++page) {
    const PageLocation p = testing::PutPage(arena_.get(), kA, page);
    if (page == 2) Release(kA, {p});
  }
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kA, 5).state, State::kNew);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kA, 6).state, State::kFull)
      << "two leases and a reservation";
  const auto match = arena_->MatchPrefix(kA, 1, Keys({0, 1, 2}), kShard0);
  EXPECT_EQ(match.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(match.status().message(), HasSubstr("limits.leases_per_session"));
  EXPECT_EQ(arena_->num_leases(kA), 2u);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 7).state, State::kNew);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 8).state, State::kNew);
  const PageKey key = testing::KeyOf(9);
  const uint32_t page_idx = 9;
  EXPECT_THAT(arena_->Reserve(kB, {&key, 1}, {&page_idx, 1}, 0)->full_reason,
              HasSubstr("limits.reservations_per_session"));
}

TEST_F(ArenaTest, LostSessionsSlotsWaitInQuarantine) {
  MakeArena(2);
  const PageLocation page = testing::PutPage(arena_.get(), kA, 0);
  testing::ReserveOne(arena_.get(), kA, 1);
  arena_->EndSession(kA, SessionEnd::kLost);
  EXPECT_EQ(arena_->Stats().slots_quarantined, 1u);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 5).state, State::kFull);
  // Another session leases and releases the page: that must not shorten the wait.
  ASSERT_TRUE(arena_->Lease(kB, std::vector{page}).ok());
  Release(kB, {page});
  clock_.Advance(absl::Seconds(5) - absl::Nanoseconds(1));
  arena_->Tick();
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 5).state, State::kFull);
  clock_.Advance(absl::Nanoseconds(1));
  arena_->Tick();
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 5).state, State::kNew);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 6).state, State::kNew);
}

// From the first lease until the last one ends, whoever holds them; bounds are inclusive.
TEST_F(ArenaTest, AgesOfLeasesAreCountedOnceAPageNobodyLeases) {
  MakeArena(3);
  const PageLocation p0 = testing::PutPage(arena_.get(), kA, 0);
  const PageLocation p1 = testing::PutPage(arena_.get(), kA, 1);
  clock_.Advance(absl::Seconds(1));
  ASSERT_TRUE(arena_->Lease(kB, std::vector{p0}).ok());
  Release(kA, {p0, p1});
  ArenaStats stats = arena_->Stats();
  EXPECT_EQ(stats.leased_age_counts[2], 1u);  // p1: 1 s; p0 is still kB's
  clock_.Advance(absl::Seconds(60));
  arena_->EndSession(kB, SessionEnd::kLost);
  stats = arena_->Stats();
  EXPECT_EQ(stats.leased_age_counts[2], 1u);
  EXPECT_EQ(stats.leased_age_counts[5], 1u);  // p0: 61 s
  EXPECT_DOUBLE_EQ(stats.leased_age_seconds, 62);
  // A new lease begins a new time.
  ASSERT_TRUE(arena_->Lease(kA, std::vector{p1}).ok());
  clock_.Advance(absl::Milliseconds(5));
  Release(kA, {p1});
  EXPECT_EQ(arena_->Stats().leased_age_counts[0], 1u);
}

TEST_F(ArenaTest, DetachGivesEverythingBackAtOnce) {
  MakeArena(2);
  testing::PutPage(arena_.get(), kA, 0);
  testing::ReserveOne(arena_.get(), kA, 1);
  arena_->EndSession(kA, SessionEnd::kDetached);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 5).state, State::kNew);
  EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 6).state, State::kNew);
}

TEST_F(ArenaTest, PinnedReservationOfADeadSessionIsFreedOnlyWhenThePinDrops) {
  MakeArena(1);
  const auto reserved = testing::ReserveOne(arena_.get(), kA, 0);
  {
    auto pin = arena_->PinReservation(kA, reserved.ticket);
    ASSERT_TRUE(pin.ok());
    arena_->EndSession(kA, SessionEnd::kLost);
    clock_.Advance(absl::Hours(1));
    arena_->Tick();
    EXPECT_EQ(arena_->Stats().slots_reserved, 1u);
    EXPECT_EQ(testing::ReserveOne(arena_.get(), kB, 1).state, State::kFull);
    std::memset(pin->unit(0, 0), 1, 16);  // still its own slot
    pin->MarkReceived(0, 0);
    ReservationPin moved = *std::move(pin);
    EXPECT_EQ(arena_->Stats().slots_reserved, 1u);
  }
  EXPECT_EQ(arena_->Stats().slots_quarantined, 1u);
}

TEST_F(ArenaTest, SessionThatEndsWhileItsPageIsSealedLeavesNoSlotThatLooksSealed) {
  MakeArena(1);
  testing::EndSessionsWhileTheySeal(arena_.get(), 200,
                                    [&](uint32_t slot) { return Generation(slot); });
}

TEST_F(ArenaTest, EndedSessionCanNeitherLeaseNorReserveNorFetch) {
  MakeArena(2);
  const PageLocation p = testing::PutPage(arena_.get(), kA, 0);
  arena_->EndSession(kB, SessionEnd::kDetached);
  arena_->EndSession(kB, SessionEnd::kLost);  // twice is once
  const auto aborted = absl::StatusCode::kAborted;
  EXPECT_EQ(arena_->MatchPrefix(kB, 1, Keys({0}), kShard0).status().code(), aborted);
  EXPECT_EQ(arena_->Lease(kB, std::vector{p}).status().code(), aborted);
  EXPECT_EQ(arena_->Release(kB, std::vector{p}).code(), aborted);
  const uint32_t page_idx = 1;
  EXPECT_EQ(arena_->Reserve(kB, Keys({1}), {&page_idx, 1}, 0).status().code(), aborted);
  const FetchEntry entry = {p.slot, 0, 0, p.generation};
  uint8_t allowed = 1;
  EXPECT_EQ(arena_->CheckFetch(kB, {&entry, 1}, {&allowed, 1}).code(), aborted);
}

TEST_F(ArenaTest, IdleReservationIsGivenUp) {
  MakeArena(1);
  const auto reserved = testing::ReserveOne(arena_.get(), kA, 0);
  clock_.Advance(absl::Seconds(59));
  ASSERT_TRUE(testing::WriteUnit(arena_.get(), kA, reserved.ticket, 0, 0, 0, 0).ok());
  clock_.Advance(absl::Seconds(59));
  arena_->Tick();
  EXPECT_EQ(arena_->Stats().slots_reserved, 1u);
  clock_.Advance(absl::Seconds(1));
  arena_->Tick();
  EXPECT_EQ(arena_->Stats().slots_quarantined, 1u);
  EXPECT_EQ(arena_->Stats().reserved_expired, 1u);
  EXPECT_EQ(arena_->Seal(kA, reserved.ticket).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ArenaTest, FetchListWithASlotLayerOrHeadOutOfRangeIsRefusedNamingTheEntry) {
  MakeArena(2);
  const PageLocation p = testing::PutPage(arena_.get(), kA, 0);
  for (const FetchEntry bad :
       {FetchEntry{3, 0, 0, 2}, FetchEntry{p.slot, 2, 0, 2}, FetchEntry{p.slot, 0, 1, 2}}) {
    const FetchEntry entries[] = {{p.slot, 1, 0, 2}, bad};
    uint8_t allowed[2];
    const absl::Status status = arena_->CheckFetch(kA, entries, allowed);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("fetch entry 1"));
  }
  EXPECT_FALSE(arena_->CheckUnit(-1, 0).ok());
  EXPECT_FALSE(arena_->CheckUnit(0, 1).ok());
  EXPECT_TRUE(arena_->CheckUnit(1, 0).ok());
}

TEST_F(ArenaTest, ReaderNeverSeesAnEvenGenerationWithAnotherPagesKeyOrChecksum) {
  MakeArena(1);
  // What each page's header must say, learnt in the same slot. Pages take turns, so a generation
  // names its page.
  struct Header {
    uint64_t key = 0;
    uint64_t checksum = 0;
  };
  Header expected[2];
  const auto put = [this](int page) {
    const PageLocation location = testing::PutPage(arena_.get(), kA, page);
    Release(kA, {location});
    return location;
  };
  PageHeader* header = arena_->memory().header(1);
  const auto key_word = [header] {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(header->key))
        .load(std::memory_order_acquire);
  };
  const auto checksum = [header] {
    return std::atomic_ref<uint64_t>(header->summary_checksum).load(std::memory_order_acquire);
  };
  for (const int page : {0, 1}) {
    put(page);
    expected[page] = {key_word(), checksum()};
  }
  ASSERT_NE(expected[0].key, expected[1].key);
  ASSERT_NE(expected[0].checksum, expected[1].checksum);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> checked{0};
  uint64_t wrong = 0;
  uint64_t backwards = 0;
  std::thread reader([&] {
    uint64_t last = 0;
    while (!stop.load(std::memory_order_relaxed)) {
      const uint64_t before = header->generation.load(std::memory_order_acquire);
      const uint64_t key = key_word();
      const uint64_t sum = checksum();
      const uint64_t after = header->generation.load(std::memory_order_relaxed);
      backwards += before < last ? 1 : 0;
      last = after;
      if (before != after || before % 2 != 0) continue;
      ++checked;
      const Header& right = expected[(before / 2 - 1) % 2];
      wrong += key != right.key || sum != right.checksum ? 1 : 0;
    }
  });
  for (int i = 0; i < 300; ++i) {
    put(i % 2);
    // Sealed pages stay until the reader has seen one: the checks count, not the scheduler's luck.
    for (const uint64_t seen = checked; checked == seen;) std::this_thread::yield();
  }
  stop = true;
  reader.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(backwards, 0u);
}

TEST_F(ArenaTest, SealWaitsForAWriteThatIsUnderWay) {
  MakeArena(1);
  const auto reserved = testing::ReserveOne(arena_.get(), kA, 0);
  testing::WritePage(arena_.get(), kA, reserved.ticket, 0);
  auto pin = arena_->PinReservation(kA, reserved.ticket);
  ASSERT_TRUE(pin.ok());
  std::atomic<bool> sealed{false};
  absl::StatusOr<SealOutcome> outcome = absl::UnknownError("not yet");
  std::thread sealer([&] {
    outcome = arena_->Seal(kA, reserved.ticket);
    sealed = true;
  });
  // Once the seal has claimed the page, nobody else may begin to write it.
  while (arena_->PinReservation(kA, reserved.ticket).ok()) std::this_thread::yield();
  absl::SleepFor(absl::Milliseconds(50));  // a seal that does not wait has ended by now
  EXPECT_FALSE(sealed);
  const auto bytes = testing::UnitBytes(arena_->geometry(), 0, 1, 0, 0);
  std::memcpy(pin->unit(0, 0), bytes.data(), bytes.size());
  pin->MarkReceived(0, 0);
  { const ReservationPin dropped = *std::move(pin); }
  sealer.join();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  const SummaryLayout summary = MakeSummaryLayout(arena_->geometry());
  uint64_t stored;
  std::memcpy(&stored,
              arena_->memory().summary(outcome->location.slot) + summary.coarse[kUnitChecksum], 8);
  EXPECT_EQ(stored, Checksum64(bytes.data(), bytes.size())) << "the later bytes were summarised";
}

TEST_F(ArenaTest, MakeSaysWhatIsWrongWithItsOptions) {
  ArenaOptions options = testing::TinyOptions(2, &clock_);
  options.bytes = 1000;
  EXPECT_THAT(Arena::Make(options).status().message(), HasSubstr("room for at least two slots"));
  options = testing::TinyOptions(2, &clock_);
  options.geometry.rank = 6;
  EXPECT_THAT(Arena::Make(options).status().message(), HasSubstr("rank"));
  options.geometry.rank = 4;
  options.place = OnGpu(0);
  if (!kAllGeometries) {
    EXPECT_THAT(Arena::Make(options).status().message(), HasSubstr("KVD_ALL_GEOMETRIES"));
  }
  options = testing::TinyOptions(2, &clock_);
  options.encoder = Encoder::kE1S;
  EXPECT_THAT(Arena::Make(options).status().message(), HasSubstr("query metric"));
}

}  // namespace
}  // namespace kvd
