// The step against dense attention in double precision, over real records and a fake pool that
// loses, delays and damages units on demand.

#include "client/decode_step.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "tests/client/fake_pool.h"

namespace kvd::testing {
namespace {

constexpr int kPages = 40;

class DecodeStepTest : public ::testing::Test {
 protected:
  void Open(StepOptions options, int num_pages = kPages, int num_daemons = 1, uint64_t seed = 1) {
    const KvGeometry g = SmallGeometry();
    const int64_t tokens = int64_t{num_pages + FakeSequence::kSpareCapacity} * g.page_tokens;
    sequence_ = std::make_unique<FakeSequence>(SequenceData::Random(g, tokens, seed), num_pages,
                                               options, num_daemons);
    auto step = DecodeStep::Plan(sequence_->pages.get(), options, &kNoModel);
    ASSERT_TRUE(step.ok()) << step.status();
    step_ = *std::move(step);
    const auto q_heads = static_cast<size_t>(g.num_q_heads);
    o_.resize(q_heads * static_cast<size_t>(g.head_dim));
    lse_.resize(q_heads);
  }

  // Runs one layer with a query of its own and the data's next token.
  absl::Status RunLayer(int layer) {
    const SequenceData& data = sequence_->data;
    const int64_t token = sequence_->pages->num_tokens();
    q_ = RandomKv(int64_t{data.geometry.num_q_heads} * data.geometry.head_dim, data.geometry.dtype,
                  2.0f, static_cast<uint64_t>(1000 + token * 10 + layer));
    const auto k = data.Rows(data.keys, layer, token);
    const auto v = data.Rows(data.values, layer, token);
    tokens_attended_ = token + 1;
    return step_->Run(layer, {q_.data(), k.data(), v.data()}, {o_.data(), lse_.data()});
  }
  absl::Status RunToken() {
    absl::Status status;
    for (int layer = 0; layer < sequence_->data.geometry.num_layers; ++layer) {
      const absl::Status s = RunLayer(layer);
      if (!s.ok()) status = s;
      if (step_->next_layer() != (layer + 1) % sequence_->data.geometry.num_layers) break;
    }
    return status;
  }

  // Pages that head attended besides the tail, from the result's own lists.
  std::vector<int> AttendedPages(int head) const {
    std::vector<int> pages;
    const SequencePages& p = *sequence_->pages;
    for (int i = 0; i < p.num_sinks(); ++i) pages.push_back(i);
    for (const int32_t i : step_->result().selection.pages_of(head)) pages.push_back(i);
    for (int i = p.first_ring_page(); i < p.num_pages(); ++i) pages.push_back(i);
    return pages;
  }

  // Largest difference of o and lse of the last layer from exact attention over `pages` and the
  // tail.
  double Error(int layer, const std::function<std::vector<int>(int head)>& pages) const {
    const SequenceData& data = sequence_->data;
    const int d = data.geometry.head_dim;
    const int64_t tail_begin = int64_t{sequence_->pages->num_pages()} * data.geometry.page_tokens;
    double worst = 0;
    for (int q = 0; q < data.geometry.num_q_heads; ++q) {
      const OracleAttention truth =
          data.Attend(layer, q, q_.data() + q * d, pages(q / data.geometry.group()), tail_begin,
                      tokens_attended_);
      worst = std::max(worst, std::abs(truth.lse - lse_[static_cast<size_t>(q)]));
      for (int i = 0; i < d; ++i) {
        worst = std::max(
            worst, std::abs(truth.o[static_cast<size_t>(i)] - o_[static_cast<size_t>(q * d + i)]));
      }
    }
    return worst;
  }
  std::vector<int> AllPages() const {
    std::vector<int> pages;
    for (int p = 0; p < sequence_->pages->num_pages(); ++p) pages.push_back(p);
    return pages;
  }

