#include "service/evictor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "tests/service/model_seed.h"

namespace kvd {
namespace {

TEST(EvictorTest, OldestEndOfLeaseGoesFirst) {
  Evictor evictor(10);
  evictor.Add(1, 0, absl::Seconds(3));
  evictor.Add(2, 0, absl::Seconds(1));
  evictor.Add(3, 0, absl::Seconds(2));
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(9)), 2u);
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(9)), 3u);
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(9)), 1u);
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(9)), std::nullopt);
}

TEST(EvictorTest, AmongEqualsTheTailGoesBeforeTheHead) {
  Evictor evictor(10);
  for (const uint32_t page : {0u, 7u, 3u}) evictor.Add(page + 1, page, absl::Seconds(1));
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(1)), 8u);
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(1)), 4u);
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(1)), 1u);
}

TEST(EvictorTest, LeasedAgainIsNoVictim) {
  Evictor evictor(10);
  evictor.Add(1, 0, absl::Seconds(1));
  evictor.Remove(1);
  evictor.Remove(1);
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(5)), std::nullopt);
}

TEST(EvictorTest, PageOfALostSessionIsHeldEvenIfAnotherLeasesAndReleasesItMeanwhile) {
  Evictor evictor(10);
  evictor.HoldUntil(1, absl::Seconds(10));
  evictor.Add(1, 0, absl::Seconds(5));
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(9)), std::nullopt);
  evictor.Remove(1);
  evictor.Add(1, 0, absl::Seconds(6));
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(9)), std::nullopt);
  EXPECT_EQ(evictor.PopVictim(absl::Seconds(10)), 1u);
}

// Guard mutations; the model test must notice each.
class ForgetsTheHold : public Evictor {
 public:
  using Evictor::Evictor;
  void HoldUntil(uint32_t, absl::Duration) {}
};
class HeadFirst : public Evictor {
 public:
  using Evictor::Evictor;
  void Add(uint32_t slot, uint32_t page_idx, absl::Duration now) {
    Evictor::Add(slot, 100 - page_idx, now);
  }
};

struct ModelPage {
  absl::Duration held_until = absl::ZeroDuration();
  bool candidate = false;
  absl::Duration since;
  uint32_t page_idx = 0;
};

// Returns the first step at which evictor and model differ, or -1.
template <typename Tested>
int FirstDifference(uint64_t seed, int steps) {
  std::mt19937_64 random(seed);
  constexpr uint32_t kSlots = 12;
  Tested evictor(kSlots);
  std::map<uint32_t, ModelPage> model;
  for (uint32_t slot = 0; slot < kSlots; ++slot) model[slot] = {};
  absl::Duration now = absl::ZeroDuration();
  for (int step = 0; step < steps; ++step) {
    const auto slot = static_cast<uint32_t>(random() % kSlots);
    ModelPage& m = model[slot];
    switch (random() % 6) {
      case 0:
        if (m.candidate) break;
        m.held_until = std::max(m.held_until, now + absl::Seconds(5));
        evictor.HoldUntil(slot, now + absl::Seconds(5));
        break;
      case 1:
      case 2:
        if (m.candidate) break;
        m = {m.held_until, true, std::max(now, m.held_until), static_cast<uint32_t>(random() % 4)};
        evictor.Add(slot, m.page_idx, now);
        break;
      case 3:
        m.candidate = false;
        evictor.Remove(slot);
        break;
      case 4:
        now += absl::Seconds(random() % 3);
        break;
      default: {
        const std::optional<uint32_t> got = evictor.PopVictim(now);
        std::optional<uint32_t> expected;
        for (const auto& [i, each] : model) {
          if (!each.candidate || each.since > now) continue;
          if (!expected.has_value() || each.since < model[*expected].since ||
              (each.since == model[*expected].since && each.page_idx > model[*expected].page_idx)) {
            expected = i;
          }
        }
        if (got != expected) return step;
        if (got.has_value()) model[*got].candidate = false;
      }
    }
    const auto candidates = std::count_if(model.begin(), model.end(),
                                          [](const auto& each) { return each.second.candidate; });
    if (evictor.num_candidates() != static_cast<uint32_t>(candidates)) return step;
  }
  return -1;
}

TEST(EvictorTest, AgreesWithAModelUnderRandomOperations) {
  EXPECT_EQ(FirstDifference<Evictor>(testing::ModelSeed(), 20000), -1);
}

TEST(EvictorTest, ModelNoticesAnEvictorThatForgetsTheQuarantine) {
  EXPECT_NE(FirstDifference<ForgetsTheHold>(testing::ModelSeed(), 20000), -1);
}

TEST(EvictorTest, ModelNoticesAnEvictorThatTakesHeadsFirst) {
  EXPECT_NE(FirstDifference<HeadFirst>(testing::ModelSeed(), 20000), -1);
}

}  // namespace
}  // namespace kvd
