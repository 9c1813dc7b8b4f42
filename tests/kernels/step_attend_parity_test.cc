// Goal: LaunchFetchAndAttend does what LaunchResolve, LaunchFetchPages and LaunchAttend do one
// after the other. Method: both over copies of the same random tables, several steps in a row, so
// that hits, misses, evictions, pages that are gone and lost daemons all come; every table, every
// byte of the page caches and every bit of the attention compared.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/built_geometries.h"
#include "kernels/step.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;

constexpr int kPages = 96, kLayers = 2, kLayer = 1, kSinks = 2, kRing = 4, kArenaSlots = 64,
              kGroup = 4;

// One side's tables: sequence 1 is padding.
class Side {
 public:
  Side(int rows, int heads, int selected, int cache_slots, int head_dim, int page_tokens,
       const DeviceArray<uint8_t>& arena, const DeviceArray<uint64_t>& headers,
       const std::vector<PagePlace>& places)
      : shape_{.num_rows = rows,
               .num_layers = kLayers,
               .num_kv_heads = heads,
               .shard_heads = heads,
               .group = kGroup,
               .head_dim = head_dim,
               .page_tokens = page_tokens,
               .cache_slots = cache_slots,
               .num_arenas = 2},
        lists_(static_cast<size_t>(rows * heads)),
        selected_(selected),
        unit_bytes_(MakeUnitLayout(head_dim, page_tokens).bytes),
        page_slot(std::vector<int32_t>(lists_ * kPages, -1)),
        slot_page(std::vector<int32_t>(lists_ * static_cast<size_t>(cache_slots), -1)),
        slot_step(std::vector<uint64_t>(lists_ * static_cast<size_t>(cache_slots), 0)),
        pages(lists_ * static_cast<size_t>(selected)),
        num_pages(lists_),
        step(std::vector<uint64_t>{1}),
        slots(pages.size()),
        miss_idx(pages.size()),
        num_misses(lists_),
        ring(static_cast<size_t>(rows * kRing * kLayers * heads) * unit_bytes_),
        sinks(static_cast<size_t>(rows * kSinks * kLayers * heads) * unit_bytes_),
        cache(static_cast<size_t>(rows * kLayers * heads * cache_slots) * unit_bytes_),
        selectable(std::vector<uint64_t>(static_cast<size_t>(rows) * 2, ~uint64_t{0})),
        units(lists_ * static_cast<size_t>(max_units())),
        num_units(lists_),
        figures(static_cast<size_t>(rows)),
        tokens(std::vector<uint16_t>(lists_ * static_cast<size_t>(head_dim), 0x3F80)),
        query(testing::RandomKv(static_cast<int64_t>(lists_) * kGroup * head_dim, KvDtype::kBf16,
                                2.0f, 4)),
        o(query.size()),
        lse(query.size() / static_cast<size_t>(head_dim)),
        places_(places),
        slabs_(std::vector<const uint8_t*>{arena.data()}),
        arenas_(std::vector<PeerArena>{
            {slabs_.data(), reinterpret_cast<const PageHeader*>(headers.data()), nullptr,
             kArenaSlots, kArenaSlots},
            {slabs_.data(), reinterpret_cast<const PageHeader*>(headers.data()), nullptr,
             kArenaSlots, kArenaSlots}}),
        lost_(std::vector<uint32_t>{0, 1}),
        rows_(static_cast<size_t>(rows)),
        maps_(lists_) {
    ring.Poison(0);
    sinks.Poison(0);
    cache.Poison(0);
    units.Poison(0);
    figures.Poison(0);
    const auto per_row = [&](const auto& array, int n) {
      return array.size() / static_cast<size_t>(rows) * static_cast<size_t>(n);
    };
    std::vector<StepRow> table(static_cast<size_t>(rows));
    for (int n = 0; n < rows; ++n) {
      if (n == 1) continue;
      table[static_cast<size_t>(n)] = {.num_tokens = kPages * page_tokens + 3,
                                       .num_pages = kPages,
                                       .num_sinks = kSinks,
                                       .first_ring_page = kPages - 2,
                                       .ring_pages = kRing,
                                       .ring = ring.data() + per_row(ring, n),
                                       .sinks = sinks.data() + per_row(sinks, n),
                                       .places = places_.data(),
                                       .selectable = selectable.data() + 2 * n,
                                       .cache = cache.data() + per_row(cache, n)};
    }
    rows_.Upload(table);
    std::vector<ResolveRow> maps;
    for (size_t r = 0; r < lists_; ++r) {
      const auto s = static_cast<size_t>(cache_slots);
      maps.push_back({page_slot.data() + r * kPages, slot_page.data() + r * s,
                      slot_step.data() + r * s, cache_slots});
    }
    maps_.Upload(maps);
  }
  int max_units() const { return selected_ + kSinks + kRing; }
  FetchArgs Args() {
    return {.shape = shape_,
            .layer = kLayer,
            .rows = rows_.data(),
            .k = tokens.data(),
            .v = tokens.data(),
            .arenas = arenas_.data(),
            .arena_lost = lost_.data(),
            .resolve = {static_cast<int>(lists_), selected_, shape_.cache_slots, maps_.data(),
                        pages.data(), num_pages.data(), step.data(), slots.data(), miss_idx.data(),
                        num_misses.data()},
            .fetch = true,
            .max_units = max_units(),
            .units = units.data(),
            .num_units = num_units.data(),
            .figures = figures.data()};
  }
  AttendArgs Attention() {
    return {.num_sequences = shape_.num_rows,
            .num_kv_heads = shape_.num_kv_heads,
            .group = kGroup,
            .head_dim = shape_.head_dim,
            .page_tokens = shape_.page_tokens,
            .dtype = KvDtype::kBf16,
            .softmax_scale = .05f,
            .logit_softcap = 0,
            .query = query.data(),
            .max_units = max_units(),
            .units = units.data(),
            .num_units = num_units.data(),
            .o = o.data(),
            .lse = lse.data()};
  }

