#include "service/metrics.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>

#include <exception>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/address.h"
#include "proto/status.h"

namespace kvd {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr const char* kRpcNames[kNumRpcs] = {"Attach",  "Session", "Detach", "Match",
                                             "Reserve", "Seal",    "Lease",  "Release",
                                             "Stats",   "Drain",   "Config"};
constexpr const char* kSizeNames[kNumFetchSizes] = {"le64K", "le1M", "le16M", "more"};
constexpr const char* kStaleNames[kNumStaleReasons] = {"generation", "incarnation", "layout",
                                                       "tenant"};
constexpr const char* kAuthNames[kNumAuthFailures] = {"no_identity", "role", "tenant"};
constexpr const char* kLimitNames[kNumLimits] = {"keys", "leases", "full", "sessions"};
// Canonical names of the outcomes of a list, in the order of WireStatus.
constexpr const char* kWireNames[kNumWireStatuses] = {
    "OK", "INVALID_ARGUMENT", "ABORTED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"};
// Tenants that have a label of their own; the rest is "other".
constexpr size_t kMaxTenantLabels = 64;

// kLatencyBounds in whole nanoseconds, so that an event on a bound is not lost to rounding.
constexpr std::array<int64_t, kLatencyBounds.size()> kBoundsNs = [] {
  std::array<int64_t, kLatencyBounds.size()> bounds{};
  for (size_t i = 0; i < bounds.size(); ++i)
    bounds[i] = static_cast<int64_t>(kLatencyBounds[i] * 1e9 + 0.5);
  return bounds;
}();

using Labels = std::vector<std::pair<std::string, std::string>>;

// Builds families one series at a time.
class FamilyBuilder {
 public:
  void Value(const char* name, const char* help, MetricType type, Labels labels, double value) {
    ClientMetric metric = MakeMetric(std::move(labels));
    if (type == MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
    Family(name, help, type).metric.push_back(std::move(metric));
  }
  void Count(const char* name, const char* help, Labels labels, uint64_t value) {
    Value(name, help, MetricType::Counter, std::move(labels), static_cast<double>(value));
  }
  void Level(const char* name, const char* help, Labels labels, double value) {
    Value(name, help, MetricType::Gauge, std::move(labels), value);
  }
  void Latency(const char* name, const char* help, Labels labels,
               const LatencyHistogram& histogram) {
    ClientMetric metric = MakeMetric(std::move(labels));
    const auto counts = histogram.counts();
    uint64_t cumulative = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      cumulative += counts[i];
      ClientMetric::Bucket bucket;
      bucket.cumulative_count = cumulative;
      bucket.upper_bound =
          i < kLatencyBounds.size() ? kLatencyBounds[i] : std::numeric_limits<double>::infinity();
      metric.histogram.bucket.push_back(bucket);
    }
    metric.histogram.sample_count = cumulative;
    metric.histogram.sample_sum = histogram.sum_seconds();
    Family(name, help, MetricType::Histogram).metric.push_back(std::move(metric));
  }
  std::vector<MetricFamily> Take() {
    std::vector<MetricFamily> families;
    for (auto& [name, family] : families_) families.push_back(std::move(family));
    return families;
  }

