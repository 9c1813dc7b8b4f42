// G5: every call has a deadline, overload is a typed refusal, and garbage on any port costs the
// daemon nothing but the connection.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "absl/strings/str_split.h"
#include "proto/address.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

class OverloadTest : public ::testing::Test {
 protected:
  void Start(uint32_t sessions_per_tenant = 0) {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    spec.session_ttl_ms = 60000;  // a frozen daemon is late, not lost
    auto dir = std::make_unique<TempDir>();
    auto config = MakeConfig(spec, dir->path());
    config.set_health_address("127.0.0.1:0");
    config.set_metrics_address("127.0.0.1:0");
    config.mutable_limits()->set_sessions_per_tenant(sessions_per_tenant);
    auto daemon = DaemonProcess::Start(std::move(dir), config);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  absl::StatusOr<std::unique_ptr<SystemWorker>> Connect(PathKind path) {
    ClientOptions options = OptionsFor({daemon_->address()}, path);
    options.control_timeout = absl::Seconds(2);
    return SystemWorker::Make(std::move(options));
  }
  // Puts and fetches `count` pages that nobody has put before.
  static void ExpectWorks(SystemWorker& worker, uint64_t first_page) {
    const auto versions = VersionsOf(first_page, 8, 1);
    const PutReport report = worker.Put(versions);
    const auto pages = NewPages(versions, report);
    ASSERT_EQ(pages.size(), 8u) << report.first_failure;
    const std::shared_ptr<Attachment> attachment = worker.attachment();
    ASSERT_NE(attachment, nullptr);
    const Fetched fetched = worker.Fetch(*attachment->fetcher, pages, absl::Seconds(10));
    EXPECT_EQ(fetched.num_exact, static_cast<int64_t>(8 * worker.shape().units_per_page()));
  }

  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(OverloadTest, FrozenDaemonCostsEachCallItsDeadlineAndHeals) {
  Start();
  auto connected = Connect(PathKind::kUcx);
  ASSERT_TRUE(connected.ok()) << connected.status();
  SystemWorker& worker = **connected;
  const auto versions = VersionsOf(0, 8, 1);
  const PutReport report = worker.Put(versions);
  const auto pages = NewPages(versions, report);
  ASSERT_EQ(pages.size(), 8u) << report.first_failure;
  const std::shared_ptr<Attachment> attachment = worker.attachment();

  daemon_->Freeze();
  const absl::Time start = absl::Now();
  const Fetched late = worker.Fetch(*attachment->fetcher, pages, absl::Milliseconds(300));
  EXPECT_EQ(late.code, absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(late.num_exact, 0);
  locks_kvd::v1::MatchRequest match;
  match.set_request_id(1);
  match.add_shards(0);
  EXPECT_EQ(worker.pool().channel(0).Match(*attachment, match).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  const PutReport stuck = worker.Put(VersionsOf(100, 2, 1));
  EXPECT_EQ(stuck.num_failed, 2);
  EXPECT_EQ(stuck.first_failure.code(), absl::StatusCode::kDeadlineExceeded) << stuck.first_failure;
  EXPECT_LT(absl::Now() - start, absl::Seconds(15));
  daemon_->Thaw();

  // The late answers reach nobody; the same session works again.
  ASSERT_TRUE(WaitFor([&] {
    return worker.Fetch(*attachment->fetcher, pages, absl::Seconds(2)).num_exact ==
           static_cast<int64_t>(8 * worker.shape().units_per_page());
  }));
  ExpectWorks(worker, 200);
}

// Shuts down every TCP connection of this process but those to `kept_port`: the daemon's control
// port.
int CutConnections(int kept_port) {
  int num_cut = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    sockaddr_in peer = {};
    socklen_t size = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
        peer.sin_family != AF_INET)
      continue;
    if (ntohs(peer.sin_port) != kept_port && shutdown(fd, SHUT_RDWR) == 0) ++num_cut;
  }
  return num_cut;
}

TEST_F(OverloadTest, CutDataConnectionIsNoticedAndTheWorkerAttachesAgain) {
  Start();
  for (const PathKind path : {PathKind::kUcx, PathKind::kShared}) {
    auto connected = Connect(path);
    ASSERT_TRUE(connected.ok()) << connected.status();
    SystemWorker& worker = **connected;
    ExpectWorks(worker, path == PathKind::kUcx ? 0 : 1000);
    const std::shared_ptr<Attachment> first = worker.attachment();
    ASSERT_GT(CutConnections(Address::Parse(daemon_->address())->port), 0);
    ASSERT_TRUE(WaitFor([&] {
      const std::shared_ptr<Attachment> now = worker.attachment();
      return now != nullptr && now != first;
    }));
    EXPECT_TRUE(first->lost.load());
    EXPECT_NE(worker.attachment()->session().token(), first->session().token());
    ExpectWorks(worker, path == PathKind::kUcx
                            ? 100
                            : 1100);  // it puts and fetches over the new connections
  }
}

TEST_F(OverloadTest, SessionsBeyondTheTenantsLimitAreRefusedAndTheOthersGoOn) {
  Start(2);
  auto first = Connect(PathKind::kShared);
  auto second = Connect(PathKind::kUcx);
  ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  EXPECT_EQ(Connect(PathKind::kShared).status().code(), absl::StatusCode::kResourceExhausted);
  ExpectWorks(**first, 0);
  second->reset();  // detaches: its place is free
  EXPECT_TRUE(Connect(PathKind::kUcx).ok());
}

// Sends random bytes over one connection; whether the peer takes them all is its business.
void SendGarbage(int family, const sockaddr* address, socklen_t size, std::mt19937_64& random) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(connect(fd, address, size), 0) << strerror(errno);
  std::vector<uint8_t> bytes(1 + random() % 4096);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  close(fd);
}

// Every TCP port that a process listens on, from the kernel's tables.
std::set<uint16_t> ListeningPorts(pid_t pid) {
  std::set<std::string> sockets;  // inodes of the process
  for (const auto& fd : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"))) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(fd.path(), gone).string();
    if (target.rfind("socket:[", 0) == 0) sockets.insert(target.substr(8, target.size() - 9));
  }
  std::set<uint16_t> ports;
  for (const char* table : {"tcp", "tcp6"}) {
    std::ifstream in(absl::StrCat("/proc/", pid, "/net/", table));
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      const std::vector<std::string> f = absl::StrSplit(line, ' ', absl::SkipEmpty());
      const bool listens = f.size() > 9 && f[3] == "0A";
      if (!listens || sockets.count(f[9]) == 0) continue;
      ports.insert(
          static_cast<uint16_t>(std::stoul(f[1].substr(f[1].rfind(':') + 1), nullptr, 16)));
    }
  }
  return ports;
}

