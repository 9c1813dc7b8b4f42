// The bookkeeping of an open sequence: what may be chosen after losses, suspensions, repairs and
// seals.

#include "client/sequence_pages.h"

#include "gtest/gtest.h"
#include "tests/client/fake_pool.h"

namespace kvd::testing {
namespace {

constexpr int kPages = 6;
const StepOptions kOptions = {};

class SequencePagesTest : public ::testing::Test {
 protected:
  SequencePagesTest()
      : sequence_(SequenceData::Random(SmallGeometry(), 16 * (kPages + 20), 1), kPages, kOptions,
                  2),
        pages_(*sequence_.pages) {}

  std::vector<int> Selectable() const {
    std::vector<int> selectable;
    for (int p = 0; p < pages_.num_pages(); ++p) {
      if (pages_.is_selectable(p)) selectable.push_back(p);
    }
    EXPECT_EQ(pages_.num_missing(), pages_.num_pages() - static_cast<int>(selectable.size()));
    return selectable;
  }
  static absl::Duration At(double seconds) { return absl::Seconds(seconds); }
  std::shared_ptr<PageSource> NewSource() {
    auto source = std::make_shared<PageSource>();
    source->fetcher = std::make_unique<FakeFetcher>(&sequence_.data);
    return source;
  }
  void FillPage() {
    for (int t = 0; t < 16; ++t) pages_.AdvanceTail();
  }

