// Goal: the step's own kernels do what their contract says, for every geometry. Method: the same
// tables on the host and the device; lists, copied and fetched bytes compared exactly with what the
// test itself laid out; pages that are gone, daemons that are lost and padding rows among them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>
#include <vector>

#include "kernels/step.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;
using kvd::testing::RandomKv;

constexpr int kLayers = 2, kHeads = 4, kShardHeads = 2, kShards = kHeads / kShardHeads, kRows = 3,
              kRing = 5;

class StepParityTest : public ::testing::TestWithParam<std::tuple<int, int, int>> {  // D, B, G
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
    const auto [dim, tokens, group] = GetParam();
    shape_ = {.num_rows = kRows,
              .num_layers = kLayers,
              .num_kv_heads = kHeads,
              .shard_heads = kShardHeads,
              .group = group,
              .head_dim = dim,
              .page_tokens = tokens,
              .cache_slots = 12,
              .num_arenas = 3};
    unit_bytes_ = MakeUnitLayout(dim, tokens).bytes;
  }
  size_t unit_idx(int layer, int head) const { return static_cast<size_t>(layer * kHeads + head); }

  StepShape shape_;
  size_t unit_bytes_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Geometries, StepParityTest,
                         ::testing::Values(std::tuple(64, 16, 1), std::tuple(64, 32, 3),
                                           std::tuple(96, 16, 7), std::tuple(128, 16, 4),
                                           std::tuple(128, 32, 8), std::tuple(256, 16, 16),
                                           std::tuple(256, 32, 2)),
                         [](const auto& p) {
                           return "D" + std::to_string(std::get<0>(p.param)) + "_B" +
                                  std::to_string(std::get<1>(p.param)) + "_G" +
                                  std::to_string(std::get<2>(p.param));
                         });

TEST_P(StepParityTest, AppendsTokensOfAnEnginesCache) {
  const int dim = shape_.head_dim, tokens = shape_.page_tokens, count = tokens + 3, layer = 1;
  const int64_t kv_tokens = count + 4;
  // Token-major cache [token][head][K then V].
  const auto cache = RandomKv(kv_tokens * kHeads * 2 * dim, KvDtype::kBf16, 2.0f, 9);
  const DeviceArray<uint16_t> d_cache(cache);
  DeviceArray<uint8_t> ring(kRing * kLayers * kHeads * unit_bytes_);
  ring.Poison(0);
  const auto* base = reinterpret_cast<const uint8_t*>(d_cache.data());
  const int64_t first = int64_t{6} * tokens - 2;  // of the sequence: three pages are touched
  KVD_CUDA_OK(
      LaunchAppendTokens({.kv = {base, base + dim * 2, int64_t{dim} * 4, int64_t{kHeads} * dim * 4},
                          .kv_token = 4,
                          .token = first,
                          .count = count,
                          .layer = layer,
                          .num_layers = kLayers,
                          .num_kv_heads = kHeads,
                          .head_dim = dim,
                          .page_tokens = tokens,
                          .ring_pages = kRing,
                          .ring = ring.data()},
                         nullptr));
  std::vector<uint8_t> want(ring.size());
  const size_t row_bytes = static_cast<size_t>(dim) * 2;
  for (int64_t i = 0; i < count; ++i) {
    for (int h = 0; h < kHeads; ++h) {
      const int64_t at = first + i;
      uint8_t* unit = want.data() + (static_cast<size_t>(at / tokens % kRing) * kLayers * kHeads +
                                     unit_idx(layer, h)) *
                                        unit_bytes_;
      const auto* from =
          reinterpret_cast<const uint8_t*>(cache.data() + ((i + 4) * kHeads + h) * 2 * dim);
      std::memcpy(unit + static_cast<size_t>(at % tokens) * row_bytes, from, row_bytes);
      std::memcpy(unit + unit_bytes_ / 2 + static_cast<size_t>(at % tokens) * row_bytes,
                  from + row_bytes, row_bytes);
    }
  }
  EXPECT_EQ(ring.Download(), want);
}

// A pool of two daemons whose slot s holds the byte pattern of s, and rows that selected some of
// its pages.
class FetchCase {
 public:
  static constexpr int kPages = 20, kSlots = 50, kPerSlab = 8, kSelected = 8;

