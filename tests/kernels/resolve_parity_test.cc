// Goal: resolve on the GPU leaves the same maps, slots and misses as the reference, step after
// step. Method: many rows with caches of different sizes, random overlapping selections, one
// captured graph; everything compared exactly.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "kernels/resolve.h"
#include "tests/kernels/resolve_cache.h"
#include "tests/support/gpu.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;

class ResolveParityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};

// One row on the host.
struct Cache : kvd::testing::ResolveCache {
  using ResolveCache::ResolveCache;
  int num_misses = 0;
  void Step(uint64_t step, const std::vector<int32_t>& pages) { num_misses = Resolve(step, pages); }
};

// The same rows on the host and on the device.
class Caches {
 public:
  Caches(const std::vector<int>& num_slots, int num_pages, int max_pages)
      : rows_(num_slots.size()),
        max_pages_(static_cast<size_t>(max_pages)),
        pages_(rows_ * max_pages_),
        num_pages_(rows_),
        step_(1),
        slots_(rows_ * max_pages_),
        miss_idx_(rows_ * max_pages_),
        num_misses_(rows_),
        valid_(rows_ * max_pages_) {
    std::vector<ResolveRow> table;
    for (const int n : num_slots) {
      host.emplace_back(n, num_pages);
      page_slot_.push_back(std::make_unique<DeviceArray<int32_t>>(host.back().page_slot));
      slot_page_.push_back(std::make_unique<DeviceArray<int32_t>>(host.back().slot_page));
      slot_step_.push_back(std::make_unique<DeviceArray<uint64_t>>(host.back().slot_step));
      table.push_back(
          {page_slot_.back()->data(), slot_page_.back()->data(), slot_step_.back()->data(), n});
    }
    table_ = std::make_unique<DeviceArray<ResolveRow>>(table);
    batch_ = {static_cast<int>(rows_),
              max_pages,
              *std::max_element(num_slots.begin(), num_slots.end()),
              table_->data(),
              pages_.data(),
              num_pages_.data(),
              step_.data(),
              slots_.data(),
              miss_idx_.data(),
              num_misses_.data()};
    graph_ = std::make_unique<Graph>(
        [&](cudaStream_t stream) { KVD_CUDA_OK(LaunchResolve(batch_, stream)); });
    evict_ = std::make_unique<Graph>([&](cudaStream_t stream) {
      KVD_CUDA_OK(LaunchEvictInvalid(batch_, valid_.data(), stream));
    });
  }

  void Step(uint64_t step, const std::vector<std::vector<int32_t>>& lists) {
    std::vector<int32_t> flat(rows_ * max_pages_, -1), counts;
    for (size_t row = 0; row < rows_; ++row) {
      host[row].Step(step, lists[row]);
      std::copy(lists[row].begin(), lists[row].end(),
                flat.begin() + static_cast<std::ptrdiff_t>(row * max_pages_));
      counts.push_back(static_cast<int32_t>(lists[row].size()));
    }
    pages_.Upload(flat);
    num_pages_.Upload(counts);
    step_.Upload({step});
    slots_.Poison();
    miss_idx_.Poison();
    num_misses_.Poison();
    KVD_CUDA_OK(cudaDeviceSynchronize());
    graph_->Replay();
  }

  // Every `nth` miss of the last step turns out to be gone, on both sides.
  void EvictEvery(size_t nth) {
    std::vector<uint8_t> valid(rows_ * max_pages_, 1);
    for (size_t row = 0; row < rows_; ++row) {
      Cache& c = host[row];
      for (size_t m = 0; m < static_cast<size_t>(c.num_misses); m += nth) {
        valid[row * max_pages_ + m] = 0;
        int32_t& slot = c.slots[static_cast<size_t>(c.miss_idx[m])];
        c.Evict(slot);
        slot = -1;
      }
    }
    valid_.Upload(valid);
    evict_->Replay();
  }

  // Rows that differ from the reference's.
  int CountWrong() const {
    const std::vector<int32_t> slots = slots_.Download(), miss_idx = miss_idx_.Download(),
                               num_misses = num_misses_.Download();
    int wrong = 0;
    for (size_t row = 0; row < rows_; ++row) {
      const Cache& c = host[row];
      bool same = num_misses[row] == c.num_misses && page_slot_[row]->Download() == c.page_slot &&
                  slot_page_[row]->Download() == c.slot_page &&
                  slot_step_[row]->Download() == c.slot_step;
      for (size_t i = 0; i < max_pages_; ++i) {
        same &= slots[row * max_pages_ + i] == (i < c.slots.size() ? c.slots[i] : -1);
        same &= miss_idx[row * max_pages_ + i] ==
                (i < static_cast<size_t>(c.num_misses) ? c.miss_idx[i] : -1);
      }
      wrong += same ? 0 : 1;
    }
    return wrong;
  }

