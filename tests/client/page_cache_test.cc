// The cache against a plain LRU model, with the invariant that its two maps are mutually inverse.

#include "client/page_cache.h"

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "tests/client/fake_pool.h"

namespace kvd::testing {
namespace {

constexpr int kCapacity = 24;
constexpr int kSlots = 9;

class PageCacheTest : public ::testing::Test {
 protected:
  PageCacheTest() {
    const std::vector<int> slots = {kSlots, 5};
    cache_ = *PageCache::Make(shape_, kCapacity, slots);
    versions_.assign(kCapacity, 1);
  }

  std::vector<int32_t> Misses(int layer, int head, uint64_t step, std::vector<int32_t> pages) {
    slots_.assign(pages.size(), -2);
    std::vector<int32_t> miss_idx(pages.size());
    const int n =
        cache_->Resolve(layer, head, step, pages, versions_.data(), slots_.data(), miss_idx.data());
    std::vector<int32_t> missed;
    for (int i = 0; i < n; ++i)
      missed.push_back(pages[static_cast<size_t>(miss_idx[static_cast<size_t>(i)])]);
    return missed;
  }

  void ExpectMutuallyInverse(int layer, int head) {
    for (int32_t p = 0; p < kCapacity; ++p) {
      const int32_t slot = cache_->slot_of(layer, head, p);
      if (slot >= 0) {
        EXPECT_EQ(cache_->page_in(layer, head, slot), p);
      }
    }
    for (int32_t s = 0; s < cache_->num_slots(layer); ++s) {
      const int32_t page = cache_->page_in(layer, head, s);
      if (page >= 0) {
        EXPECT_EQ(cache_->slot_of(layer, head, page), s);
      }
    }
  }

  const WorkerShape shape_ = *WorkerShape::Make(SmallGeometry(), {});
  std::unique_ptr<PageCache> cache_;
  std::vector<uint32_t> versions_;
  std::vector<int32_t> slots_;
};

TEST_F(PageCacheTest, HitsAndMissesAreThoseOfAnLruModel) {
  std::mt19937 random(7);
  struct Model {
    std::map<int32_t, uint64_t> last_use;
  };
  std::map<std::pair<int, int>, Model> models;
  for (uint64_t step = 1; step <= 400; ++step) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        Model& model = models[{layer, head}];
        const auto num_slots = static_cast<size_t>(cache_->num_slots(layer));
        std::set<int32_t> wanted;
        const size_t count = 1 + random() % num_slots;
        while (wanted.size() < count) wanted.insert(static_cast<int32_t>(random() % kCapacity));
        std::vector<int32_t> expected;
        for (const int32_t p : wanted) {
          if (model.last_use.count(p) == 0) {
            expected.push_back(p);
          } else {
            model.last_use[p] = step;
          }
        }
        const std::vector<int32_t> pages(wanted.begin(), wanted.end());
        ASSERT_EQ(Misses(layer, head, step, pages), expected) << "step " << step;
        std::set<int32_t> distinct(slots_.begin(), slots_.end());
        EXPECT_EQ(distinct.size(), pages.size());
        for (const int32_t p : expected) model.last_use[p] = step;
        // Ties in the model (pages of one step) leave the victim open: read it from the cache.
        for (auto it = model.last_use.begin(); it != model.last_use.end();) {
          const bool cached = cache_->slot_of(layer, head, it->first) >= 0;
          if (!cached) {
            EXPECT_NE(it->second, step) << "a page of this step was a victim";
          }
          it = cached ? std::next(it) : model.last_use.erase(it);
        }
        EXPECT_LE(model.last_use.size(), num_slots);
        ExpectMutuallyInverse(layer, head);
      }
    }
  }
}

TEST_F(PageCacheTest, OldestPageIsTheVictim) {
  for (int32_t p = 0; p < kSlots; ++p) Misses(0, 0, static_cast<uint64_t>(p) + 1, {p});
  Misses(0, 0, 20, {0});  // touched again
  Misses(0, 0, 21, {20});
  EXPECT_GE(cache_->slot_of(0, 0, 0), 0);
  EXPECT_EQ(cache_->slot_of(0, 0, 1), -1);
}

TEST_F(PageCacheTest, AnotherVersionOfAPageIsAMissAndThenAHit) {
  EXPECT_EQ(Misses(0, 1, 1, {3, 4, 5}), (std::vector<int32_t>{3, 4, 5}));
  EXPECT_EQ(Misses(0, 1, 2, {3, 4, 5}), std::vector<int32_t>{});
  versions_[4] = 2;
  EXPECT_EQ(Misses(0, 1, 3, {2, 3, 4, 5, 6}), (std::vector<int32_t>{2, 4, 6}));
  EXPECT_EQ(Misses(0, 1, 4, {4}), std::vector<int32_t>{});
}

TEST_F(PageCacheTest, EvictedPageIsAMissAgain) {
  Misses(1, 0, 1, {3, 4});
  cache_->Evict(1, 0, slots_[0]);
  EXPECT_EQ(cache_->slot_of(1, 0, 3), -1);
  ExpectMutuallyInverse(1, 0);
  EXPECT_EQ(Misses(1, 0, 2, {3, 4}), std::vector<int32_t>{3});
}

TEST_F(PageCacheTest, HeadsAndLayersDoNotShareSlots) {
  Misses(0, 0, 1, {3});
  EXPECT_EQ(Misses(0, 1, 1, {3}), std::vector<int32_t>{3});
  EXPECT_EQ(Misses(1, 0, 1, {3}), std::vector<int32_t>{3});
  std::set<const uint8_t*> units;
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (int s = 0; s < cache_->num_slots(layer); ++s) units.insert(cache_->unit(layer, head, s));
    }
  }
  EXPECT_EQ(units.size(), static_cast<size_t>(2 * (kSlots + 5)));
  EXPECT_EQ(static_cast<size_t>(*units.rbegin() - *units.begin()),
            (units.size() - 1) * shape_.unit_bytes());
}

}  // namespace
}  // namespace kvd::testing
