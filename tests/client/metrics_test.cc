#include "client/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/decode_step.h"
#include "tests/client/fake_pool.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;

// The value of one series, or -1 if it is not there.
double ValueOf(const std::string& text, const std::string& series) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::StartsWith(line, absl::StrCat(kClientPrefix, series, " "))) {
      return std::stod(std::string(line.substr(line.rfind(' '))));
    }
  }
  return -1;
}

class ClientMetricsTest : public ::testing::Test {
 protected:
  std::string Text() const {
    const ChannelView views[] = {{"kvd-0:7411", channel_, PathKind::kShared}};
    return metrics_.Text(views);
  }
  ClientMetrics metrics_;
  std::shared_ptr<ChannelFigures> channel_ = std::make_shared<ChannelFigures>();
};

TEST_F(ClientMetricsTest, EveryFamilyOfTheTableIsShownAndNoOther) {
  std::set<std::string> expected;
  for (const MetricInfo& info : ClientMetricTable()) {
    EXPECT_TRUE(expected.insert(std::string(kClientPrefix) + info.name).second) << info.name;
  }
  std::set<std::string> shown;
  for (const absl::string_view line : absl::StrSplit(Text(), '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (absl::StartsWith(line, "# TYPE ")) shown.insert(words[2]);
  }
  EXPECT_EQ(shown, expected);
}

TEST_F(ClientMetricsTest, CountsStayWhenASequenceEndsAndLevelsGo) {
  auto step = std::make_unique<StepTotals>();
  auto fetch = std::make_unique<FetchTotals>();
  metrics_.Add({step.get(), fetch.get(), LossPolicy::kGoOn, 1000, 200});
  step->hits.Add(7);
  step->AddStep({1000, 2000, 0, 0, 0, 0}, /*sparse=*/true, 0.03);
  step->lossy_steps.Add(1);
  step->unsealed_pages.Set(2);
  PathTotals& shared = (*fetch)[static_cast<size_t>(PathKind::kShared)];
  shared.verified.Add(5);
  shared.corrupt.Add(1);
  shared.aborted.Add(2);
  shared.failed.Add(3);
  const std::string open = Text();
  EXPECT_EQ(ValueOf(open, "mirror_bytes"), 1000);
  EXPECT_EQ(ValueOf(open, "page_cache_bytes"), 200);
  EXPECT_EQ(ValueOf(open, "seal_lag_pages"), 2);
  metrics_.Remove(step.get());
  step.reset();
  fetch.reset();
  const std::string ended = Text();
  EXPECT_EQ(ValueOf(ended, "mirror_bytes"), 0);
  EXPECT_EQ(ValueOf(ended, "seal_lag_pages"), 0);
  for (const std::string& text : {open, ended}) {
    EXPECT_EQ(ValueOf(text, "page_cache_lookups_total{result=\"hit\"}"), 7);
    EXPECT_EQ(ValueOf(text, "rows_total{kind=\"sparse\"}"), 1);
    EXPECT_EQ(ValueOf(text, "rows_total{kind=\"dense\"}"), 0);
    EXPECT_EQ(ValueOf(text, "step_seconds_count{stage=\"score\",mode=\"host\"}"), 1);
    EXPECT_EQ(ValueOf(text, "step_seconds_sum{stage=\"score\",mode=\"host\"}"), 2e-6);
    EXPECT_EQ(ValueOf(text, "lost_mass_ratio_bucket{policy=\"go_on\",le=\"0.02\"}"), 0);
    EXPECT_EQ(ValueOf(text, "lost_mass_ratio_bucket{policy=\"go_on\",le=\"0.05\"}"), 1);
    EXPECT_EQ(ValueOf(text, "lost_mass_ratio_count{policy=\"fail\"}"), 0);
    EXPECT_EQ(ValueOf(text, "loss_actions_total{policy=\"go_on\"}"), 1);
    EXPECT_EQ(ValueOf(text, "loss_actions_total{policy=\"recompute\"}"), 0);
    EXPECT_EQ(ValueOf(text, "fetched_units_total{path=\"shared\",result=\"ok\"}"), 6);
    EXPECT_EQ(ValueOf(text, "fetched_units_total{path=\"shared\",result=\"failed\"}"), 3);
    EXPECT_EQ(ValueOf(text, "fetched_units_total{path=\"ucx\",result=\"ok\"}"), 0);
    EXPECT_EQ(ValueOf(text, "verified_units_total{path=\"shared\"}"), 5);
    EXPECT_EQ(ValueOf(text, "verify_failures_total{path=\"shared\",reason=\"checksum\"}"), 1);
    EXPECT_EQ(ValueOf(text, "verify_failures_total{path=\"shared\",reason=\"incarnation\"}"), 2);
  }
}

TEST_F(ClientMetricsTest, WhatWasNotAddedIsNotFolded) {
  StepTotals step;
  step.hits.Add(7);
  metrics_.Remove(&step);
  EXPECT_EQ(ValueOf(Text(), "page_cache_lookups_total{result=\"hit\"}"), 0);
}

TEST_F(ClientMetricsTest, DaemonsAreCountedByCodePathAndReason) {
  channel_->CountAttach(absl::StatusCode::kOk);
  channel_->CountAttach(absl::StatusCode::kUnavailable);
  channel_->CountAttach(absl::StatusCode::kUnavailable);
  channel_->CountIncarnationChange();
  PathReport report;
  report.refusals = {{PathKind::kPeer, PathRefusal::kHostMemory},
                     {PathKind::kShared, PathRefusal::kFailed}};
  channel_->CountPath(report);
  const std::string text = Text();
  EXPECT_EQ(ValueOf(text, "path_info{daemon=\"kvd-0:7411\",path=\"shared\"}"), 1);
  EXPECT_EQ(ValueOf(text, "attach_total{result=\"OK\"}"), 1);
  EXPECT_EQ(ValueOf(text, "attach_total{result=\"UNAVAILABLE\"}"), 2);
  EXPECT_EQ(ValueOf(text, "attach_total{result=\"ABORTED\"}"), -1);
  EXPECT_EQ(ValueOf(text, "daemon_incarnation_changes_total{daemon=\"kvd-0:7411\"}"), 1);
  EXPECT_EQ(ValueOf(text, "path_refused_total{path=\"shared\",reason=\"failed\"}"), 1);
  EXPECT_EQ(ValueOf(text, "path_refused_total{path=\"peer\",reason=\"failed\"}"), 0);
  const ChannelView lost[] = {{"kvd-0:7411", channel_, std::nullopt}};
  EXPECT_THAT(metrics_.Text(lost), ::testing::Not(HasSubstr("path_info")));
}

TEST_F(ClientMetricsTest, ADaemonWithSeveralChannelsIsOneSeries) {
  const auto other = std::make_shared<ChannelFigures>();
  channel_->CountIncarnationChange();
  other->CountIncarnationChange();
  const ChannelView views[] = {{"kvd-0:7411", channel_, std::nullopt},
                               {"kvd-0:7411", other, PathKind::kUcx},
                               {"kvd-0:7411", other, PathKind::kUcx}};
  const std::string text = metrics_.Text(views);
  std::set<std::string> series;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    if (line[0] == '#') continue;
    EXPECT_TRUE(series.emplace(line.substr(0, line.rfind(' '))).second) << line;
  }
  EXPECT_EQ(ValueOf(text, "daemon_incarnation_changes_total{daemon=\"kvd-0:7411\"}"), 3);
}