  // Overwrites one entry on the device with another of the same map, as a broken kernel might.
  void Break(size_t row) {
    std::vector<int32_t> map = slot_page_[row]->Download();
    std::swap(map[0], map[1]);
    slot_page_[row]->Upload(map);
  }
  const ResolveBatch& batch() const { return batch_; }

  std::vector<Cache> host;

 private:
  size_t rows_, max_pages_;
  std::vector<std::unique_ptr<DeviceArray<int32_t>>> page_slot_, slot_page_;
  std::vector<std::unique_ptr<DeviceArray<uint64_t>>> slot_step_;
  std::unique_ptr<DeviceArray<ResolveRow>> table_;
  DeviceArray<int32_t> pages_, num_pages_;
  DeviceArray<uint64_t> step_;
  DeviceArray<int32_t> slots_, miss_idx_, num_misses_;
  DeviceArray<uint8_t> valid_;
  ResolveBatch batch_ = {};
  std::unique_ptr<Graph> graph_, evict_;
};

// `count` pages, most of them near the front: selections of different steps overlap.
std::vector<int32_t> Choose(int count, int num_pages, std::mt19937* random) {
  std::set<int32_t> chosen;
  while (chosen.size() < static_cast<size_t>(count)) {
    const auto p = static_cast<uint32_t>(num_pages);
    chosen.insert(
        static_cast<int32_t>(std::min({(*random)() % p, (*random)() % p, (*random)() % p})));
  }
  return {chosen.begin(), chosen.end()};
}

TEST_F(ResolveParityTest, EveryStepLeavesTheReferencesMapsSlotsAndMisses) {
  const std::vector<int> num_slots = {0, 1, 7, 40, 126, 252, 378, 378, 500, 512, 513, 100};
  constexpr int kPages = 3000, kSelect = 126;
  Caches caches(num_slots, kPages, kSelect);
  std::mt19937 random(1);
  for (uint64_t step = 1; step <= 40; ++step) {
    std::vector<std::vector<int32_t>> lists;
    for (size_t row = 0; row < num_slots.size(); ++row)
      lists.push_back(
          Choose(row == 11 ? 0 : static_cast<int>(random() % (kSelect + 1)), kPages, &random));
    caches.Step(step * 3, lists);
    ASSERT_EQ(caches.CountWrong(), 0) << "step " << step;
    if (step % 4 == 0) {
      caches.EvictEvery(step % 3 + 1);
      ASSERT_EQ(caches.CountWrong(), 0) << "eviction after step " << step;
    }
  }
  caches.Break(6);
  EXPECT_EQ(caches.CountWrong(), 1);
}

TEST_F(ResolveParityTest, TheLargestCachesAndListsWork) {
  const std::vector<int> num_slots = {4096, 4096, 2049, 1000};
  constexpr int kPages = 70000, kSelect = 4096;
  Caches caches(num_slots, kPages, kSelect);
  std::mt19937 random(2);
  for (uint64_t step = 1; step <= 6; ++step) {
    std::vector<std::vector<int32_t>> lists;
    for (const int count : {4096, 1365, 682, 4096}) lists.push_back(Choose(count, kPages, &random));
    caches.Step(uint64_t{1} << 40 | step, lists);
    ASSERT_EQ(caches.CountWrong(), 0) << "step " << step;
  }
}

TEST_F(ResolveParityTest, ManyRowsInOneLaunchAreIndependent) {
  std::vector<int> num_slots;
  for (int i = 0; i < 300; ++i) num_slots.push_back(20 + i % 50);
  Caches caches(num_slots, 200, 16);
  std::mt19937 random(3);
  for (uint64_t step = 1; step <= 5; ++step) {
    std::vector<std::vector<int32_t>> lists;
    for (size_t row = 0; row < num_slots.size(); ++row) lists.push_back(Choose(16, 200, &random));
    caches.Step(step, lists);
    ASSERT_EQ(caches.CountWrong(), 0) << "step " << step;
  }
}

TEST_F(ResolveParityTest, BadArgumentsAreRefused) {
  const Caches caches({4}, 10, 2);
  ResolveBatch batch = caches.batch();
  batch.max_slots = kMaxCacheSlots + 1;
  EXPECT_EQ(LaunchResolve(batch, nullptr), cudaErrorInvalidValue);
  batch = caches.batch();
  batch.num_rows = -1;
  EXPECT_EQ(LaunchResolve(batch, nullptr), cudaErrorInvalidValue);
  batch.num_rows = 0;
  EXPECT_EQ(LaunchResolve(batch, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace kvd
