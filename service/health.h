// grpc.health.v1 on a plaintext port of its own, for supervisors that cannot speak mTLS.
//
// Named services: "startup" (the daemon came up), "live" (its loops tick), "ready" (it takes new
// work); "" answers as "ready". Nothing else is served there. Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_HEALTH_H_
#define LOCKS_KVD_SERVICE_HEALTH_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace grpc {
class CallbackGenericService;
class Server;
}  // namespace grpc

namespace kvd {

class HealthServer {
 public:
  // Listens; everything is NOT_SERVING until it is set. kUnavailable if the address cannot be
  // listened on.
  static absl::StatusOr<std::unique_ptr<HealthServer>> Make(const std::string& address);
  ~HealthServer();

  void SetStarted(bool serving);
  void SetLive(bool serving);
  void SetReady(bool serving);
  uint16_t port() const { return port_; }

 private:
  HealthServer(std::unique_ptr<grpc::CallbackGenericService> nothing_else,
               std::unique_ptr<grpc::Server> server, uint16_t port);
  std::unique_ptr<grpc::CallbackGenericService> nothing_else_;  // outlives server_
  std::unique_ptr<grpc::Server> server_;
  uint16_t port_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_HEALTH_H_
