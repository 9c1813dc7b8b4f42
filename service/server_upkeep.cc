// Server: what is said of it at the start, what its metrics show, and the threads that watch over
// sessions, arenas and certificates.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/layout.h"
#include "service/config.h"
#include "service/log_setup.h"
#include "service/server_parts.h"
#include "spdlog/spdlog.h"

namespace kvd {
namespace {

// The daemon is not live once its upkeep loop did not tick for this long.
constexpr absl::Duration kLiveLimit = absl::Seconds(10);
constexpr absl::Duration kCertificateCheck = absl::Minutes(1);

std::string KindOf(const MemoryPlace& place) {
  return place.on_gpu() ? absl::StrCat("gpu gpu=", place.gpu) : "host";
}

}  // namespace

void Server::Parts::LogStart() const {
  spdlog::info("start version={} layout={} incarnation={} pid={}", kVersion, kLayoutVersion,
               ready.incarnation(), ready.pid());
  for (const auto& arena : arenas) {
    const ArenaShape& shape = arena->memory().shape();
    spdlog::info(
        "memory arena={}/{} kind={} slots={} slot_bytes={} record_bytes={} slabs={} encoder={}",
        arena->tenant(), arena->model(), KindOf(arena->memory().place()), shape.num_slots - 1,
        shape.slot.slot_bytes(), shape.slot.summary_bytes(), shape.num_slabs(),
        EncoderName(arena->options().encoder));
  }
  for (const std::string& path : Offers().report) spdlog::info("path offer={}", LogQuote(path));
  spdlog::info("serving control={} health={} metrics={} tls={}", ready.control_address(),
               ready.health_address(), ready.metrics_address(), !IsInsecure(config));
  if (IsInsecure(config)) {
    spdlog::warn(
        "insecure control={} meaning=\"callers are not authenticated: any of them may name any "
        "tenant\"",
        ready.control_address());
  }
}

MetricsSnapshot Server::Parts::Snapshot() const {
  MetricsSnapshot snapshot;
  for (const auto& arena : arenas) {
    const ArenaShape& shape = arena->memory().shape();
    snapshot.arenas.push_back({arena->tenant(), arena->model(), shape.num_slots - 1,
                               shape.slot.slot_bytes(), shape.slot.summary_bytes(),
                               arena->Stats()});
  }
  snapshot.sessions = sessions->size();
  snapshot.live = clock.Now() - absl::Nanoseconds(last_tick_ns.load()) < kLiveLimit;
  snapshot.draining = pool->draining();
  data_plane->Fill(&snapshot);
  if (cluster != nullptr) {
    snapshot.membership = cluster->Figures();
    const std::shared_ptr<const MembershipView> view = cluster->View();
    snapshot.members = view == nullptr ? 0 : view->members.size();
  }
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [file, expiry] : certificates) {
    snapshot.cert_expiry_seconds.emplace_back(file,
                                              absl::ToDoubleSeconds(expiry - absl::UnixEpoch()));
  }
  return snapshot;
}

bool Server::Parts::SleepUnlessStopping(absl::Duration time) const {
  std::unique_lock<std::mutex> lock(mutex);
  return !changed.wait_for(lock, absl::ToChronoNanoseconds(time), [this] { return stopping; });
}

void Server::Parts::UpkeepLoop() {
  const absl::Duration interval =
      std::clamp(sessions->ttl() / 20, absl::Milliseconds(5), absl::Milliseconds(250));
  absl::Duration last_certificate_check = clock.Now();
  absl::Duration turn = last_certificate_check;
  while (SleepUnlessStopping(interval)) {
    metrics.upkeep_stalls.Observe(clock.Now() - turn - interval);
    turn = clock.Now();
    for (const SessionInfo& session : sessions->EndSilent()) {
      spdlog::warn("session_lost session={} tenant={} client={} silent_ms={}",
                   static_cast<uint64_t>(session.id), session.arena->tenant(),
                   LogQuote(session.client_name), absl::ToInt64Milliseconds(session.silent));
    }
    pool->TickStreams();
    for (const auto& arena : arenas) arena->Tick();
    const absl::Duration now = clock.Now();
    last_tick_ns = absl::ToInt64Nanoseconds(now);
    if (now - last_certificate_check >= kCertificateCheck) {
      last_certificate_check = now;
      CheckCertificates();
    }
  }
}

void Server::Parts::CheckCertificates() {
  if (IsInsecure(config)) return;
  auto expiries = CheckTlsFiles(config.control().tls(), absl::Now());
  if (!expiries.ok()) {
    spdlog::error("certificates_bad problem={}", LogQuote(expiries.status().message()));
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  certificates = *std::move(expiries);
}

void Server::Parts::WatchLoop() {
  bool live = true;
  while (SleepUnlessStopping(absl::Seconds(1))) {
    const absl::Duration since = clock.Now() - absl::Nanoseconds(last_tick_ns.load());
    const bool now_live = since < kLiveLimit;
    if (now_live == live) continue;
    live = now_live;
    spdlog::error("upkeep_loop live={} since_ms={}", live, absl::ToInt64Milliseconds(since));
    if (health != nullptr) health->SetLive(live);
  }
}

uint32_t Server::Parts::CountLeases() const {
  uint64_t leases = 0;
  for (const auto& arena : arenas) leases += arena->Stats().leases;
  return static_cast<uint32_t>(std::min<uint64_t>(leases, UINT32_MAX));
}

bool Server::Parts::IsBusy() const { return CountLeases() > 0 || data_plane->num_in_flight() > 0; }

}  // namespace kvd
