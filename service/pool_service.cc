#include "service/pool_service.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/geometry.h"
#include "proto/status.h"
#include "service/config.h"
#include "service/log_setup.h"
#include "service/request_check.h"
#include "spdlog/spdlog.h"

namespace kvd {
namespace {

namespace v1 = locks_kvd::v1;

constexpr size_t kMaxClientName = 256;

std::string Hex(absl::string_view bytes) { return absl::BytesToHexString(bytes); }
std::string Hex(const Fingerprint& f) {
  return Hex(absl::string_view(reinterpret_cast<const char*>(f.data()), f.size()));
}

v1::ReserveReply::State ToProto(ReserveOutcome::State state) {
  switch (state) {
    case ReserveOutcome::State::kNew:
      return v1::ReserveReply::STATE_NEW;
    case ReserveOutcome::State::kHit:
      return v1::ReserveReply::STATE_HIT;
    case ReserveOutcome::State::kPending:
      return v1::ReserveReply::STATE_PENDING;
    case ReserveOutcome::State::kFull:
      return v1::ReserveReply::STATE_FULL;
  }
  return v1::ReserveReply::STATE_UNSPECIFIED;
}

void CountRefusal(const absl::Status& status, Metrics* metrics) {
  if (status.code() == absl::StatusCode::kInvalidArgument) metrics->malformed_calls.Add();
  if (status.code() == absl::StatusCode::kUnauthenticated)
    metrics->auth_failures[kAuthNoIdentity].Add();
}

void FillArenaInfo(const Arena& arena, v1::ArenaInfo* info) {
  *info->mutable_geometry() = kvd::ToProto(arena.geometry());
  info->set_num_slots(arena.memory().shape().num_slots);
  info->set_slots_per_slab(arena.memory().shape().slots_per_slab);
  info->set_encoder(EncoderName(arena.options().encoder));
  info->set_query_metric_checksum(arena.options().metric.file_checksum());
  info->set_canary_slot(kCanarySlot);
}

}  // namespace

PoolService::PoolService(PoolOptions options)
    : options_(std::move(options)),
      started_(options_.clock->Now()),
      streams_(options_.sessions, options_.metrics, options_.clock) {}

void PoolService::Open(PathOffers offers) {
  offers_ = std::move(offers);
  open_.store(true, std::memory_order_release);
}

void PoolService::StartDraining(const std::string& reason) {
  draining_.store(true, std::memory_order_release);
  streams_.StartDraining(reason);
}

void PoolService::TickStreams() {
  streams_.Tick();
  if (options_.moves != nullptr) options_.moves->Tick();
}

void PoolService::EndStreams() {
  streams_.EndAll();
  if (options_.moves != nullptr) options_.moves->EndAll();
}

grpc::Status PoolService::Serve(Rpc rpc, const grpc::ServerContext& context,
                                const std::function<absl::Status(const PeerIdentity&)>& work) {
  const absl::Duration start = options_.clock->Now();
  const absl::StatusOr<PeerIdentity> peer = IdentifyPeer(context, options_.tls);
  const absl::Status status = peer.ok() ? work(*peer) : peer.status();
  Metrics& metrics = *options_.metrics;
  const auto method = static_cast<size_t>(rpc);
  metrics.rpc_requests[method][static_cast<size_t>(status.code())].Add();
  // A move takes as long as its pages.
  if (rpc != Rpc::kMove) metrics.rpc_seconds[method].Observe(options_.clock->Now() - start);
  CountRefusal(status, &metrics);
  return ToGrpc(status);
}

absl::Status PoolService::CheckNotDraining() const {
  if (!draining()) return absl::OkStatus();
  return absl::UnavailableError(
      "the daemon is draining and takes no new sessions or pages: use another daemon");
}

absl::Status PoolService::CheckLeasing() const {
  if (!leasing_stopped_.load(std::memory_order_acquire)) return absl::OkStatus();
  return absl::UnavailableError("the daemon has drained: use another daemon");
}

absl::StatusOr<SessionHandle> PoolService::FindSession(const PeerIdentity& peer,
                                                       const v1::SessionRef& session) const {
  KVD_ASSIGN_OR_RETURN(const SessionKey key, ParseSessionRef(session));
  absl::StatusOr<SessionHandle> found = options_.sessions->Find(key.token, key.incarnation);
  if (!found.ok()) {
    if (key.incarnation != options_.sessions->incarnation()) {
      options_.metrics->stale_rejects[kStaleIncarnation].Add();
    }
    return found;
  }
  if (absl::Status status = CheckSessionTenant(peer, *found); !status.ok()) {
    options_.metrics->stale_rejects[kStaleTenant].Add();
    options_.metrics->auth_failures[kAuthTenant].Add();
    return status;
  }
  return found;
}

absl::StatusOr<std::shared_ptr<Arena>> PoolService::FindArena(const std::string& tenant,
                                                              const std::string& model) const {
  std::vector<std::string> others;
  for (const auto& arena : options_.arenas) {
    if (arena->tenant() != tenant) continue;
    if (arena->model() == model) return arena;
    others.push_back(arena->model());
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "model %s: this daemon has no such arena for tenant %s; it has %s: add the arena to the "
      "daemon's "
      "configuration or ask for one of these",
      LogQuote(model), LogQuote(tenant), others.empty() ? "none" : absl::StrJoin(others, ", ")));
}