  FakeSequence sequence_;
  SequencePages& pages_;
};

TEST_F(SequencePagesTest, SuspendedDaemonsPagesComeBackButMissingOnesDoNot) {
  pages_.MarkMissing(3);
  pages_.Suspend(1, At(10));
  EXPECT_EQ(Selectable(), (std::vector<int>{0, 2, 4}));
  ASSERT_TRUE(pages_.BeginStep(At(10.5)).ok());
  EXPECT_EQ(Selectable(), (std::vector<int>{0, 2, 4}));
  ASSERT_TRUE(pages_.BeginStep(At(11)).ok());
  EXPECT_EQ(Selectable(), (std::vector<int>{0, 1, 2, 4, 5}));
  EXPECT_EQ(pages_.MissingPages(), std::vector<int>{3});
}

TEST_F(SequencePagesTest, LostDaemonStaysMaskedAlsoIfItWasSuspended) {
  pages_.Suspend(1, At(10));
  sequence_.sources[1]->lost = true;
  ASSERT_TRUE(pages_.BeginStep(At(10.1)).ok());
  ASSERT_TRUE(pages_.BeginStep(At(100)).ok());
  EXPECT_EQ(Selectable(), (std::vector<int>{0, 2, 4}));
}

TEST_F(SequencePagesTest, NewSessionOfADaemonHasNoneOfTheOldPages) {
  sequence_.sources[1]->lost = true;
  pages_.SetSource(1, NewSource());
  ASSERT_TRUE(pages_.BeginStep(At(1)).ok());
  EXPECT_EQ(Selectable(), (std::vector<int>{0, 2, 4}));
  const uint32_t version = pages_.versions()[3];
  pages_.SetPage(3, 1, std::vector<SlotRef>{{9, 4}});
  EXPECT_EQ(Selectable(), (std::vector<int>{0, 2, 3, 4}));
  EXPECT_NE(pages_.versions()[3], version);
}

TEST_F(SequencePagesTest, SamePageSetAgainEndsASuspensionOnlyThroughItsSource) {
  pages_.Suspend(1, At(10));
  pages_.SetPage(3, 1, std::vector<SlotRef>{FakeSlot(3)});
  EXPECT_FALSE(pages_.is_selectable(3));
  pages_.SetSource(1, sequence_.sources[1]);
  EXPECT_EQ(Selectable().size(), static_cast<size_t>(kPages));
}

TEST_F(SequencePagesTest, SealedPageOfAStrangerReplacesTheLostSession) {
  FillPage();
  sequence_.sources[1]->lost = true;
  const auto stranger = NewSource();
  pages_.PushSealed({1, stranger, {{3, 2}}});
  ASSERT_TRUE(pages_.BeginStep(At(1)).ok());
  EXPECT_EQ(Selectable(), (std::vector<int>{0, 2, 4, 6}));
  EXPECT_EQ(pages_.fetcher(1), stranger->fetcher.get());
}

TEST_F(SequencePagesTest, SealedPageOfASessionThatIsLostMeanwhileIsMissingAndReplacesNothing) {
  FillPage();
  const auto old = NewSource();
  old->lost = true;
  pages_.PushSealed({1, old, {{3, 2}}});
  ASSERT_TRUE(pages_.BeginStep(At(1)).ok());
  EXPECT_EQ(pages_.num_pages(), kPages + 1);
  EXPECT_EQ(pages_.MissingPages(), std::vector<int>{kPages});
  EXPECT_EQ(pages_.fetcher(1), sequence_.fetchers[1]);
}

TEST_F(SequencePagesTest, WindowFollowsSealsAndCompletePagesStayInTheRing) {
  EXPECT_EQ(pages_.first_ring_page(), kPages - 1);
  FillPage();
  FillPage();
  EXPECT_EQ(pages_.complete_pages(), kPages + 2);
  EXPECT_EQ(pages_.first_ring_page(), kPages - 1);
  pages_.PushSealed({0, sequence_.sources[0], {FakeSlot(6)}});
  ASSERT_TRUE(pages_.BeginStep(At(1)).ok());
  EXPECT_EQ(pages_.first_ring_page(), kPages);
  EXPECT_EQ(pages_.tail_page(), kPages + 2);
  EXPECT_EQ(pages_.tail_row(), 0);
}

TEST_F(SequencePagesTest, PagesWithASecondHolderTurnToItAndTheOthersAreMissing) {
  pages_.SetAlternate(1, 0, std::vector<SlotRef>{{40, 8}});
  pages_.SetAlternate(0, 1, std::vector<SlotRef>{{41, 8}});
  const uint32_t version = pages_.versions()[1];
  sequence_.sources[1]->lost = true;
  ASSERT_TRUE(pages_.BeginStep(At(1)).ok());
  EXPECT_EQ(Selectable(), (std::vector<int>{0, 1, 2, 4}));
  EXPECT_EQ(pages_.daemon_of(1), 0);
  EXPECT_EQ(pages_.slot_of(1, 0), (SlotRef{40, 8}));
  EXPECT_EQ(pages_.versions()[1], version) << "the same bytes: what is cached stays good";
  pages_.MarkMissing(0);
  EXPECT_FALSE(pages_.is_selectable(0)) << "its second holder is the lost daemon";
  pages_.MarkMissing(1);
  EXPECT_FALSE(pages_.is_selectable(1)) << "a second holder is taken once";
}

TEST_F(SequencePagesTest, MovedPagesAreReadElsewhereFromTheNextStepOn) {
  std::shared_ptr<PageSource> source = NewSource();
  const uint32_t version = pages_.versions()[3];
  auto batch = std::make_unique<MovedPages>();
  batch->push_back({3, 1, source, {{50, 6}}});
  batch->push_back({5, 1, source, {{51, 6}}});
  ASSERT_TRUE(pages_.PushMoved(&batch));
  EXPECT_EQ(pages_.slot_of(3, 0), FakeSlot(3)) << "not before a step";
  EXPECT_EQ(pages_.TakeBackMoved(), nullptr);
  auto second = std::make_unique<MovedPages>();
  EXPECT_FALSE(pages_.PushMoved(&second)) << "one batch at a time";
  ASSERT_TRUE(pages_.BeginStep(At(1)).ok());
  // Daemon 1 has another session now: of the old one's pages only those that moved are there.
  EXPECT_EQ(Selectable(), (std::vector<int>{0, 2, 3, 4, 5}));
  EXPECT_EQ(pages_.slot_of(3, 0), (SlotRef{50, 6}));
  EXPECT_EQ(pages_.versions()[3], version);
  EXPECT_EQ(pages_.fetcher(1), source->fetcher.get());
  const auto back = pages_.TakeBackMoved();
  ASSERT_NE(back, nullptr);
  EXPECT_EQ((*back)[0].source, sequence_.sources[1])
      << "the old session is freed outside of a step";
  EXPECT_TRUE(pages_.PushMoved(&second));
}

TEST_F(SequencePagesTest, AMoveToASessionThatEndedMeanwhileChangesNothing) {
  std::shared_ptr<PageSource> source = NewSource();
  source->lost = true;
  auto batch = std::make_unique<MovedPages>();
  batch->push_back({3, 1, source, {{50, 6}}});
  ASSERT_TRUE(pages_.PushMoved(&batch));
  ASSERT_TRUE(pages_.BeginStep(At(1)).ok());
  EXPECT_EQ(Selectable().size(), static_cast<size_t>(kPages));
  EXPECT_EQ(pages_.slot_of(3, 0), FakeSlot(3));
}

}  // namespace
}  // namespace kvd::testing
