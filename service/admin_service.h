// gRPC handlers of Admin: for operators, never for workers.
//
// Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_ADMIN_SERVICE_H_
#define LOCKS_KVD_SERVICE_ADMIN_SERVICE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/pool.grpc.pb.h"
#include "service/auth.h"
#include "service/metrics.h"

namespace kvd {

// Admin of one daemon.
class AdminService final : public locks_kvd::v1::Admin::Service {
 public:
  struct DrainOutcome {
    bool clean = false;
    uint32_t leases_left = 0;
  };
  // Drains for at most `limit` (the daemon's own if zero) and, if asked to, ends the process
  // afterwards. kUnavailable while the daemon starts.
  using DrainFunction =
      std::function<absl::StatusOr<DrainOutcome>(absl::Duration limit, bool exit)>;

  AdminService(bool tls, Metrics* metrics, std::string config_text, DrainFunction drain)
      : tls_(tls),
        metrics_(metrics),
        config_text_(std::move(config_text)),
        drain_(std::move(drain)) {}

  grpc::Status Drain(grpc::ServerContext* context, const locks_kvd::v1::DrainRequest* request,
                     locks_kvd::v1::DrainReply* reply) override;
  grpc::Status Config(grpc::ServerContext* context, const locks_kvd::v1::ConfigRequest* request,
                      locks_kvd::v1::ConfigReply* reply) override;

 private:
  grpc::Status Serve(Rpc rpc, const grpc::ServerContext& context,
                     const std::function<absl::Status()>& work);

  const bool tls_;
  Metrics* const metrics_;
  const std::string config_text_;
  const DrainFunction drain_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_ADMIN_SERVICE_H_