absl::Status PoolService::CheckFingerprints(const Arena& arena,
                                            const v1::AttachRequest& request) const {
  const uint64_t layout = LayoutFingerprint(arena.geometry());
  if (request.layout_fingerprint() != layout) {
    options_.metrics->stale_rejects[kStaleLayout].Add();
    return absl::FailedPreconditionError(absl::StrFormat(
        "layout_fingerprint of arena %s/%s: expected %016x, got %016x: client and daemon differ in "
        "geometry "
        "or layout version: compare the client's geometry with arenas.geometry in the daemon's "
        "configuration, and the two software versions (daemon %s, layout %d)",
        arena.tenant(), arena.model(), layout, request.layout_fingerprint(), options_.version,
        kLayoutVersion));
  }
  const Fingerprint& model = arena.options().model_fingerprint;
  if (request.model_fingerprint().size() != model.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("model_fingerprint: expected %d bytes, got %d", model.size(),
                        request.model_fingerprint().size()));
  }
  if (std::memcmp(request.model_fingerprint().data(), model.data(), model.size()) != 0) {
    options_.metrics->stale_rejects[kStaleLayout].Add();
    return absl::FailedPreconditionError(absl::StrFormat(
        "model_fingerprint of arena %s/%s: expected %s, got %s: the geometry is the same but "
        "weights or RoPE "
        "differ: set arenas.identity in the daemon's configuration and the client's model identity "
        "alike",
        arena.tenant(), arena.model(), Hex(model), Hex(request.model_fingerprint())));
  }
  return absl::OkStatus();
}

grpc::Status PoolService::Attach(grpc::ServerContext* context, const v1::AttachRequest* request,
                                 v1::AttachReply* reply) {
  return Serve(Rpc::kAttach, *context, [&](const PeerIdentity& peer) -> absl::Status {
    if (!open_.load(std::memory_order_acquire)) {
      return absl::UnavailableError("the daemon is starting: try again in a moment");
    }
    KVD_RETURN_IF_ERROR(CheckNotDraining());
    if (request->protocol_min() > kProtocolVersion || request->protocol_max() < kProtocolVersion) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "protocol: the daemon (%s) speaks %u, the client %u to %u: upgrade the older of the two",
          options_.version, kProtocolVersion, request->protocol_min(), request->protocol_max()));
    }
    if (request->client_name().size() > kMaxClientName) {
      return absl::InvalidArgumentError(
          absl::StrFormat("client_name: expected at most %d bytes, got %d", kMaxClientName,
                          request->client_name().size()));
    }
    const absl::StatusOr<std::string> tenant = request->mover()
                                                   ? MoverTenant(peer, request->tenant())
                                                   : ClientTenant(peer, request->tenant());
    if (!tenant.ok()) {
      if (absl::IsPermissionDenied(tenant.status())) {
        options_.metrics->auth_failures[peer.role == Role::kClient ? kAuthTenant : kAuthRole].Add();
      }
      return tenant.status();
    }
    KVD_ASSIGN_OR_RETURN(const std::shared_ptr<Arena> arena, FindArena(*tenant, request->model()));
    KVD_RETURN_IF_ERROR(CheckFingerprints(*arena, *request));
    const absl::StatusOr<AttachedSession> session =
        options_.sessions->Attach(arena, request->client_name(),
                                  request->mover() ? SessionKind::kMover : SessionKind::kWorker);
    if (!session.ok()) {
      options_.metrics->limit_rejects[kLimitSessions].Add();
      return session.status();
    }
    const Incarnation& incarnation = options_.sessions->incarnation();
    reply->set_protocol(kProtocolVersion);
    reply->mutable_session()->set_token(session->token.data(), session->token.size());
    reply->mutable_session()->set_incarnation(incarnation.data(), incarnation.size());
    reply->set_heartbeat_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.heartbeat)));
    reply->set_session_ttl_ms(
        static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.sessions->ttl())));
    reply->set_replicas(options_.replicas);
    FillArenaInfo(*arena, reply->mutable_arena());
    const bool on_gpu = arena->memory().place().on_gpu();
    if (!on_gpu && offers_.shared.has_value()) *reply->mutable_shared() = *offers_.shared;
    if (on_gpu && offers_.peer.has_value()) *reply->mutable_peer() = *offers_.peer;
    if (offers_.ucx.has_value()) *reply->mutable_ucx() = *offers_.ucx;
    if (!on_gpu && reply->has_ucx()) reply->mutable_ucx()->clear_gpu_host_id();
    spdlog::info("session_attached session={} tenant={} model={} client={} ucx={}",
                 static_cast<uint64_t>(session->id), arena->tenant(), arena->model(),
                 LogQuote(request->client_name()), LogQuote(request->ucx_version()));
    return absl::OkStatus();
  });
}

