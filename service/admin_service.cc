#include "service/admin_service.h"

#include <grpc/grpc_security_constants.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "service/log_setup.h"
#include "service/verifier.h"
#include "spdlog/spdlog.h"

namespace kvd {

namespace v1 = locks_kvd::v1;

namespace {

// As LogConfig.level.
constexpr const char* kLevels[] = {"trace", "debug", "info", "warn", "error"};

std::string CurrentLevel() {
  const auto level = spdlog::default_logger()->level();
  for (const char* name : kLevels) {
    if (spdlog::level::from_str(name) == level) return name;
  }
  return "off";
}

uint32_t CodeOf(WireStatus status) {
  switch (status) {
    case WireStatus::kOk:
      return static_cast<uint32_t>(absl::StatusCode::kOk);
    case WireStatus::kInvalid:
      return static_cast<uint32_t>(absl::StatusCode::kInvalidArgument);
    case WireStatus::kAborted:
      return static_cast<uint32_t>(absl::StatusCode::kAborted);
    case WireStatus::kExhausted:
      return static_cast<uint32_t>(absl::StatusCode::kResourceExhausted);
    case WireStatus::kUnavailable:
      return static_cast<uint32_t>(absl::StatusCode::kUnavailable);
    case WireStatus::kLate:
      break;
  }
  return static_cast<uint32_t>(absl::StatusCode::kDeadlineExceeded);
}

uint64_t Micros(absl::Duration duration) {
  return static_cast<uint64_t>(std::max<int64_t>(0, absl::ToInt64Microseconds(duration)));
}

void FillPage(const std::optional<SlotView>& view, uint32_t shard, v1::PagesReply::Page* page) {
  page->set_shard(shard);
  page->set_state(v1::PagesReply::STATE_MISSING);
  if (!view.has_value()) return;
  page->set_state(view->state == SlotState::kSealed ? v1::PagesReply::STATE_SEALED
                                                    : v1::PagesReply::STATE_RESERVED);
  page->set_slot(view->slot);
  page->set_generation(view->generation);
  page->set_leases(view->leases);
  page->set_matched(view->matched);
}

// The caller for the log: the subject of its certificate, which is signed, and its address.
std::string Caller(const grpc::ServerContext& context) {
  std::string name;
  if (const auto auth = context.auth_context(); auth != nullptr) {
    const auto names = auth->FindPropertyValues(GRPC_X509_CN_PROPERTY_NAME);
    if (!names.empty()) name.assign(names[0].data(), names[0].size());
  }
  return absl::StrCat("peer=", LogQuote(context.peer()), " subject=", LogQuote(name));
}

}  // namespace

grpc::Status AdminService::Serve(Rpc rpc, absl::string_view name,
                                 const grpc::ServerContext& context, const std::string& detail,
                                 const std::function<absl::Status()>& work, bool goes_on) {
  const absl::StatusOr<PeerIdentity> peer = IdentifyPeer(context, options_.tls);
  absl::Status status = peer.ok() ? CheckAdmin(*peer) : peer.status();
  const std::string method(name);
  if (status.ok()) {
    spdlog::log(goes_on ? spdlog::level::debug : spdlog::level::info, "admin_call method={} {}{}{}",
                method, Caller(context), detail.empty() ? "" : " ", detail);
    status = work();
  } else {
    options_.metrics->auth_failures[peer.ok() ? kAuthRole : kAuthNoIdentity].Add();
    spdlog::warn("admin_refused method={} {} reason={}", method, Caller(context),
                 LogQuote(status.message()));
  }
  options_.metrics->rpc_requests[static_cast<size_t>(rpc)][static_cast<size_t>(status.code())]
      .Add();
  return ToGrpc(status);
}

absl::StatusOr<std::shared_ptr<Arena>> AdminService::FindArena(const std::string& tenant,
                                                               const std::string& model) const {
  for (const auto& arena : *options_.arenas) {
    if (arena->tenant() == tenant && arena->model() == model) return arena;
  }
  return absl::NotFoundError(absl::StrCat("arena ", LogQuote(tenant), "/", LogQuote(model),
                                          ": this daemon has none of that name: see Stats"));
}

grpc::Status AdminService::Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                                 v1::DrainReply* reply) {
  const std::string detail =
      absl::StrCat("timeout_ms=", request->timeout_ms(), " exit=", request->exit());
  return Serve(Rpc::kDrain, "Drain", *context, detail, [&]() -> absl::Status {
    KVD_ASSIGN_OR_RETURN(
        const DrainOutcome outcome,
        options_.drain(absl::Milliseconds(request->timeout_ms()), request->exit()));
    reply->set_clean(outcome.clean);
    reply->set_leases_left(outcome.leases_left);
    return absl::OkStatus();
  });
}

grpc::Status AdminService::Config(grpc::ServerContext* context, const v1::ConfigRequest*,
                                  v1::ConfigReply* reply) {
  return Serve(Rpc::kConfig, "Config", *context, "", [&] {
    reply->set_text(options_.config());
    return absl::OkStatus();
  });
}

