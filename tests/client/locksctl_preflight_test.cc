// locksctl preflight: each fault that it is for is made here, and found.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "tests/client/fake_pool.h"
#include "tests/client/locksctl_process.h"
#include "tests/client/locksctl_stand_in.h"
#include "tests/service/test_certificates.h"
#include "tests/support/daemon_process.h"

namespace kvd::testing {
namespace {

using ::testing::HasSubstr;

class LocksctlPreflightTest : public ::testing::Test {
 protected:
  // With certificates if there are any.
  void Start(const TestCertificates* certificates = nullptr) {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    auto dir = std::make_unique<TempDir>();
    auto config = MakeConfig(spec, dir->path());
    if (certificates != nullptr) *config.mutable_control()->mutable_tls() = certificates->Server();
    auto daemon = DaemonProcess::Start(std::move(dir), config);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    flags_ = " --daemon " + daemon_->address() + " ";
  }
  static std::string Tls(const TestCertificates& certificates, const std::string& name) {
    return " --ca " + certificates.Path("ca.pem") + " --cert " + certificates.Path(name + ".pem") +
           " --key " + certificates.Path(name + ".key") + " ";
  }
  // Result of the first check of that name.
  static std::string Result(const JsonRows& rows, const std::string& check) {
    const int row = rows.Find("check", check);
    return row < 0 ? "none" : rows.text(row, "result");
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::string flags_;
};

TEST_F(LocksctlPreflightTest, AGoodHostPassesWithoutAGpu) {
  Start();
  const JsonRows rows = JsonRows::Of(
      "preflight --memlock 4096 --tenant test --model model --weights-id weights --rope "
      "theta=10000" +
      flags_);
  for (const std::string check :
       {"memlock", "port", "control", "clock", "ucx", "socket_dir", "fetch"}) {
    EXPECT_EQ(Result(rows, check), "ok") << check;
  }
  if (!std::filesystem::exists("/proc/driver/nvidia")) {
    EXPECT_EQ(rows.text(rows.Find("check", "gpu"), "found"), "not applicable: no GPU");
  }
  for (int row = 0; row < rows.size(); ++row) EXPECT_EQ(rows.text(row, "todo"), "");
}

TEST_F(LocksctlPreflightTest, FindsALimitOfLockedMemoryThatIsTooSmall) {
  Start();
  const Ran ran = Locksctl("preflight --memlock 1048576" + flags_, "prlimit --memlock=65536:65536");
  EXPECT_EQ(ran.code, 1) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("raise it to at least 1048576"));
}

TEST_F(LocksctlPreflightTest, FindsGpusThatDoNotReachEachOther) {
  Start();
  const TempDir folder;  // with an nvidia-smi of its own
  const std::string tool = folder.path() + "/nvidia-smi";
  std::ofstream(tool)
      << "#!/bin/sh\nprintf '\\tGPU0\\tGPU1\\n GPU0\\tX\\tTNS\\n GPU1\\tTNS\\tX\\n'\n";
  chmod(tool.c_str(), 0755);
  const Ran ran = Locksctl("preflight" + flags_, "PATH=" + folder.path() + ":$PATH");
  EXPECT_EQ(ran.code, 1) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("2 GPUs, no access: GPU0-GPU1 TNS"));
}

TEST_F(LocksctlPreflightTest, FindsAClosedPort) {
  const JsonRows rows = JsonRows::Of("preflight --daemon 127.0.0.1:1", 1);
  EXPECT_EQ(Result(rows, "port"), "failed");
  EXPECT_EQ(Result(rows, "control"), "none") << "what follows would say the same";
  const JsonRows unknown = JsonRows::Of("preflight --daemon no.such.host.invalid:7411", 1);
  EXPECT_EQ(Result(unknown, "port"), "failed");
  EXPECT_EQ(Locksctl("preflight --daemon nonsense").code, 2);
}

TEST_F(LocksctlPreflightTest, FindsCertificatesThatAreOrWillSoonBeExpired) {
  const TestCertificates certificates;  // two days
  certificates.Issue("worker", "ca", "URI:locks-kvd://client/test");
  certificates.Issue("expired", "ca", "URI:locks-kvd://client/test", -1);
  Start(&certificates);
  const std::string good = "preflight --days 1" + flags_ + Tls(certificates, "worker");
  const JsonRows passed = JsonRows::Of(good);
  EXPECT_EQ(passed.text(passed.Find("about", daemon_->address() + " shows"), "result"), "ok")
      << "the daemon's own too";

  const JsonRows soon =
      JsonRows::Of("preflight --days 7" + flags_ + Tls(certificates, "worker"), 1);
  EXPECT_EQ(soon.text(soon.Find("about", daemon_->address() + " shows"), "result"), "failed");
  const JsonRows expired =
      JsonRows::Of("preflight --days 1" + flags_ + Tls(certificates, "expired"), 1);
  const int row = expired.Find("about", certificates.Path("expired.pem"));
  EXPECT_EQ(expired.text(row, "result"), "failed");
  EXPECT_THAT(expired.text(row, "found"), HasSubstr("expired at"));
  EXPECT_EQ(Result(expired, "control"), "failed") << "the daemon refuses it";
}

TEST_F(LocksctlPreflightTest, FindsAnotherUcxVersionAndAClockThatIsOff) {
  StandInDaemon daemon;
  JsonRows rows = JsonRows::Of("preflight" + daemon.flags());
  EXPECT_EQ(Result(rows, "ucx"), "ok");
  EXPECT_EQ(Result(rows, "clock"), "ok");
  daemon.stats.set_ucx_version("0.0.1");
  rows = JsonRows::Of("preflight" + daemon.flags(), 1);
  EXPECT_EQ(Result(rows, "ucx"), "failed");
  EXPECT_THAT(rows.text(rows.Find("check", "ucx"), "found"), HasSubstr("there 0.0.1"));
  daemon.stats.set_ucx_version("");
  daemon.clock_ahead = absl::Minutes(10);
  rows = JsonRows::Of("preflight" + daemon.flags(), 1);
  EXPECT_EQ(Result(rows, "ucx"), "skipped");
  EXPECT_EQ(Result(rows, "clock"), "failed");
}

TEST_F(LocksctlPreflightTest, FindsASocketDirectoryThatIsOpenToOthers) {
  Start();
  chmod((daemon_->dir() + "/socket").c_str(), 0777);
  const JsonRows rows = JsonRows::Of("preflight" + flags_, 1);
  EXPECT_EQ(Result(rows, "socket_dir"), "failed");
}

TEST_F(LocksctlPreflightTest, FindsADrainingDaemonAndAWrongModel) {
  Start();
  const JsonRows wrong = JsonRows::Of(
      "preflight --tenant test --model model --weights-id other --rope theta=10000" + flags_, 1);
  EXPECT_EQ(Result(wrong, "fetch"), "failed");
  EXPECT_EQ(Locksctl("drain --yes" + flags_).code, 0);
  EXPECT_EQ(Result(JsonRows::Of("preflight" + flags_, 1), "control"), "failed");
}

}  // namespace
}  // namespace kvd::testing
