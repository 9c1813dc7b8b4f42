// What an operator does to a daemon that works: certificates are rotated, a CA is retired, pages
// are verified, slow fetches are looked at. None of it may cost a session or a byte.

#include <grpc/grpc_security_constants.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "proto/grpc_channel.h"
#include "proto/pool.grpc.pb.h"
#include "tests/service/test_certificates.h"
#include "tests/support/path_parameter.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

namespace fs = std::filesystem;
namespace v1 = locks_kvd::v1;

// Versions of the daemon's files. It reads them through a link that is turned at once, as
// Kubernetes does with mounted secrets: certificate and key never stem from two versions.
class RotatedFiles {
 public:
  explicit RotatedFiles(const TestCertificates* certificates) : certificates_(*certificates) {}

  // `server` is the certificate's name; clients must chain to one of `cas`.
  void Use(const std::string& server, const std::vector<std::string>& cas) {
    const fs::path version = dir_.path() + "/v" + std::to_string(++version_);
    fs::create_directory(version);
    fs::copy_file(certificates_.Path(server + ".pem"), version / "server.pem");
    fs::copy_file(certificates_.Path(server + ".key"), version / "server.key");
    std::ofstream bundle(version / "ca.pem");
    for (const std::string& ca : cas)
      bundle << TestCertificates::Read(certificates_.Path(ca + ".pem"));
    bundle.close();
    const fs::path next = dir_.path() + "/next";
    fs::create_directory_symlink(version, next);
    fs::rename(next, dir_.path() + "/live");
  }
  v1::TlsConfig Config() const {
    v1::TlsConfig tls;
    tls.set_certificate_file(dir_.path() + "/live/server.pem");
    tls.set_key_file(dir_.path() + "/live/server.key");
    tls.set_ca_file(dir_.path() + "/live/ca.pem");
    return tls;
  }

 private:
  const TestCertificates& certificates_;
  TempDir dir_;
  int version_ = 0;
};

// Fetches and puts without a pause; remembers what went wrong.
class Traffic {
 public:
  Traffic(SystemWorker* worker, std::span<const SealedVersion> pages,
          std::span<const PageVersion> versions)
      : worker_(*worker), session_(worker->attachment()), thread_([this, pages, versions] {
          while (!stop_.load()) {
            const Fetched fetched = worker_.Fetch(*session_->fetcher, pages, absl::Seconds(10));
            if (fetched.num_missing > 0 || fetched.num_wrong > 0) ++num_bad_;
            // A control call on the old connection: every page is still there.
            const PutReport report = worker_.Put(versions);
            if (report.num_hit != static_cast<int64_t>(versions.size())) ++num_bad_;
            ++num_rounds_;
            absl::SleepFor(absl::Milliseconds(5));
          }
        }) {}
  ~Traffic() { Stop(); }
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  int num_rounds() const { return num_rounds_.load(); }
  int num_bad() const { return num_bad_.load(); }
  // The very session that it began with.
  bool same_session() const { return worker_.attachment() == session_; }
  // Waits for some more rounds.
  bool GoesOn() const {
    const int before = num_rounds();
    return WaitFor([&] { return num_rounds() > before + 5; });
  }

 private:
  SystemWorker& worker_;
  const std::shared_ptr<Attachment> session_;
  std::atomic<bool> stop_{false};
  std::atomic<int> num_rounds_{0};
  std::atomic<int> num_bad_{0};
  std::thread thread_;
};