  FetchCase(const StepShape& shape, size_t unit_bytes)
      : shape_(shape),
        unit_bytes_(unit_bytes),
        slab_bytes_(kPerSlab * slot_bytes()),
        slabs_((kSlots + kPerSlab - 1) / kPerSlab * slab_bytes_),
        cache_(kRows * kLayers * kHeads * static_cast<size_t>(shape.cache_slots) * unit_bytes) {
    std::vector<uint8_t> bytes(slabs_.size());
    for (size_t i = 0; i < bytes.size() / 4; ++i) {
      const uint32_t word = WordAt(i * 4);
      std::memcpy(bytes.data() + i * 4, &word, 4);
    }
    slabs_.Upload(bytes);
    cache_.Poison(0);
  }
  size_t slot_bytes() const { return kLayers * kShardHeads * unit_bytes_; }
  static uint32_t WordAt(size_t offset) {
    return static_cast<uint32_t>(offset * 2654435761u) ^ static_cast<uint32_t>(offset >> 7);
  }
  // The bytes of a unit as the arena holds them.
  std::vector<uint8_t> Unit(uint32_t slot, int layer, int head_in_shard) const {
    std::vector<uint8_t> unit(unit_bytes_);
    const size_t at = slot / kPerSlab * slab_bytes_ + slot % kPerSlab * slot_bytes() +
                      static_cast<size_t>(layer * kShardHeads + head_in_shard) * unit_bytes_;
    for (size_t i = 0; i < unit_bytes_ / 4; ++i) {
      const uint32_t word = WordAt(at + i * 4);
      std::memcpy(unit.data() + i * 4, &word, 4);
    }
    return unit;
  }
  static uint32_t SlotOf(int row, int page, int shard) {
    return static_cast<uint32_t>((row * 7 + page * 2 + shard) % kSlots);
  }

  const StepShape shape_;
  const size_t unit_bytes_;
  const size_t slab_bytes_;
  DeviceArray<uint8_t> slabs_;
  DeviceArray<uint8_t> cache_;
};

