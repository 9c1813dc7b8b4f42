#include "client/locksctl_daemon.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/geometry.h"

namespace kvd {

using locks_kvd::v1::StatsReply;

absl::StatusOr<DaemonFigures> QueryFigures(const LocksctlOptions& options,
                                           const std::string& daemon) {
  KVD_ASSIGN_OR_RETURN(const auto channel, OpenGrpcChannel(daemon, options.tls));
  const auto stub = locks_kvd::v1::Pool::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       absl::ToChronoNanoseconds(options.timeout));
  DaemonFigures figures;
  const absl::Time start = absl::Now();
  const grpc::Status status = stub->Stats(&context, {}, &figures.stats);
  figures.took = absl::Now() - start;
  if (!status.ok()) return Annotate(FromGrpc(status), daemon);
  if (const auto auth = context.auth_context(); auth != nullptr) {
    const auto pem = auth->FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME);
    if (!pem.empty()) figures.certificate.assign(pem[0].data(), pem[0].size());
  }
  return figures;
}

absl::StatusOr<StatsReply> QueryStats(const LocksctlOptions& options, const std::string& daemon) {
  KVD_ASSIGN_OR_RETURN(DaemonFigures figures, QueryFigures(options, daemon));
  return std::move(figures.stats);
}

absl::StatusOr<StatsReply::ArenaStats> WantedArena(const LocksctlOptions& options) {
  KVD_ASSIGN_OR_RETURN(const StatsReply stats, QueryStats(options, options.daemons[0]));
  for (const StatsReply::ArenaStats& arena : stats.arenas()) {
    const bool wanted = arena.model() == options.model &&
                        (options.tenant.empty() || arena.tenant() == options.tenant);
    if (wanted) return arena;
  }
  return absl::NotFoundError(absl::StrCat(options.daemons[0], " has no arena for tenant '",
                                          options.tenant, "' and model '", options.model,
                                          "': see `locksctl status`"));
}

absl::StatusOr<ClientOptions> AttachOptions(const LocksctlOptions& options) {
  KVD_ASSIGN_OR_RETURN(const StatsReply::ArenaStats arena, WantedArena(options));
  ClientOptions client;
  client.daemons = options.daemons;
  client.tenant = arena.tenant();
  client.model = options.model;
  KVD_ASSIGN_OR_RETURN(client.geometry, FromProto(arena.geometry()));
  client.weights_id = options.weights_id;
  client.rope = options.rope;
  client.salt = options.salt;
  client.tls = options.tls;
  client.client_name = absl::StrCat("locksctl ", options.verb);
  client.control_timeout = options.timeout;
  return client;
}

ExitCode Complain(const absl::Status& status) {
  std::cerr << "locksctl: " << status.ToString() << "\n";
  const bool unreachable = status.code() == absl::StatusCode::kUnavailable ||
                           status.code() == absl::StatusCode::kDeadlineExceeded;
  return unreachable ? ExitCode::kUnreachable : ExitCode::kCheckFailed;
}

ExitCode Worse(ExitCode a, ExitCode b) { return std::max(a, b); }

Rounds::Rounds(const LocksctlOptions& options, bool repeats)
    : interval_(options.interval > absl::ZeroDuration() ? options.interval : absl::Seconds(1)),
      count_(repeats ? options.count : 1),
      redraws_(options.watch && options.output == OutputForm::kTable &&
               isatty(STDOUT_FILENO) == 1) {}

bool Rounds::Next() {
  std::cout << std::flush;
  if (count_ > 0 && round_ >= count_) return false;
  if (round_++ > 0) absl::SleepFor(interval_);
  if (redraws_) std::cout << "\x1b[H\x1b[2J";
  return true;
}

}  // namespace kvd
