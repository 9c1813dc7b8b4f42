// locksctl preflight: what would keep this host from working with the daemons, found before a
// worker finds it.

#include <fstream>
#include <iostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/kv_client.h"
#include "client/locksctl_daemon.h"
#include "client/locksctl_host_checks.h"
#include "client/locksctl_net.h"
#include "client/locksctl_output.h"
#include "client/locksctl_verbs.h"
#include "proto/ucx_worker.h"

namespace kvd {
namespace {

using locks_kvd::v1::StatsReply;
using Result = Check::Result;

constexpr int64_t kLeastDays = 7;

Check Failed(Check check, std::string found, std::string todo) {
  check.result = Result::kFailed;
  check.found = std::move(found);
  check.todo = std::move(todo);
  return check;
}

Check Skipped(Check check, std::string found) {
  check.result = Result::kSkipped;
  check.found = std::move(found);
  return check;
}

std::string HostId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

Check CheckPort(const std::string& daemon, absl::Duration timeout) {
  Check check = {.name = "port", .about = daemon};
  const absl::StatusOr<Address> address = Address::Parse(daemon);
  const absl::Status status =
      address.ok() ? ConnectTcp(*address, timeout).status() : address.status();
  if (status.ok()) {
    check.found = "open";
    return check;
  }
  return Failed(check, std::string(status.message()),
                "is the daemon started, the address right, a firewall in between?");
}

Check CheckControl(const std::string& daemon, const absl::StatusOr<DaemonFigures>& figures) {
  Check check = {.name = "control", .about = daemon};
  if (!figures.ok()) {
    return Failed(check, std::string(figures.status().message()),
                  "TLS on one side only, another CA, or an expired certificate? The daemon's log "
                  "says more");
  }
  const StatsReply& stats = figures->stats;
  check.found = absl::StrCat(stats.draining() ? "draining" : "serving", ", version ",
                             stats.version(), ", ", stats.insecure() ? "insecure" : "mtls");
  if (stats.draining()) return Failed(check, check.found, "start the daemon again");
  return check;
}

Check CheckDaemonClock(const std::string& daemon, const DaemonFigures& figures) {
  if (figures.stats.unix_ms() == 0) {
    return Skipped({.name = "clock", .about = daemon}, "the daemon does not tell its time");
  }
  const absl::Time theirs = absl::FromUnixMillis(static_cast<int64_t>(figures.stats.unix_ms()));
  return CheckClock(daemon, theirs - (absl::Now() - figures.took / 2));
}

// The same version on both sides, and transports that start here.
Check CheckUcx(const LocksctlOptions& options, const std::string& daemon, const StatsReply& stats) {
  Check check = {.name = "ucx", .about = daemon};
  if (stats.ucx_version().empty()) return Skipped(check, "the daemon does not offer it");
  const std::string ours = UcxWorker::Version();
  if (ours != stats.ucx_version()) {
    return Failed(check, absl::StrCat("version here ", ours, ", there ", stats.ucx_version()),
                  "run the same version: a session over ucx is refused otherwise");
  }
  UcxOptions ucx;
  const absl::StatusOr<Address> address = Address::Parse(options.daemons[0]);
  if (address.ok() && address->IsLoopback()) ucx.devices = "lo";
  const auto worker = UcxWorker::Make(ucx);
  if (!worker.ok()) {
    return Failed(check, std::string(worker.status().message()),
                  "check UCX_* in the environment and the network devices");
  }
  check.found = absl::StrCat("version ", ours, ", here ", (*worker)->transports(), ", there ",
                             stats.ucx_transports());
  return check;
}

Check CheckShared(const std::string& daemon, const StatsReply& stats) {
  const Check check = {.name = "socket_dir", .about = daemon};
  if (!stats.has_shared()) return Skipped(check, "the daemon does not offer the shared path");
  if (stats.shared().host_id() != HostId()) {
    return Skipped(check, "not applicable: the daemon is on another host");
  }
  return CheckSocketDirectory(stats.shared().socket_path());
}

// Attaches as a worker would; attaching fetches and proves the canary.
Check CheckFetch(const LocksctlOptions& options, const std::string& daemon) {
  Check check = {.name = "fetch", .about = daemon};
  if (options.model.empty()) return Skipped(check, "give --model to attach and fetch the canary");
  LocksctlOptions one = options;
  one.daemons = {daemon};
  absl::StatusOr<ClientOptions> client_options = AttachOptions(one);
  absl::Status status = client_options.status();
  if (status.ok()) {
    const auto client = KvClient::Make(*client_options);
    status = client.status();
    if (status.ok()) {
      const absl::string_view path = PathName((*client)->Daemons()[0].path.path);
      check.found = absl::StrCat("the canary came by ", path);
      return check;
    }
  }
  return Failed(check, std::string(status.message()), "the message says which side to change");
}

void CheckDaemon(const LocksctlOptions& options, const std::string& daemon,
                 absl::Duration least_left, std::vector<Check>* checks) {
  checks->push_back(CheckPort(daemon, options.timeout));
  if (checks->back().result == Result::kFailed) return;  // the rest would say the same
  const absl::StatusOr<DaemonFigures> figures = QueryFigures(options, daemon);
  checks->push_back(CheckControl(daemon, figures));
  if (!figures.ok()) return;
  if (!figures->certificate.empty()) {
    checks->push_back(CheckCertificate(absl::StrCat(daemon, " shows"), figures->certificate,
                                       least_left, absl::Now()));
  }
  checks->push_back(CheckDaemonClock(daemon, *figures));
  checks->push_back(CheckUcx(options, daemon, figures->stats));
  checks->push_back(CheckShared(daemon, figures->stats));
  checks->push_back(CheckFetch(options, daemon));
}

const char* Name(Result result) {
  switch (result) {
    case Result::kOk:
      return "ok";
    case Result::kFailed:
      return "failed";
    case Result::kSkipped:
      break;
  }
  return "skipped";
}

}  // namespace

ExitCode RunPreflight(const LocksctlOptions& options) {
  const absl::Duration least_left =
      absl::Hours(24 * (options.days > 0 ? options.days : kLeastDays));
  std::vector<Check> checks = {CheckMemlock(options.memlock), CheckGpus("/"), CheckPeerAccess()};
  if (options.tls.empty()) {
    checks.push_back(Skipped({.name = "certificate", .about = "ours"},
                             "no certificates are given: only a daemon without them will do"));
  } else {
    for (const std::string& file : {options.tls.certificate_file, options.tls.ca_file}) {
      checks.push_back(CheckCertificateFile(file, least_left, absl::Now()));
    }
  }
  for (const std::string& daemon : options.daemons) {
    CheckDaemon(options, daemon, least_left, &checks);
  }
  Table table = {{"check", "about", "result", "found", "todo"}, {}};
  ExitCode code = ExitCode::kOk;
  for (const Check& check : checks) {
    if (check.result == Result::kFailed) code = ExitCode::kCheckFailed;
    table.rows.push_back({check.name, check.about, Name(check.result), check.found, check.todo});
  }
  std::cout << Render(table, options.output);
  return code;
}

}  // namespace kvd
