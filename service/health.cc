#include "service/health.h"

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <chrono>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvd {

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Make(const std::string& address) {
  // The switch is the process's: on for this server only, so that the control port has no health
  // service.
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(4096);
  builder.SetResourceQuota(grpc::ResourceQuota("health").SetMaxThreads(4).Resize(size_t{16} << 20));
  // gRPC starts no server without a service of ours; this one answers UNIMPLEMENTED to all but
  // health.
  auto nothing_else = std::make_unique<grpc::CallbackGenericService>();
  builder.RegisterCallbackGenericService(nothing_else.get());
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  grpc::EnableDefaultHealthCheckService(false);
  if (server == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("health_address ", address, ": cannot listen: is the port taken?"));
  }
  auto health = std::unique_ptr<HealthServer>(
      new HealthServer(std::move(nothing_else), std::move(server), static_cast<uint16_t>(port)));
  health->SetStarted(false);
  health->SetLive(false);
  health->SetReady(false);
  return health;
}

HealthServer::HealthServer(std::unique_ptr<grpc::CallbackGenericService> nothing_else,
                           std::unique_ptr<grpc::Server> server, uint16_t port)
    : nothing_else_(std::move(nothing_else)), server_(std::move(server)), port_(port) {}

HealthServer::~HealthServer() {
  server_->GetHealthCheckService()->Shutdown();
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

void HealthServer::SetStarted(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus("startup", serving);
}

void HealthServer::SetLive(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus("live", serving);
}

void HealthServer::SetReady(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus("ready", serving);
  server_->GetHealthCheckService()->SetServingStatus("", serving);
}

}  // namespace kvd
