// The sizes are those of the tables in kernels/README.md, counted by hand.

#include "kernels/layout.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

namespace kvd {
namespace {

KvGeometry Good() {
  KvGeometry g;
  g.num_layers = 32;
  g.num_q_heads = 32;
  g.num_kv_heads = 8;
  g.num_shards = 2;
  g.head_dim = 128;
  g.softmax_scale = 0.088f;
  return g;
}

TEST(LayoutTest, RecordSizesAreThoseOfTheDocument) {
  struct Row {
    int head_dim, page_tokens, rank;
    uint32_t coarse, fine, unit;
  };
  constexpr Row kRows[] = {{128, 16, 8, 240, 560, 8192},  {128, 16, 4, 240, 240, 8192},
                           {128, 32, 8, 272, 656, 16384}, {64, 16, 8, 144, 336, 4096},
                           {96, 16, 8, 192, 448, 6144},   {256, 16, 8, 432, 1008, 16384}};
  for (const Row& row : kRows) {
    const SummaryLayout layout = MakeSummaryLayout(row.head_dim, row.page_tokens, row.rank);
    EXPECT_EQ(layout.coarse_bytes, row.coarse);
    EXPECT_EQ(layout.fine_bytes, row.fine);
    EXPECT_EQ(layout.record_bytes(), row.coarse + row.fine);
    EXPECT_EQ(MakeUnitLayout(row.head_dim, row.page_tokens).bytes, row.unit);
    EXPECT_EQ(MakeUnitLayout(row.head_dim, row.page_tokens).k_bytes, row.unit / 2);
  }
}

TEST(LayoutTest, FieldsFollowEachOtherAndRowsAreAligned) {
  for (int d : {64, 96, 128, 256}) {
    for (int b : {16, 32}) {
      for (int r : {4, 8}) {
        const SummaryLayout layout = MakeSummaryLayout(d, b, r);
        const auto row = static_cast<uint32_t>(d / 2);
        const auto tokens = static_cast<uint32_t>(b);
        const auto fine_modes = static_cast<uint32_t>(r - 2);
        EXPECT_EQ(layout.coarse[kCentroidHigh], 0u);
        EXPECT_EQ(layout.coarse[kCoarseBasis], row);
        EXPECT_EQ(layout.coarse[kCoarseCoefficients], 3 * row);
        EXPECT_EQ(layout.coarse[kCoarseScales], 3 * row + 2 * tokens);
        EXPECT_EQ(layout.coarse[kCentroidScale], layout.coarse[kCoarseScales] + 4);
        EXPECT_EQ(layout.coarse[kTau], layout.coarse[kCentroidScale] + 2);
        EXPECT_EQ(layout.coarse[kUnitChecksum], layout.coarse[kTau] + 2);
        EXPECT_EQ(layout.coarse[kUnitChecksum] % 8, 0u);
        EXPECT_LE(layout.coarse[kUnitChecksum] + 8, layout.coarse_bytes);
        EXPECT_EQ(layout.fine[kCentroidLow], 0u);
        EXPECT_EQ(layout.fine[kFineBasis], row);
        EXPECT_EQ(layout.fine[kFineCoefficients], (1 + fine_modes) * row);
        EXPECT_EQ(layout.fine[kFineScales], (1 + fine_modes) * row + fine_modes * tokens);
        EXPECT_LE(layout.fine[kFineScales] + 2 * fine_modes, layout.fine_bytes);
        for (uint32_t rows : {layout.coarse[kCoarseBasis], layout.coarse[kCoarseCoefficients],
                              layout.fine[kFineBasis], layout.fine[kFineCoefficients],
                              layout.coarse_bytes, layout.fine_bytes})
          EXPECT_EQ(rows % 16, 0u) << d << " " << b << " " << r;
      }
    }
  }
}

TEST(LayoutTest, SlotPlacesAreDistinctAndFillItExactly) {
  KvGeometry g = Good();
  g.num_layers = 3;
  const SlotLayout slot = MakeSlotLayout(g);
  EXPECT_EQ(slot.shard_heads, 4);
  EXPECT_EQ(slot.num_units(), 12u);
  EXPECT_EQ(slot.slot_bytes(), 12u * 8192);
  EXPECT_EQ(slot.summary_bytes(), 12u * 800);
  std::set<size_t> units, records;
  for (int layer = 0; layer < 3; ++layer) {
    for (int head = 0; head < 4; ++head) {
      units.insert(slot.unit_offset(layer, head));
      records.insert(slot.coarse_offset(layer, head));
      records.insert(slot.fine_offset(layer, head));
    }
  }
  EXPECT_EQ(units.size(), 12u);
  EXPECT_EQ(records.size(), 24u);
  EXPECT_EQ(*units.rbegin() + 8192, slot.slot_bytes());
  EXPECT_EQ(slot.fine_offset(0, 0), 12u * 240) << "fine parts follow all coarse parts";
  EXPECT_EQ(*records.rbegin() + 560, slot.summary_bytes());
  EXPECT_EQ(slot.unit_offset(1, 0), 4u * 8192) << "heads are the faster index";
}

TEST(LayoutTest, OffsetsDoNotWrapAtThirtyTwoBits) {
  KvGeometry g = Good();
  g.num_layers = 1024;
  g.num_q_heads = g.num_kv_heads = 256;
  g.num_shards = 1;
  g.head_dim = 256;
  g.page_tokens = 32;
  const SlotLayout slot = MakeSlotLayout(g);
  EXPECT_EQ(slot.slot_bytes(), size_t{1024} * 256 * 32768);
  EXPECT_EQ(slot.unit_offset(1023, 255), slot.slot_bytes() - 32768);
}

struct Change {
  std::string field;
  std::function<void(KvGeometry*)> apply;
};

TEST(LayoutTest, ProblemNamesTheFieldThatIsWrong) {
  EXPECT_EQ(Problem(Good()), nullptr);
  const std::vector<Change> changes = {
      {"head_dim", [](KvGeometry* g) { g->head_dim = 80; }},
      {"page_tokens", [](KvGeometry* g) { g->page_tokens = 64; }},
      {"rank", [](KvGeometry* g) { g->rank = 12; }},
      {"num_layers", [](KvGeometry* g) { g->num_layers = 0; }},
      {"num_kv_heads", [](KvGeometry* g) { g->num_kv_heads = 0; }},
      {"num_q_heads", [](KvGeometry* g) { g->num_q_heads = 33; }},
      {"num_q_heads", [](KvGeometry* g) { g->num_q_heads = 8 * 17; }},
      {"num_shards", [](KvGeometry* g) { g->num_shards = 3; }},
      {"dtype", [](KvGeometry* g) { g->dtype = static_cast<KvDtype>(9); }},
      {"softmax_scale", [](KvGeometry* g) { g->softmax_scale = 0; }},
      {"softmax_scale", [](KvGeometry* g) { g->softmax_scale = std::stof("nan"); }},
      {"logit_softcap", [](KvGeometry* g) { g->logit_softcap = -1; }},
  };
  for (const Change& change : changes) {
    KvGeometry g = Good();
    change.apply(&g);
    ASSERT_NE(Problem(g), nullptr) << change.field;
    EXPECT_EQ(std::string(Problem(g)).rfind(change.field, 0), 0u) << Problem(g);
  }
}

TEST(LayoutTest, FingerprintTellsEveryFieldApart) {
  const std::vector<Change> changes = {
      {"none", [](KvGeometry*) {}},
      {"num_layers", [](KvGeometry* g) { g->num_layers = 31; }},
      {"num_q_heads", [](KvGeometry* g) { g->num_q_heads = 64; }},
      {"num_kv_heads", [](KvGeometry* g) { g->num_kv_heads = 16; }},
      {"num_shards", [](KvGeometry* g) { g->num_shards = 4; }},
      {"head_dim", [](KvGeometry* g) { g->head_dim = 64; }},
      {"page_tokens", [](KvGeometry* g) { g->page_tokens = 32; }},
      {"rank", [](KvGeometry* g) { g->rank = 4; }},
      {"dtype", [](KvGeometry* g) { g->dtype = KvDtype::kFp16; }},
      {"rotated", [](KvGeometry* g) { g->rotated = false; }},
      {"softmax_scale", [](KvGeometry* g) { g->softmax_scale = 0.0625f; }},
      {"logit_softcap", [](KvGeometry* g) { g->logit_softcap = 50; }},
  };
  std::set<uint64_t> seen;
  for (const Change& change : changes) {
    KvGeometry g = Good();
    change.apply(&g);
    EXPECT_TRUE(seen.insert(LayoutFingerprint(g)).second) << change.field;
    EXPECT_EQ(LayoutFingerprint(g), LayoutFingerprint(g));
  }
}

}  // namespace
}  // namespace kvd
