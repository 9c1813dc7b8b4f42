// Goal: whatever sessions do, a sealed page keeps its bytes and generation while it is leased or
// held by the quarantine, and headers tell the truth. Method: random operations against a map,
// every invariant after every step, on a test clock.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tests/service/arena_fixture.h"
#include "tests/service/model_seed.h"

namespace kvd {
namespace {

using State = ReserveOutcome::State;

constexpr uint32_t kSlots = 5;
constexpr int kPages = 9;
constexpr uint32_t kShard0[] = {0};

class ArenaModel {
 public:
  explicit ArenaModel(uint64_t seed)
      : random_(seed), arena_(testing::MakeArena(testing::TinyOptions(kSlots, &clock_))) {}

  void Step() {
    switch (random_() % 10) {
      case 0:
        return Begin();
      case 1:
        return End(random_() % 2 == 0 ? SessionEnd::kDetached : SessionEnd::kLost);
      case 2:
      case 3:
        return Reserve();
      case 4:
      case 5:
        return Seal();
      case 6:
        return Match();
      case 7:
        return Release();
      case 8:
        return Lease();
      default:
        clock_.Advance(absl::Seconds(random_() % 3));
        arena_->Tick();
    }
  }

  void Check() {
    std::set<uint32_t> leased;
    for (const auto& [session, slots] : leases_) {
      ASSERT_EQ(arena_->num_leases(session), slots.size());
      leased.insert(slots.begin(), slots.end());
    }
    for (uint32_t slot = 1; slot <= kSlots; ++slot) {
      const uint64_t generation = arena_->memory().header(slot)->generation.load();
      ASSERT_GE(generation, last_generation_[slot]) << "generations only grow";
      last_generation_[slot] = generation;
      const bool sealed = std::any_of(sealed_.begin(), sealed_.end(), [slot](const auto& each) {
        return each.second.location.slot == slot;
      });
      ASSERT_EQ(generation % 2 == 0, sealed) << "even only while sealed";
    }
    for (const auto& [page, copy] : sealed_) {
      const PageHeader* header = arena_->memory().header(copy.location.slot);
      ASSERT_EQ(header->generation.load(), copy.location.generation);
      ASSERT_EQ(std::memcmp(header->key, testing::KeyOf(page).data(), 16), 0);
      for (int layer = 0; layer < 2; ++layer) {
        const auto bytes = testing::UnitBytes(arena_->geometry(), page, copy.write, layer, 0);
        ASSERT_EQ(std::memcmp(arena_->memory().unit(copy.location.slot, layer, 0), bytes.data(),
                              bytes.size()),
                  0)
            << "page " << page;
      }
    }
    const ArenaStats stats = arena_->Stats();
    ASSERT_EQ(stats.slots_sealed, sealed_.size());
    ASSERT_EQ(stats.slots_leased, leased.size());
    ASSERT_EQ(
        stats.slots_free + stats.slots_reserved + stats.slots_sealed + stats.slots_quarantined,
        kSlots);
  }

 private:
  struct Copy {
    PageLocation location;
    int write;
  };
  struct Writing {
    Ticket ticket;
    SessionId session;
    int write;
  };

  std::optional<SessionId> AnySession() {
    if (leases_.empty()) return std::nullopt;
    auto it = leases_.begin();
    std::advance(it, static_cast<long>(random_() % leases_.size()));
    return it->first;
  }
  int AnyPage() { return static_cast<int>(random_() % kPages); }

  void Begin() {
    if (leases_.size() >= 4) return;
    const auto session = static_cast<SessionId>(next_session_++);
    arena_->BeginSession(session);
    leases_[session] = {};
  }

  void End(SessionEnd why) {
    const auto session = AnySession();
    if (!session.has_value()) return;
    arena_->EndSession(*session, why);
    if (why == SessionEnd::kLost) {
      for (const uint32_t slot : leases_[*session])
        held_until_[slot] = clock_.Now() + absl::Seconds(5);
    }
    leases_.erase(*session);
    std::erase_if(writing_, [&](const auto& each) { return each.second.session == *session; });
  }

  // Finds out which page was evicted for a new one, and whether that was allowed.
  void CheckEvictions() {
    for (auto it = sealed_.begin(); it != sealed_.end();) {
      const uint32_t slot = it->second.location.slot;
      if (arena_->memory().header(slot)->generation.load() == it->second.location.generation) {
        ++it;
        continue;
      }
      for (const auto& [session, slots] : leases_)
        ASSERT_FALSE(slots.contains(slot)) << "evicted while leased";
      ASSERT_LE(held_until_[slot], clock_.Now()) << "evicted within the quarantine";
      it = sealed_.erase(it);
    }
  }

