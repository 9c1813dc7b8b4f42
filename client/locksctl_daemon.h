// Calls to one daemon, as locksctl makes them.
//
// Thread safety: safe. Blocking: up to the options' timeout for each call.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_DAEMON_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_DAEMON_H_

#include <grpcpp/client_context.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/client_options.h"
#include "client/locksctl_options.h"
#include "proto/grpc_channel.h"
#include "proto/pool.grpc.pb.h"
#include "proto/status.h"

namespace kvd {

// Admin of one daemon; needs the admin role there.
class AdminCaller {
 public:
  // kInvalidArgument for files that cannot be read. Connects with the first call.
  static absl::StatusOr<AdminCaller> Make(const LocksctlOptions& options,
                                          const std::string& daemon) {
    KVD_ASSIGN_OR_RETURN(const auto channel, OpenGrpcChannel(daemon, options.tls));
    return AdminCaller(options, daemon, locks_kvd::v1::Admin::NewStub(channel));
  }

  // One call; `extra` is added to the timeout.
  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Call(grpc::Status (locks_kvd::v1::Admin::Stub::*method)(
                                 grpc::ClientContext*, const Request&, Reply*),
                             const Request& request,
                             absl::Duration extra = absl::ZeroDuration()) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         absl::ToChronoNanoseconds(timeout_ + extra));
    Reply reply;
    const grpc::Status status = ((*stub_).*method)(&context, request, &reply);
    if (!status.ok()) return Annotate(FromGrpc(status), daemon_);
    return reply;
  }

 private:
  AdminCaller(const LocksctlOptions& options, std::string daemon,
              std::unique_ptr<locks_kvd::v1::Admin::Stub> stub)
      : timeout_(options.timeout), daemon_(std::move(daemon)), stub_(std::move(stub)) {}

  absl::Duration timeout_;
  std::string daemon_;
  std::unique_ptr<locks_kvd::v1::Admin::Stub> stub_;
};

// One Admin call to `daemon`.
template <typename Request, typename Reply>
absl::StatusOr<Reply> CallAdmin(const LocksctlOptions& options, const std::string& daemon,
                                grpc::Status (locks_kvd::v1::Admin::Stub::*method)(
                                    grpc::ClientContext*, const Request&, Reply*),
                                const Request& request,
                                absl::Duration extra = absl::ZeroDuration()) {
  KVD_ASSIGN_OR_RETURN(const AdminCaller admin, AdminCaller::Make(options, daemon));
  return admin.Call(method, request, extra);
}

// Figures of one daemon, how long it took to ask, and the certificate that it showed.
struct DaemonFigures {
  locks_kvd::v1::StatsReply stats;
  absl::Duration took;
  std::string certificate;  // PEM; empty without TLS
};
absl::StatusOr<DaemonFigures> QueryFigures(const LocksctlOptions& options,
                                           const std::string& daemon);
absl::StatusOr<locks_kvd::v1::StatsReply> QueryStats(const LocksctlOptions& options,
                                                     const std::string& daemon);

// The arena of --tenant and --model at the first daemon. kNotFound if it has none.
absl::StatusOr<locks_kvd::v1::StatsReply::ArenaStats> WantedArena(const LocksctlOptions& options);

// What a client must be to attach to it: the geometry comes from the daemon.
absl::StatusOr<ClientOptions> AttachOptions(const LocksctlOptions& options);

// Says it on standard error; kUnreachable for a daemon that does not answer, else kCheckFailed.
ExitCode Complain(const absl::Status& status);

// The one that a caller should hear of.
ExitCode Worse(ExitCode a, ExitCode b);

// Rounds of a verb that repeats: clears a terminal, or just goes on elsewhere; sleeps in between.
class Rounds {
 public:
  Rounds(const LocksctlOptions& options, bool repeats);
  // True once a round; sleeps before every one but the first.
  bool Next();

 private:
  const absl::Duration interval_;
  const int64_t count_;
  const bool redraws_;
  int64_t round_ = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_DAEMON_H_
