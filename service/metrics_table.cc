// The daemon's metrics: the table of families, and how each is filled when somebody asks.

#include <algorithm>
#include <map>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "service/metrics.h"

namespace kvd {
namespace {

constexpr auto kCounter = MetricType::kCounter;
constexpr auto kGauge = MetricType::kGauge;
constexpr auto kHistogram = MetricType::kHistogram;

// In the order of deploy/docs/metrics.md.
constexpr MetricInfo kTable[] = {
    {"build_info", kGauge, "version, commit, cuda, ucx, layout", "What runs; always 1."},
    {"incarnation_info", kGauge, "incarnation", "Incarnation of the process; always 1."},
    {"start_time_seconds", kGauge, "", "Start of the process, since 1970."},
    {"draining", kGauge, "", "1 while the daemon drains."},
    {"arena_capacity_bytes", kGauge, "arena, memory=host, kind=page|summary",
     "Memory of an arena's slots."},
    {"arena_used_bytes", kGauge, "arena, memory=host, kind=page|summary",
     "Memory of sealed and reserved slots."},
    {"slots", kGauge, "arena, state=free|reserved|sealed|quarantined",
     "Slots by state, the canary's not counted."},
    {"match_pages_total", kCounter, "result=hit|miss", "Pages that Match was asked for."},
    {"match_seconds", kHistogram, "result=hit|miss", "Time of a Match; hit: it found a page."},
    {"reserved_pages_total", kCounter, "result=new|hit|refused|expired",
     "Pages that writers asked to reserve; expired: given up, because nothing more came."},
    {"sealed_pages_total", kCounter, "result=new|refused", "Seals of pages."},
    {"ingest_bytes_total", kCounter, "result=new|refused", "Bytes of units that writers sent."},
    {"seal_seconds", kHistogram, "", "From a page's last unit to the page being visible."},
    {"summarize_seconds", kHistogram, "", "Time to build a page's records."},
    {"sealed_never_matched_pages_total", kCounter, "", "Evicted pages that no Match had found."},
    {"fetch_requests_total", kCounter, "path=ucx, status", "Fetch lists that came to an end."},
    {"fetch_units_total", kCounter, "path=ucx, status=OK|NOT_FOUND",
     "Units and records asked for in good lists."},
    {"fetch_bytes_total", kCounter, "path=ucx, status=OK", "Bytes sent."},
    {"fetch_seconds", kHistogram, "path=ucx, size=le64K|le1M|le16M|more",
     "From a list's arrival until its last piece had left."},
    {"fetch_queue_seconds", kHistogram, "path=ucx, size=le64K|le1M|le16M|more",
     "From a list's arrival until its first unit was copied."},
    {"fetch_inflight", kGauge, "path=ucx", "Lists that are queued or being answered."},
    {"stale_rejects_total", kCounter, "reason=generation|incarnation|lease|layout|tenant",
     "What came from the past and was refused: calls, and units of lists over ucx."},
    {"checksum_checks_total", kCounter, "where=verify",
     "Units and records compared with their checksums."},
    {"checksum_failures_total", kCounter, "where=verify",
     "Units and records that did not match their checksums."},
    {"sessions", kGauge, "role=client", "Live sessions."},
    {"leases", kGauge, "role=client", "Leases of all sessions."},
    {"leased_bytes", kGauge, "role=client", "Memory of leased slots."},
    {"leased_age_seconds", kHistogram, "role=client",
     "How long a page was leased, from its first lease until its last one ended."},
    {"lease_reclaims_total", kCounter, "reason=session_lost|released", "Leases that ended."},
    {"quarantined_slots_total", kCounter, "reason=session_lost|expired",
     "Slots that went into quarantine, because their writer was lost or stopped sending."},
    {"evicted_pages_total", kCounter, "reason=room", "Pages evicted."},
    {"evict_refused_total", kCounter, "",
     "Evictions that found everything leased, reserved or in quarantine."},
    {"evictor_runs_total", kCounter, "result=idle|freed", "Runs of the evictor."},
    {"tenant_used_bytes", kGauge, "tenant", "Memory of a tenant's sealed and reserved slots."},
    {"tenant_quota_bytes", kGauge, "tenant", "Memory of a tenant's arenas."},
    {"tenant_rejects_total", kCounter, "tenant, reason=full|limit",
     "Pages that a tenant could not reserve: its arena is full, or a session met a limit."},
    {"rpc_requests_total", kCounter, "method, code", "Control calls answered."},
    {"rpc_seconds", kHistogram, "method", "Time of a control call."},
    {"auth_failures_total", kCounter, "reason=no_identity|role|tenant", "Callers turned away."},
    {"malformed_messages_total", kCounter, "surface=grpc|am|uds",
     "Messages that no correct client sends."},
    {"limit_rejects_total", kCounter, "limit=keys|leases|full|sessions|fetch",
     "Requests over a cap."},
    {"cert_expiry_timestamp_seconds", kGauge, "cert",
     "When a certificate file expires, since 1970; with TLS only."},
    {"members", kGauge, "state=listed",
     "Members of the pool in the view in force; 0 of a daemon alone."},
    {"membership_updates_total", kCounter, "result=accepted|refused",
     "Answers of the source of members: those that became a view, and bad ones."},
    {"membership_age_seconds", kGauge, "",
     "Time since the last good answer, 0 of a static list or a daemon alone."},
    {"moved_pages_total", kCounter, "reason=drain|rebalance|replica, carrier=ucx|nccl",
     "Pages that this daemon copied to others."},
    {"moved_bytes_total", kCounter, "reason=drain|rebalance|replica, carrier=ucx|nccl",
     "Bytes of those pages and their records."},
    {"moves_aborted_total", kCounter, "reason=drain|rebalance|replica, carrier=ucx|nccl",
     "Rounds of copies that another daemon ended; of nccl: moves that failed and that ucx went on "
     "with."},
    {"loop_stall_seconds", kHistogram, "loop=ucx|upkeep",
     "How long a loop was away: turns of the ucx thread over 1 ms, lateness of the upkeep's."},
};

constexpr const char* kRpcNames[kNumRpcs] = {
    "Attach", "Session", "Detach", "Match",  "Reserve", "Seal",  "Lease",   "Release",
    "Stats",  "Move",    "Drain",  "Config", "Verify",  "Pages", "Slowlog", "LogLevel"};
constexpr const char* kMoveNames[kNumMoveReasons] = {"drain", "rebalance", "replica"};
constexpr const char* kCarrierNames[kNumCarriers] = {"ucx", "nccl"};
constexpr const char* kSizeNames[kNumFetchSizes] = {"le64K", "le1M", "le16M", "more"};
constexpr const char* kStaleNames[kNumStaleReasons] = {"generation", "incarnation", "lease",
                                                       "layout", "tenant"};
constexpr const char* kAuthNames[kNumAuthFailures] = {"no_identity", "role", "tenant"};
constexpr const char* kLimitNames[kNumLimits] = {"keys", "leases", "full", "sessions"};
// Canonical names of the outcomes of a list, in the order of WireStatus.
constexpr const char* kWireNames[kNumWireStatuses] = {
    "OK", "INVALID_ARGUMENT", "ABORTED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"};
// Tenants that have a label of their own; the rest is "other".
constexpr size_t kMaxTenantLabels = 64;

void AddIdentity(const MetricsIdentity& identity, const MetricsSnapshot& snapshot,
                 MetricsText* out) {
  const std::string incarnation = absl::BytesToHexString(absl::string_view(
      reinterpret_cast<const char*>(identity.incarnation.data()), identity.incarnation.size()));
  const std::string layout = absl::StrCat(identity.layout_version);
  out->Level("build_info", {identity.version, identity.commit, "none", identity.ucx, layout}, 1);
  out->Level("incarnation_info", {incarnation}, 1);
  out->Level("start_time_seconds", {}, identity.start_time_seconds);
  out->Level("draining", {}, snapshot.draining ? 1 : 0);
  for (const auto& [file, seconds] : snapshot.cert_expiry_seconds)
    out->Level("cert_expiry_timestamp_seconds", {file}, seconds);
}

uint64_t UsedSlots(const MetricsSnapshot::ArenaFigures& a) {
  return a.stats.slots_sealed + a.stats.slots_reserved;
}

void AddArena(const MetricsSnapshot::ArenaFigures& a, MetricsText* out) {
  const std::string arena = absl::StrCat(a.tenant, "/", a.model);
  const auto memory = [&](const char* kind, uint64_t bytes_per_slot) {
    out->Level("arena_capacity_bytes", {arena, "host", kind},
               static_cast<double>(a.num_slots * bytes_per_slot));
    out->Level("arena_used_bytes", {arena, "host", kind},
               static_cast<double>(UsedSlots(a) * bytes_per_slot));
  };
  memory("page", a.slot_bytes);
  memory("summary", a.summary_bytes);
  out->Level("slots", {arena, "free"}, a.stats.slots_free);
  out->Level("slots", {arena, "reserved"}, a.stats.slots_reserved);
  out->Level("slots", {arena, "sealed"}, a.stats.slots_sealed);
  out->Level("slots", {arena, "quarantined"}, a.stats.slots_quarantined);
}

// Figures of one kind over all arenas.
template <typename Field>
uint64_t Sum(const MetricsSnapshot& snapshot, Field ArenaStats::*field) {
  uint64_t total = 0;
  for (const auto& arena : snapshot.arenas) total += arena.stats.*field;
  return total;
}

// Counters of pages and leases have no arena label: the sum over arenas.
void AddPages(const MetricsSnapshot& s, MetricsText* out) {
  out->Count("match_pages_total", {"hit"}, Sum(s, &ArenaStats::matched_pages));
  out->Count("match_pages_total", {"miss"}, Sum(s, &ArenaStats::unmatched_pages));
  out->Count("reserved_pages_total", {"new"}, Sum(s, &ArenaStats::reserved_new));
  out->Count("reserved_pages_total", {"hit"}, Sum(s, &ArenaStats::reserved_hit));
  out->Count("reserved_pages_total", {"refused"}, Sum(s, &ArenaStats::reserved_refused));
  out->Count("reserved_pages_total", {"expired"}, Sum(s, &ArenaStats::reserved_expired));
  out->Count("sealed_pages_total", {"new"}, Sum(s, &ArenaStats::sealed_pages));
  out->Count("sealed_pages_total", {"refused"}, Sum(s, &ArenaStats::seals_refused));
  out->Count("sealed_never_matched_pages_total", {}, Sum(s, &ArenaStats::sealed_never_matched));
  const uint64_t evicted = Sum(s, &ArenaStats::evicted_pages);
  const uint64_t refused = Sum(s, &ArenaStats::evictions_refused);
  out->Count("evicted_pages_total", {"room"}, evicted);
  out->Count("evict_refused_total", {}, refused);
  out->Count("evictor_runs_total", {"freed"}, evicted);
  out->Count("evictor_runs_total", {"idle"}, refused);
}

void AddLeases(const MetricsSnapshot& s, MetricsText* out) {
  out->Level("sessions", {"client"}, static_cast<double>(s.sessions));
  out->Level("leases", {"client"}, static_cast<double>(Sum(s, &ArenaStats::leases)));
  uint64_t leased_bytes = 0;
  std::array<uint64_t, kLeasedAgeBounds.size() + 1> ages = {};
  double age_seconds = 0;
  for (const auto& a : s.arenas) {
    leased_bytes += a.stats.slots_leased * (a.slot_bytes + a.summary_bytes);
    for (size_t i = 0; i < ages.size(); ++i) ages[i] += a.stats.leased_age_counts[i];
    age_seconds += a.stats.leased_age_seconds;
  }
  out->Level("leased_bytes", {"client"}, static_cast<double>(leased_bytes));
  out->Histogram("leased_age_seconds", {"client"}, kLeasedAgeBounds, ages, age_seconds);
  out->Count("lease_reclaims_total", {"session_lost"}, Sum(s, &ArenaStats::leases_lost));
  out->Count("lease_reclaims_total", {"released"}, Sum(s, &ArenaStats::leases_released));
  // Every reservation that expires goes into quarantine; the others are of lost sessions.
  const uint64_t quarantined = Sum(s, &ArenaStats::quarantined_slots);
  const uint64_t expired = std::min(quarantined, Sum(s, &ArenaStats::reserved_expired));
  out->Count("quarantined_slots_total", {"session_lost"}, quarantined - expired);
  out->Count("quarantined_slots_total", {"expired"}, expired);
}

void AddTenants(const MetricsSnapshot& snapshot, MetricsText* out) {
  struct Tenant {
    uint64_t used = 0, quota = 0, full = 0, limit = 0;
  };
  std::map<std::string, Tenant> tenants;
  for (const auto& a : snapshot.arenas) {
    const bool named = tenants.contains(a.tenant) || tenants.size() < kMaxTenantLabels;
    Tenant& tenant = tenants[named ? a.tenant : "other"];
    tenant.used += UsedSlots(a) * (a.slot_bytes + a.summary_bytes);
    tenant.quota += a.num_slots * (a.slot_bytes + a.summary_bytes);
    const uint64_t full = std::min(a.stats.evictions_refused, a.stats.reserved_refused);
    tenant.full += full;
    tenant.limit += a.stats.reserved_refused - full;
  }
  for (const auto& [name, tenant] : tenants) {
    out->Level("tenant_used_bytes", {name}, static_cast<double>(tenant.used));
    out->Level("tenant_quota_bytes", {name}, static_cast<double>(tenant.quota));
    out->Count("tenant_rejects_total", {name, "full"}, tenant.full);
    out->Count("tenant_rejects_total", {name, "limit"}, tenant.limit);
  }
}

void AddDataPlane(const FetchCounters& f, const MetricsSnapshot& s, MetricsText* out) {
  for (size_t i = 0; i < kNumWireStatuses; ++i)
    out->Count("fetch_requests_total", {"ucx", kWireNames[i]}, f.requests[i].value());
  out->Count("fetch_units_total", {"ucx", "OK"}, f.units_ok.value());
  out->Count("fetch_units_total", {"ucx", "NOT_FOUND"}, f.units_missing.value());
  out->Count("fetch_bytes_total", {"ucx", "OK"}, f.bytes.value());
  for (size_t i = 0; i < kNumFetchSizes; ++i) {
    out->Latency("fetch_seconds", {"ucx", kSizeNames[i]}, f.seconds[i]);
    out->Latency("fetch_queue_seconds", {"ucx", kSizeNames[i]}, f.queue_seconds[i]);
  }
  out->Level("fetch_inflight", {"ucx"}, static_cast<double>(s.fetch_inflight));
  out->Count("ingest_bytes_total", {"new"}, s.ingest_bytes);
  out->Count("ingest_bytes_total", {"refused"}, s.ingest_refused_bytes);
  out->Count("malformed_messages_total", {"am"}, s.fetch_malformed + s.ingest_malformed);
  out->Count("malformed_messages_total", {"uds"}, s.uds_malformed);
  out->Count("limit_rejects_total", {"fetch"}, s.fetch_refused);
  if (s.ucx_stalls != nullptr) out->Latency("loop_stall_seconds", {"ucx"}, *s.ucx_stalls);
}

void AddPool(const MoveCounters& moves, const MetricsSnapshot& s, MetricsText* out) {
  for (size_t c = 0; c < kNumCarriers; ++c) {
    for (size_t i = 0; i < kNumMoveReasons; ++i) {
      out->Count("moved_pages_total", {kMoveNames[i], kCarrierNames[c]}, moves.pages[c][i].value());
      out->Count("moved_bytes_total", {kMoveNames[i], kCarrierNames[c]}, moves.bytes[c][i].value());
      out->Count("moves_aborted_total", {kMoveNames[i], kCarrierNames[c]},
                 moves.aborted[c][i].value());
    }
  }
  out->Level("members", {"listed"}, static_cast<double>(s.members));
  out->Count("membership_updates_total", {"accepted"}, s.membership.accepted);
  out->Count("membership_updates_total", {"refused"}, s.membership.refused);
  out->Level("membership_age_seconds", {}, absl::ToDoubleSeconds(s.membership.age));
}

void AddControlPlane(const Metrics& m, MetricsText* out) {
  for (size_t rpc = 0; rpc < kNumRpcs; ++rpc) {
    for (size_t code = 0; code < kNumCodes; ++code) {
      const uint64_t count = m.rpc_requests[rpc][code].value();
      if (count == 0 && code != 0) continue;
      out->Count("rpc_requests_total",
                 {kRpcNames[rpc], absl::StatusCodeToString(static_cast<absl::StatusCode>(code))},
                 count);
    }
    out->Latency("rpc_seconds", {kRpcNames[rpc]}, m.rpc_seconds[rpc]);
  }
  for (size_t i = 0; i < kNumAuthFailures; ++i)
    out->Count("auth_failures_total", {kAuthNames[i]}, m.auth_failures[i].value());
  out->Count("malformed_messages_total", {"grpc"}, m.malformed_calls.value());
  for (size_t i = 0; i < kNumLimits; ++i)
    out->Count("limit_rejects_total", {kLimitNames[i]}, m.limit_rejects[i].value());
  for (size_t i = 0; i < kNumStaleReasons; ++i)
    out->Count("stale_rejects_total", {kStaleNames[i]}, m.stale_rejects[i].value());
  out->Count("checksum_checks_total", {"verify"}, m.verify_checks.value());
  out->Count("checksum_failures_total", {"verify"}, m.verify_failures.value());
  out->Latency("match_seconds", {"hit"}, m.match_hit_seconds);
  out->Latency("match_seconds", {"miss"}, m.match_miss_seconds);
  out->Latency("seal_seconds", {}, m.seal_seconds);
  out->Latency("summarize_seconds", {}, m.summarize_seconds);
  out->Latency("loop_stall_seconds", {"upkeep"}, m.upkeep_stalls);
}

}  // namespace

std::span<const MetricInfo> DaemonMetrics() { return kTable; }

std::string MetricsPage(const Metrics& metrics, const MetricsIdentity& identity,
                        const MetricsSnapshot& snapshot) {
  MetricsText out(kDaemonPrefix, kTable);
  AddIdentity(identity, snapshot, &out);
  for (const auto& arena : snapshot.arenas) AddArena(arena, &out);
  AddPages(snapshot, &out);
  AddLeases(snapshot, &out);
  AddTenants(snapshot, &out);
  AddDataPlane(metrics.fetch, snapshot, &out);
  AddPool(metrics.moves, snapshot, &out);
  AddControlPlane(metrics, &out);
  return out.Text();
}

}  // namespace kvd
