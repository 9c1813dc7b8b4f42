// Goal: exact LRU whose two maps stay each other's inverse. Method: random steps against a
// list-based model, all invariants after each; small cases by hand.
#include "kernels/resolve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "tests/kernels/resolve_cache.h"

namespace kvd {
namespace {

using ::testing::ElementsAre;

class Cache : public testing::ResolveCache {
 public:
  using ResolveCache::ResolveCache;

  int Run(uint64_t step, const std::vector<int32_t>& pages) {
    const int num_misses = Resolve(step, pages);
    miss_idx.resize(static_cast<size_t>(num_misses));
    return num_misses;
  }

  void CheckInverse() const {
    for (size_t s = 0; s < slot_page.size(); ++s) {
      if (slot_page[s] >= 0) {
        EXPECT_EQ(page_slot[static_cast<size_t>(slot_page[s])], static_cast<int32_t>(s));
      }
      EXPECT_EQ(slot_page[s] < 0, slot_step[s] == 0);
    }
    for (size_t p = 0; p < page_slot.size(); ++p) {
      if (page_slot[p] >= 0) {
        EXPECT_EQ(slot_page[static_cast<size_t>(page_slot[p])], static_cast<int32_t>(p));
      }
    }
  }
};

TEST(ResolveTest, FirstStepMissesEverythingAndTheNextHitsIt) {
  Cache cache(4, 10);
  EXPECT_EQ(cache.Run(1, {2, 5, 9}), 3);
  EXPECT_THAT(cache.slots, ElementsAre(0, 1, 2));
  EXPECT_THAT(cache.miss_idx, ElementsAre(0, 1, 2));
  EXPECT_EQ(cache.Run(2, {2, 5, 9}), 0);
  EXPECT_THAT(cache.slots, ElementsAre(0, 1, 2));
  cache.CheckInverse();
}

TEST(ResolveTest, HitsAreTouchedBeforeAnyMissClaimsASlot) {
  Cache cache(3, 10);
  cache.Run(1, {1});
  cache.Run(2, {2});
  cache.Run(3, {3});
  // Page 1 is the oldest and, in this list, stands after the misses: it must still survive.
  EXPECT_EQ(cache.Run(4, {0, 1, 4}), 2);
  EXPECT_THAT(cache.miss_idx, ElementsAre(0, 2));
  EXPECT_EQ(cache.slots[1], 0);
  EXPECT_EQ(cache.page_slot[2], -1);
  EXPECT_EQ(cache.page_slot[3], -1);
  cache.CheckInverse();
}

TEST(ResolveTest, TheLeastRecentlyUsedSlotsAreTakenFirst) {
  Cache cache(4, 20);
  cache.Run(1, {1, 2, 3, 4});
  cache.Run(2, {1, 3});
  cache.Run(3, {4});
  EXPECT_EQ(cache.Run(4, {10}), 1);
  EXPECT_EQ(cache.page_slot[2], -1);  // step 1
  EXPECT_EQ(cache.Run(5, {11}), 1);
  EXPECT_EQ(cache.page_slot[1], -1);  // step 2, lower slot of the two
  EXPECT_GE(cache.page_slot[3], 0);
  cache.CheckInverse();
}

TEST(ResolveTest, PagesBeyondTheSlotsAreNeitherHitsNorMisses) {
  Cache cache(2, 10);
  cache.Run(1, {4});
  EXPECT_EQ(cache.Run(2, {1, 3, 4, 8}), 1);
  EXPECT_THAT(cache.slots, ElementsAre(1, -1, 0, -1));
  EXPECT_THAT(cache.miss_idx, ElementsAre(0));
  cache.CheckInverse();
  Cache none(0, 10);
  EXPECT_EQ(none.Run(1, {1, 2}), 0);
  EXPECT_THAT(none.slots, ElementsAre(-1, -1));
}

TEST(ResolveTest, AnEvictedSlotIsEmptyAndTakenFirst) {
  Cache cache(3, 10);
  cache.Run(1, {1, 2, 3});
  cache.Evict(1);
  EXPECT_EQ(cache.page_slot[2], -1);
  cache.CheckInverse();
  EXPECT_EQ(cache.Run(2, {1, 2, 3}), 1);
  EXPECT_THAT(cache.miss_idx, ElementsAre(1));
  EXPECT_THAT(cache.slots, ElementsAre(0, 1, 2));
  cache.Evict(0);
  cache.Evict(0);  // again: nothing happens
  cache.CheckInverse();
}

TEST(ResolveTest, RandomStepsFollowAnLruModel) {
  std::mt19937 random(1);
  for (int num_slots : {1, 7, 40, 100}) {
    constexpr int kPages = 150, kSelected = 20;
    Cache cache(num_slots, kPages);
    std::list<int32_t> model;  // cached pages, least recently used first; pages of one step by slot
    for (uint64_t step = 1; step <= 300; ++step) {
      std::set<int32_t> chosen;
      while (chosen.size() < kSelected) {
        chosen.insert(static_cast<int32_t>(std::min(random() % kPages, random() % kPages)));
      }
      const std::vector<int32_t> pages(chosen.begin(), chosen.end());
      std::vector<int32_t> hits, absent;
      for (int32_t p : pages) {
        const bool cached = std::find(model.begin(), model.end(), p) != model.end();
        (cached ? hits : absent).push_back(p);
        model.remove(p);
      }
      const size_t room = static_cast<size_t>(num_slots) - hits.size();
      if (absent.size() > room) absent.resize(room);
      while (model.size() + hits.size() + absent.size() > static_cast<size_t>(num_slots))
        model.pop_front();

      EXPECT_EQ(cache.Run(step, pages), static_cast<int>(absent.size()));
      cache.CheckInverse();
      for (size_t i = 0; i < absent.size(); ++i) {
        EXPECT_EQ(pages[static_cast<size_t>(cache.miss_idx[i])], absent[i]);
      }
      std::vector<int32_t> now = hits;
      now.insert(now.end(), absent.begin(), absent.end());
      std::sort(now.begin(), now.end(), [&](int32_t a, int32_t b) {
        return cache.page_slot[static_cast<size_t>(a)] < cache.page_slot[static_cast<size_t>(b)];
      });
      model.insert(model.end(), now.begin(), now.end());
      for (int32_t p : model) EXPECT_GE(cache.page_slot[static_cast<size_t>(p)], 0) << "page " << p;
    }
  }
}

}  // namespace
}  // namespace kvd