TEST_F(ClientMetricsTest, ListsOutsideOfStepsAreCountedByOutcome) {
  uint8_t valid[] = {1, 0, 1};
  const FetchEntry entries[3] = {};
  FetchList list;
  list.entries = entries;
  list.valid = valid;
  list.path_bytes = 300;
  channel_->CountFetch(list, PathKind::kUcx);
  list.code = absl::StatusCode::kDeadlineExceeded;
  valid[0] = valid[2] = 0;
  channel_->CountFetch(list, PathKind::kUcx);
  list.code = absl::StatusCode::kAborted;
  channel_->CountFetch(list, PathKind::kUcx);
  const std::string text = Text();
  EXPECT_EQ(ValueOf(text, "fetched_units_total{path=\"ucx\",result=\"ok\"}"), 2);
  EXPECT_EQ(ValueOf(text, "fetched_units_total{path=\"ucx\",result=\"missing\"}"), 1);
  EXPECT_EQ(ValueOf(text, "fetched_units_total{path=\"ucx\",result=\"late\"}"), 3);
  EXPECT_EQ(ValueOf(text, "fetched_units_total{path=\"ucx\",result=\"failed\"}"), 3);
  EXPECT_EQ(ValueOf(text, "fetched_bytes_total{path=\"ucx\"}"), 900);
  EXPECT_EQ(ValueOf(text, "verified_units_total{path=\"ucx\"}"), 2);
  EXPECT_EQ(ValueOf(text, "verify_failures_total{path=\"ucx\",reason=\"generation\"}"), 1);
  EXPECT_EQ(ValueOf(text, "verify_failures_total{path=\"ucx\",reason=\"incarnation\"}"), 3);
}