 private:
  const StepShape shape_;
  const size_t lists_;
  const int selected_;
  const size_t unit_bytes_;

 public:
  DeviceArray<int32_t> page_slot, slot_page;
  DeviceArray<uint64_t> slot_step;
  DeviceArray<int32_t> pages, num_pages;
  DeviceArray<uint64_t> step;
  DeviceArray<int32_t> slots, miss_idx, num_misses;
  DeviceArray<uint8_t> ring, sinks, cache;
  DeviceArray<uint64_t> selectable;
  DeviceArray<UnitRef> units;
  DeviceArray<int32_t> num_units;
  DeviceArray<StepFigures> figures;
  DeviceArray<uint16_t> tokens, query;
  DeviceArray<float> o, lse;

 private:
  DeviceArray<PagePlace> places_;
  DeviceArray<const uint8_t*> slabs_;
  DeviceArray<PeerArena> arenas_;
  DeviceArray<uint32_t> lost_;
  DeviceArray<StepRow> rows_;
  DeviceArray<ResolveRow> maps_;
};

void ExpectSameTables(const Side& got, const Side& want, uint64_t step) {
  EXPECT_EQ(got.page_slot.Download(), want.page_slot.Download()) << step;
  EXPECT_EQ(got.slot_page.Download(), want.slot_page.Download()) << step;
  EXPECT_EQ(got.slot_step.Download(), want.slot_step.Download()) << step;
  EXPECT_EQ(got.slots.Download(), want.slots.Download()) << step;
  EXPECT_EQ(got.selectable.Download(), want.selectable.Download()) << step;
  EXPECT_TRUE(got.cache.Download() == want.cache.Download()) << step;
  EXPECT_TRUE(got.ring.Download() == want.ring.Download()) << step;
  const auto f = got.figures.Download(), g = want.figures.Download();
  for (size_t n = 0; n < f.size(); ++n) {
    EXPECT_EQ(f[n].hits, g[n].hits) << step;
    EXPECT_EQ(f[n].misses, g[n].misses) << step;
    EXPECT_EQ(f[n].failed, g[n].failed) << step;
    EXPECT_EQ(f[n].num_failures, g[n].num_failures) << step;
  }
}

void ExpectSameAttention(const Side& got, const Side& want, uint64_t step) {
  const auto o = got.o.Download(), lse = got.lse.Download(), want_o = want.o.Download(),
             want_lse = want.lse.Download();
  EXPECT_EQ(std::memcmp(o.data(), want_o.data(), o.size() * sizeof(float)), 0) << step;
  EXPECT_EQ(std::memcmp(lse.data(), want_lse.data(), lse.size() * sizeof(float)), 0) << step;
  EXPECT_TRUE(std::isfinite(lse[0])) << step;
}

