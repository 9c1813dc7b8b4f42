#include "client/locksctl_host_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/service/test_certificates.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;
using Result = Check::Result;
namespace fs = std::filesystem;

class HostChecksTest : public ::testing::Test {
 protected:
  HostChecksTest() {
    std::string pattern = ::testing::TempDir() + "/kvd_checks_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~HostChecksTest() override { fs::remove_all(folder_); }
  fs::path folder_;
};

TEST_F(HostChecksTest, MemlockIsHeldAgainstWhatIsWanted) {
  rlimit before = {};
  getrlimit(RLIMIT_MEMLOCK, &before);
  rlimit small = before;
  small.rlim_cur = 65536;
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &small), 0);
  EXPECT_EQ(CheckMemlock(65536).result, Result::kOk);
  const Check failed = CheckMemlock(65537);
  EXPECT_EQ(failed.result, Result::kFailed);
  EXPECT_THAT(failed.found, HasSubstr("65536"));
  EXPECT_THAT(failed.todo, HasSubstr("65537"));
  const bool rdma = fs::exists("/sys/class/infiniband") && !fs::is_empty("/sys/class/infiniband");
  EXPECT_EQ(CheckMemlock(0).result, rdma ? Result::kFailed : Result::kSkipped);
  setrlimit(RLIMIT_MEMLOCK, &before);
}

TEST_F(HostChecksTest, WithoutAGpuThatCheckDoesNotApply) {
  const Check none = CheckGpus(folder_.string());
  EXPECT_EQ(none.result, Result::kSkipped);
  EXPECT_EQ(none.found, "not applicable: no GPU");
}

TEST_F(HostChecksTest, AGpuThatCannotBeOpenedIsNotVisible) {
  fs::create_directories(folder_ / "proc/driver/nvidia/gpus/0000:17:00.0");
  fs::create_directories(folder_ / "proc/driver/nvidia/gpus/0000:2a:00.0");
  fs::create_directories(folder_ / "dev");
  std::ofstream(folder_ / "dev/nvidia0") << "";
  const Check hidden = CheckGpus(folder_.string());
  EXPECT_EQ(hidden.result, Result::kFailed);
  EXPECT_THAT(hidden.found, HasSubstr("2 GPUs"));
  EXPECT_THAT(hidden.found, HasSubstr("dev/nvidia1"));
  std::ofstream(folder_ / "dev/nvidia1") << "";
  EXPECT_EQ(CheckGpus(folder_.string()).result, Result::kOk);
}

// The first text is what an H200 host of two GPUs printed.
TEST_F(HostChecksTest, PairsOfGpusWithoutPeerAccessAreNamed) {
  int num_gpus = 0;
  EXPECT_THAT(PairsWithoutPeerAccess(
                  " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n\n"
                  "  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n",
                  &num_gpus),
              ::testing::IsEmpty());
  EXPECT_EQ(num_gpus, 2);
  EXPECT_THAT(PairsWithoutPeerAccess(
                  "\tGPU0\tGPU1\tGPU2\n GPU0\tX\tCNS\tOK\n GPU1\tCNS\tX\tNS\n GPU2\tOK\tNS\tX\n",
                  &num_gpus),
              ::testing::ElementsAre("GPU0-GPU1 CNS", "GPU1-GPU2 NS"));
  EXPECT_EQ(num_gpus, 3);
  EXPECT_THAT(PairsWithoutPeerAccess("no devices were found\n", &num_gpus), ::testing::IsEmpty());
  EXPECT_EQ(num_gpus, 0);
}

TEST_F(HostChecksTest, CertificatesMustLiveOn) {
  const testing::TestCertificates certificates;  // two days
  certificates.Issue("expired", "ca", "URI:locks-kvd://admin", -1);
  const std::string good = certificates.Path("server.pem");
  const absl::Time now = absl::Now();
  EXPECT_EQ(CheckCertificateFile(good, absl::Hours(24), now).result, Result::kOk);
  const Check soon = CheckCertificateFile(good, absl::Hours(24 * 7), now);
  EXPECT_EQ(soon.result, Result::kFailed);
  EXPECT_THAT(soon.todo, HasSubstr("less than 7 days"));
  const Check expired =
      CheckCertificateFile(certificates.Path("expired.pem"), absl::Hours(24), now);
  EXPECT_EQ(expired.result, Result::kFailed);
  EXPECT_THAT(expired.found, HasSubstr("expired at "));
  EXPECT_EQ(CheckCertificateFile("/nowhere.pem", absl::Hours(1), now).result, Result::kFailed);
  EXPECT_EQ(CheckCertificateFile(certificates.Path("server.key"), absl::Hours(1), now).result,
            Result::kFailed)
      << "a key is no certificate";
}

TEST_F(HostChecksTest, TheSocketsDirectoryIsClosedToOthersAndOpenToUs) {
  const std::string socket = (folder_ / "s.sock").string();
  chmod(folder_.c_str(), 0750);
  EXPECT_EQ(CheckSocketDirectory(socket).result, Result::kFailed) << "there is no socket";
  std::ofstream(socket) << "";
  EXPECT_EQ(CheckSocketDirectory(socket).result, Result::kOk);
  chmod(folder_.c_str(), 0755);
  const Check open = CheckSocketDirectory(socket);
  EXPECT_EQ(open.result, Result::kFailed);
  EXPECT_THAT(open.found, HasSubstr("0755"));
  EXPECT_EQ(CheckSocketDirectory("/nowhere/at/all/s.sock").result, Result::kFailed);
}

TEST_F(HostChecksTest, ClocksMayDifferByLessThanHalfAMinute) {
  EXPECT_EQ(CheckClock("d", absl::Seconds(-29)).result, Result::kOk);
  EXPECT_EQ(CheckClock("d", absl::Seconds(31)).result, Result::kFailed);
  EXPECT_EQ(CheckClock("d", absl::Seconds(-31)).result, Result::kFailed);
}

}  // namespace
}  // namespace kvd