SessionStreams::Reactor* PoolService::Session(grpc::CallbackServerContext* context) {
  return streams_.Open(IdentifyPeer(*context, options_.tls));
}

grpc::Status PoolService::Detach(grpc::ServerContext* context, const v1::DetachRequest* request,
                                 v1::DetachReply*) {
  return Serve(Rpc::kDetach, *context, [&](const PeerIdentity& peer) -> absl::Status {
    KVD_ASSIGN_OR_RETURN(const SessionHandle session, FindSession(peer, request->session()));
    KVD_ASSIGN_OR_RETURN(const SessionKey key, ParseSessionRef(request->session()));
    KVD_RETURN_IF_ERROR(options_.sessions->Detach(key.token, key.incarnation));
    spdlog::info("session_detached session={} tenant={}", static_cast<uint64_t>(session.id),
                 session.arena->tenant());
    return absl::OkStatus();
  });
}

grpc::Status PoolService::Match(grpc::ServerContext* context, const v1::MatchRequest* request,
                                v1::MatchReply* reply) {
  const absl::Duration start = options_.clock->Now();
  return Serve(Rpc::kMatch, *context, [&](const PeerIdentity& peer) -> absl::Status {
    KVD_ASSIGN_OR_RETURN(const SessionHandle session, FindSession(peer, request->session()));
    KVD_RETURN_IF_ERROR(CheckLeasing());
    KVD_ASSIGN_OR_RETURN(const std::span<const PageKey> keys, ParseKeys(request->pages()));
    KVD_RETURN_IF_ERROR(CheckShards(*session.arena, request->shards(), keys.size()));
    const std::vector<uint32_t> shards(request->shards().begin(), request->shards().end());
    const auto found =
        request->each()
            ? session.arena->MatchEach(session.id, request->request_id(), keys, shards)
            : session.arena->MatchPrefix(session.id, request->request_id(), keys, shards);
    if (!found.ok()) {
      if (absl::IsResourceExhausted(found.status()))
        options_.metrics->limit_rejects[kLimitLeases].Add();
      return found.status();
    }
    reply->set_num_pages(static_cast<uint32_t>(found->pages.size()));
    if (request->each()) reply->mutable_pages()->Add(found->pages.begin(), found->pages.end());
    for (const PageLocation& location : found->locations) {
      reply->add_slots(location.slot);
      reply->add_generations(location.generation);
    }
    Metrics& m = *options_.metrics;
    (reply->num_pages() > 0 ? m.match_hit_seconds : m.match_miss_seconds)
        .Observe(options_.clock->Now() - start);
    return absl::OkStatus();
  });
}

grpc::Status PoolService::Reserve(grpc::ServerContext* context, const v1::ReserveRequest* request,
                                  v1::ReserveReply* reply) {
  return Serve(Rpc::kReserve, *context, [&](const PeerIdentity& peer) -> absl::Status {
    KVD_ASSIGN_OR_RETURN(const SessionHandle session, FindSession(peer, request->session()));
    KVD_RETURN_IF_ERROR(CheckNotDraining());
    KVD_ASSIGN_OR_RETURN(const std::span<const PageKey> keys, ParseKeys(request->pages()));
    KVD_RETURN_IF_ERROR(CheckShard(*session.arena, request->shard()));
    const std::vector<uint32_t> page_idx(request->pages().page_idx().begin(),
                                         request->pages().page_idx().end());
    const auto& words = request->pages().placement_words();
    if (!words.empty() && static_cast<size_t>(words.size()) != keys.size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("pages.placement_words: expected none or one for each of %d keys, got %d",
                          keys.size(), words.size()));
    }
    KVD_ASSIGN_OR_RETURN(const ReserveOutcome outcome,
                         session.arena->Reserve(session.id, keys, page_idx, request->shard(),
                                                {words.data(), static_cast<size_t>(words.size())}));
    for (const ReserveOutcome::Page& page : outcome.pages) {
      v1::ReserveReply::Result* result = reply->add_results();
      result->set_state(ToProto(page.state));
      result->set_slot(page.slot);
      result->set_ticket(static_cast<uint64_t>(page.ticket));
      result->set_generation(page.generation);
    }
    if (!outcome.full_reason.empty()) options_.metrics->limit_rejects[kLimitFull].Add();
    reply->set_full_reason(outcome.full_reason);
    return absl::OkStatus();
  });
}