  static constexpr ScanModel kNoModel = {1e-6, 1e9, 1e9, 1e9};
  static constexpr double kTolerance = 1e-4;  // attend.h: 2e-5 of the largest component, lse 1e-5
  std::unique_ptr<FakeSequence> sequence_;
  std::unique_ptr<DecodeStep> step_;
  std::vector<uint16_t> q_;
  std::vector<float> o_;
  std::vector<float> lse_;
  int64_t tokens_attended_ = 0;
};

TEST_F(DecodeStepTest, BudgetOverEverythingEqualsDenseAttention) {
  Open({.budget = kPages});
  for (int t = 0; t < 3; ++t) {
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(RunLayer(layer).ok());
      EXPECT_LT(Error(layer, [this](int) { return AllPages(); }), kTolerance) << t << " " << layer;
    }
  }
  // The comparison can fail: without one page, or with the other layer's truth, it does.
  EXPECT_GT(Error(1,
                  [this](int) {
                    auto pages = AllPages();
                    pages.erase(pages.begin() + 7);
                    return pages;
                  }),
            10 * kTolerance);
  EXPECT_GT(Error(0, [this](int) { return AllPages(); }), 10 * kTolerance);
}

TEST_F(DecodeStepTest, HitsAndMissesMergeToOnePassOverTheSelection) {
  Open({.budget = 9, .cache_ratio = 1.5}, kPages, 3);
  int64_t hits = 0;
  int64_t misses = 0;
  for (int t = 0; t < 8; ++t) {
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(RunLayer(layer).ok());
      EXPECT_LT(Error(layer, [this](int head) { return AttendedPages(head); }), kTolerance);
      EXPECT_EQ(step_->result().units.hits + step_->result().units.misses, 2 * 9);
      EXPECT_EQ(step_->result().units.verified, step_->result().units.misses);
      hits += step_->result().units.hits;
      misses += step_->result().units.misses;
    }
  }
  EXPECT_GT(hits, 0);
  EXPECT_GT(misses, 2 * 2 * 9);
  EXPECT_EQ(step_->totals().hits.value(), hits);
  EXPECT_EQ(step_->totals().misses.value(), misses);
  for (const FakeFetcher* fetcher : sequence_->fetchers) EXPECT_GT(fetcher->num_units, 0);
}

TEST_F(DecodeStepTest, ProgressiveScanOverAllCandidatesSelectsWhatTheFullScanSelects) {
  const auto select = [this](StepOptions options) {
    Open(options);
    EXPECT_TRUE(RunLayer(0).ok());
    std::vector<int> pages = AttendedPages(0);
    const std::vector<int> more = AttendedPages(1);
    pages.insert(pages.end(), more.begin(), more.end());
    return pages;
  };
  const auto full = select({.budget = 6, .scan = ScanMode::kFull});
  EXPECT_EQ(step_->result().selection.scan, ScanMode::kFull);
  const int64_t full_bytes = step_->result().bytes_scanned;
  // 39 candidates: all but the sink, so that the scan is really progressive.
  const auto wide = select({.budget = 6, .scan = ScanMode::kProgressive, .num_candidates = 39});
  EXPECT_EQ(step_->result().selection.scan, ScanMode::kProgressive);
  EXPECT_EQ(wide, full);
  select({.budget = 6, .scan = ScanMode::kProgressive, .num_candidates = 8});
  EXPECT_LT(step_->result().bytes_scanned, full_bytes);
  EXPECT_LT(Error(0, [this](int head) { return AttendedPages(head); }), kTolerance);
}

TEST_F(DecodeStepTest, MissingUnitsAreLeftOutMaskedAndCounted) {
  Open({.budget = kPages, .loss = LossPolicy::kGoOn});
  sequence_->fetchers[0]->missing_slots = {5, 17};
  ASSERT_TRUE(RunLayer(0).ok());
  EXPECT_EQ(step_->result().units.missing, 2 * 2);  // two pages of two heads
  EXPECT_EQ(step_->result().num_missing_pages, 2);
  const auto without_lost = [this](int) {
    auto pages = AllPages();
    std::erase_if(pages, [](int p) { return p == 5 || p == 17; });
    return pages;
  };
  EXPECT_LT(Error(0, without_lost), kTolerance);
  EXPECT_GT(Error(0, [this](int) { return AllPages(); }), 10 * kTolerance);
  EXPECT_EQ(sequence_->pages->MissingPages(), (std::vector<int>{5, 17}));
  EXPECT_EQ(step_->cache().slot_of(0, 0, 5), -1);

  // The estimate of what was lost is near the truth (records are good to a few percent).
  const SequenceData& data = sequence_->data;
  const auto head = static_cast<size_t>(0);
  const auto all = AllPages();
  const double dense = data.Attend(0, 0, q_.data(), all, kPages * 16, tokens_attended_).lse;
  const double lost = 1 - std::exp(static_cast<double>(lse_[head]) - dense);
  ASSERT_EQ(step_->result().lost_mass.size(), 6u);
  EXPECT_NEAR(step_->result().lost_mass[head], lost, 0.3 * lost + 1e-4);
  EXPECT_NEAR(step_->result().unread_mass[head], step_->result().lost_mass[head], 1e-6);

  // From now on the pages are not even asked for.
  const int64_t units = sequence_->fetchers[0]->num_units;
  ASSERT_TRUE(RunLayer(1).ok());
  EXPECT_EQ(sequence_->fetchers[0]->num_units, units + 2 * (kPages - 4));
  EXPECT_LT(Error(1, without_lost), kTolerance);
}