// A real step over a fake pool that damages one page and has lost another: the counters say exactly
// what its results said, and a scrape beside it sees nothing that falls.
TEST_F(ClientMetricsTest, StepsAreCountedAsTheirResultsSay) {
  constexpr int kPages = 40;
  constexpr int kTokens = 6;
  StepOptions options{.budget = 9};
  options.verify = VerifyPolicy::kChecksum;
  options.loss = LossPolicy::kGoOn;
  const KvGeometry g = testing::SmallGeometry();
  testing::FakeSequence sequence(
      testing::SequenceData::Random(
          g, int64_t{kPages + testing::FakeSequence::kSpareCapacity} * g.page_tokens, 1),
      kPages, options);
  const ScanModel no_model = {1e-6, 1e9, 1e9, 1e9};
  auto step = *DecodeStep::Plan(sequence.pages.get(), options, &no_model);
  metrics_.Add({&step->totals(), &step->fetch_totals(), options.loss, 1, 1});
  for (uint32_t slot = 0; slot < kPages; ++slot) {
    if (slot % 4 == 0) sequence.fetchers[0]->corrupt_slots.insert(slot);
    if (slot % 4 == 1) sequence.fetchers[0]->missing_slots.insert(slot);
  }
  std::atomic<bool> stop{false};
  std::thread scraper([&] {
    double last = 0;
    while (!stop) {
      const double now = ValueOf(Text(), "selected_pages_total");
      EXPECT_GE(now, last);
      last = now;
    }
  });
  UnitCounts units;
  std::vector<float> o(static_cast<size_t>(g.num_q_heads * g.head_dim));
  std::vector<float> lse(static_cast<size_t>(g.num_q_heads));
  for (int t = 0; t < kTokens; ++t) {
    if (t == 2) {
      sequence.fetchers[0]->corrupt_slots.clear();
      sequence.fetchers[0]->missing_slots.clear();
    }
    const int64_t token = sequence.pages->num_tokens();
    const auto q = testing::RandomKv(int64_t{g.num_q_heads} * g.head_dim, g.dtype, 2,
                                     static_cast<uint64_t>(100 + t));
    for (int layer = 0; layer < g.num_layers; ++layer) {
      const auto k = sequence.data.Rows(sequence.data.keys, layer, token);
      const auto v = sequence.data.Rows(sequence.data.values, layer, token);
      ASSERT_TRUE(step->Run(layer, {q.data(), k.data(), v.data()}, {o.data(), lse.data()}).ok());
      const UnitCounts& counts = step->result().units;
      units.hits += counts.hits;
      units.misses += counts.misses;
      units.verified += counts.verified;
      units.missing += counts.missing;
      units.checksum_failures += counts.checksum_failures;
    }
  }
  stop = true;
  scraper.join();
  EXPECT_GT(units.missing, 0);
  EXPECT_GT(units.checksum_failures, 0);
  EXPECT_GT(units.verified, 0);
  const std::string text = Text();
  const auto value = [&text](const std::string& series) {
    return static_cast<int64_t>(ValueOf(text, series));
  };
  EXPECT_EQ(value("page_cache_lookups_total{result=\"hit\"}"), units.hits);
  EXPECT_EQ(value("page_cache_lookups_total{result=\"miss\"}"), units.misses);
  EXPECT_EQ(value("selected_pages_total"), units.hits + units.misses);
  EXPECT_EQ(value("considered_pages_total"), kTokens * g.num_layers * g.num_kv_heads * kPages);
  EXPECT_EQ(value("verified_units_total{path=\"shared\"}"), units.verified);
  EXPECT_EQ(value("fetched_units_total{path=\"shared\",result=\"missing\"}"), units.missing);
  EXPECT_EQ(value("verify_failures_total{path=\"shared\",reason=\"checksum\"}"),
            units.checksum_failures);
  EXPECT_EQ(value("rows_total{kind=\"sparse\"}"), kTokens);
  EXPECT_EQ(value("step_seconds_count{stage=\"attend\",mode=\"host\"}"), kTokens);
  EXPECT_EQ(value("loss_actions_total{policy=\"go_on\"}"), kTokens);
  EXPECT_EQ(value("lost_mass_ratio_count{policy=\"go_on\"}"), kTokens);
  EXPECT_GT(ValueOf(text, "lost_mass_ratio_sum{policy=\"go_on\"}"), 0);
  EXPECT_GT(value("fetch_seconds_count{path=\"shared\"}"), 0);
  EXPECT_EQ(value("fetch_seconds_count{path=\"ucx\"}"), 0);
}

}  // namespace
}  // namespace kvd