TEST_F(OverloadTest, GarbageOnEveryPortAndOnTheUnixSocketIsHarmless) {
  Start();
  auto worker = Connect(PathKind::kUcx);
  ASSERT_TRUE(worker.ok()) << worker.status();
  const std::set<uint16_t> ports = ListeningPorts(daemon_->pid());
  const auto control = Address::Parse(daemon_->address());
  const auto health = Address::Parse(daemon_->ready().health_address());
  const auto metrics = Address::Parse(daemon_->ready().metrics_address());
  ASSERT_TRUE(control.ok() && health.ok() && metrics.ok());
  for (const auto& known : {*control, *health, *metrics}) {
    EXPECT_EQ(ports.count(static_cast<uint16_t>(known.port)), 1u) << known.port;
  }
  EXPECT_GT(ports.size(), 3u);  // and those of UCX
  sockaddr_un local = {};
  local.sun_family = AF_UNIX;
  const std::string& path = daemon_->ready().socket_path();
  ASSERT_LT(path.size(), sizeof(local.sun_path));
  std::memcpy(local.sun_path, path.data(), path.size());
  std::mt19937_64 random(1);
  for (int i = 0; i < 50; ++i) {
    for (const uint16_t port : ports) {
      sockaddr_in tcp = {};
      tcp.sin_family = AF_INET;
      tcp.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      tcp.sin_port = htons(port);
      SendGarbage(AF_INET, reinterpret_cast<const sockaddr*>(&tcp), sizeof(tcp), random);
    }
    SendGarbage(AF_UNIX, reinterpret_cast<const sockaddr*>(&local), sizeof(local), random);
  }
  ASSERT_NO_FATAL_FAILURE(ExpectWorks(**worker, 0));
  for (const PathKind kind : {PathKind::kShared, PathKind::kUcx}) {
    auto later = Connect(kind);
    ASSERT_TRUE(later.ok()) << later.status() << daemon_->LogTail();
    ASSERT_NO_FATAL_FAILURE(ExpectWorks(**later, 100 + 100 * static_cast<uint64_t>(kind)));
  }
  const auto status = daemon_->Stop();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(*status, 0) << daemon_->LogTail();
}

}  // namespace
}  // namespace kvd::testing
