#include "proto/metrics_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace kvd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr MetricInfo kTable[] = {
    {"pages_total", MetricType::kCounter, "path=shared|ucx, result", "Pages."},
    {"level", MetricType::kGauge, "", "A level."},
    {"wait_seconds", MetricType::kHistogram, "path", "A wait."},
};

TEST(MetricsTextTest, LatencyFallsIntoTheFirstBucketThatHoldsIt) {
  LatencyHistogram histogram;
  histogram.Observe(absl::Nanoseconds(500));
  histogram.Observe(absl::Microseconds(1));  // bounds are inclusive
  histogram.Observe(absl::Nanoseconds(1001));
  histogram.Observe(absl::Seconds(2));
  histogram.Observe(absl::Nanoseconds(-5));  // a clock that was read on two cores
  const LatencyCounts counts = histogram.counts();
  EXPECT_EQ(counts[0], 3u);
  EXPECT_EQ(counts[1], 1u);
  EXPECT_EQ(counts.back(), 1u);
  EXPECT_NEAR(histogram.sum_seconds(), 2.000002501, 1e-12);
}

TEST(MetricsTextTest, EveryBoundIsInItsOwnBucketAndOneNanosecondMoreInTheNext) {
  for (size_t i = 0; i < kLatencyBounds.size(); ++i) {
    const auto ns = static_cast<int64_t>(kLatencyBounds[i] * 1e9 + 0.5);
    EXPECT_EQ(LatencyBucket(ns), i);
    EXPECT_EQ(LatencyBucket(ns + 1), i + 1);
  }
}

TEST(MetricsTextTest, NoEventIsLostBetweenThreads) {
  LatencyHistogram histogram;
  Counter counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 10000; ++n) {
        histogram.Observe(absl::Microseconds(3));
        counter.Add(2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter.value(), 80000u);
  EXPECT_EQ(histogram.counts()[2], 40000u);
}

TEST(MetricsTextTest, FamiliesAreWrittenInTheOrderOfTheTable) {
  MetricsText text("x_", kTable);
  text.Level("level", {}, 0.25);
  text.Count("pages_total", {"shared", "ok"}, 1);
  text.Count("pages_total", {"ucx", "late"}, 123456789012345u);
  EXPECT_EQ(text.Text(),
            "# HELP x_pages_total Pages.\n"
            "# TYPE x_pages_total counter\n"
            "x_pages_total{path=\"shared\",result=\"ok\"} 1\n"
            "x_pages_total{path=\"ucx\",result=\"late\"} 123456789012345\n"
            "# HELP x_level A level.\n"
            "# TYPE x_level gauge\n"
            "x_level 0.25\n");
}

TEST(MetricsTextTest, HistogramsAreCumulativeAndEndWithInfinity) {
  MetricsText text("x_", kTable);
  const double bounds[] = {0.5, 1e-06 * 1e6};
  const uint64_t counts[] = {3, 0, 2};
  text.Histogram("wait_seconds", {"ucx"}, bounds, counts, 4.5);
  EXPECT_THAT(text.Text(), HasSubstr("x_wait_seconds_count{path=\"ucx\"} 5\n"
                                     "x_wait_seconds_sum{path=\"ucx\"} 4.5\n"
                                     "x_wait_seconds_bucket{path=\"ucx\",le=\"0.5\"} 3\n"
                                     "x_wait_seconds_bucket{path=\"ucx\",le=\"1\"} 3\n"
                                     "x_wait_seconds_bucket{path=\"ucx\",le=\"+Inf\"} 5\n"));
}

TEST(MetricsTextTest, ValuesOfLabelsAreEscaped) {
  MetricsText text("x_", kTable);
  text.Count("pages_total", {"a\"b\\c\nd", ""}, 0);
  EXPECT_THAT(text.Text(), HasSubstr("{path=\"a\\\"b\\\\c\\nd\",result=\"\"} 0\n"));
}

TEST(MetricsTextTest, BytesStayWholeNumbers) {
  MetricsText text("x_", kTable);
  text.Level("level", {}, 549755813888.0);
  EXPECT_THAT(text.Text(), HasSubstr("x_level 549755813888\n"));
}

TEST(MetricsTextTest, MarkdownShowsEveryFamilyAndNoBareBar) {
  const std::string page = MetricsMarkdown("x_", kTable);
  EXPECT_THAT(page, StartsWith("| name | type | labels | what |\n|---|---|---|---|\n"));
  EXPECT_THAT(page,
              HasSubstr("| `x_pages_total` | counter | path: shared, ucx; result | Pages. |\n"));
  EXPECT_THAT(page, Not(HasSubstr("shared|ucx")));
}

TEST(MetricsTextDeathTest, WhatIsNotInTheTableIsABug) {
  MetricsText text("x_", kTable);
  EXPECT_DEATH(text.Count("other_total", {}, 1), "");
  EXPECT_DEATH(text.Level("pages_total", {"shared", "ok"}, 1), "");
  EXPECT_DEATH(text.Count("pages_total", {"shared"}, 1), "");
}

}  // namespace
}  // namespace kvd