TEST_P(StepParityTest, ListsAndFetchesAndLeavesOutWhatIsGone) {
  const int layer = 1, sinks = 1, ring_first = 18, lists = kRows * kHeads;
  FetchCase pool(shape_, unit_bytes_);
  std::vector<const uint8_t*> slab_table;
  for (size_t at = 0; at < pool.slabs_.size(); at += pool.slab_bytes_)
    slab_table.push_back(pool.slabs_.data() + at);
  const DeviceArray<const uint8_t*> d_slabs(slab_table);
  std::vector<uint64_t> headers(FetchCase::kSlots * 8);
  for (size_t s = 0; s < FetchCase::kSlots; ++s) headers[s * 8] = 2 * s + 2;
  const uint32_t gone = FetchCase::SlotOf(0, 6, 1);
  headers[gone * 8] += 1;
  const DeviceArray<uint64_t> d_headers(headers);
  const auto* header = reinterpret_cast<const PageHeader*>(d_headers.data());
  const DeviceArray<PeerArena> arenas(std::vector<PeerArena>{
      {d_slabs.data(), header, nullptr, FetchCase::kSlots, FetchCase::kPerSlab},
      {d_slabs.data(), header, nullptr, FetchCase::kSlots, FetchCase::kPerSlab},
      {}});
  const DeviceArray<uint32_t> arena_lost(std::vector<uint32_t>{0, 1, 1});
  // Page 9 of row 2 lies with the lost daemon.
  std::vector<PagePlace> places;
  for (int n = 0; n < kRows; ++n) {
    for (int p = 0; p < FetchCase::kPages; ++p) {
      for (int s = 0; s < kShards; ++s) {
        const uint32_t slot = FetchCase::SlotOf(n, p, s);
        places.push_back({2 * uint64_t{slot} + 2, slot, n == 2 && p == 9 ? 1u : 0u});
      }
    }
  }
  const DeviceArray<PagePlace> d_places(places);
  DeviceArray<uint64_t> selectable(std::vector<uint64_t>(kRows, ~uint64_t{0}));
  DeviceArray<uint8_t> ring(kRows * kRing * kLayers * kHeads * unit_bytes_),
      sink_units(kRows * kLayers * kHeads * unit_bytes_);
  std::vector<StepRow> rows(kRows);
  const size_t cache_row = pool.cache_.size() / kRows;
  for (size_t n = 0; n < kRows; ++n) {
    if (n == 1) continue;  // padding
    rows[n] = {.num_tokens = 20 * shape_.page_tokens + 5,
               .num_pages = FetchCase::kPages,
               .num_sinks = sinks,
               .first_ring_page = ring_first,
               .ring_pages = kRing,
               .ring = ring.data() + n * ring.size() / kRows,
               .sinks = sink_units.data() + n * sink_units.size() / kRows,
               .places = d_places.data() + n * FetchCase::kPages * kShards,
               .selectable = selectable.data() + n,
               .cache = pool.cache_.data() + n * cache_row};
  }
  const DeviceArray<StepRow> d_rows(rows);
  // Every list selects 2, 4, ..., 16 and 9 in place of 10; slot i holds entry i; odd positions are
  // misses.
  std::vector<int32_t> pages, slots, miss_idx, counts, num_misses, page_slot, slot_page;
  std::vector<uint64_t> slot_step;
  for (int r = 0; r < lists; ++r) {
    const bool padding = r / kHeads == 1;
    std::vector<int32_t> of_page(FetchCase::kPages, -1),
        of_slot(static_cast<size_t>(shape_.cache_slots), -1);
    for (int i = 0; i < FetchCase::kSelected; ++i) {
      const int page = i == 4 ? 9 : 2 * (i + 1);
      pages.push_back(page);
      slots.push_back(i);
      of_page[static_cast<size_t>(page)] = i;
      of_slot[static_cast<size_t>(i)] = page;
      miss_idx.push_back(i < 5 ? (i < 3 ? i * 2 : i == 3 ? 5 : 7) : -1);  // 0, 2, 4, 5, 7
    }
    counts.push_back(padding ? 0 : FetchCase::kSelected);
    num_misses.push_back(padding ? 0 : 5);
    page_slot.insert(page_slot.end(), of_page.begin(), of_page.end());
    slot_page.insert(slot_page.end(), of_slot.begin(), of_slot.end());
  }
  slot_step.resize(slot_page.size(), 3);
  DeviceArray<int32_t> d_pages(pages), d_slots(slots), d_miss(miss_idx), d_counts(counts),
      d_misses(num_misses), d_page_slot(page_slot), d_slot_page(slot_page);
  DeviceArray<uint64_t> d_slot_step(slot_step), d_step(std::vector<uint64_t>{3});
  std::vector<ResolveRow> maps;
  for (size_t r = 0; r < static_cast<size_t>(lists); ++r) {
    const auto s = static_cast<size_t>(shape_.cache_slots);
    maps.push_back({d_page_slot.data() + r * FetchCase::kPages, d_slot_page.data() + r * s,
                    d_slot_step.data() + r * s, shape_.cache_slots});
  }
  const DeviceArray<ResolveRow> d_maps(maps);
  DeviceArray<StepFigures> figures(kRows);
  figures.Poison(0);
  constexpr int kMaxUnits = 16;
  DeviceArray<UnitRef> units(static_cast<size_t>(lists) * kMaxUnits);
  DeviceArray<int32_t> num_units(static_cast<size_t>(lists));
  const DeviceArray<uint16_t> token(static_cast<size_t>(kRows * kHeads * shape_.head_dim));
  const FetchArgs args = {
      .shape = shape_,
      .layer = layer,
      .rows = d_rows.data(),
      .k = token.data(),
      .v = token.data(),
      .arenas = arenas.data(),
      .arena_lost = arena_lost.data(),
      .resolve = {lists, FetchCase::kSelected, shape_.cache_slots, d_maps.data(), d_pages.data(),
                  d_counts.data(), d_step.data(), d_slots.data(), d_miss.data(), d_misses.data()},
      .fetch = true,
      .max_units = kMaxUnits,
      .units = units.data(),
      .num_units = num_units.data(),
      .figures = figures.data()};
  const Graph graph([&](cudaStream_t stream) { KVD_CUDA_OK(LaunchFetchPages(args, stream)); });
  graph.Replay();

  const std::vector<uint8_t> cache = pool.cache_.Download();
  const std::vector<UnitRef> got_units = units.Download();
  const std::vector<int32_t> got_counts = num_units.Download(),
                             got_page_slot = d_page_slot.Download(), got_slots = d_slots.Download();
  for (int r = 0; r < lists; ++r) {
    const auto n = static_cast<size_t>(r / kHeads);
    const int head = r % kHeads, ring_pages = 20 - ring_first + 1;
    if (n == 1) {
      EXPECT_EQ(got_counts[static_cast<size_t>(r)], 0);
      continue;
    }
    ASSERT_EQ(got_counts[static_cast<size_t>(r)], sinks + FetchCase::kSelected + ring_pages);
    const UnitRef* list = got_units.data() + static_cast<ptrdiff_t>(r) * kMaxUnits;
    EXPECT_EQ(list[0].unit, rows[n].sinks + unit_idx(layer, head) * unit_bytes_);
    for (int i = 0; i < ring_pages; ++i) {
      const UnitRef& unit = list[sinks + FetchCase::kSelected + i];
      const auto place = static_cast<size_t>((ring_first + i) % kRing);
      EXPECT_EQ(unit.unit,
                rows[n].ring + (place * kLayers * kHeads + unit_idx(layer, head)) * unit_bytes_);
      EXPECT_EQ(unit.num_tokens, i + 1 == ring_pages ? 6 : shape_.page_tokens);
    }
    for (int i = 0; i < FetchCase::kSelected; ++i) {
      const auto at = static_cast<size_t>(r * FetchCase::kSelected + i);
      const bool is_miss = i == 0 || i == 2 || i == 4 || i == 5 || i == 7;
      const bool is_gone =
          (n == 0 && pages[at] == 6 && head / kShardHeads == 1) || (n == 2 && pages[at] == 9);
      const size_t offset =
          n * cache_row + (unit_idx(layer, head) * static_cast<size_t>(shape_.cache_slots) +
                           static_cast<size_t>(i)) *
                              unit_bytes_;
      EXPECT_EQ(list[sinks + i].unit, pool.cache_.data() + offset);
      EXPECT_EQ(list[sinks + i].num_tokens, is_gone ? 0 : shape_.page_tokens) << r << " " << i;
      EXPECT_EQ(got_slots[at], is_gone ? -1 : i);
      EXPECT_EQ(got_page_slot[static_cast<size_t>(r * FetchCase::kPages + pages[at])],
                is_gone ? -1 : i);
      const std::vector<uint8_t> want =
          is_miss && !is_gone
              ? pool.Unit(FetchCase::SlotOf(static_cast<int>(n), pages[at], head / kShardHeads),
                          layer, head % kShardHeads)
              : std::vector<uint8_t>(unit_bytes_);
      EXPECT_EQ(std::memcmp(cache.data() + offset, want.data(), unit_bytes_), 0) << r << " " << i;
    }
  }
  const std::vector<StepFigures> f = figures.Download();
  const std::vector<uint64_t> bits = selectable.Download();
  EXPECT_EQ(f[0].hits, kHeads * 3u);
  EXPECT_EQ(f[0].misses, kHeads * 5u);
  EXPECT_EQ(f[0].failed, 2u);  // the second shard's heads
  EXPECT_EQ(f[0].failed_pages[1], 6);
  EXPECT_EQ(f[2].failed, kHeads * 1u);
  EXPECT_EQ(f[1].hits + f[1].misses + f[1].failed, 0u);
  EXPECT_EQ(bits[0], ~(uint64_t{1} << 6));
  EXPECT_EQ(bits[2], ~(uint64_t{1} << 9));
}

