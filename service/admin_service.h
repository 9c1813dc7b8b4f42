// gRPC handlers of Admin: for operators, never for workers.
//
// Every call is checked for the admin role and logged with who called. Page keys are never logged.
// Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_ADMIN_SERVICE_H_
#define LOCKS_KVD_SERVICE_ADMIN_SERVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/pool.grpc.pb.h"
#include "service/arena.h"
#include "service/auth.h"
#include "service/metrics.h"
#include "service/slowlog.h"

namespace kvd {

struct DrainOutcome {
  bool clean = false;
  uint32_t leases_left = 0;
};

struct AdminOptions {
  bool tls = false;
  // All of these outlive the service; `arenas` is complete before the first call.
  Metrics* metrics = nullptr;
  const Slowlog* slowlog = nullptr;
  const std::vector<std::shared_ptr<Arena>>* arenas = nullptr;
  // The configuration in force as protobuf text.
  std::function<std::string()> config;
  // Drains for at most `limit` (the daemon's own if zero) and, if asked to, ends the process
  // afterwards. kUnavailable while the daemon starts.
  std::function<absl::StatusOr<DrainOutcome>(absl::Duration limit, bool exit)> drain;
};

// Admin of one daemon.
class AdminService final : public locks_kvd::v1::Admin::Service {
 public:
  explicit AdminService(AdminOptions options) : options_(std::move(options)) {}

  // Pages of one Pages call.
  static constexpr size_t kMaxPages = 4096;

  grpc::Status Drain(grpc::ServerContext* context, const locks_kvd::v1::DrainRequest* request,
                     locks_kvd::v1::DrainReply* reply) override;
  grpc::Status Config(grpc::ServerContext* context, const locks_kvd::v1::ConfigRequest* request,
                      locks_kvd::v1::ConfigReply* reply) override;
  grpc::Status Verify(grpc::ServerContext* context, const locks_kvd::v1::VerifyRequest* request,
                      locks_kvd::v1::VerifyReply* reply) override;
  grpc::Status Pages(grpc::ServerContext* context, const locks_kvd::v1::PagesRequest* request,
                     locks_kvd::v1::PagesReply* reply) override;
  grpc::Status Slowlog(grpc::ServerContext* context, const locks_kvd::v1::SlowlogRequest* request,
                       locks_kvd::v1::SlowlogReply* reply) override;
  grpc::Status LogLevel(grpc::ServerContext* context, const locks_kvd::v1::LogLevelRequest* request,
                        locks_kvd::v1::LogLevelReply* reply) override;

 private:
  // Checks the role, runs `work`, counts and logs the call: at debug if it goes on with an earlier
  // one, else at info. `detail` is what was asked for, as key=value pairs.
  grpc::Status Serve(Rpc rpc, absl::string_view name, const grpc::ServerContext& context,
                     const std::string& detail, const std::function<absl::Status()>& work,
                     bool goes_on = false);
  absl::StatusOr<std::shared_ptr<Arena>> FindArena(const std::string& tenant,
                                                   const std::string& model) const;

  const AdminOptions options_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_ADMIN_SERVICE_H_
