#include "client/mirror.h"

#include <cstring>

#include "gtest/gtest.h"
#include "tests/client/fake_pool.h"

namespace kvd::testing {
namespace {

// A record's bytes say where it comes from.
std::vector<uint8_t> TaggedRecords(const WorkerShape& shape, int page, int shard) {
  const SlotLayout& slot = shape.slot;
  std::vector<uint8_t> records(slot.summary_bytes());
  for (int layer = 0; layer < shape.num_layers(); ++layer) {
    for (int h = 0; h < slot.shard_heads; ++h) {
      const auto tag = static_cast<uint8_t>(1 + page * 16 + layer * 8 + shard * 4 + h);
      std::memset(records.data() + slot.coarse_offset(layer, h), tag, slot.coarse_bytes);
      std::memset(records.data() + slot.fine_offset(layer, h), tag + 100, slot.fine_bytes);
    }
  }
  return records;
}

TEST(MirrorTest, EveryRecordStandsAtItsLayerHeadAndPage) {
  KvGeometry g = SmallGeometry();
  g.num_kv_heads = 4;
  g.num_q_heads = 4;
  g.num_shards = 2;
  const WorkerShape shape = *WorkerShape::Make(g, {});
  constexpr int kCapacity = 5;
  auto mirror = *Mirror::Make(shape, kCapacity);
  for (int page = 0; page < 2; ++page) {
    for (int shard = 0; shard < 2; ++shard) {
      ASSERT_TRUE(mirror->Store(page, shard, TaggedRecords(shape, page, shard).data()).ok());
    }
  }
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 4; ++head) {
      for (int page = 0; page < 2; ++page) {
        const int tag = 1 + page * 16 + layer * 8 + (head / 2) * 4 + head % 2;
        const auto idx = static_cast<size_t>(head * kCapacity + page);
        const uint8_t* coarse = mirror->coarse(layer) + idx * shape.summary.coarse_bytes;
        const uint8_t* fine = mirror->fine(layer) + idx * shape.summary.fine_bytes;
        EXPECT_EQ(coarse[0], tag);
        EXPECT_EQ(coarse[shape.summary.coarse_bytes - 1], tag);
        EXPECT_EQ(fine[0], tag + 100);
        EXPECT_EQ(fine[shape.summary.fine_bytes - 1], tag + 100);
        EXPECT_EQ(mirror->unit_checksum(layer, head, page),
                  0x0101010101010101ull * static_cast<uint64_t>(tag));
      }
    }
  }
}

TEST(MirrorTest, ChecksumInTheRecordIsTheUnits) {
  const SequenceData data = SequenceData::Random(SmallGeometry(), 32, 3);
  const WorkerShape shape = *WorkerShape::Make(data.geometry, {});
  auto mirror = *Mirror::Make(shape, 2);
  ASSERT_TRUE(mirror->Store(1, 0, PageRecords(data, shape, 1).data()).ok());
  const auto unit = data.Unit(1, 0, 1);
  EXPECT_EQ(mirror->unit_checksum(1, 0, 1), Checksum64(unit.data(), unit.size()));
  const auto other = data.Unit(0, 0, 1);
  EXPECT_NE(mirror->unit_checksum(1, 0, 1), Checksum64(other.data(), other.size()));
}

TEST(WorkerShapeTest, ShardsMustAscendAndExist) {
  KvGeometry g = SmallGeometry();
  g.num_shards = 2;
  EXPECT_EQ(WorkerShape::Make(g, {})->num_heads(), 2);
  EXPECT_EQ(WorkerShape::Make(g, {1})->num_heads(), 1);
  EXPECT_FALSE(WorkerShape::Make(g, {1, 0}).ok());
  EXPECT_FALSE(WorkerShape::Make(g, {0, 0}).ok());
  EXPECT_FALSE(WorkerShape::Make(g, {2}).ok());
}

}  // namespace
}  // namespace kvd::testing
