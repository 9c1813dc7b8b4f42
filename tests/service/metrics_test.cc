#include "service/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/service/http_get.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(MetricsTest, LatencyFallsIntoTheFirstBucketThatHoldsIt) {
  LatencyHistogram histogram;
  histogram.Observe(absl::Nanoseconds(500));
  histogram.Observe(absl::Microseconds(1));  // bounds are inclusive
  histogram.Observe(absl::Nanoseconds(1001));
  histogram.Observe(absl::Seconds(2));
  const auto counts = histogram.counts();
  EXPECT_EQ(counts[0], 2u);
  EXPECT_EQ(counts[1], 1u);
  EXPECT_EQ(counts.back(), 1u);
  EXPECT_NEAR(histogram.sum_seconds(), 2.000002501, 1e-12);
}

TEST(MetricsTest, BoundsGrow) {
  for (size_t i = 1; i < kLatencyBounds.size(); ++i)
    EXPECT_LT(kLatencyBounds[i - 1], kLatencyBounds[i]);
}

TEST(MetricsTest, NoEventIsLostBetweenThreads) {
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

class MetricsServerTest : public ::testing::Test {
 protected:
  MetricsServerTest() {
    MetricsIdentity identity;
    identity.version = "9.9";
    identity.ucx = "none";
    auto server =
        MetricsServer::Make("127.0.0.1:0", &metrics_, identity, [this] { return snapshot_; });
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  std::string Scrape() { return testing::HttpGet(server_->port(), "/metrics"); }

  Metrics metrics_;
  MetricsSnapshot snapshot_;
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsServerTest, FiguresAppearUnderTheirNamesAndLabels) {
  metrics_.fetch.requests[static_cast<size_t>(WireStatus::kExhausted)].Add(3);
  metrics_.fetch.seconds[kLe1M].Observe(absl::Microseconds(150));
  metrics_.rpc_requests[static_cast<size_t>(Rpc::kMatch)][10].Add(2);
  MetricsSnapshot::ArenaFigures arena;
  arena.tenant = "acme";
  arena.model = "m";
  arena.stats.slots_sealed = 7;
  arena.stats.matched_pages = 11;
  snapshot_.arenas = {arena};
  snapshot_.draining = true;
  const std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("locks_kvd_build_info{version=\"9.9\""));
  EXPECT_THAT(
      text,
      HasSubstr("locks_kvd_fetch_requests_total{path=\"ucx\",status=\"RESOURCE_EXHAUSTED\"} 3"));
  EXPECT_THAT(
      text,
      HasSubstr("locks_kvd_fetch_seconds_bucket{path=\"ucx\",size=\"le1M\",le=\"0.0001\"} 0"));
  EXPECT_THAT(
      text, HasSubstr("locks_kvd_fetch_seconds_bucket{path=\"ucx\",size=\"le1M\",le=\"+Inf\"} 1"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_rpc_requests_total{method=\"Match\",code=\"ABORTED\"} 2"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_slots{arena=\"acme/m\",state=\"sealed\"} 7"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_match_pages_total{result=\"hit\"} 11"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_draining 1"));
}

TEST_F(MetricsServerTest, TenantLabelsAreBounded) {
  for (int i = 0; i < 200; ++i) {
    MetricsSnapshot::ArenaFigures arena;
    arena.tenant = "t" + std::to_string(i);
    arena.model = "m";
    snapshot_.arenas.push_back(arena);
  }
  const std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("locks_kvd_tenant_used_bytes{tenant=\"t63\"}"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_tenant_used_bytes{tenant=\"other\"}"));
  EXPECT_THAT(text, Not(HasSubstr("locks_kvd_tenant_used_bytes{tenant=\"t64\"}")));
}

TEST_F(MetricsServerTest, TakenPortIsReported) {
  const auto second = MetricsServer::Make("127.0.0.1:" + std::to_string(server_->port()), &metrics_,
                                          {}, [] { return MetricsSnapshot(); });
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), HasSubstr("metrics_address"));
}

}  // namespace
}  // namespace kvd
