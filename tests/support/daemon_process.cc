#include "tests/support/daemon_process.h"

#include <fcntl.h>
#include <google/protobuf/text_format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/check.h"
#include "proto/geometry.h"
#include "proto/status.h"

namespace kvd::testing {
namespace {

// Sanitizers make a start slow; a hang is still noticed.
constexpr absl::Duration kStartTimeout = absl::Seconds(30);
constexpr absl::Duration kPollInterval = absl::Milliseconds(10);

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string DaemonBinary() { return ProgramBeside("locks-kvd", KVD_DAEMON_BINARY); }

}  // namespace

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "kvd_test_XXXXXX").string();
  KVD_CHECK(mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string ProgramBeside(const std::string& name, const std::string& otherwise) {
  std::error_code unreadable;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  const std::string beside = (program.parent_path() / name).string();
  return access(beside.c_str(), X_OK) == 0 ? beside : otherwise;
}

bool HaveDaemonBinary() { return access(DaemonBinary().c_str(), X_OK) == 0; }

locks_kvd::v1::DaemonConfig MakeConfig(const DaemonSpec& spec, const std::string& dir) {
  locks_kvd::v1::DaemonConfig config;
  config.mutable_control()->set_address(absl::StrCat(spec.host, ":", spec.port));
  if (spec.shared_path) config.mutable_data()->set_socket_dir(absl::StrCat(dir, "/socket"));
  config.mutable_data()->set_ucx(spec.ucx);
  locks_kvd::v1::ArenaConfig& arena = *config.add_arenas();
  arena.set_tenant(spec.tenant);
  arena.set_model(spec.model);
  *arena.mutable_geometry() = ToProto(spec.geometry);
  arena.mutable_identity()->set_weights_id(spec.weights_id);
  arena.mutable_identity()->set_rope(spec.rope);
  arena.set_bytes(spec.arena_bytes);
  if (spec.gpu >= 0) arena.set_gpu(spec.gpu);
  config.mutable_times()->set_heartbeat_ms(spec.heartbeat_ms);
  config.mutable_times()->set_session_ttl_ms(spec.session_ttl_ms);
  config.mutable_times()->set_quarantine_ms(spec.quarantine_ms);
  config.mutable_log()->set_format("json");
  config.set_ready_file(absl::StrCat(dir, "/ready"));
  return config;
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(const DaemonSpec& spec) {
  auto dir = std::make_unique<TempDir>();
  const locks_kvd::v1::DaemonConfig config = MakeConfig(spec, dir->path());
  return Start(std::move(dir), config);
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(
    std::unique_ptr<TempDir> dir, const locks_kvd::v1::DaemonConfig& config) {
  return StartUnder({}, std::move(dir), config);
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::StartUnder(
    std::vector<std::string> prefix, std::unique_ptr<TempDir> dir,
    const locks_kvd::v1::DaemonConfig& config) {
  auto daemon = std::unique_ptr<DaemonProcess>(new DaemonProcess());
  daemon->prefix_ = std::move(prefix);
  daemon->dir_ = std::move(dir);
  daemon->config_ = config;
  KVD_RETURN_IF_ERROR(daemon->Launch());
  return daemon;
}

DaemonProcess::~DaemonProcess() { Kill(); }

absl::Status DaemonProcess::Launch() {
  if (!config_.data().socket_dir().empty()) {
    std::filesystem::create_directories(config_.data().socket_dir());
    std::filesystem::permissions(config_.data().socket_dir(),
                                 std::filesystem::perms::owner_all |
                                     std::filesystem::perms::group_read |
                                     std::filesystem::perms::group_exec);
  }
  std::filesystem::remove(config_.ready_file());
  std::string text;
  google::protobuf::TextFormat::PrintToString(config_, &text);
  const std::string config_path = absl::StrCat(dir(), "/config.textproto");
  std::ofstream(config_path) << text;
  const std::string log_path = absl::StrCat(dir(), "/log");
  const int log = open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (log < 0) return absl::InternalError(absl::StrCat("cannot open ", log_path));
  const std::string flag = absl::StrCat("--config=", config_path);
  const std::string binary = DaemonBinary();
  std::vector<char*> argv;
  for (const std::string& word : prefix_) argv.push_back(const_cast<char*>(word.c_str()));
  for (const char* word : {binary.c_str(), flag.c_str()}) argv.push_back(const_cast<char*>(word));
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that crashes or is killed leaves no daemon behind
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  close(log);
  if (pid_ < 0) return absl::InternalError("fork failed");
  return WaitReady();
}

absl::Status DaemonProcess::WaitReady() {
  const absl::Time end = absl::Now() + kStartTimeout;
  while (absl::Now() < end) {
    if (Reap()) {
      return absl::InternalError(absl::StrCat("the daemon ended with status ", exit_status_,
                                              " before it was ready:\n", LogTail()));
    }
    const std::string text = ReadFile(config_.ready_file());
    locks_kvd::v1::ReadyFile ready;
    if (!text.empty() && google::protobuf::TextFormat::ParseFromString(text, &ready)) {
      ready_ = std::move(ready);
      return absl::OkStatus();
    }
    absl::SleepFor(kPollInterval);
  }
  Kill();
  return absl::DeadlineExceededError(
      absl::StrCat("the daemon was not ready in time:\n", LogTail()));
}

bool DaemonProcess::Reap() {
  if (pid_ <= 0 || waitpid(pid_, &exit_status_, WNOHANG) != pid_) return false;
  pid_ = -1;
  return true;
}

void DaemonProcess::Kill() {
  if (pid_ <= 0) return;
  // Under `unshare --fork` the daemon is a child; who waits for it ends once it is gone.
  std::ifstream children(absl::StrCat("/proc/", pid_, "/task/", pid_, "/children"));
  pid_t child = 0;
  const bool has_child = static_cast<bool>(children >> child) && child > 0;
  kill(has_child ? child : pid_, SIGKILL);
  waitpid(pid_, &exit_status_, 0);
  pid_ = -1;
}

void DaemonProcess::Freeze() {
  int status = 0;
  KVD_CHECK(kill(pid_, SIGSTOP) == 0 && waitpid(pid_, &status, WUNTRACED) == pid_ &&
            WIFSTOPPED(status));
}
void DaemonProcess::Thaw() { kill(pid_, SIGCONT); }

absl::StatusOr<int> DaemonProcess::Stop(absl::Duration timeout) {
  if (pid_ <= 0) return absl::FailedPreconditionError("the daemon does not run");
  kill(pid_, SIGTERM);
  const absl::Time end = absl::Now() + timeout;
  while (absl::Now() < end) {
    if (Reap()) return exit_status_;
    absl::SleepFor(kPollInterval);
  }
  Kill();
  return absl::DeadlineExceededError(absl::StrCat("the daemon did not end:\n", LogTail()));
}

absl::Status DaemonProcess::Restart() {
  KVD_CHECK(!running());
  config_.mutable_control()->set_address(ready_.control_address());
  return Launch();
}

std::string DaemonProcess::LogTail() const {
  constexpr size_t kTailBytes = 4000;
  std::string log = ReadFile(absl::StrCat(dir(), "/log"));
  if (log.size() > kTailBytes) log.erase(0, log.size() - kTailBytes);
  return log;
}

}  // namespace kvd::testing
