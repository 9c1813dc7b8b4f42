#include "client/locksctl_verbs.h"

#include <algorithm>
#include <chrono>
#include <iostream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/grpc_channel.h"
#include "client/kv_client.h"
#include "client/locksctl_output.h"
#include "proto/geometry.h"
#include "proto/pool.grpc.pb.h"
#include "proto/status.h"

namespace kvd {
namespace {

using locks_kvd::v1::StatsReply;

void SetDeadline(grpc::ClientContext& context, absl::Duration timeout) {
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(timeout));
}

std::string ShortIncarnation(const StatsReply& stats) {
  return absl::BytesToHexString(stats.incarnation()).substr(0, 12);
}

std::string DescribeGeometry(const locks_kvd::v1::Geometry& g) {
  return absl::StrCat("L", g.num_layers(), " H", g.num_q_heads(), "/", g.num_kv_heads(), " D",
                      g.head_dim(), " B", g.page_tokens(), " R", g.rank());
}

ExitCode Worse(ExitCode a, ExitCode b) { return std::max(a, b); }

}  // namespace

absl::StatusOr<StatsReply> QueryStats(const LocksctlOptions& options, const std::string& daemon) {
  KVD_ASSIGN_OR_RETURN(const auto channel, OpenGrpcChannel(daemon, options.tls));
  const auto stub = locks_kvd::v1::Pool::NewStub(channel);
  grpc::ClientContext context;
  SetDeadline(context, options.timeout);
  StatsReply reply;
  const grpc::Status status = stub->Stats(&context, {}, &reply);
  if (!status.ok()) return Annotate(FromGrpc(status), daemon);
  return reply;
}

absl::StatusOr<ClientOptions> AttachOptions(const LocksctlOptions& options) {
  KVD_ASSIGN_OR_RETURN(const StatsReply stats, QueryStats(options, options.daemons[0]));
  for (const StatsReply::ArenaStats& arena : stats.arenas()) {
    const bool wanted = arena.model() == options.model &&
                        (options.tenant.empty() || arena.tenant() == options.tenant);
    if (!wanted) continue;
    ClientOptions client;
    client.daemons = options.daemons;
    client.tenant = arena.tenant();
    client.model = options.model;
    KVD_ASSIGN_OR_RETURN(client.geometry, FromProto(arena.geometry()));
    client.weights_id = options.weights_id;
    client.rope = options.rope;
    client.tls = options.tls;
    client.client_name = absl::StrCat("locksctl ", options.verb);
    client.control_timeout = options.timeout;
    return client;
  }
  return absl::NotFoundError(absl::StrCat(options.daemons[0], " has no arena for tenant '",
                                          options.tenant, "' and model '", options.model,
                                          "': see `locksctl status`"));
}

ExitCode Complain(const absl::Status& status) {
  std::cerr << "locksctl: " << status.ToString() << "\n";
  const bool unreachable = status.code() == absl::StatusCode::kUnavailable ||
                           status.code() == absl::StatusCode::kDeadlineExceeded;
  return unreachable ? ExitCode::kUnreachable : ExitCode::kCheckFailed;
}