grpc::Status PoolService::Seal(grpc::ServerContext* context, const v1::SealRequest* request,
                               v1::SealReply* reply) {
  return Serve(Rpc::kSeal, *context, [&](const PeerIdentity& peer) -> absl::Status {
    KVD_ASSIGN_OR_RETURN(const SessionHandle session, FindSession(peer, request->session()));
    const auto count = static_cast<size_t>(request->tickets_size());
    KVD_RETURN_IF_ERROR(CheckCount("tickets", count));
    const auto& checksums = request->summary_checksums();
    const bool copies = session.kind == SessionKind::kMover;
    if (static_cast<size_t>(checksums.size()) != (copies ? count : 0)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("summary_checksums: expected one for each of %d tickets from a mover, "
                          "none from a worker, got %d",
                          count, checksums.size()));
    }
    std::vector<absl::StatusOr<SealOutcome>> outcomes(
        count, absl::DeadlineExceededError(
                   "not begun before the call ended: the ticket stays, seal it again"));
    options_.sealer->Run(count, [&](size_t i) {
      if (context->IsCancelled()) return;
      const int n = static_cast<int>(i);
      const auto ticket = static_cast<Ticket>(request->tickets(n));
      outcomes[i] = copies ? session.arena->SealCopy(session.id, ticket, checksums.Get(n))
                           : session.arena->Seal(session.id, ticket);
    });
    for (const absl::StatusOr<SealOutcome>& outcome : outcomes) {
      v1::SealReply::Result* result = reply->add_results();
      if (!outcome.ok()) {
        result->set_code(static_cast<uint32_t>(outcome.status().code()));
        result->set_message(std::string(outcome.status().message()));
        continue;
      }
      result->set_slot(outcome->location.slot);
      result->set_generation(outcome->location.generation);
      if (outcome->summarize > absl::ZeroDuration()) {
        options_.metrics->seal_seconds.Observe(outcome->since_last_unit);
        options_.metrics->summarize_seconds.Observe(outcome->summarize);
      }
    }
    return absl::OkStatus();
  });
}

grpc::Status PoolService::Lease(grpc::ServerContext* context, const v1::LeaseRequest* request,
                                v1::LeaseReply* reply) {
  return Serve(Rpc::kLease, *context, [&](const PeerIdentity& peer) -> absl::Status {
    KVD_ASSIGN_OR_RETURN(const SessionHandle session, FindSession(peer, request->session()));
    KVD_RETURN_IF_ERROR(CheckLeasing());
    KVD_ASSIGN_OR_RETURN(const std::vector<PageLocation> locations,
                         ParseLocations(*session.arena, request->slots(), request->generations()));
    const absl::StatusOr<std::vector<bool>> leased = session.arena->Lease(session.id, locations);
    if (!leased.ok()) {
      if (absl::IsResourceExhausted(leased.status()))
        options_.metrics->limit_rejects[kLimitLeases].Add();
      return leased.status();
    }
    for (const bool each : *leased) {
      reply->add_leased(each);
      options_.metrics->stale_rejects[kStaleGeneration].Add(each ? 0 : 1);
    }
    return absl::OkStatus();
  });
}

grpc::Status PoolService::Release(grpc::ServerContext* context, const v1::ReleaseRequest* request,
                                  v1::ReleaseReply*) {
  return Serve(Rpc::kRelease, *context, [&](const PeerIdentity& peer) -> absl::Status {
    KVD_ASSIGN_OR_RETURN(const SessionHandle session, FindSession(peer, request->session()));
    KVD_ASSIGN_OR_RETURN(const std::vector<PageLocation> locations,
                         ParseLocations(*session.arena, request->slots(), request->generations()));
    return session.arena->Release(session.id, locations);
  });
}

grpc::Status PoolService::Move(grpc::ServerContext* context, MoveReceiver::Stream* stream) {
  return Serve(Rpc::kMove, *context, [&](const PeerIdentity& peer) -> absl::Status {
    if (options_.moves == nullptr)
      return absl::FailedPreconditionError("this daemon takes pages by UCX alone");
    return options_.moves->Serve(
        context, stream, [&](const v1::SessionRef& session) { return FindSession(peer, session); });
  });
}

}  // namespace kvd