 private:
  static ClientMetric MakeMetric(Labels labels) {
    ClientMetric metric;
    for (auto& [name, value] : labels) {
      ClientMetric::Label label;
      label.name = std::move(name);
      label.value = std::move(value);
      metric.label.push_back(std::move(label));
    }
    return metric;
  }
  MetricFamily& Family(const char* name, const char* help, MetricType type) {
    const std::string full = absl::StrCat("locks_kvd_", name);
    MetricFamily& family = families_[full];
    family.name = full;
    family.help = help;
    family.type = type;
    return family;
  }
  std::map<std::string, MetricFamily> families_;
};

void AddIdentity(const MetricsIdentity& identity, const MetricsSnapshot& snapshot,
                 FamilyBuilder* out) {
  const std::string incarnation = absl::BytesToHexString(absl::string_view(
      reinterpret_cast<const char*>(identity.incarnation.data()), identity.incarnation.size()));
  out->Level("build_info", "What runs.",
             {{"version", identity.version},
              {"ucx", identity.ucx},
              {"cuda", "none"},
              {"layout", absl::StrCat(identity.layout_version)}},
             1);
  out->Level("incarnation_info", "Incarnation of the process.", {{"incarnation", incarnation}}, 1);
  out->Level("start_time_seconds", "Start, since 1970.", {}, identity.start_time_seconds);
  out->Level("draining", "1 while the daemon drains.", {}, snapshot.draining ? 1 : 0);
  out->Level("sessions", "Live sessions.", {{"role", "client"}},
             static_cast<double>(snapshot.sessions));
  for (const auto& [file, seconds] : snapshot.cert_expiry_seconds) {
    out->Level("cert_expiry_timestamp_seconds", "When a certificate expires, since 1970.",
               {{"cert", file}}, seconds);
  }
}

uint64_t UsedSlots(const MetricsSnapshot::ArenaFigures& a) {
  return a.stats.slots_sealed + a.stats.slots_reserved;
}

void AddArena(const MetricsSnapshot::ArenaFigures& a, FamilyBuilder* out) {
  const std::string arena = absl::StrCat(a.tenant, "/", a.model);
  const auto memory = [&](const char* kind, uint64_t bytes_per_slot) {
    const Labels labels = {{"arena", arena}, {"memory", "host"}, {"kind", kind}};
    out->Level("arena_capacity_bytes", "Memory of an arena.", labels,
               static_cast<double>(a.num_slots * bytes_per_slot));
    out->Level("arena_used_bytes", "Memory of sealed and reserved slots.", labels,
               static_cast<double>(UsedSlots(a) * bytes_per_slot));
  };
  memory("page", a.slot_bytes);
  memory("summary", a.summary_bytes);
  const std::pair<const char*, uint32_t> states[] = {{"free", a.stats.slots_free},
                                                     {"reserved", a.stats.slots_reserved},
                                                     {"sealed", a.stats.slots_sealed},
                                                     {"quarantined", a.stats.slots_quarantined}};
  for (const auto& [state, slots] : states) {
    out->Level("slots", "Slots by state, the canary's not counted.",
               {{"arena", arena}, {"state", state}}, slots);
  }
}

// Counters of pages and leases have no arena label: the sum over arenas.
void AddTotals(const MetricsSnapshot& snapshot, FamilyBuilder* out) {
  const auto sum = [&snapshot](auto ArenaStats::*field) {
    uint64_t total = 0;
    for (const auto& arena : snapshot.arenas) total += arena.stats.*field;
    return total;
  };
  const char* match = "Pages asked for by Match.";
  out->Count("match_pages_total", match, {{"result", "hit"}}, sum(&ArenaStats::matched_pages));
  out->Count("match_pages_total", match, {{"result", "miss"}}, sum(&ArenaStats::unmatched_pages));
  const char* reserved = "Pages that writers asked to reserve.";
  out->Count("reserved_pages_total", reserved, {{"result", "new"}}, sum(&ArenaStats::reserved_new));
  out->Count("reserved_pages_total", reserved, {{"result", "hit"}}, sum(&ArenaStats::reserved_hit));
  out->Count("reserved_pages_total", reserved, {{"result", "refused"}},
             sum(&ArenaStats::reserved_refused));
  out->Count("reserved_pages_total", reserved, {{"result", "expired"}},
             sum(&ArenaStats::reserved_expired));
  const char* sealed = "Seals of pages.";
  out->Count("sealed_pages_total", sealed, {{"result", "new"}}, sum(&ArenaStats::sealed_pages));
  out->Count("sealed_pages_total", sealed, {{"result", "refused"}},
             sum(&ArenaStats::seals_refused));
  out->Count("sealed_never_matched_pages_total", "Evicted pages that no Match ever found.", {},
             sum(&ArenaStats::sealed_never_matched));
  const uint64_t evicted = sum(&ArenaStats::evicted_pages);
  const uint64_t refused = sum(&ArenaStats::evictions_refused);
  out->Count("evicted_pages_total", "Pages evicted.", {{"reason", "room"}}, evicted);
  out->Count("evict_refused_total",
             "Evictions that found everything leased, reserved or in quarantine.", {}, refused);
  out->Count("evictor_runs_total", "Runs of the evictor.", {{"result", "freed"}}, evicted);
  out->Count("evictor_runs_total", "Runs of the evictor.", {{"result", "idle"}}, refused);
  out->Level("leases", "Leases of all sessions.", {{"role", "client"}},
             static_cast<double>(sum(&ArenaStats::leases)));
  uint64_t leased_bytes = 0;
  for (const auto& a : snapshot.arenas)
    leased_bytes += a.stats.slots_leased * (a.slot_bytes + a.summary_bytes);
  out->Level("leased_bytes", "Memory of leased slots.", {{"role", "client"}},
             static_cast<double>(leased_bytes));
  const char* ended = "Leases that ended.";
  out->Count("lease_reclaims_total", ended, {{"reason", "session_lost"}},
             sum(&ArenaStats::leases_lost));
  out->Count("lease_reclaims_total", ended, {{"reason", "released"}},
             sum(&ArenaStats::leases_released));
  out->Count("quarantined_slots_total", "Slots that went into quarantine.",
             {{"reason", "session_lost"}}, sum(&ArenaStats::quarantined_slots));
}

void AddTenants(const MetricsSnapshot& snapshot, FamilyBuilder* out) {
  std::map<std::string, std::pair<uint64_t, uint64_t>> tenants;  // used, quota
  for (const auto& a : snapshot.arenas) {
    const bool named = tenants.contains(a.tenant) || tenants.size() < kMaxTenantLabels;
    auto& [used, quota] = tenants[named ? a.tenant : "other"];
    used += UsedSlots(a) * (a.slot_bytes + a.summary_bytes);
    quota += a.num_slots * (a.slot_bytes + a.summary_bytes);
  }
  for (const auto& [tenant, bytes] : tenants) {
    out->Level("tenant_used_bytes", "Memory that a tenant uses.", {{"tenant", tenant}},
               static_cast<double>(bytes.first));
    out->Level("tenant_quota_bytes", "Memory of a tenant's arenas.", {{"tenant", tenant}},
               static_cast<double>(bytes.second));
  }
}

void AddFetch(const FetchCounters& f, FamilyBuilder* out) {
  for (size_t i = 0; i < kNumWireStatuses; ++i) {
    out->Count("fetch_requests_total", "Fetch lists answered.",
               {{"path", "ucx"}, {"status", kWireNames[i]}}, f.requests[i].value());
  }
  const char* units = "Units and records asked for.";
  out->Count("fetch_units_total", units, {{"path", "ucx"}, {"status", "OK"}}, f.units_ok.value());
  out->Count("fetch_units_total", units, {{"path", "ucx"}, {"status", "NOT_FOUND"}},
             f.units_missing.value());
  out->Count("fetch_bytes_total", "Bytes of units and records sent.",
             {{"path", "ucx"}, {"status", "OK"}}, f.bytes.value());
  for (size_t i = 0; i < kNumFetchSizes; ++i) {
    const Labels labels = {{"path", "ucx"}, {"size", kSizeNames[i]}};
    out->Latency("fetch_seconds", "From a list's arrival to its last piece sent.", labels,
                 f.seconds[i]);
    out->Latency("fetch_queue_seconds", "From a list's arrival to its first copied unit.", labels,
                 f.queue_seconds[i]);
  }
}

void AddDataPlane(const MetricsSnapshot& s, FamilyBuilder* out) {
  out->Level("fetch_inflight", "Lists that are being answered.", {{"path", "ucx"}},
             static_cast<double>(s.fetch_inflight));
  out->Count("ingest_bytes_total", "Bytes of units stored.", {{"result", "new"}}, s.ingest_bytes);
  const char* malformed = "Messages that no correct client sends.";
  out->Count("malformed_messages_total", malformed, {{"surface", "am"}},
             s.fetch_malformed + s.ingest_malformed);
  out->Count("malformed_messages_total", malformed, {{"surface", "uds"}}, s.uds_malformed);
  const char* limits = "Requests over a cap.";
  out->Count("limit_rejects_total", limits, {{"limit", "fetch"}}, s.fetch_refused);
}

std::string CodeName(size_t code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

void AddControlPlane(const Metrics& m, FamilyBuilder* out) {
  for (size_t rpc = 0; rpc < kNumRpcs; ++rpc) {
    for (size_t code = 0; code < kNumCodes; ++code) {
      const uint64_t count = m.rpc_requests[rpc][code].value();
      if (count == 0 && code != 0) continue;
      out->Count("rpc_requests_total", "Control calls answered.",
                 {{"method", kRpcNames[rpc]}, {"code", CodeName(code)}}, count);
    }
    out->Latency("rpc_seconds", "Time of a control call.", {{"method", kRpcNames[rpc]}},
                 m.rpc_seconds[rpc]);
  }
  for (size_t i = 0; i < kNumAuthFailures; ++i) {
    out->Count("auth_failures_total", "Callers turned away.", {{"reason", kAuthNames[i]}},
               m.auth_failures[i].value());
  }
  out->Count("malformed_messages_total", "Messages that no correct client sends.",
             {{"surface", "grpc"}}, m.malformed_calls.value());
  for (size_t i = 0; i < kNumLimits; ++i) {
    out->Count("limit_rejects_total", "Requests over a cap.", {{"limit", kLimitNames[i]}},
               m.limit_rejects[i].value());
  }
  for (size_t i = 0; i < kNumStaleReasons; ++i) {
    out->Count("stale_rejects_total", "Requests from the past, refused.",
               {{"reason", kStaleNames[i]}}, m.stale_rejects[i].value());
  }
  out->Latency("match_seconds", "Time of a Match.", {}, m.match_seconds);
  out->Latency("seal_seconds", "From a page's last unit to its being visible.", {}, m.seal_seconds);
  out->Latency("summarize_seconds", "Time to build a page's records.", {}, m.summarize_seconds);
}

class Collector final : public prometheus::Collectable {
 public:
  Collector(const Metrics* metrics, MetricsIdentity identity,
            std::function<MetricsSnapshot()> snapshot)
      : metrics_(metrics), identity_(std::move(identity)), snapshot_(std::move(snapshot)) {}

  std::vector<MetricFamily> Collect() const override {
    const MetricsSnapshot snapshot = snapshot_();
    FamilyBuilder out;
    AddIdentity(identity_, snapshot, &out);
    for (const auto& arena : snapshot.arenas) AddArena(arena, &out);
    AddTotals(snapshot, &out);
    AddTenants(snapshot, &out);
    AddFetch(metrics_->fetch, &out);
    AddDataPlane(snapshot, &out);
    AddControlPlane(*metrics_, &out);
    return out.Take();
  }

 private:
  const Metrics* metrics_;
  const MetricsIdentity identity_;
  const std::function<MetricsSnapshot()> snapshot_;
};

}  // namespace

void LatencyHistogram::Observe(absl::Duration latency) {
  const int64_t ns = absl::ToInt64Nanoseconds(latency);
  size_t bucket = 0;
  while (bucket < kBoundsNs.size() && ns > kBoundsNs[bucket]) ++bucket;
  counts_[bucket].fetch_add(1, std::memory_order_relaxed);
  sum_ns_.fetch_add(static_cast<uint64_t>(ns < 0 ? 0 : ns), std::memory_order_relaxed);
}

std::array<uint64_t, kLatencyBounds.size() + 1> LatencyHistogram::counts() const {
  std::array<uint64_t, kLatencyBounds.size() + 1> counts;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = counts_[i].load(std::memory_order_relaxed);
  return counts;
}

double LatencyHistogram::sum_seconds() const {
  return static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) * 1e-9;
}

struct MetricsServer::Impl {
  std::shared_ptr<Collector> collector;
  std::unique_ptr<prometheus::Exposer> exposer;
};

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Make(
    const std::string& address, const Metrics* metrics, MetricsIdentity identity,
    std::function<MetricsSnapshot()> snapshot) {
  auto impl = std::make_unique<Impl>();
  impl->collector = std::make_shared<Collector>(metrics, std::move(identity), std::move(snapshot));
  try {
    impl->exposer = std::make_unique<prometheus::Exposer>(address, 2);
    impl->exposer->RegisterCollectable(impl->collector);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(
        "metrics_address ", address, ": cannot listen: ", error.what(), ": is the port taken?"));
  }
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;

uint16_t MetricsServer::port() const {
  const std::vector<int> ports = impl_->exposer->GetListeningPorts();
  return ports.empty() ? uint16_t{0} : static_cast<uint16_t>(ports[0]);
}

}  // namespace kvd
