// The whole client against a real daemon with real certificates: who has the right one works on
// both paths, who has none, another CA's, an expired one, none of our names or another tenant's is
// refused with a typed error, and nobody else notices.

#include <gtest/gtest.h>

#include "tests/service/test_certificates.h"
#include "tests/support/path_parameter.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

class MtlsTest : public ::testing::TestWithParam<PathKind> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    certificates_.Issue("worker", "ca", "URI:locks-kvd://client/test");
    certificates_.Issue("rival", "ca", "URI:locks-kvd://client/rival");
    certificates_.Issue("stranger", "other_ca", "URI:locks-kvd://client/test");
    certificates_.Issue("expired", "ca", "URI:locks-kvd://client/test", -1);
    certificates_.Issue("nameless", "ca", "DNS:worker.example");
    certificates_.Issue("ambiguous", "ca",
                        "URI:locks-kvd://client/test,URI:locks-kvd://client/rival");
    certificates_.Issue("admin", "ca", "URI:locks-kvd://admin");
    certificates_.Issue("daemon", "ca", "URI:locks-kvd://daemon");
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    auto dir = std::make_unique<TempDir>();
    auto config = MakeConfig(spec, dir->path());
    *config.mutable_control()->mutable_tls() = certificates_.Server();
    auto daemon = DaemonProcess::Start(std::move(dir), config);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  // Attaches with certificate `name`; without any if it is empty.
  absl::StatusOr<std::unique_ptr<SystemWorker>> Connect(const std::string& name) {
    ClientOptions options = OptionsFor({daemon_->address()}, GetParam());
    options.control_timeout = absl::Seconds(5);
    if (!name.empty()) {
      options.tls = {.ca_file = certificates_.Path("ca.pem"),
                     .certificate_file = certificates_.Path(name + ".pem"),
                     .key_file = certificates_.Path(name + ".key")};
    }
    return SystemWorker::Make(std::move(options));
  }

  TestCertificates certificates_;
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_P(MtlsTest, OnlyTheRightCertificateWorks) {
  auto worker = Connect("worker");
  ASSERT_TRUE(worker.ok()) << worker.status() << daemon_->LogTail();
  for (const std::string name : {"", "stranger", "expired"}) {
    const absl::Status refused = Connect(name).status();
    EXPECT_TRUE(refused.code() == absl::StatusCode::kUnavailable ||
                refused.code() == absl::StatusCode::kUnauthenticated)
        << "certificate '" << name << "': " << refused;
  }
  for (const std::string name : {"nameless", "ambiguous"}) {
    EXPECT_EQ(Connect(name).status().code(), absl::StatusCode::kUnauthenticated) << name;
  }
  // The wrong tenant, and roles that attach to no tenant's arena.
  for (const std::string name : {"rival", "admin", "daemon"}) {
    EXPECT_EQ(Connect(name).status().code(), absl::StatusCode::kPermissionDenied) << name;
  }

  const auto versions = VersionsOf(0, 8, 1);
  const PutReport report = (*worker)->Put(versions);
  const auto pages = NewPages(versions, report);
  ASSERT_EQ(pages.size(), 8u) << report.first_failure;
  const Fetched fetched =
      (*worker)->Fetch(*(*worker)->attachment()->fetcher, pages, absl::Seconds(10));
  EXPECT_EQ(fetched.num_exact, static_cast<int64_t>(8 * (*worker)->shape().units_per_page()));
}

INSTANTIATE_TEST_SUITE_P(Paths, MtlsTest, ::testing::Values(PathKind::kShared, PathKind::kUcx),
                         PathParameterName);

}  // namespace
}  // namespace kvd::testing
