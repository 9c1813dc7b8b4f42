// What sessions cost on either side: memory, sockets, threads, and CPU time of sessions that do
// nothing.
//
// usage: session_bench [--workers=1] [--members=200] [--path=ucx|shared] [--json FILE]
// Starts a daemon and attaches `workers` clients, each to `members` addresses (127.0.0.1 up) of
// that one daemon: every pair is a session with a control connection of its own. The UCX connection
// is one for each worker, since all its members are one daemon. Figures are differences of /proc
// between before and after, a session; one arrangement a run, since a process does not give its
// memory back.

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/report.h"
#include "client/kv_client.h"
#include "kernels/check.h"
#include "proto/address.h"
#include "tests/support/daemon_process.h"

ABSL_FLAG(int, workers, 1, "clients");
ABSL_FLAG(int, members, 200, "sessions of each, at most 250");
ABSL_FLAG(std::string, path, "ucx", "ucx or shared");
ABSL_FLAG(std::string, json, "", "write the figures to this file");

namespace kvd::bench {
namespace {

constexpr absl::Duration kIdle = absl::Seconds(10);

// A process at one moment.
struct Usage {
  double anonymous_kib = 0;
  double threads = 0;
  double sockets = 0;
  double cpu_s = 0;
};

Usage UsageOf(pid_t pid) {
  const std::string folder = absl::StrCat("/proc/", pid);
  Usage usage;
  std::ifstream status(folder + "/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string name;
    double value = 0;
    words >> name >> value;
    if (name == "RssAnon:") usage.anonymous_kib = value;
    if (name == "Threads:") usage.threads = value;
  }
  for (const auto& file : std::filesystem::directory_iterator(folder + "/fd")) {
    std::error_code gone;  // a descriptor may be closed meanwhile
    const std::string target = std::filesystem::read_symlink(file, gone).string();
    if (target.starts_with("socket:")) usage.sockets += 1;
  }
  // Fields 14 and 15: user and system time, in ticks. The name, field 2, has no spaces here.
  std::ifstream stat(folder + "/stat");
  std::string word;
  for (int field = 1; field <= 15 && stat >> word; ++field) {
    if (field >= 14) usage.cpu_s += std::stod(word) / static_cast<double>(sysconf(_SC_CLK_TCK));
  }
  return usage;
}

KvGeometry SmallGeometry() {
  KvGeometry geometry;
  geometry.num_layers = 4;
  geometry.num_q_heads = 8;
  geometry.num_kv_heads = 2;
  geometry.head_dim = 64;
  geometry.softmax_scale = .125f;
  return geometry;
}

std::unique_ptr<kvd::testing::DaemonProcess> StartDaemon(const kvd::testing::DaemonSpec& spec) {
  auto dir = std::make_unique<kvd::testing::TempDir>();
  locks_kvd::v1::DaemonConfig config = MakeConfig(spec, dir->path());
  config.mutable_control()->set_address("0.0.0.0:0");  // all of 127.0.0.0/8
  config.mutable_control()->set_insecure_allow(true);
  config.mutable_data()->set_ucx_devices("lo");
  config.mutable_log()->set_level("warn");
  auto started = kvd::testing::DaemonProcess::Start(std::move(dir), config);
  if (!started.ok()) std::fprintf(stderr, "%s\n", started.status().ToString().c_str());
  KVD_CHECK(started.ok());
  return *std::move(started);
}

ClientOptions WorkerOptions(const kvd::testing::DaemonSpec& spec, uint16_t port) {
  ClientOptions options;
  for (int i = 1; i <= absl::GetFlag(FLAGS_members); ++i)
    options.daemons.push_back(absl::StrCat("127.0.0.", i, ":", port));
  options.tenant = spec.tenant;
  options.model = spec.model;
  options.geometry = spec.geometry;
  options.weights_id = spec.weights_id;
  options.rope = spec.rope;
  options.ucx_devices = "lo";
  options.control_timeout = absl::Seconds(30);
  if (absl::GetFlag(FLAGS_path) == "ucx") options.best_path = PathKind::kUcx;
  return options;
}

void AddFigures(const std::string& side, const Usage& before, const Usage& attached,
                const Usage& after_idle, int sessions, Report* report) {
  report->Add({absl::StrCat(side, "/anonymous_memory"),
               (attached.anonymous_kib - before.anonymous_kib) / sessions, "KiB", 0, 0});
  report->Add(
      {absl::StrCat(side, "/sockets"), (attached.sockets - before.sockets) / sessions, "1", 0, 0});
  report->Add(
      {absl::StrCat(side, "/threads"), (attached.threads - before.threads) / sessions, "1", 0, 0});
  report->Add({absl::StrCat(side, "/attach_cpu"), (attached.cpu_s - before.cpu_s) * 1e3 / sessions,
               "ms", 0, 0});
  report->Add({absl::StrCat(side, "/idle_cpu"),
               (after_idle.cpu_s - attached.cpu_s) * 1e3 / absl::ToDoubleSeconds(kIdle) / sessions,
               "ms/s", 0, 0});
}

int Main() {
  kvd::testing::DaemonSpec spec;
  spec.geometry = SmallGeometry();
  spec.heartbeat_ms = 1000;
  spec.session_ttl_ms = 5000;
  const auto daemon = StartDaemon(spec);
  const ClientOptions options = WorkerOptions(spec, Address::Parse(daemon->address())->port);
  const int num_workers = absl::GetFlag(FLAGS_workers);
  const int sessions = num_workers * absl::GetFlag(FLAGS_members);
  const Usage daemon_before = UsageOf(daemon->pid());
  const Usage workers_before = UsageOf(getpid());
  std::vector<std::unique_ptr<KvClient>> workers;
  for (int w = 0; w < num_workers; ++w) {
    auto made = KvClient::Make(options);
    if (!made.ok()) {
      std::fprintf(stderr, "session_bench: worker %d: %s\n", w, made.status().ToString().c_str());
      return 1;
    }
    workers.push_back(*std::move(made));
  }
  absl::SleepFor(absl::Seconds(2));  // the first pings and greetings
  const Usage daemon_attached = UsageOf(daemon->pid());
  const Usage workers_attached = UsageOf(getpid());
  absl::SleepFor(kIdle);
  Report report(absl::StrCat("session_bench, a session of ", num_workers, " x ",
                             absl::GetFlag(FLAGS_members), ", ", absl::GetFlag(FLAGS_path)));
  AddFigures("daemon", daemon_before, daemon_attached, UsageOf(daemon->pid()), sessions, &report);
  AddFigures("worker", workers_before, workers_attached, UsageOf(getpid()), sessions, &report);
  int attached = 0;
  for (const auto& worker : workers) {
    for (const DaemonView& view : worker->Daemons()) attached += view.attached ? 1 : 0;
  }
  report.Check("attached", attached == sessions,
               absl::StrCat(attached, " of ", sessions, " sessions live"));
  return report.Finish(absl::GetFlag(FLAGS_json));
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("What sessions cost a daemon and a worker.");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
