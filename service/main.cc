// locks-kvd: the pool daemon. Reads flags and the configuration, serves until it is told to stop.
// SIGTERM or SIGINT drains; a second one ends at once. Exit codes: 0 ended in order, 1 failed, 2
// wrong flags or configuration.

#include <pthread.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/layout.h"
#include "service/config.h"
#include "service/log_setup.h"
#include "service/metrics.h"
#include "service/server.h"
#include "spdlog/spdlog.h"

namespace kvd {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

int Usage(const absl::Status& status) {
  std::fprintf(stderr, "locks-kvd: %s\n", std::string(status.message()).c_str());
  return kExitUsage;
}

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// Drains at the first signal, ends the process at the second. SIGUSR1 ends the thread.
class SignalThread {
 public:
  explicit SignalThread(Server* server) : server_(server), thread_([this] { Loop(); }) {}
  ~SignalThread() {
    pthread_kill(thread_.native_handle(), SIGUSR1);
    thread_.join();
  }
  // No drain is under way or begins after this: the server may end.
  void LeaveServer() {
    std::thread drain;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      server_ = nullptr;
      drain = std::move(drain_);
    }
    if (drain.joinable()) drain.join();
  }

 private:
  void Loop() {
    sigset_t signals = StopSignals();
    sigaddset(&signals, SIGUSR1);
    for (int received = 0;;) {
      int signal = 0;
      sigwait(&signals, &signal);
      if (signal == SIGUSR1) return;
      if (++received > 1) {
        spdlog::warn("killed signal={} meaning=\"a second signal: ended without waiting\"", signal);
        std::_Exit(kExitFailed);
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      if (server_ == nullptr) continue;  // it is ending already
      drain_ = std::thread([server = server_, signal] {
        server->Drain(absl::ZeroDuration(), absl::StrCat("signal ", signal));
        server->RequestExit();
      });
    }
  }

  std::mutex mutex_;  // guards server_ and drain_
  Server* server_;
  std::thread drain_;
  std::thread thread_;
};

int Serve(const locks_kvd::v1::DaemonConfig& config) {
  SetUpLogging(config.log());
  // Blocked before any thread starts, so that only SignalThread sees them.
  sigset_t signals = StopSignals();
  sigaddset(&signals, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  // Before any thread starts: NCCL reads it. Nothing of ours uses NVLink multicast.
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(config);
  if (!server.ok()) {
    spdlog::error("start_failed code={} problem={}",
                  absl::StatusCodeToString(server.status().code()),
                  LogQuote(server.status().message()));
    return kExitFailed;
  }
  SignalThread signal_thread(server->get());
  (*server)->WaitForExit();
  signal_thread.LeaveServer();
  server->reset();
  return 0;
}

int Main(const std::vector<std::string>& args) {
  const absl::StatusOr<CommandLine> line = ParseCommandLine(args);
  if (!line.ok()) return Usage(line.status());
  if (line->action == CommandLine::Action::kHelp) {
    std::fputs(HelpText().c_str(), stdout);
    return 0;
  }
  if (line->action == CommandLine::Action::kShowVersion) {
    std::printf("locks-kvd %s, layout %u\n", kVersion, kLayoutVersion);
    return 0;
  }
  if (line->action == CommandLine::Action::kListMetrics) {
    std::fputs(MetricsMarkdown(kDaemonPrefix, DaemonMetrics()).c_str(), stdout);
    return 0;
  }
  const absl::StatusOr<locks_kvd::v1::DaemonConfig> config = LoadConfig(*line);
  if (!config.ok()) return Usage(config.status());
  if (line->action == CommandLine::Action::kPrintConfig) {
    std::fputs(PrintConfig(*config).c_str(), stdout);
    return 0;
  }
  if (line->action == CommandLine::Action::kCheckConfig) {
    std::printf("good: %d arenas\n", config->arenas_size());
    return 0;
  }
  return Serve(*config);
}

}  // namespace
}  // namespace kvd

int main(int argc, char** argv) {
  return kvd::Main(std::vector<std::string>(argv + 1, argv + argc));
}