  void Reserve() {
    const auto session = AnySession();
    if (!session.has_value()) return;
    const int page = AnyPage();
    const auto got = testing::ReserveOne(arena_.get(), *session, page);
    if (sealed_.contains(page)) {
      ASSERT_EQ(got.state, State::kHit);
      ASSERT_EQ(got.slot, sealed_[page].location.slot);
      leases_[*session].insert(got.slot);
      return;
    }
    if (writing_.contains(page)) {
      ASSERT_EQ(got.state, State::kPending);
      return;
    }
    ASSERT_TRUE(got.state == State::kNew || got.state == State::kFull);
    CheckEvictions();
    if (got.state == State::kFull) return;
    writing_[page] = {got.ticket, *session, static_cast<int>(random_() % 50)};
  }

  void Seal() {
    const auto it = writing_.find(AnyPage());
    if (it == writing_.end()) return;
    const auto [page, writing] = *it;
    const bool complete = random_() % 4 != 0;
    if (complete)
      testing::WritePage(arena_.get(), writing.session, writing.ticket, page, writing.write);
    const auto sealed = arena_->Seal(writing.session, writing.ticket);
    ASSERT_EQ(sealed.ok(), complete) << sealed.status();
    writing_.erase(it);
    if (!complete) return;
    sealed_[page] = {sealed->location, writing.write};
    leases_[writing.session].insert(sealed->location.slot);
  }

  void Match() {
    const auto session = AnySession();
    if (!session.has_value()) return;
    std::vector<PageKey> keys;
    std::vector<int> pages;
    for (int i = 0; i < 3; ++i) {
      pages.push_back(AnyPage());
      keys.push_back(testing::KeyOf(pages.back()));
    }
    const auto found = arena_->MatchPrefix(*session, next_request_++, keys, kShard0);
    ASSERT_TRUE(found.ok());
    size_t expected = 0;
    while (expected < pages.size() && sealed_.contains(pages[expected])) ++expected;
    ASSERT_EQ(found->locations.size(), expected);
    for (size_t i = 0; i < expected; ++i) {
      ASSERT_EQ(found->locations[i], sealed_[pages[i]].location);
      leases_[*session].insert(found->locations[i].slot);
    }
  }

  PageLocation AnyLocation() {
    const auto it = sealed_.find(AnyPage());
    if (it != sealed_.end() && random_() % 4 != 0) return it->second.location;
    return {static_cast<uint32_t>(random_() % (kSlots + 1)), 2 * (1 + random_() % 6)};
  }
  bool IsThere(const PageLocation& location) const {
    return std::any_of(sealed_.begin(), sealed_.end(),
                       [&](const auto& each) { return each.second.location == location; });
  }

  void Release() {
    const auto session = AnySession();
    if (!session.has_value()) return;
    const PageLocation location = AnyLocation();
    ASSERT_TRUE(arena_->Release(*session, {&location, 1}).ok());
    if (IsThere(location)) leases_[*session].erase(location.slot);
  }

  void Lease() {
    const auto session = AnySession();
    if (!session.has_value()) return;
    const PageLocation location = AnyLocation();
    const auto leased = arena_->Lease(*session, {&location, 1});
    ASSERT_TRUE(leased.ok());
    ASSERT_EQ((*leased)[0], IsThere(location)) << "never a lease of an older generation";
    if ((*leased)[0]) leases_[*session].insert(location.slot);
  }

  std::mt19937_64 random_;
  TestClock clock_;
  std::unique_ptr<Arena> arena_;
  std::map<SessionId, std::set<uint32_t>> leases_;
  std::map<int, Copy> sealed_;
  std::map<int, Writing> writing_;
  std::map<uint32_t, absl::Duration> held_until_;
  std::map<uint32_t, uint64_t> last_generation_;
  uint64_t next_session_ = 1;
  uint64_t next_request_ = 1;
};

TEST(ArenaModelTest, EveryInvariantHoldsUnderRandomOperations) {
  ArenaModel model(testing::ModelSeed());
  for (int step = 0; step < 4000; ++step) {
    model.Step();
    if (::testing::Test::HasFatalFailure()) FAIL() << "in step " << step;
    model.Check();
    if (::testing::Test::HasFatalFailure()) FAIL() << "after step " << step;
  }
}

}  // namespace
}  // namespace kvd
