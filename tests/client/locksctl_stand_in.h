// A daemon that answers what a test wants: for what a real one never says of itself.

#ifndef LOCKS_KVD_TESTS_CLIENT_LOCKSCTL_STAND_IN_H_
#define LOCKS_KVD_TESTS_CLIENT_LOCKSCTL_STAND_IN_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/pool.grpc.pb.h"
#include "proto/ucx_worker.h"

namespace kvd::testing {

class StandInDaemon final : public locks_kvd::v1::Pool::Service {
 public:
  StandInDaemon() : admin_(this) {
    stats.set_version("stand-in");
    stats.set_ucx_version(UcxWorker::Version());
    auto* arena = stats.add_arenas();
    arena->set_tenant("test");
    arena->set_model("model");
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
  }
  ~StandInDaemon() override { server_->Shutdown(); }

  std::string flags() const { return absl::StrCat(" --daemon 127.0.0.1:", port_, " "); }

  // Set before a call.
  locks_kvd::v1::StatsReply stats;
  absl::Duration clock_ahead;
  locks_kvd::v1::VerifyReply verify;

 private:
  class StandInAdmin final : public locks_kvd::v1::Admin::Service {
   public:
    explicit StandInAdmin(StandInDaemon* daemon) : daemon_(*daemon) {}
    grpc::Status Verify(grpc::ServerContext*, const locks_kvd::v1::VerifyRequest*,
                        locks_kvd::v1::VerifyReply* reply) override {
      *reply = daemon_.verify;
      return grpc::Status::OK;
    }

   private:
    StandInDaemon& daemon_;
  };

  grpc::Status Stats(grpc::ServerContext*, const locks_kvd::v1::StatsRequest*,
                     locks_kvd::v1::StatsReply* reply) override {
    *reply = stats;
    reply->set_unix_ms(static_cast<uint64_t>(absl::ToUnixMillis(absl::Now() + clock_ahead)));
    return grpc::Status::OK;
  }

  StandInAdmin admin_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_CLIENT_LOCKSCTL_STAND_IN_H_
