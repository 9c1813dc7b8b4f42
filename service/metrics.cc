#include "service/metrics.h"

#include <CivetServer.h>

#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvd {
namespace {

// Upper bound of the bucket that holds the fraction `q` of all events, for people: "<= 2 ms".
std::string Quantile(const LatencyCounts& counts, double q) {
  uint64_t total = 0;
  for (const uint64_t n : counts) total += n;
  if (total == 0) return "-";
  uint64_t seen = 0;
  for (size_t i = 0; i < kLatencyBounds.size(); ++i) {
    seen += counts[i];
    if (static_cast<double>(seen) >= q * static_cast<double>(total))
      return absl::StrFormat("<= %g ms", kLatencyBounds[i] * 1e3);
  }
  return absl::StrFormat("> %g ms", kLatencyBounds.back() * 1e3);
}

std::string MiB(uint64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

class Pages {
 public:
  Pages(const Metrics* metrics, MetricsIdentity identity, std::function<MetricsSnapshot()> snapshot)
      : metrics_(metrics), identity_(std::move(identity)), snapshot_(std::move(snapshot)) {}
  std::pair<int, std::string> Metrics() const {
    return {200, MetricsPage(*metrics_, identity_, snapshot_())};
  }
  std::pair<int, std::string> Summary() const {
    return {200, SummaryPage(*metrics_, identity_, snapshot_())};
  }
  std::pair<int, std::string> Healthz() const {
    const MetricsSnapshot snapshot = snapshot_();
    if (!snapshot.live) return {503, "the upkeep loop does not turn\n"};
    return {200, snapshot.draining ? "draining\n" : "ok\n"};
  }

 private:
  const kvd::Metrics* const metrics_;
  const MetricsIdentity identity_;
  const std::function<MetricsSnapshot()> snapshot_;
};

class Handler final : public CivetHandler {
 public:
  using Page = std::pair<int, std::string> (Pages::*)() const;
  Handler(const Pages* pages, const char* path, Page page, const char* content_type)
      : pages_(pages), path_(path), page_(page), content_type_(content_type) {}
  const char* path() const { return path_; }
  bool handleGet(CivetServer*, mg_connection* connection) override {
    // civetweb hands over what is below the path too.
    if (absl::string_view(mg_get_request_info(connection)->local_uri) != path_) return false;
    const auto [code, text] = (pages_->*page_)();
    const std::string answer = absl::StrCat(
        "HTTP/1.1 ", code, code == 200 ? " OK" : " Service Unavailable",
        "\r\nContent-Type: ", content_type_, "\r\nContent-Length: ", text.size(), "\r\n\r\n", text);
    mg_write(connection, answer.data(), answer.size());
    return true;
  }

 private:
  const Pages* const pages_;
  const char* const path_;
  const Page page_;
  const char* const content_type_;
};

constexpr char kPrometheusType[] = "text/plain; version=0.0.4; charset=utf-8";
constexpr char kTextType[] = "text/plain; charset=utf-8";

}  // namespace

std::string SummaryPage(const Metrics& metrics, const MetricsIdentity& identity,
                        const MetricsSnapshot& snapshot) {
  std::string out =
      absl::StrFormat("locks-kvd %s, layout %u, ucx %s%s\n", identity.version,
                      identity.layout_version, identity.ucx, snapshot.draining ? ", draining" : "");
  absl::StrAppend(&out, "sessions ", snapshot.sessions, ", fetches in flight ",
                  snapshot.fetch_inflight, "\n");
  for (const auto& a : snapshot.arenas) {
    const ArenaStats& s = a.stats;
    absl::StrAppendFormat(
        &out,
        "arena %s/%s: %s; slots %u: %u free, %u reserved, %u sealed, %u quarantined; %u leased by "
        "%u leases; pages matched %u, not found %u, sealed %u, evicted %u, refused %u\n",
        a.tenant, a.model, MiB(a.num_slots * (a.slot_bytes + a.summary_bytes)), a.num_slots,
        s.slots_free, s.slots_reserved, s.slots_sealed, s.slots_quarantined, s.slots_leased,
        s.leases, s.matched_pages, s.unmatched_pages, s.sealed_pages, s.evicted_pages,
        s.reserved_refused);
  }
  LatencyCounts fetches = {};
  for (const LatencyHistogram& size : metrics.fetch.seconds) {
    const LatencyCounts counts = size.counts();
    for (size_t i = 0; i < counts.size(); ++i) fetches[i] += counts[i];
  }
  const uint64_t good = metrics.fetch.requests[0].value();
  uint64_t bad = 0;
  for (size_t i = 1; i < kNumWireStatuses; ++i) bad += metrics.fetch.requests[i].value();
  absl::StrAppendFormat(
      &out,
      "fetches over ucx: %u good, %u not; units %u, missing %u; %s; p50 %s, p99 %s, p99.9 %s\n",
      good, bad, metrics.fetch.units_ok.value(), metrics.fetch.units_missing.value(),
      MiB(metrics.fetch.bytes.value()), Quantile(fetches, 0.5), Quantile(fetches, 0.99),
      Quantile(fetches, 0.999));
  absl::StrAppendFormat(&out, "match p99 %s, seal p99 %s\n",
                        Quantile(metrics.match_hit_seconds.counts(), 0.99),
                        Quantile(metrics.seal_seconds.counts(), 0.99));
  return out;
}

struct MetricsServer::Impl {
  explicit Impl(Pages p) : pages(std::move(p)) {}
  const Pages pages;
  Handler metrics{&pages, "/metrics", &Pages::Metrics, kPrometheusType};
  Handler summary{&pages, "/metrics/summary", &Pages::Summary, kTextType};
  Handler healthz{&pages, "/healthz", &Pages::Healthz, kTextType};
  std::unique_ptr<CivetServer> http;  // ends before what it serves
};

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Make(
    const std::string& address, const Metrics* metrics, MetricsIdentity identity,
    std::function<MetricsSnapshot()> snapshot) {
  auto impl = std::make_unique<Impl>(Pages(metrics, std::move(identity), std::move(snapshot)));
  try {
    impl->http = std::make_unique<CivetServer>(std::vector<std::string>{
        "listening_ports", address, "num_threads", "2", "request_timeout_ms", "5000"});
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(
        "metrics_address ", address, ": cannot listen: ", error.what(), ": is the port taken?"));
  }
  for (Handler* handler : {&impl->metrics, &impl->summary, &impl->healthz})
    impl->http->addHandler(handler->path(), handler);
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;

uint16_t MetricsServer::port() const {
  const std::vector<int> ports = impl_->http->getListeningPorts();
  return ports.empty() ? uint16_t{0} : static_cast<uint16_t>(ports[0]);
}

}  // namespace kvd
