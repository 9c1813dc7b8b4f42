// Lists are grouped by daemon and cut into waves; a daemon that fails gets no further wave.

#include "client/miss_fetch.h"

#include "gtest/gtest.h"
#include "tests/client/fake_pool.h"

namespace kvd::testing {
namespace {

constexpr int kPages = 24;
constexpr int kLayer = 1;

class MissFetchTest : public ::testing::Test {
 protected:
  MissFetchTest()
      : sequence_(SequenceData::Random(SmallGeometry(), 16 * (kPages + 1), 5), kPages, options_,
                  2) {
    buffer_.resize(2 * kPages * sequence_.shape.unit_bytes());
  }

  // Fetches every page of both heads in lists of at most `wave` units.
  void FetchAll(size_t wave) {
    fetch_ = *MissFetch::Make(sequence_.shape, 2 * kPages, 2, options_, wave);
    fetch_->Clear();
    for (int32_t page = 0; page < kPages; ++page) {
      for (int32_t head = 0; head < 2; ++head) fetch_->Add(page, head, 0, At(page, head));
    }
    fetch_->Start(*sequence_.pages, kLayer);
    bytes_ = fetch_->Finish(*sequence_.pages, kLayer, counts_);
  }
  uint8_t* At(int page, int head) {
    return buffer_.data() + static_cast<size_t>(page * 2 + head) * sequence_.shape.unit_bytes();
  }
  bool IsRight(int page, int head) {
    const auto unit = sequence_.data.Unit(kLayer, head, page);
    return std::memcmp(At(page, head), unit.data(), unit.size()) == 0;
  }

  const StepOptions options_;
  FakeSequence sequence_;
  std::vector<uint8_t> buffer_;
  std::unique_ptr<MissFetch> fetch_;
  UnitCounts counts_;
  int64_t bytes_ = 0;
};

TEST_F(MissFetchTest, EveryWaveSizeDeliversTheSameUnits) {
  for (const size_t wave : {size_t{1}, size_t{5}, size_t{24}, size_t{1000}}) {
    std::fill(buffer_.begin(), buffer_.end(), uint8_t{0});
    counts_ = {};
    for (FakeFetcher* fetcher : sequence_.fetchers) fetcher->num_lists = 0;
    FetchAll(wave);
    EXPECT_EQ(counts_.verified, 2 * kPages);
    EXPECT_EQ(bytes_, static_cast<int64_t>(buffer_.size()));
    for (int page = 0; page < kPages; ++page) {
      EXPECT_TRUE(IsRight(page, 0) && IsRight(page, 1)) << page;
    }
    EXPECT_FALSE(std::memcmp(At(0, 0), At(0, 1), 64) == 0);
    const auto units = size_t{kPages};  // of each daemon
    EXPECT_EQ(sequence_.fetchers[0]->num_lists, static_cast<int64_t>((units + wave - 1) / wave));
  }
}

TEST_F(MissFetchTest, FailedDaemonGetsNoFurtherWaveAndTheOtherIsServedWhole) {
  sequence_.fetchers[1]->list_code = absl::StatusCode::kUnavailable;
  FetchAll(4);
  EXPECT_EQ(sequence_.fetchers[1]->num_lists, 1);
  EXPECT_EQ(counts_.verified, kPages);
  EXPECT_EQ(counts_.failed, kPages);
  for (const Miss& miss : fetch_->misses()) {
    EXPECT_EQ(miss.outcome == Miss::Outcome::kVerified, miss.page % 2 == 0);
  }
  EXPECT_EQ(sequence_.pages->num_missing(), kPages / 2);
}

TEST_F(MissFetchTest, MissingPageOfALaterWaveIsMarked) {
  sequence_.fetchers[0]->missing_slots = {20};
  FetchAll(3);
  EXPECT_EQ(counts_.missing, 2);
  EXPECT_EQ(sequence_.pages->MissingPages(), std::vector<int>{20});
}

// Every page of a daemon with a second holder is fetched there, in the same call, whatever went
// wrong.
class MissFetchFailoverTest : public MissFetchTest {
 protected:
  void SetUp() override {
    for (int page = 0; page < kPages; ++page) {
      sequence_.pages->SetAlternate(page, 1 - page % 2, std::vector<SlotRef>{FakeSlot(page)});
    }
  }
  void ExpectAllRight() {
    EXPECT_EQ(counts_.verified, 2 * kPages);
    EXPECT_EQ(counts_.failed + counts_.missing + counts_.late, 0);
    for (int page = 0; page < kPages; ++page) {
      EXPECT_TRUE(IsRight(page, 0) && IsRight(page, 1)) << page;
    }
    for (const Miss& miss : fetch_->misses()) EXPECT_EQ(miss.outcome, Miss::Outcome::kVerified);
    EXPECT_EQ(sequence_.pages->num_missing(), 0);
  }
};

TEST_F(MissFetchFailoverTest, AFailedDaemonsUnitsComeFromTheOther) {
  sequence_.fetchers[1]->list_code = absl::StatusCode::kUnavailable;
  FetchAll(5);
  ExpectAllRight();
  EXPECT_EQ(sequence_.fetchers[1]->num_lists, 1);
}

TEST_F(MissFetchFailoverTest, AMissingPageComesFromTheOtherWhole) {
  // Slot 20 is missing at its first holder only.
  sequence_.fetchers[0]->missing_slots = {20};
  FetchAll(3);
  ExpectAllRight();
  EXPECT_EQ(sequence_.pages->daemon_of(20), 1);
}

TEST_F(MissFetchFailoverTest, BothHoldersGoneIsCountedOnceAUnit) {
  sequence_.fetchers[0]->missing_slots = {20};
  sequence_.fetchers[1]->missing_slots = {20};
  FetchAll(3);
  EXPECT_EQ(counts_.missing, 2);
  EXPECT_EQ(counts_.verified, 2 * kPages - 2);
  EXPECT_EQ(sequence_.pages->MissingPages(), std::vector<int>{20});
}

}  // namespace
}  // namespace kvd::testing
