// The store in host memory; the one on a GPU is tests/service/gpu_arena_test.cc.
#include "service/page_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/checksum.h"
#include "tests/service/arena_fixture.h"

namespace kvd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class PageStoreTest : public ::testing::Test {
 protected:
  PageStoreTest() {
    const KvGeometry g = testing::TinyGeometry();
    memory_ = *ArenaMemory::MakeShared(CarveArena(g, testing::BytesForSlots(g, 3)));
    store_ =
        *PageStore::Make(*memory_, {.geometry = g, .encoder = Encoder::kE0, .metric = &metric_});
    slot_ = memory_->shape().slot;
  }
  // Writes the units of `page` and seals the slot as `generation`; the records' checksum.
  uint64_t Seal(uint32_t slot, int page, uint64_t generation) {
    for (int layer = 0; layer < slot_.num_layers; ++layer) {
      const std::vector<uint8_t> bytes =
          testing::UnitBytes(testing::TinyGeometry(), page, 0, layer, 0);
      const PageStore::UnitWrite write = {slot, layer, 0, bytes.data()};
      store_->WriteUnits({&write, 1});
    }
    const absl::StatusOr<uint64_t> checksum = store_->BuildRecords(slot, 0, 0);
    EXPECT_TRUE(checksum.ok()) << checksum.status();
    store_->PublishSealed(slot, generation, testing::KeyOf(page), *checksum);
    return *checksum;
  }

  const QueryMetric metric_;
  std::unique_ptr<ArenaMemory> memory_;
  std::unique_ptr<PageStore> store_;
  SlotLayout slot_;
};

TEST_F(PageStoreTest, ReadsPassOnlyTheSealedGenerationAndZeroTheRest) {
  Seal(1, 10, 2);
  Seal(2, 20, 4);
  std::vector<uint8_t> out(3 * slot_.unit_bytes, 0xEE), valid(3, 0xEE);
  const std::vector<PageStore::Read> reads = {{{1, 1, 0, 2}, out.data()},
                                              {{2, 0, 0, 2}, out.data() + slot_.unit_bytes},
                                              {{2, 1, 0, 4}, out.data() + 2 * slot_.unit_bytes}};
  store_->ReadUnits(reads, valid);
  EXPECT_THAT(valid, ElementsAre(1, 0, 1));
  const auto holds = [&](size_t i, const std::vector<uint8_t>& bytes) {
    return std::memcmp(out.data() + i * slot_.unit_bytes, bytes.data(), bytes.size()) == 0;
  };
  const KvGeometry g = testing::TinyGeometry();
  EXPECT_TRUE(holds(0, testing::UnitBytes(g, 10, 0, 1, 0)));
  EXPECT_FALSE(holds(0, testing::UnitBytes(g, 10, 0, 0, 0)));
  EXPECT_TRUE(holds(1, std::vector<uint8_t>(slot_.unit_bytes)));
  EXPECT_TRUE(holds(2, testing::UnitBytes(g, 20, 0, 1, 0)));
  const PageStore::Gone gone[] = {{1, 3}, {2, 5}};
  store_->PublishGone(gone);
  store_->ReadUnits(reads, valid);
  EXPECT_THAT(valid, ElementsAre(0, 0, 0));
}

TEST_F(PageStoreTest, SummariesAreTheHeaderAndAllRecordsUnderOneGuard) {
  const uint64_t checksum = Seal(1, 10, 2);
  const size_t item = sizeof(PageHeader) + slot_.summary_bytes();
  std::vector<uint8_t> out(2 * item, 0xEE), valid(2, 0xEE);
  const PageStore::Read reads[] = {{{1, 0, 0, 2}, out.data()}, {{1, 0, 0, 4}, out.data() + item}};
  store_->ReadSummaries(reads, valid);
  EXPECT_THAT(valid, ElementsAre(1, 0));
  EXPECT_EQ(std::memcmp(out.data() + offsetof(PageHeader, key), testing::KeyOf(10).data(), 16), 0);
  EXPECT_EQ(std::memcmp(out.data() + offsetof(PageHeader, summary_checksum), &checksum, 8), 0);
  EXPECT_EQ(Checksum64(out.data() + sizeof(PageHeader), slot_.summary_bytes()), checksum);
  EXPECT_EQ(Checksum64(out.data() + item, item),
            Checksum64(std::vector<uint8_t>(item).data(), item));
}

TEST_F(PageStoreTest, CopyIsProvedByItsRecordsAndEveryUnit) {
  const uint64_t checksum = Seal(1, 10, 2);
  StagingBuffer staging;
  const PageStore::PageBytes page = store_->ReadPage(1, &staging);
  EXPECT_EQ(page.summary_checksum, checksum);
  for (int layer = 0; layer < slot_.num_layers; ++layer) {
    const PageStore::UnitWrite write = {2, layer, 0, page.units + slot_.unit_offset(layer, 0)};
    store_->WriteUnits({&write, 1});
  }
  const PageStore::RecordsWrite records = {2, page.records};
  store_->WriteRecords({&records, 1});
  EXPECT_TRUE(store_->ProveCopy(2, checksum).ok());
  EXPECT_THAT(store_->ProveCopy(2, checksum + 1).message(), HasSubstr("the records' checksum"));
  memory_->unit(2, 1, 0)[100] ^= 1;
  const absl::Status damaged = store_->ProveCopy(2, checksum);
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(damaged.message(), HasSubstr("layer 1, head 0"));
}

}  // namespace
}  // namespace kvd
