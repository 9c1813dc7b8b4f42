// What needs the admin role: figures that are nobody else's business, and changes.

#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/locksctl_daemon.h"
#include "client/locksctl_output.h"
#include "client/locksctl_verbs.h"
#include "proto/config.pb.h"

namespace kvd {
namespace {

using locks_kvd::v1::Admin;
using locks_kvd::v1::StatsReply;

// Sums over one arena.
struct Verified {
  uint64_t pages = 0;
  uint64_t units = 0;
  uint64_t evicted = 0;
  int64_t wrong = 0;
};

absl::StatusOr<Verified> VerifyArena(const AdminCaller& admin, const std::string& daemon,
                                     const StatsReply::ArenaStats& arena, Table* wrong) {
  const bool shows_progress = isatty(STDERR_FILENO) == 1;
  Verified sums;
  locks_kvd::v1::VerifyRequest request;
  request.set_tenant(arena.tenant());
  request.set_model(arena.model());
  for (bool done = false; !done;) {
    KVD_ASSIGN_OR_RETURN(const locks_kvd::v1::VerifyReply reply,
                         admin.Call(&Admin::Stub::Verify, request));
    if (!reply.done() && reply.next_slot() <= request.first_slot()) {
      return absl::InternalError(absl::StrCat(daemon, ": verify does not advance"));
    }
    sums.pages += reply.pages();
    sums.units += reply.units();
    sums.evicted += reply.evicted();
    sums.wrong += reply.failures_size();
    for (const auto& failure : reply.failures()) {
      wrong->rows.push_back({daemon, arena.tenant(), arena.model(), int64_t{failure.slot()},
                             static_cast<int64_t>(failure.generation()), failure.what()});
    }
    if (shows_progress) {
      std::cerr << "\r" << daemon << " " << arena.tenant() << "/" << arena.model() << ": "
                << reply.next_slot() << " of " << reply.num_slots() << " slots"
                << (reply.done() ? "\n" : "") << std::flush;
    }
    request.set_first_slot(reply.next_slot());
    done = reply.done();
  }
  return sums;
}

// The configuration as JSON; as a JSON string if it is one that this version does not know.
Cell ConfigJson(const std::string& text) {
  locks_kvd::v1::DaemonConfig config;
  google::protobuf::util::JsonPrintOptions print;
  print.preserve_proto_field_names = true;
  std::string json;
  const bool known = google::protobuf::TextFormat::ParseFromString(text, &config) &&
                     google::protobuf::util::MessageToJsonString(config, &json, print).ok();
  return known ? Cell::Json(json) : Cell(text);
}

}  // namespace

ExitCode RunVerify(const LocksctlOptions& options) {
  Table sums = {{"daemon", "tenant", "model", "pages", "units", "evicted_meanwhile", "wrong"}, {}};
  Table wrong = {{"daemon", "tenant", "model", "slot", "generation", "what"}, {}};
  ExitCode code = ExitCode::kOk;
  for (const std::string& daemon : options.daemons) {
    const absl::StatusOr<StatsReply> stats = QueryStats(options, daemon);
    const absl::StatusOr<AdminCaller> admin = AdminCaller::Make(options, daemon);
    if (!stats.ok() || !admin.ok()) {
      code = Worse(code, Complain(stats.ok() ? admin.status() : stats.status()));
      continue;
    }
    for (const StatsReply::ArenaStats& arena : stats->arenas()) {
      const bool wanted = (options.tenant.empty() || options.tenant == arena.tenant()) &&
                          (options.model.empty() || options.model == arena.model());
      if (!wanted) continue;
      const absl::StatusOr<Verified> verified = VerifyArena(*admin, daemon, arena, &wrong);
      if (!verified.ok()) {
        code = Worse(code, Complain(verified.status()));
        continue;
      }
      if (verified->wrong > 0) code = Worse(code, ExitCode::kCheckFailed);
      sums.rows.push_back({daemon, arena.tenant(), arena.model(),
                           static_cast<int64_t>(verified->pages),
                           static_cast<int64_t>(verified->units),
                           static_cast<int64_t>(verified->evicted), verified->wrong});
    }
  }
  std::cout << Render(sums, options.output);
  if (!wrong.rows.empty()) std::cerr << Render(wrong, OutputForm::kTable);
  return code;
}

ExitCode RunSlowlog(const LocksctlOptions& options) {
  Table table = {{"daemon", "ended", "session", "code", "units", "missing_units", "bytes",
                  "queue_us", "move_us"},
                 {}};
  ExitCode code = ExitCode::kOk;
  locks_kvd::v1::SlowlogRequest request;
  request.set_max_entries(static_cast<uint32_t>(std::min<int64_t>(options.count, UINT32_MAX)));
  for (const std::string& daemon : options.daemons) {
    const auto reply = CallAdmin(options, daemon, &Admin::Stub::Slowlog, request);
    if (!reply.ok()) {
      code = Worse(code, Complain(reply.status()));
      continue;
    }
    for (const auto& fetch : reply->fetches()) {
      const absl::Time ended = absl::FromUnixMicros(static_cast<int64_t>(fetch.unix_us()));
      table.rows.push_back(
          {daemon, absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", ended, absl::UTCTimeZone()),
           static_cast<int64_t>(fetch.session_id()),
           absl::StatusCodeToString(static_cast<absl::StatusCode>(fetch.code())),
           int64_t{fetch.units()}, int64_t{fetch.missing_units()},
           static_cast<int64_t>(fetch.bytes()), static_cast<int64_t>(fetch.queue_us()),
           static_cast<int64_t>(fetch.move_us())});
    }
  }
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunConfig(const LocksctlOptions& options) {
  Table table = {{"daemon", "config"}, {}};
  std::string text;
  ExitCode code = ExitCode::kOk;
  for (const std::string& daemon : options.daemons) {
    const auto reply = CallAdmin(options, daemon, &Admin::Stub::Config, {});
    if (!reply.ok()) {
      code = Worse(code, Complain(reply.status()));
      continue;
    }
    absl::StrAppend(&text, "# ", daemon, "\n", reply->text());
    table.rows.push_back({daemon, ConfigJson(reply->text())});
  }
  std::cout << (options.output == OutputForm::kJson ? Render(table, options.output) : text);
  return code;
}

ExitCode RunLogLevel(const LocksctlOptions& options) {
  Table table = {{"daemon", "before", "level"}, {}};
  ExitCode code = ExitCode::kOk;
  locks_kvd::v1::LogLevelRequest request;
  if (!options.arguments.empty()) request.set_level(options.arguments[0]);
  for (const std::string& daemon : options.daemons) {
    const auto reply = CallAdmin(options, daemon, &Admin::Stub::LogLevel, request);
    if (!reply.ok()) {
      const bool usage = absl::IsInvalidArgument(reply.status());
      const ExitCode failed = Complain(reply.status());
      code = Worse(code, usage ? ExitCode::kUsage : failed);
      continue;
    }
    table.rows.push_back({daemon, reply->before(), reply->level()});
  }
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunDrain(const LocksctlOptions& options) {
  Table table = {{"daemon", "clean", "leases_left"}, {}};
  ExitCode code = ExitCode::kOk;
  locks_kvd::v1::DrainRequest request;
  request.set_timeout_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options.drain_timeout)));
  request.set_exit(options.exit);
  // A drain takes its own time; the call's timeout comes on top. 60 s is the daemon's default
  // limit.
  const absl::Duration limit =
      options.drain_timeout > absl::ZeroDuration() ? options.drain_timeout : absl::Seconds(60);
  for (const std::string& daemon : options.daemons) {
    const auto reply = CallAdmin(options, daemon, &Admin::Stub::Drain, request, limit);
    if (!reply.ok()) {
      code = Worse(code, Complain(reply.status()));
      continue;
    }
    if (!reply->clean()) code = Worse(code, ExitCode::kCheckFailed);
    table.rows.push_back({daemon, reply->clean(), int64_t{reply->leases_left()}});
  }
  std::cout << Render(table, options.output);
  return code;
}

}  // namespace kvd
