// Goal: a step begins as it says, and its token is in the tail unit before attend reads that.
// Method: appended bytes compared with the reference's, and attention over nothing but the token;
// padding rows among them.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/append.h"
#include "kernels/attend.h"
#include "kernels/dtype.h"
#include "kernels/step.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;
using kvd::testing::RandomKv;

constexpr int kLayers = 2, kHeads = 4, kRows = 3, kRing = 5;

TEST(BeginStepTest, BeginRaisesTheStepNotesLostArenasAndClearsTheFigures) {
  if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
  const DeviceArray<uint32_t> lost_words(std::vector<uint32_t>{0, 1});
  const DeviceArray<PageHeader> header(1);
  const DeviceArray<PeerArena> arenas(
      std::vector<PeerArena>{{nullptr, header.data(), lost_words.data(), 1, 1},
                             {nullptr, header.data(), lost_words.data() + 1, 1, 1},
                             {}});
  constexpr int kMany = 300;  // more rows than the kernel has threads
  DeviceArray<uint64_t> step(std::vector<uint64_t>{41});
  DeviceArray<uint32_t> arena_lost(3);
  DeviceArray<StepFigures> figures(kMany);
  figures.Poison();
  BeginStepArgs args = {kMany, 3, arenas.data(), step.data(), arena_lost.data(), figures.data()};
  KVD_CUDA_OK(LaunchBeginStep(args, nullptr));
  EXPECT_EQ(step.Download()[0], 42u);
  EXPECT_EQ(arena_lost.Download(), (std::vector<uint32_t>{0, 1, 1}));
  for (const StepFigures& f : figures.Download())
    EXPECT_EQ(f.hits + f.misses + f.failed + f.damaged + f.num_failures, 0u);
  args.num_arenas = -1;
  EXPECT_EQ(LaunchBeginStep(args, nullptr), cudaErrorInvalidValue);
}

// What LaunchFetchPages needs where nothing is selected: attend then reads the ring alone.
struct NothingSelected {
  NothingSelected(const StepShape& step_shape, const std::vector<StepRow>& step_rows,
                  const std::vector<uint16_t>& key, const std::vector<uint16_t>& value)
      : shape(step_shape),
        rows(step_rows),
        k(key),
        v(value),
        counts(lists()),
        units(lists() * kMaxUnits),
        num_units(lists()),
        figures(step_rows.size()) {
    counts.Poison(0);
    figures.Poison(0);
  }
  size_t lists() const { return static_cast<size_t>(shape.num_rows * shape.num_kv_heads); }
  FetchArgs Args(int layer, bool fetch) const {
    return {.shape = shape,
            .layer = layer,
            .rows = rows.data(),
            .k = k.data(),
            .v = v.data(),
            .arenas = nullptr,
            .arena_lost = nullptr,
            .resolve = {static_cast<int>(lists()), 1, 1, nullptr, nullptr, counts.data(), nullptr,
                        nullptr, nullptr, counts.data()},
            .fetch = fetch,
            .max_units = kMaxUnits,
            .units = units.data(),
            .num_units = num_units.data(),
            .figures = figures.data()};
  }

  static constexpr int kMaxUnits = 8;
  const StepShape shape;
  const DeviceArray<StepRow> rows;
  DeviceArray<uint16_t> k, v;
  DeviceArray<int32_t> counts;
  DeviceArray<UnitRef> units;
  DeviceArray<int32_t> num_units;
  DeviceArray<StepFigures> figures;
};

class StepAppendTest : public ::testing::TestWithParam<std::tuple<int, int>> {  // D, B
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};
INSTANTIATE_TEST_SUITE_P(Geometries, StepAppendTest,
                         ::testing::Combine(::testing::Values(64, 96, 128, 256),
                                            ::testing::Values(16, 32)));