grpc::Status AdminService::Verify(grpc::ServerContext* context, const v1::VerifyRequest* request,
                                  v1::VerifyReply* reply) {
  const std::string detail =
      absl::StrCat("tenant=", LogQuote(request->tenant()), " model=", LogQuote(request->model()),
                   " first_slot=", request->first_slot());
  const auto work = [&]() -> absl::Status {
    KVD_ASSIGN_OR_RETURN(const std::shared_ptr<Arena> arena,
                         FindArena(request->tenant(), request->model()));
    const VerifyOutcome outcome = VerifySlots(*arena, request->first_slot(), request->max_slots());
    reply->set_next_slot(outcome.next_slot);
    reply->set_done(outcome.done);
    reply->set_num_slots(arena->memory().shape().num_slots);
    reply->set_pages(outcome.pages);
    reply->set_units(outcome.units);
    reply->set_evicted(outcome.evicted);
    for (const VerifyOutcome::Failure& failure : outcome.failures) {
      spdlog::error("verify_failed arena={}/{} slot={} generation={} what={}", arena->tenant(),
                    arena->model(), failure.location.slot, failure.location.generation,
                    LogQuote(failure.what));
      v1::VerifyReply::Failure* out = reply->add_failures();
      out->set_slot(failure.location.slot);
      out->set_generation(failure.location.generation);
      out->set_what(failure.what);
    }
    options_.metrics->verify_checks.Add(outcome.units + outcome.pages + outcome.failures.size());
    options_.metrics->verify_failures.Add(outcome.failures.size());
    return absl::OkStatus();
  };
  return Serve(Rpc::kVerify, "Verify", *context, detail, work, request->first_slot() > 0);
}

grpc::Status AdminService::Pages(grpc::ServerContext* context, const v1::PagesRequest* request,
                                 v1::PagesReply* reply) {
  const size_t count = request->keys().size() / sizeof(PageKey);
  const std::string detail = absl::StrCat("tenant=", LogQuote(request->tenant()),
                                          " model=", LogQuote(request->model()), " pages=", count);
  return Serve(Rpc::kPages, "Pages", *context, detail, [&]() -> absl::Status {
    if (request->keys().size() % sizeof(PageKey) != 0 || count > kMaxPages) {
      return absl::InvalidArgumentError(
          absl::StrFormat("keys: expected at most %d keys of %d bytes, got %d bytes", kMaxPages,
                          sizeof(PageKey), request->keys().size()));
    }
    KVD_ASSIGN_OR_RETURN(const std::shared_ptr<Arena> arena,
                         FindArena(request->tenant(), request->model()));
    const auto num_shards = static_cast<uint32_t>(arena->geometry().num_shards);
    reply->set_num_shards(num_shards);
    for (size_t i = 0; i < count; ++i) {
      PageId page;
      std::memcpy(page.key.data(), request->keys().data() + i * sizeof(PageKey), sizeof(PageKey));
      for (page.shard = 0; page.shard < num_shards; ++page.shard) {
        FillPage(arena->ViewPage(page), page.shard, reply->add_pages());
      }
    }
    return absl::OkStatus();
  });
}

grpc::Status AdminService::Slowlog(grpc::ServerContext* context, const v1::SlowlogRequest* request,
                                   v1::SlowlogReply* reply) {
  return Serve(Rpc::kSlowlog, "Slowlog", *context, "", [&] {
    const uint32_t wanted = request->max_entries();
    const size_t limit = wanted == 0 ? kvd::Slowlog::kEntries : wanted;
    reply->set_threshold_us(Micros(options_.slowlog->threshold()));
    reply->set_num_seen(options_.slowlog->num_seen());
    for (const kvd::Slowlog::Entry& entry : options_.slowlog->Newest(limit)) {
      v1::SlowlogReply::Fetch* out = reply->add_fetches();
      out->set_unix_us(static_cast<uint64_t>(absl::ToUnixMicros(entry.ended)));
      out->set_session_id(static_cast<uint64_t>(entry.event.session));
      out->set_code(CodeOf(entry.event.status));
      out->set_units(entry.event.units);
      out->set_missing_units(entry.event.missing_units);
      out->set_bytes(entry.event.bytes);
      out->set_queue_us(Micros(entry.event.queued));
      out->set_move_us(Micros(entry.event.total - entry.event.queued));
    }
    return absl::OkStatus();
  });
}

grpc::Status AdminService::LogLevel(grpc::ServerContext* context,
                                    const v1::LogLevelRequest* request, v1::LogLevelReply* reply) {
  const std::string detail = absl::StrCat("level=", LogQuote(request->level()));
  return Serve(Rpc::kLogLevel, "LogLevel", *context, detail, [&]() -> absl::Status {
    reply->set_before(CurrentLevel());
    bool known = request->level().empty();
    for (const char* name : kLevels) known = known || request->level() == name;
    if (!known) {
      return absl::InvalidArgumentError(absl::StrCat(
          "level: expected trace, debug, info, warn or error, got ", LogQuote(request->level())));
    }
    if (!request->level().empty()) spdlog::set_level(spdlog::level::from_str(request->level()));
    reply->set_level(CurrentLevel());
    return absl::OkStatus();
  });
}

}  // namespace kvd