TEST_F(DecodeStepTest, LossPolicyDecidesTheStatus) {
  for (const auto& [policy, code] :
       {std::pair{LossPolicy::kRecompute, absl::StatusCode::kUnavailable},
        std::pair{LossPolicy::kFail, absl::StatusCode::kAborted},
        std::pair{LossPolicy::kGoOn, absl::StatusCode::kOk}}) {
    Open({.budget = kPages, .loss = policy});
    sequence_->fetchers[0]->missing_slots = {5};
    EXPECT_EQ(RunLayer(0).code(), code);
    EXPECT_EQ(RunLayer(1).code(), code) << "a loss is reported until it is repaired";
  }
}

TEST_F(DecodeStepTest, RepairedPageIsFetchedAgainAndCountsAsWhole) {
  Open({.budget = kPages});
  sequence_->fetchers[0]->missing_slots = {5};
  EXPECT_EQ(RunToken().code(), absl::StatusCode::kUnavailable);
  sequence_->fetchers[0]->missing_slots = {};
  sequence_->pages->SetPage(5, 0, std::vector<SlotRef>{FakeSlot(5)});
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(RunLayer(layer).ok());
    EXPECT_LT(Error(layer, [this](int) { return AllPages(); }), kTolerance);
  }
}

TEST_F(DecodeStepTest, CachedUnitsOfAnEarlierRowAreNotHits) {
  Open({.budget = kPages});
  ASSERT_TRUE(RunToken().ok());
  ASSERT_TRUE(RunLayer(0).ok());
  EXPECT_EQ(step_->result().units.misses, 0);
  ASSERT_TRUE(RunLayer(1).ok());
  sequence_->pages->SetPage(5, 0, std::vector<SlotRef>{FakeSlot(5)});
  ASSERT_TRUE(RunLayer(0).ok());
  EXPECT_EQ(step_->result().units.misses, 2);  // page 5 of two heads
}

TEST_F(DecodeStepTest, StaleGenerationIsMissingNeverWrong) {
  Open({.budget = kPages, .loss = LossPolicy::kGoOn});
  SlotRef stale = FakeSlot(9);
  stale.generation -= 2;
  sequence_->pages->SetPage(9, 0, std::vector<SlotRef>{stale});
  ASSERT_TRUE(RunLayer(0).ok());
  EXPECT_EQ(sequence_->pages->MissingPages(), std::vector<int>{9});
  EXPECT_LT(Error(0,
                  [this](int) {
                    auto pages = AllPages();
                    std::erase(pages, 9);
                    return pages;
                  }),
            kTolerance);
}

TEST_F(DecodeStepTest, DamagedUnitIsFoundByTheChecksumPolicyOnly) {
  for (const auto verify : {VerifyPolicy::kGeneration, VerifyPolicy::kChecksum}) {
    Open({.budget = kPages, .verify = verify, .loss = LossPolicy::kGoOn});
    sequence_->fetchers[0]->corrupt_slots = {11};
    ASSERT_TRUE(RunLayer(0).ok());
    const bool found = verify == VerifyPolicy::kChecksum;
    EXPECT_EQ(step_->result().units.checksum_failures, found ? 2 : 0);
    EXPECT_EQ(sequence_->pages->num_missing(), found ? 1 : 0);
  }
}

TEST_F(DecodeStepTest, LateDaemonIsSuspendedForTheStepAndComesBack) {
  Open({.budget = kPages, .loss = LossPolicy::kGoOn}, kPages, 2);
  sequence_->fetchers[1]->list_code = absl::StatusCode::kDeadlineExceeded;
  ASSERT_TRUE(RunLayer(0).ok());
  EXPECT_GT(step_->result().units.late, 0);
  EXPECT_EQ(step_->result().num_missing_pages, kPages / 2);
  const auto even = [this](int) {
    auto pages = AllPages();
    std::erase_if(pages,
                  [](int p) { return p % 2 == 1 && p != kPages - 1; });  // the window is local
    return pages;
  };
  EXPECT_LT(Error(0, even), kTolerance);
  // The second layer does not wait for it again.
  const int64_t lists = sequence_->fetchers[1]->num_lists;
  ASSERT_TRUE(RunLayer(1).ok());
  EXPECT_EQ(sequence_->fetchers[1]->num_lists, lists);
  // After the suspension its pages are tried again: they were late, not gone.
  sequence_->fetchers[1]->list_code = absl::StatusCode::kOk;
  ASSERT_TRUE(sequence_->pages->BeginStep(absl::InfiniteDuration()).ok());
  ASSERT_TRUE(RunLayer(0).ok());
  EXPECT_EQ(step_->result().num_missing_pages, 0);
  EXPECT_LT(Error(0, [this](int) { return AllPages(); }), kTolerance);
}