TEST_P(StepAppendTest, TheListAppendsAsTheReferenceAndLeavesPaddingAlone) {
  const auto [dim, tokens] = GetParam();
  constexpr int kLayer = 1;
  const StepShape shape = {.num_rows = kRows,
                           .num_layers = kLayers,
                           .num_kv_heads = kHeads,
                           .shard_heads = kHeads,
                           .group = 4,
                           .head_dim = dim,
                           .page_tokens = tokens,
                           .cache_slots = 1,
                           .num_arenas = 0};
  const size_t unit_bytes = MakeUnitLayout(dim, tokens).bytes,
               ring_bytes = kRing * kLayers * kHeads * unit_bytes;
  const std::vector<uint8_t> before(kRows * ring_bytes, 0x5A);
  DeviceArray<uint8_t> ring(before);
  const auto k = RandomKv(int64_t{kRows} * kHeads * dim, KvDtype::kBf16, 2.0f, 2),
             v = RandomKv(int64_t{kRows} * kHeads * dim, KvDtype::kBf16, 2.0f, 3);
  std::vector<StepRow> rows(kRows);
  const int64_t lengths[kRows] = {3 * tokens + 5, -1, 7 * tokens - 1};  // the second is padding
  std::vector<uint8_t> want = before;
  for (size_t n = 0; n < kRows; ++n) {
    rows[n].num_tokens = lengths[n];
    rows[n].ring_pages = kRing;
    rows[n].ring = ring.data() + n * ring_bytes;
    if (lengths[n] < 0) continue;
    rows[n].first_ring_page = static_cast<int32_t>(lengths[n] / tokens);
    std::vector<uint8_t*> tails;
    const int32_t token = static_cast<int32_t>(lengths[n] % tokens);
    for (int h = 0; h < kHeads; ++h) {
      const auto place = static_cast<size_t>(lengths[n] / tokens % kRing);
      tails.push_back(want.data() + n * ring_bytes +
                      ((place * kLayers + kLayer) * kHeads + static_cast<size_t>(h)) * unit_bytes);
    }
    const auto at = n * kHeads * static_cast<size_t>(dim);
    ref::Append({1, kHeads, dim, tokens, k.data() + at, v.data() + at, tails.data(), &token});
  }
  const NothingSelected step(shape, rows, k, v);
  for (const bool fetch : {true, false}) {  // captured, host-driven
    ring.Upload(before);
    KVD_CUDA_OK(LaunchFetchPages(step.Args(kLayer, fetch), nullptr));
    EXPECT_EQ(ring.Download(), want);
  }
  FetchArgs args = step.Args(kLayer, true);
  args.k = nullptr;
  EXPECT_EQ(LaunchFetchPages(args, nullptr), cudaErrorInvalidValue);
  args = step.Args(kLayers, true);
  EXPECT_EQ(LaunchFetchPages(args, nullptr), cudaErrorInvalidValue);
}

// Over its first token a sequence attends nothing but that token: o is its value, whatever the
// query. More rows than the list has CTAs, one step after the other in one graph.
TEST(AppendBeforeAttendTest, AttendReadsTheTokenThatTheListAppendedJustBefore) {
  if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
  constexpr int kDim = 128, kTokens = 16, kMany = 100, kGroup = 4;
  const StepShape shape = {.num_rows = kMany,
                           .num_layers = kLayers,
                           .num_kv_heads = kHeads,
                           .shard_heads = kHeads,
                           .group = kGroup,
                           .head_dim = kDim,
                           .page_tokens = kTokens,
                           .cache_slots = 1,
                           .num_arenas = 0};
  const size_t ring_bytes = kLayers * kHeads * MakeUnitLayout(kDim, kTokens).bytes;
  DeviceArray<uint8_t> ring(kMany * ring_bytes);
  ring.Poison(0);
  std::vector<StepRow> rows(kMany);
  for (size_t n = 0; n < kMany; ++n) {
    rows[n].num_tokens = 0;
    rows[n].ring = ring.data() + n * ring_bytes;
  }
  const int64_t size = int64_t{kMany} * kHeads * kDim;
  const auto query = RandomKv(size * kGroup, KvDtype::kBf16, 1.0f, 1),
             key = RandomKv(size, KvDtype::kBf16, 1.0f, 2);
  NothingSelected step(shape, rows, key, key);
  const DeviceArray<uint16_t> d_query(query);
  DeviceArray<float> o(query.size()), lse(query.size() / kDim);
  const AttendArgs attend = {.num_sequences = kMany,
                             .num_kv_heads = kHeads,
                             .group = kGroup,
                             .head_dim = kDim,
                             .page_tokens = kTokens,
                             .dtype = KvDtype::kBf16,
                             .softmax_scale = .088f,
                             .logit_softcap = 0,
                             .query = d_query.data(),
                             .max_units = NothingSelected::kMaxUnits,
                             .units = step.units.data(),
                             .num_units = step.num_units.data(),
                             .o = o.data(),
                             .lse = lse.data()};
  const Graph graph([&](cudaStream_t stream) {
    for (int layer = 0; layer < kLayers; ++layer) {
      KVD_CUDA_OK(LaunchFetchPages(step.Args(layer, true), stream));
      KVD_CUDA_OK(LaunchAttend(attend, stream));
    }
  });
  for (uint32_t round = 0; round < 20; ++round) {
    const auto value = RandomKv(size, KvDtype::kBf16, 1.0f, 10 + round);
    step.v.Upload(value);
    graph.Replay();
    const std::vector<float> got = o.Download();
    int wrong = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const float want = FromBf16(value[i / (kGroup * kDim) * kDim + i % kDim]);
      wrong += !(std::abs(got[i] - want) <= 1e-4f * std::abs(want) + 1e-6f);
    }
    ASSERT_EQ(wrong, 0) << "round " << round;
  }
}

}  // namespace
}  // namespace kvd