ExitCode RunStatus(const LocksctlOptions& options) {
  Table table = {{"daemon", "state", "incarnation", "version", "uptime_s", "security", "tenant",
                  "model", "geometry", "encoder", "pages_used", "pages_total", "paths"},
                 {}};
  ExitCode code = ExitCode::kOk;
  for (const std::string& daemon : options.daemons) {
    const absl::StatusOr<StatsReply> stats = QueryStats(options, daemon);
    if (!stats.ok()) {
      code = Worse(code, Complain(stats.status()));
      table.rows.push_back({daemon, "unreachable", "", "", int64_t{0}, "", "", "", "", "",
                            int64_t{0}, int64_t{0}, ""});
      continue;
    }
    for (const StatsReply::ArenaStats& arena : stats->arenas()) {
      const int64_t used =
          arena.slots_sealed() + arena.slots_reserved() + arena.slots_quarantined();
      table.rows.push_back({daemon, stats->draining() ? "draining" : "serving",
                            ShortIncarnation(*stats), stats->version(),
                            static_cast<int64_t>(stats->uptime_ms() / 1000),
                            stats->insecure() ? "insecure" : "mtls", arena.tenant(), arena.model(),
                            DescribeGeometry(arena.geometry()), arena.encoder(), used,
                            used + arena.slots_free(), absl::StrJoin(stats->paths(), "; ")});
    }
  }
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunPaths(const LocksctlOptions& options) {
  absl::StatusOr<ClientOptions> client_options = AttachOptions(options);
  if (!client_options.ok()) return Complain(client_options.status());
  Table table = {{"daemon", "path", "canary_mb_per_s", "canary_us", "rejected"}, {}};
  ExitCode code = ExitCode::kOk;
  for (const std::string& daemon : options.daemons) {
    client_options->daemons = {daemon};
    const auto client = KvClient::Make(*client_options);
    if (!client.ok()) {
      code = Worse(code, Complain(client.status()));
      table.rows.push_back({daemon, "none", int64_t{0}, int64_t{0}, ""});
      continue;
    }
    const DaemonView view = (*client)->Daemons()[0];
    const absl::string_view path = PathName(view.path.path);
    table.rows.push_back({daemon, std::string(path.data(), path.size()),
                          static_cast<int64_t>(view.path.canary_bytes_per_second / 1e6),
                          static_cast<int64_t>(view.path.canary_seconds * 1e6),
                          absl::StrJoin(view.path.rejected, "; ")});
  }
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunStat(const LocksctlOptions& options) {
  ExitCode code = ExitCode::kOk;
  for (int64_t round = 0;; ++round) {
    Table table = {{"daemon", "tenant", "model", "free", "reserved", "sealed", "quarantined",
                    "leased", "evicted", "sessions"},
                   {}};
    for (const std::string& daemon : options.daemons) {
      const absl::StatusOr<StatsReply> stats = QueryStats(options, daemon);
      if (!stats.ok()) {
        code = Worse(code, Complain(stats.status()));
        continue;
      }
      for (const StatsReply::ArenaStats& arena : stats->arenas()) {
        const auto sessions = std::count_if(
            stats->sessions().begin(), stats->sessions().end(), [&](const auto& session) {
              return session.tenant() == arena.tenant() && session.model() == arena.model();
            });
        table.rows.push_back({daemon, arena.tenant(), arena.model(), int64_t{arena.slots_free()},
                              int64_t{arena.slots_reserved()}, int64_t{arena.slots_sealed()},
                              int64_t{arena.slots_quarantined()}, int64_t{arena.slots_leased()},
                              static_cast<int64_t>(arena.evicted_pages()), int64_t{sessions}});
      }
    }
    std::cout << Render(table, options.output) << std::flush;
    const bool once = options.interval == absl::ZeroDuration();
    if (once || (options.count > 0 && round + 1 >= options.count)) return code;
    absl::SleepFor(options.interval);
  }
}

ExitCode RunDrain(const LocksctlOptions& options) {
  Table table = {{"daemon", "clean", "leases_left"}, {}};
  ExitCode code = ExitCode::kOk;
  for (const std::string& daemon : options.daemons) {
    const auto channel = OpenGrpcChannel(daemon, options.tls);
    if (!channel.ok()) return Complain(channel.status());
    const auto stub = locks_kvd::v1::Admin::NewStub(*channel);
    locks_kvd::v1::DrainRequest request;
    request.set_timeout_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options.drain_timeout)));
    request.set_exit(options.exit);
    grpc::ClientContext context;
    // A drain takes its own time; the call's timeout comes on top. 60 s is the daemon's default
    // limit.
    const absl::Duration limit =
        options.drain_timeout > absl::ZeroDuration() ? options.drain_timeout : absl::Seconds(60);
    SetDeadline(context, limit + options.timeout);
    locks_kvd::v1::DrainReply reply;
    const grpc::Status status = stub->Drain(&context, request, &reply);
    if (!status.ok()) {
      code = Worse(code, Complain(Annotate(FromGrpc(status), daemon)));
      continue;
    }
    if (!reply.clean()) code = Worse(code, ExitCode::kCheckFailed);
    table.rows.push_back({daemon, reply.clean(), int64_t{reply.leases_left()}});
  }
  std::cout << Render(table, options.output);
  return code;
}

}  // namespace kvd