TEST_F(DecodeStepTest, LostDaemonsPagesAreMaskedBeforeTheNextStepAndStayInTheLostMass) {
  Open({.budget = kPages, .loss = LossPolicy::kGoOn}, kPages, 2);
  ASSERT_TRUE(RunToken().ok());
  sequence_->sources[1]->lost = true;
  const int64_t lists = sequence_->fetchers[1]->num_lists;
  ASSERT_TRUE(RunLayer(0).ok());
  EXPECT_EQ(sequence_->fetchers[1]->num_lists, lists);
  EXPECT_EQ(step_->result().num_missing_pages, kPages / 2);
  for (const float lost : step_->result().lost_mass) EXPECT_GT(lost, 0.05f);
  ASSERT_TRUE(RunLayer(1).ok());
  // It does not come back by itself.
  ASSERT_TRUE(sequence_->pages->BeginStep(absl::InfiniteDuration()).ok());
  EXPECT_EQ(sequence_->pages->num_missing(), kPages / 2);
}

TEST_F(DecodeStepTest, TailGrowsOverPageBordersAndSealedPagesAreAdopted) {
  Open({.budget = 64}, 3);
  SequencePages& pages = *sequence_->pages;
  for (int t = 0; t < 16 * 5; ++t) {
    // The sealer, by hand and two pages late.
    if (t % 16 == 3 && t > 32) {
      const int p = pages.num_pages();
      ASSERT_LT(p, pages.complete_pages());
      ASSERT_TRUE(pages.mirror()
                      .Store(p, 0, PageRecords(sequence_->data, sequence_->shape, p).data())
                      .ok());
      pages.PushSealed({0, sequence_->sources[0], {FakeSlot(p)}});
    }
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(RunLayer(layer).ok());
      ASSERT_LT(Error(layer, [this](int) { return AllPages(); }), kTolerance) << t;
    }
  }
  EXPECT_EQ(pages.num_pages(), 6);
  EXPECT_EQ(pages.tail_page(), 8);
}

TEST_F(DecodeStepTest, FullRingRefusesTheTokenAndNothingChanges) {
  Open({.budget = 8}, 3);
  const int ring = 1 + TailRing::kSlackPages;
  absl::Status status;
  int tokens = 0;
  for (; tokens < 16 * 20 && status.ok(); ++tokens) status = RunToken();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(tokens - 1, 16 * (ring - 1));
  const int64_t count = sequence_->pages->num_tokens();
  EXPECT_EQ(RunLayer(0).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(sequence_->pages->num_tokens(), count);
  // One seal makes room.
  SequencePages& pages = *sequence_->pages;
  ASSERT_TRUE(
      pages.mirror().Store(3, 0, PageRecords(sequence_->data, sequence_->shape, 3).data()).ok());
  pages.PushSealed({0, sequence_->sources[0], {FakeSlot(3)}});
  EXPECT_TRUE(RunToken().ok());
}

TEST_F(DecodeStepTest, SequenceWithoutSealedPagesAttendsItsTail) {
  Open({.budget = 8}, 0);
  for (int t = 0; t < 20; ++t) {
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(RunLayer(layer).ok());
      ASSERT_LT(Error(layer, [](int) { return std::vector<int>{}; }), kTolerance) << t;
    }
  }
}

TEST_F(DecodeStepTest, DenseLayerAttendsEveryPage) {
  Open({.budget = 4, .dense_layers = {1}});
  ASSERT_TRUE(RunLayer(0).ok());
  EXPECT_EQ(step_->result().selection.pages_of(0).size(), 4u);
  ASSERT_TRUE(RunLayer(1).ok());
  EXPECT_LT(Error(1, [this](int) { return AllPages(); }), kTolerance);
}

TEST_F(DecodeStepTest, LayersOutOfOrderAndBadOptionsAreRefused) {
  Open({.budget = 4});
  EXPECT_EQ(RunLayer(1).code(), absl::StatusCode::kInvalidArgument);
  const auto plan = [this](StepOptions options) {
    return DecodeStep::Plan(sequence_->pages.get(), options, &kNoModel).status().code();
  };
  EXPECT_EQ(plan({.budget = -1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(plan({.n_sink = 2}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(plan({.cache_ratio = 0.5}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(plan({.dense_layers = {2}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(plan({.budget = 4}), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace kvd::testing