TEST_P(StepParityTest, PageUpdatesChangeTheTableTheBitsAndTheCachesMaps) {
  constexpr int kPages = 130, kSlots = 6, kCacheRows = 5;
  std::vector<int32_t> page_slot(kCacheRows * kPages, -1), slot_page(kCacheRows * kSlots, -1);
  std::vector<uint64_t> slot_step(kCacheRows * kSlots, 9);
  for (size_t r = 0; r < kCacheRows; ++r) {
    page_slot[r * kPages + 70] = 2;
    slot_page[r * kSlots + 2] = 70;
  }
  DeviceArray<int32_t> d_page_slot(page_slot), d_slot_page(slot_page);
  DeviceArray<uint64_t> d_slot_step(slot_step),
      selectable(std::vector<uint64_t>{~uint64_t{0}, 0, ~uint64_t{0}});
  DeviceArray<PagePlace> places(kPages * 2);
  places.Poison(0);
  const DeviceArray<PageUpdate> updates(std::vector<PageUpdate>{
      {70, PageUpdate::kSelectable | PageUpdate::kForget}, {3, 0}, {129, PageUpdate::kForget}});
  const DeviceArray<PagePlace> fresh(
      std::vector<PagePlace>{{4, 1, 0}, {6, 2, 0}, {8, 3, 1}, {10, 4, 1}, {12, 5, 2}, {14, 6, 2}});
  KVD_CUDA_OK(LaunchPageUpdates(
      {3, 2, updates.data(), fresh.data(), places.data(), selectable.data(), kCacheRows, kPages,
       kSlots, d_page_slot.data(), d_slot_page.data(), d_slot_step.data()},
      nullptr));
  EXPECT_EQ(selectable.Download(),
            (std::vector<uint64_t>{~uint64_t{8}, uint64_t{1} << 6, ~uint64_t{2}}));
  const std::vector<PagePlace> got = places.Download();
  EXPECT_EQ(got[70 * 2 + 1].slot, 2u);
  EXPECT_EQ(got[129 * 2].generation, 12u);
  EXPECT_EQ(got[3 * 2].daemon, 1u);
  EXPECT_EQ(got[4 * 2].generation, 0u);
  for (const int32_t slot : d_page_slot.Download()) EXPECT_EQ(slot, -1);
  for (const int32_t page : d_slot_page.Download()) EXPECT_EQ(page, -1);
  EXPECT_EQ(std::count(slot_step.begin(), slot_step.end(), 9u), kCacheRows * kSlots);
  const std::vector<uint64_t> steps = d_slot_step.Download();
  EXPECT_EQ(std::count(steps.begin(), steps.end(), 0u), kCacheRows);
}

}  // namespace
}  // namespace kvd