struct Case {
  int rows, heads, selected, cache_slots, head_dim, page_tokens;
};

class StepAttendParityTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};

TEST_P(StepAttendParityTest, OneLaunchDoesWhatThreeDo) {
  const Case c = GetParam();
  std::mt19937 random(7);
  const size_t slot_bytes =
      static_cast<size_t>(kLayers * c.heads) * MakeUnitLayout(c.head_dim, c.page_tokens).bytes;
  const auto values = testing::RandomKv(static_cast<int64_t>(kArenaSlots * slot_bytes / 2),
                                        KvDtype::kBf16, 1.0f, 3);
  std::vector<uint8_t> bytes(kArenaSlots * slot_bytes);
  std::memcpy(bytes.data(), values.data(), bytes.size());
  const DeviceArray<uint8_t> arena(bytes);
  std::vector<uint64_t> headers(kArenaSlots * 8);
  for (size_t s = 0; s < kArenaSlots; ++s)
    headers[s * 8] = 2 * s + (s % 7 == 3 ? 4 : 2);  // some were sealed anew
  const DeviceArray<uint64_t> d_headers(headers);
  std::vector<PagePlace> places;
  for (uint32_t p = 0; p < kPages; ++p)
    places.push_back({2 * uint64_t{p % kArenaSlots} + 2, p % kArenaSlots, p % 11 == 5 ? 1u : 0u});
  Side apart(c.rows, c.heads, c.selected, c.cache_slots, c.head_dim, c.page_tokens, arena,
             d_headers, places);
  Side together(c.rows, c.heads, c.selected, c.cache_slots, c.head_dim, c.page_tokens, arena,
                d_headers, places);
  uint32_t all_misses = 0, all_failed = 0;
  for (uint64_t step = 1; step <= 6; ++step) {
    std::vector<int32_t> pages, counts;
    for (int r = 0; r < c.rows * c.heads; ++r) {
      std::vector<int32_t> mine;
      for (int p = kSinks; p < kPages - 2; ++p)
        if (static_cast<int>(mine.size()) < c.selected && random() % 3 != 0) mine.push_back(p);
      counts.push_back(r / c.heads == 1 ? 0 : static_cast<int32_t>(mine.size()));
      mine.resize(static_cast<size_t>(c.selected), -1);
      pages.insert(pages.end(), mine.begin(), mine.end());
    }
    for (Side* side : {&apart, &together}) {
      side->pages.Upload(pages);
      side->num_pages.Upload(counts);
      side->step.Upload({step});
    }
    const FetchArgs listed = apart.Args(), args = together.Args();
    Graph([&](cudaStream_t stream) {
      KVD_CUDA_OK(LaunchResolve(listed.resolve, stream));
      KVD_CUDA_OK(LaunchFetchPages(listed, stream));
      KVD_CUDA_OK(LaunchAttend(apart.Attention(), stream));
    }).Replay();
    Graph([&](cudaStream_t stream) {
      KVD_CUDA_OK(LaunchFetchAndAttend(args, together.Attention(), stream));
    }).Replay();
    ExpectSameTables(together, apart, step);
    ExpectSameAttention(together, apart, step);
    const auto f = together.figures.Download();
    all_misses = f[0].misses;
    all_failed = f[0].failed;
  }
  EXPECT_GT(all_misses, 0u);
  EXPECT_GT(all_failed, 0u);
}

std::vector<Case> Cases() {
  std::vector<Case> cases = {{3, 2, 24, 40, 64, 16},   {2, 8, 40, 90, 128, 16},
                             {5, 8, 40, 90, 128, 16},   // so many rows that a CTA has two parts
                             {17, 8, 30, 64, 128, 16},  // four
                             {3, 2, 60, 48, 128, 16},   // fewer slots than pages
                             {2, 2, 60, 700, 64, 16},   // more slots than a warp holds
                             {2, 2, 90, 4000, 64, 16},  // than the areas have room for
                             {3, 2, 40, 90, 128, 32}};  // units of two pieces
  if (IsBuiltHeadDim(256))
    cases.push_back({2, 1, 4000, 4096, 256, 16});  // more than shared memory has room for
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Sizes, StepAttendParityTest, ::testing::ValuesIn(Cases()),
                         [](const auto& p) { return "Case" + std::to_string(p.index); });

}  // namespace
}  // namespace kvd
