// Real locks-kvd processes for integration, system and chaos tests: configuration, start,
// readiness, stop, kill, freeze.
//
// Thread safety: compatible. A daemon that is still running is killed by the destructor.

#ifndef LOCKS_KVD_TESTS_SUPPORT_DAEMON_PROCESS_H_
#define LOCKS_KVD_TESTS_SUPPORT_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/layout.h"
#include "proto/config.pb.h"

namespace kvd::testing {

// A directory of its own under the system's temporary one, removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct DaemonSpec {
  std::string tenant = "test";
  std::string model = "model";
  std::string weights_id = "weights";
  std::string rope = "theta=10000";
  KvGeometry geometry;
  uint64_t arena_bytes = uint64_t{64} << 20;
  int gpu = -1;  // CUDA ordinal of the arena; -1: host memory
  bool shared_path = true;
  bool ucx = true;
  uint32_t heartbeat_ms = 100;
  uint32_t session_ttl_ms = 1000;
  uint32_t quarantine_ms = 0;  // 0: the session TTL
  int port = 0;                // of the control plane; 0: any
  std::string host = "127.0.0.1";
};

// What a daemon of `spec` is configured with; files go to `dir`. Change it before Start where a
// test needs more (limits, TLS, further arenas).
locks_kvd::v1::DaemonConfig MakeConfig(const DaemonSpec& spec, const std::string& dir);

class DaemonProcess {
 public:
  // What runs the binary, before its own path: {"ip", "netns", "exec", "d1"}. It must keep the
  // process id, or wait for the daemon as a child, as `unshare --fork` does: then Freeze, Thaw and
  // Stop do not reach the daemon.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> StartUnder(
      std::vector<std::string> prefix, std::unique_ptr<TempDir> dir,
      const locks_kvd::v1::DaemonConfig& config);
  // Writes the configuration, starts the binary, waits until its ready file is there.
  // kDeadlineExceeded or kInternal with the end of its log if it does not come up.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const DaemonSpec& spec);
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(
      std::unique_ptr<TempDir> dir, const locks_kvd::v1::DaemonConfig& config);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // host:port of the control plane.
  const std::string& address() const { return ready_.control_address(); }
  const locks_kvd::v1::ReadyFile& ready() const { return ready_; }
  pid_t pid() const { return pid_; }
  bool running() const { return pid_ > 0; }

  void Kill();    // SIGKILL, waited for
  void Freeze();  // SIGSTOP, waited for: every thread has stopped
  void Thaw();    // SIGCONT
  // SIGTERM, waited for: its exit status. kDeadlineExceeded (then killed) if it does not end.
  absl::StatusOr<int> Stop(absl::Duration timeout = absl::Seconds(20));
  // Starts the same configuration again, at the same address, in a new process. REQUIRES: not
  // running.
  absl::Status Restart();

  // The end of what it logged.
  std::string LogTail() const;
  const std::string& dir() const { return dir_->path(); }

 private:
  DaemonProcess() = default;
  absl::Status Launch();
  absl::Status WaitReady();
  // Non-blocking; forgets the process if it ended.
  bool Reap();

  std::vector<std::string> prefix_;
  std::unique_ptr<TempDir> dir_;
  locks_kvd::v1::DaemonConfig config_;
  locks_kvd::v1::ReadyFile ready_;
  pid_t pid_ = -1;
  int exit_status_ = 0;
};

// Path of a program that stands beside the one that runs, as in the folder of deploy/bundle.sh;
// else `otherwise`.
std::string ProgramBeside(const std::string& name, const std::string& otherwise);

// True if the daemon's binary is beside this program or part of its build (KVD_DAEMON_BINARY).
bool HaveDaemonBinary();

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_DAEMON_PROCESS_H_