class RotationTest : public ::testing::TestWithParam<PathKind> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    const std::string daemon_names = "DNS:localhost,IP:127.0.0.1";
    certificates_.Issue("renewed", "ca", daemon_names);
    certificates_.Issue("moved", "other_ca", daemon_names);
    certificates_.Issue("worker", "ca", "URI:locks-kvd://client/test");
    certificates_.Issue("new_worker", "other_ca", "URI:locks-kvd://client/test");
    std::ofstream(certificates_.Path("both.pem"))
        << TestCertificates::Read(certificates_.Path("ca.pem"))
        << TestCertificates::Read(certificates_.Path("other_ca.pem"));
    files_.Use("server", {"ca"});
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    auto dir = std::make_unique<TempDir>();
    auto config = MakeConfig(spec, dir->path());
    *config.mutable_control()->mutable_tls() = files_.Config();
    auto daemon = DaemonProcess::Start(std::move(dir), config);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  // Files of a caller that trusts both CAs.
  TlsFiles FilesOf(const std::string& name) const {
    return {.ca_file = certificates_.Path("both.pem"),
            .certificate_file = certificates_.Path(name + ".pem"),
            .key_file = certificates_.Path(name + ".key")};
  }
  absl::StatusOr<std::unique_ptr<SystemWorker>> Connect(const std::string& name) {
    ClientOptions options = OptionsFor({daemon_->address()}, GetParam());
    options.control_timeout = absl::Seconds(5);
    options.tls = FilesOf(name);
    return SystemWorker::Make(std::move(options));
  }
  // The certificate that a new connection as `name` is shown; empty if it is refused.
  std::string Shown(const std::string& name) const {
    const auto channel = OpenGrpcChannel(daemon_->address(), FilesOf(name));
    EXPECT_TRUE(channel.ok()) << channel.status();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    v1::StatsReply reply;
    if (!v1::Pool::NewStub(*channel)->Stats(&context, {}, &reply).ok()) return "";
    const auto pem = context.auth_context()->FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME);
    return pem.empty() ? "" : std::string(pem[0].data(), pem[0].size());
  }
  std::string Pem(const std::string& name) const {
    return TestCertificates::Read(certificates_.Path(name + ".pem"));
  }

  TestCertificates certificates_;
  RotatedFiles files_{&certificates_};
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_P(RotationTest, TwoRotationsUnderTrafficLoseNoSessionAndRetireTheOldCa) {
  auto worker = Connect("worker");
  ASSERT_TRUE(worker.ok()) << worker.status() << daemon_->LogTail();
  const auto versions = VersionsOf(0, 8, 1);
  const PutReport report = (*worker)->Put(versions);
  const auto pages = NewPages(versions, report);
  ASSERT_EQ(pages.size(), 8u) << report.first_failure;
  Traffic traffic(worker->get(), pages, versions);
  ASSERT_TRUE(traffic.GoesOn());
  ASSERT_EQ(Shown("worker"), Pem("server"));
  ASSERT_EQ(Shown("new_worker"), "") << "its CA is not trusted yet";

  files_.Use("renewed", {"ca", "other_ca"});
  ASSERT_TRUE(WaitFor([&] { return Shown("worker") == Pem("renewed"); })) << daemon_->LogTail();
  EXPECT_TRUE(WaitFor([&] { return Shown("new_worker") == Pem("renewed"); }));
  EXPECT_TRUE(traffic.GoesOn());

  files_.Use("moved", {"other_ca"});
  ASSERT_TRUE(WaitFor([&] { return Shown("new_worker") == Pem("moved"); })) << daemon_->LogTail();
  ASSERT_TRUE(WaitFor([&] { return Shown("worker").empty(); })) << "the old CA is still trusted";
  // Longer than a session lives without pings: the old session's still arrive.
  absl::SleepFor(absl::Seconds(2));
  EXPECT_TRUE(traffic.GoesOn());
  traffic.Stop();
  EXPECT_EQ(traffic.num_bad(), 0) << "of " << traffic.num_rounds() << daemon_->LogTail();
  EXPECT_TRUE(traffic.same_session());

  const absl::Status refused = Connect("worker").status();
  EXPECT_TRUE(absl::IsUnavailable(refused) || absl::IsUnauthenticated(refused)) << refused;
  auto newcomer = Connect("new_worker");
  ASSERT_TRUE(newcomer.ok()) << newcomer.status();
  EXPECT_EQ((*newcomer)->Put(versions).num_hit, 8) << "the same tenant's pages";
}

TEST_P(RotationTest, FilesThatDoNotFitCostNoSessionAndServeAgainOnceTheyDo) {
  auto worker = Connect("worker");
  ASSERT_TRUE(worker.ok()) << worker.status() << daemon_->LogTail();
  const auto versions = VersionsOf(0, 8, 1);
  const PutReport report = (*worker)->Put(versions);
  const auto pages = NewPages(versions, report);
  ASSERT_EQ(pages.size(), 8u) << report.first_failure;
  Traffic traffic(worker->get(), pages, versions);
  // A key that belongs to another certificate: the mistake of who copies one file only. New
  // connections fail as long as it stands.
  const fs::path live = fs::path(files_.Config().key_file());
  fs::copy_file(certificates_.Path("moved.key"), live.string() + ".next");
  fs::rename(live.string() + ".next", live);
  EXPECT_TRUE(WaitFor([&] { return Shown("worker").empty(); }));
  EXPECT_TRUE(traffic.GoesOn());
  files_.Use("renewed", {"ca"});
  EXPECT_TRUE(WaitFor([&] { return Shown("worker") == Pem("renewed"); })) << daemon_->LogTail();
  EXPECT_TRUE(traffic.GoesOn());
  traffic.Stop();
  EXPECT_EQ(traffic.num_bad(), 0) << "of " << traffic.num_rounds();
  EXPECT_TRUE(traffic.same_session());
}

