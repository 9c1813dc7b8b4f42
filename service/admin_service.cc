#include "service/admin_service.h"

#include "proto/status.h"
#include "service/log_setup.h"
#include "spdlog/spdlog.h"

namespace kvd {

namespace v1 = locks_kvd::v1;

grpc::Status AdminService::Serve(Rpc rpc, const grpc::ServerContext& context,
                                 const std::function<absl::Status()>& work) {
  const absl::StatusOr<PeerIdentity> peer = IdentifyPeer(context, tls_);
  absl::Status status = peer.ok() ? CheckAdmin(*peer) : peer.status();
  if (status.ok()) {
    status = work();
  } else {
    metrics_->auth_failures[peer.ok() ? kAuthRole : kAuthNoIdentity].Add();
    spdlog::warn("admin_refused peer={} reason={}", LogQuote(context.peer()),
                 LogQuote(status.message()));
  }
  metrics_->rpc_requests[static_cast<size_t>(rpc)][static_cast<size_t>(status.code())].Add();
  return ToGrpc(status);
}

grpc::Status AdminService::Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                                 v1::DrainReply* reply) {
  return Serve(Rpc::kDrain, *context, [&]() -> absl::Status {
    spdlog::info("admin_drain peer={} exit={}", LogQuote(context->peer()), request->exit());
    KVD_ASSIGN_OR_RETURN(const DrainOutcome outcome,
                         drain_(absl::Milliseconds(request->timeout_ms()), request->exit()));
    reply->set_clean(outcome.clean);
    reply->set_leases_left(outcome.leases_left);
    return absl::OkStatus();
  });
}

grpc::Status AdminService::Config(grpc::ServerContext* context, const v1::ConfigRequest*,
                                  v1::ConfigReply* reply) {
  return Serve(Rpc::kConfig, *context, [&] {
    reply->set_text(config_text_);
    return absl::OkStatus();
  });
}

}  // namespace kvd
