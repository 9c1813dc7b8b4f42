#include "service/lease_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "tests/service/model_seed.h"

namespace kvd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Released = LeaseTable::Released;

constexpr SessionId kA{1};
constexpr SessionId kB{2};

TEST(LeaseTableTest, LeasingTwiceIsOneLeaseAndOneReleaseEndsIt) {
  LeaseTable table(100);
  table.Begin(kA);
  EXPECT_TRUE(table.Lease(kA, 70));
  EXPECT_FALSE(table.Lease(kA, 70));
  EXPECT_EQ(table.num_leases(kA), 1u);
  EXPECT_EQ(table.Release(kA, 70), Released::kLast);
  EXPECT_EQ(table.Release(kA, 70), Released::kNothing);
  EXPECT_FALSE(table.Holds(kA, 70));
}

TEST(LeaseTableTest, OneSessionCannotReleaseAnothersLease) {
  LeaseTable table(100);
  table.Begin(kA);
  table.Begin(kB);
  table.Lease(kA, 5);
  EXPECT_EQ(table.Release(kB, 5), Released::kNothing);
  EXPECT_EQ(table.holders(5), 1u);
  table.Lease(kB, 5);
  EXPECT_EQ(table.Release(kA, 5), Released::kStillHeld);
  EXPECT_EQ(table.Release(kB, 5), Released::kLast);
}

TEST(LeaseTableTest, EndingASessionEndsItsLeasesAndNoOthers) {
  LeaseTable table(200);
  table.Begin(kA);
  table.Begin(kB);
  for (const uint32_t slot : {3u, 64u, 199u}) table.Lease(kA, slot);
  table.Lease(kB, 64);
  EXPECT_THAT(table.End(kA), ElementsAre(3, 64, 199));
  EXPECT_FALSE(table.IsLive(kA));
  EXPECT_EQ(table.holders(64), 1u);
  EXPECT_TRUE(table.Holds(kB, 64));
  EXPECT_EQ(table.num_leased_slots(), 1u);
  EXPECT_THAT(table.End(kA), IsEmpty());
}

TEST(LeaseTableTest, UnknownSessionsAndSlotsHoldNothing) {
  LeaseTable table(10);
  EXPECT_FALSE(table.Holds(kA, 1));
  EXPECT_EQ(table.Bits(kA), nullptr);
  EXPECT_EQ(table.Release(kA, 1), Released::kNothing);
  table.Begin(kA);
  EXPECT_EQ(table.Release(kA, 4000), Released::kNothing);
  EXPECT_FALSE(table.Holds(kA, 4000));
}

// Guard mutation: a table that forgets whose lease it is. The model test below must notice it.
class AnyoneReleases : public LeaseTable {
 public:
  using LeaseTable::LeaseTable;
  Released Release(SessionId, uint32_t slot) {
    const SessionId holder = Holds(kA, slot) ? kA : kB;
    return LeaseTable::Release(holder, slot);
  }
};

// Returns the first step at which table and model differ, or -1.
template <typename Table>
int FirstDifference(uint64_t seed, int steps) {
  std::mt19937_64 random(seed);
  constexpr uint32_t kSlots = 130;
  Table table(kSlots);
  std::map<SessionId, std::set<uint32_t>> model;
  for (int step = 0; step < steps; ++step) {
    const auto session = static_cast<SessionId>(1 + random() % 4);
    const auto slot = static_cast<uint32_t>(random() % kSlots);
    const bool live = model.contains(session);
    switch (random() % 8) {
      case 0:
        if (!live) {
          table.Begin(session);
          model[session] = {};
        }
        break;
      case 1: {
        if (random() % 8 != 0) break;
        const std::vector<uint32_t> held = table.End(session);
        const std::set<uint32_t> expected = live ? model[session] : std::set<uint32_t>{};
        if (std::set<uint32_t>(held.begin(), held.end()) != expected) return step;
        model.erase(session);
        break;
      }
      case 2:
      case 3:
      case 4:
        if (live && table.Lease(session, slot) != model[session].insert(slot).second) return step;
        break;
      default: {
        const bool had = live && model[session].erase(slot) == 1;
        if ((table.Release(session, slot) != Released::kNothing) != had) return step;
      }
    }
    uint64_t total = 0;
    uint32_t leased_slots = 0;
    for (uint32_t i = 0; i < kSlots; ++i) {
      uint32_t holders = 0;
      for (const auto& [id, slots] : model) {
        holders += slots.contains(i) ? 1 : 0;
        if (table.Holds(id, i) != slots.contains(i)) return step;
      }
      if (table.holders(i) != holders) return step;
      total += holders;
      leased_slots += holders > 0 ? 1 : 0;
    }
    if (table.num_leases() != total || table.num_leased_slots() != leased_slots) return step;
    for (const auto& [id, slots] : model) {
      if (table.num_leases(id) != slots.size()) return step;
    }
  }
  return -1;
}

TEST(LeaseTableTest, AgreesWithAModelUnderRandomOperations) {
  EXPECT_EQ(FirstDifference<LeaseTable>(testing::ModelSeed(), 5000), -1);
}

TEST(LeaseTableTest, ModelNoticesATableThatLetsAnyoneRelease) {
  EXPECT_NE(FirstDifference<AnyoneReleases>(testing::ModelSeed(), 5000), -1);
}

}  // namespace
}  // namespace kvd
