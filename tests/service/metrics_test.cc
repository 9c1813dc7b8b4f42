#include "service/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "tests/service/http_get.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() {
    identity_.version = "9.9";
    identity_.commit = "abc";
    identity_.ucx = "none";
  }
  std::string Scrape() const { return MetricsPage(metrics_, identity_, snapshot_); }

  Metrics metrics_;
  MetricsIdentity identity_;
  MetricsSnapshot snapshot_;
};

TEST_F(MetricsTest, FiguresAppearUnderTheirNamesAndLabels) {
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
  EXPECT_THAT(text, HasSubstr("locks_kvd_build_info{version=\"9.9\",commit=\"abc\""));
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

TEST_F(MetricsTest, TenantLabelsAreBounded) {
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

// Names of the table, and names of the live answer with _bucket, _sum and _count taken off.
TEST_F(MetricsTest, EveryFamilyOfTheTableIsShownAndNoOther) {
  MetricsSnapshot::ArenaFigures arena;
  arena.tenant = "acme";
  arena.model = "m";
  const LatencyHistogram stalls;
  snapshot_.arenas = {arena};
  snapshot_.ucx_stalls = &stalls;
  snapshot_.cert_expiry_seconds = {{"server.pem", 2e9}};
  std::set<std::string> expected;
  for (const MetricInfo& info : DaemonMetrics()) {
    EXPECT_TRUE(expected.insert(std::string(kDaemonPrefix) + info.name).second) << info.name;
  }
  std::set<std::string> shown;
  for (const absl::string_view line : absl::StrSplit(Scrape(), '\n')) {
    if (absl::StartsWith(line, "# TYPE ")) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      shown.insert(words[2]);
    }
  }
  EXPECT_EQ(shown, expected);
}

TEST_F(MetricsTest, FiguresOfArenasAddUp) {
  MetricsSnapshot::ArenaFigures arena;
  arena.tenant = "acme";
  arena.model = "m";
  arena.num_slots = 10;
  arena.slot_bytes = 1000;
  arena.summary_bytes = 10;
  arena.stats.slots_sealed = 3;
  arena.stats.slots_reserved = 1;
  arena.stats.slots_leased = 2;
  arena.stats.reserved_refused = 7;
  arena.stats.evictions_refused = 5;
  arena.stats.quarantined_slots = 4;
  arena.stats.reserved_expired = 1;
  arena.stats.leased_age_counts[2] = 6;  // up to a second
  arena.stats.leased_age_seconds = 3.5;
  snapshot_.arenas = {arena, arena};
  const std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("locks_kvd_arena_capacity_bytes{arena=\"acme/m\",memory=\"host\","
                              "kind=\"page\"} 10000\n"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_leased_bytes{role=\"client\"} 4040\n"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_tenant_used_bytes{tenant=\"acme\"} 8080\n"));
  EXPECT_THAT(text,
              HasSubstr("locks_kvd_tenant_rejects_total{tenant=\"acme\",reason=\"full\"} 10\n"));
  EXPECT_THAT(text,
              HasSubstr("locks_kvd_tenant_rejects_total{tenant=\"acme\",reason=\"limit\"} 4\n"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_quarantined_slots_total{reason=\"session_lost\"} 6\n"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_quarantined_slots_total{reason=\"expired\"} 2\n"));
  EXPECT_THAT(text,
              HasSubstr("locks_kvd_leased_age_seconds_bucket{role=\"client\",le=\"0.1\"} 0\n"));
  EXPECT_THAT(text,
              HasSubstr("locks_kvd_leased_age_seconds_bucket{role=\"client\",le=\"1\"} 12\n"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_leased_age_seconds_sum{role=\"client\"} 7\n"));
}

TEST_F(MetricsTest, APoolsFiguresAreShownAndOfADaemonAloneTheyAreZero) {
  metrics_.moves
      .pages[static_cast<size_t>(Carrier::kUcx)][static_cast<size_t>(MoveReason::kReplica)]
      .Add(5);
  EXPECT_THAT(Scrape(), HasSubstr("locks_kvd_members{state=\"listed\"} 0\n"));
  snapshot_.membership = MembershipFigures{4, 1, absl::Seconds(90)};
  snapshot_.members = 3;
  const std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("locks_kvd_members{state=\"listed\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_membership_updates_total{result=\"refused\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("locks_kvd_membership_age_seconds 90\n"));
  EXPECT_THAT(text,
              HasSubstr("locks_kvd_moved_pages_total{reason=\"replica\",carrier=\"ucx\"} 5\n"));
}

TEST_F(MetricsTest, SummaryIsForPeople) {
  MetricsSnapshot::ArenaFigures arena;
  arena.tenant = "acme";
  arena.model = "m";
  arena.stats.slots_sealed = 7;
  snapshot_.arenas = {arena};
  metrics_.fetch.requests[0].Add(100);
  for (int i = 0; i < 100; ++i)
    metrics_.fetch.seconds[kLe1M].Observe(absl::Microseconds(i == 0 ? 900 : 140));
  const std::string text = SummaryPage(metrics_, identity_, snapshot_);
  EXPECT_THAT(text, HasSubstr("locks-kvd 9.9"));
  EXPECT_THAT(text, HasSubstr("arena acme/m"));
  EXPECT_THAT(text, HasSubstr("7 sealed"));
  EXPECT_THAT(text, HasSubstr("100 good"));
  EXPECT_THAT(text, HasSubstr("p50 <= 0.15 ms, p99 <= 0.15 ms, p99.9 <= 1 ms"));
}

// One test for all of HTTP: the server takes 2 s to stop.
TEST_F(MetricsTest, ServerAnswersItsThreePathsAndNothingElse) {
  auto server =
      MetricsServer::Make("127.0.0.1:0", &metrics_, identity_, [this] { return snapshot_; });
  ASSERT_TRUE(server.ok()) << server.status();
  const auto get = [&](const std::string& path) {
    return testing::HttpGet((*server)->port(), path);
  };
  EXPECT_THAT(get("/metrics"), HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_TRUE(absl::EndsWith(get("/metrics"), "\r\n\r\n" + Scrape()));
  EXPECT_TRUE(absl::EndsWith(get("/metrics/summary"),
                             "\r\n\r\n" + SummaryPage(metrics_, identity_, snapshot_)));
  EXPECT_THAT(get("/healthz"), HasSubstr("HTTP/1.1 200 OK"));
  snapshot_.draining = true;
  EXPECT_THAT(get("/healthz"), HasSubstr("draining"));
  snapshot_.live = false;
  EXPECT_THAT(get("/healthz"), HasSubstr("HTTP/1.1 503"));
  for (const char* path : {"/", "/metrics/../etc/passwd", "/etc/passwd", "/debug/state",
                           "/healthz/x", "/metrics/x", "/metricsx"}) {
    EXPECT_THAT(get(path), HasSubstr(" 404 ")) << path;
  }
  const auto second = MetricsServer::Make("127.0.0.1:" + std::to_string((*server)->port()),
                                          &metrics_, {}, [] { return MetricsSnapshot(); });
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), HasSubstr("metrics_address"));
}

}  // namespace
}  // namespace kvd
