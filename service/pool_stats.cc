// PoolService::Stats: what a caller may see of arenas, sessions and fetches.

#include <algorithm>

#include "absl/time/clock.h"
#include "proto/geometry.h"
#include "service/config.h"
#include "service/pool_service.h"

namespace kvd {
namespace {

namespace v1 = locks_kvd::v1;

void FillArenaStats(const Arena& arena, v1::StatsReply::ArenaStats* out) {
  const ArenaStats stats = arena.Stats();
  const SlotLayout& slot = arena.memory().shape().slot;
  out->set_tenant(arena.tenant());
  out->set_model(arena.model());
  *out->mutable_geometry() = kvd::ToProto(arena.geometry());
  out->set_encoder(EncoderName(arena.options().encoder));
  out->set_query_metric_checksum(arena.options().metric.file_checksum());
  out->set_slots_free(stats.slots_free);
  out->set_slots_reserved(stats.slots_reserved);
  out->set_slots_sealed(stats.slots_sealed);
  out->set_slots_quarantined(stats.slots_quarantined);
  out->set_slots_leased(stats.slots_leased);
  out->set_slot_bytes(slot.slot_bytes());
  out->set_summary_bytes(slot.summary_bytes());
  out->set_evicted_pages(stats.evicted_pages);
  if (arena.memory().place().on_gpu()) out->set_gpu(arena.memory().place().gpu);
}

void FillSessionStats(const SessionInfo& session, v1::StatsReply::SessionStats* out) {
  out->set_session_id(static_cast<uint64_t>(session.id));
  out->set_tenant(session.arena->tenant());
  out->set_model(session.arena->model());
  out->set_client_name(session.client_name);
  out->set_age_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(session.age)));
  out->set_silent_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(session.silent)));
  out->set_leased_pages(session.arena->num_leases(session.id));
  out->set_reserved_pages(session.arena->num_reservations(session.id));
}

void FillFetchStats(const FetchCounters& counters, v1::StatsReply::FetchStats* out) {
  uint64_t requests = 0;
  for (const Counter& counter : counters.requests) requests += counter.value();
  out->set_requests(requests);
  const Counter& ok = counters.requests[static_cast<size_t>(WireStatus::kOk)];
  out->set_failed(requests - std::min(requests, ok.value()));
  out->set_units(counters.units_ok.value());
  out->set_missing_units(counters.units_missing.value());
  out->set_bytes(counters.bytes.value());
}

}  // namespace

grpc::Status PoolService::Stats(grpc::ServerContext* context, const v1::StatsRequest*,
                                v1::StatsReply* reply) {
  return Serve(Rpc::kStats, *context, [&](const PeerIdentity& peer) -> absl::Status {
    const auto visible = [&peer](const Arena& arena) {
      return !peer.authenticated || peer.role != Role::kClient || peer.tenant == arena.tenant();
    };
    const Incarnation& incarnation = options_.sessions->incarnation();
    reply->set_incarnation(incarnation.data(), incarnation.size());
    reply->set_version(options_.version);
    reply->set_draining(draining());
    reply->set_uptime_ms(
        static_cast<uint64_t>(absl::ToInt64Milliseconds(options_.clock->Now() - started_)));
    reply->set_insecure(!options_.tls);
    reply->set_unix_ms(static_cast<uint64_t>(absl::ToUnixMillis(absl::Now())));
    if (!peer.authenticated || peer.role != Role::kClient) {
      FillFetchStats(options_.metrics->fetch, reply->mutable_fetch());
    }
    for (const auto& arena : options_.arenas) {
      if (visible(*arena)) FillArenaStats(*arena, reply->add_arenas());
    }
    for (const SessionInfo& session : options_.sessions->List()) {
      if (visible(*session.arena)) FillSessionStats(session, reply->add_sessions());
    }
    if (open_.load(std::memory_order_acquire)) {
      for (const std::string& path : offers_.report) reply->add_paths(path);
      if (offers_.shared.has_value()) *reply->mutable_shared() = *offers_.shared;
      if (offers_.ucx.has_value()) {
        reply->set_ucx_version(offers_.ucx->version());
        reply->set_ucx_transports(offers_.ucx->transports());
      }
    }
    return absl::OkStatus();
  });
}

}  // namespace kvd