INSTANTIATE_TEST_SUITE_P(Paths, RotationTest, ::testing::Values(PathKind::kShared, PathKind::kUcx),
                         PathParameterName);

class OperateTest : public ::testing::Test {
 protected:
  void Start(uint32_t units_per_fetch, uint64_t arena_bytes) {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    spec.arena_bytes = arena_bytes;
    auto dir = std::make_unique<TempDir>();
    auto config = MakeConfig(spec, dir->path());
    config.mutable_limits()->set_units_per_fetch(units_per_fetch);
    auto daemon = DaemonProcess::Start(std::move(dir), config);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    auto worker = SystemWorker::Make(OptionsFor({daemon_->address()}, PathKind::kUcx));
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    const auto channel = OpenGrpcChannel(daemon_->address(), {});
    ASSERT_TRUE(channel.ok());
    admin_ = v1::Admin::NewStub(*channel);
  }
  v1::SlowlogReply Slowlog() const {
    grpc::ClientContext context;
    v1::SlowlogReply reply;
    const grpc::Status status = admin_->Slowlog(&context, {}, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }
  // Every slot of the arena, a call at a time.
  v1::VerifyReply VerifyAll() const {
    v1::VerifyReply sum;
    v1::VerifyRequest request;
    request.set_tenant("test");
    request.set_model("model");
    request.set_max_slots(7);
    while (!sum.done()) {
      grpc::ClientContext context;
      v1::VerifyReply reply;
      const grpc::Status status = admin_->Verify(&context, request, &reply);
      if (!status.ok()) {
        ADD_FAILURE() << status.error_message();
        return sum;
      }
      sum.set_pages(sum.pages() + reply.pages());
      sum.mutable_failures()->MergeFrom(reply.failures());
      sum.set_done(reply.done());
      request.set_first_slot(reply.next_slot());
    }
    return sum;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<SystemWorker> worker_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

TEST_F(OperateTest, ARefusedFetchIsInTheSlowlogWithItsSession) {
  const auto units = static_cast<uint32_t>(2 * 2);
  Start(/*units_per_fetch=*/units * 2, uint64_t{64} << 20);
  const auto versions = VersionsOf(0, 3, 1);
  const PutReport report = worker_->Put(versions);
  const auto pages = NewPages(versions, report);
  ASSERT_EQ(pages.size(), 3u) << report.first_failure;
  Fetcher& fetcher = *worker_->attachment()->fetcher;
  const uint64_t before = Slowlog().num_seen();
  EXPECT_EQ(worker_->Fetch(fetcher, pages, absl::Seconds(10)).code,
            absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(WaitFor([&] { return Slowlog().num_seen() > before; }));
  const v1::SlowlogReply log = Slowlog();
  ASSERT_GE(log.fetches_size(), 1);
  EXPECT_EQ(log.fetches(0).code(), static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(log.fetches(0).units(), units * 3);
  EXPECT_EQ(log.fetches(0).missing_units(), units * 3);
  EXPECT_NE(log.fetches(0).session_id(), 0u);
  const absl::Time ended = absl::FromUnixMicros(static_cast<int64_t>(log.fetches(0).unix_us()));
  EXPECT_LT(absl::AbsDuration(absl::Now() - ended), absl::Minutes(1));
}

TEST_F(OperateTest, PagesAreVerifiedWhileOthersComeAndGo) {
  Start(/*units_per_fetch=*/65536, uint64_t{2} << 20);
  const auto kept = VersionsOf(0, 8, 1);
  const PutReport report = worker_->Put(kept);
  ASSERT_EQ(report.num_new, 8) << report.first_failure;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t first = 100; !stop.load(); first += 16) {
      worker_->Put(VersionsOf(first, 16, 1));  // evicts what an earlier round left
    }
  });
  uint64_t pages = 0;
  for (int round = 0; round < 20; ++round) {
    const v1::VerifyReply reply = VerifyAll();
    pages += reply.pages();
    EXPECT_GE(reply.pages(), 8u) << "leased pages stay";
    for (const auto& failure : reply.failures()) ADD_FAILURE() << failure.what();
  }
  stop = true;
  writer.join();
  EXPECT_GT(pages, 160u) << "others came and went";
}

}  // namespace
}  // namespace kvd::testing
