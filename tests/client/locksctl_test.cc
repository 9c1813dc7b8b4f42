// locksctl as a process against real daemons: what it prints and, above all, its exit codes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/client/fake_pool.h"
#include "tests/support/daemon_process.h"

namespace kvd::testing {
namespace {

using ::testing::HasSubstr;

struct Ran {
  int code;
  std::string output;
};

Ran Locksctl(const std::string& arguments) {
  FILE* pipe = popen(absl::StrCat(KVD_LOCKSCTL_BINARY, " ", arguments, " 2>&1").c_str(), "r");
  std::array<char, 4096> bytes;
  std::string output;
  for (size_t n; (n = fread(bytes.data(), 1, bytes.size(), pipe)) > 0;) {
    output.append(bytes.data(), n);
  }
  return {WEXITSTATUS(pclose(pipe)), output};
}

class LocksctlTest : public ::testing::Test {
 protected:
  void Start(bool shared_path = true) {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    spec.shared_path = shared_path;
    auto daemon = DaemonProcess::Start(spec);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    flags_ = absl::StrCat(" --daemon ", daemon_->address(), " ");
    model_ = " --tenant test --model model --weights-id weights --rope theta=10000 ";
  }
  std::unique_ptr<DaemonProcess> daemon_;
  std::string flags_;
  std::string model_;
};

TEST_F(LocksctlTest, StatusAndStatShowTheArena) {
  Start();
  const Ran status = Locksctl("status" + flags_);
  EXPECT_EQ(status.code, 0) << status.output;
  EXPECT_THAT(status.output, HasSubstr("L2 H6/2 D64 B16 R8"));
  const Ran json = Locksctl("stat -o json --interval 10ms --count 2" + flags_);
  EXPECT_EQ(json.code, 0) << json.output;
  EXPECT_THAT(json.output, HasSubstr("\"model\": \"model\""));
}

TEST_F(LocksctlTest, SelftestComparesEveryLengthOnEveryPath) {
  Start();
  const Ran ran = Locksctl("selftest --max-pages 40" + flags_ + model_);
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("shared  40"));
  EXPECT_THAT(ran.output, HasSubstr("ucx     40"));
}

TEST_F(LocksctlTest, PathsSayWhyNotABetterOne) {
  Start(/*shared_path=*/false);
  const Ran ran = Locksctl("paths -o json" + flags_ + model_);
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("\"path\": \"ucx\""));
  EXPECT_THAT(ran.output, HasSubstr("shared: "));
}

TEST_F(LocksctlTest, ExitCodesTellUsageUnreachableAndFailureApart) {
  Start();
  EXPECT_EQ(Locksctl("reboot").code, 2);
  EXPECT_EQ(Locksctl("drain" + flags_).code, 2);
  EXPECT_EQ(Locksctl("status --daemon 127.0.0.1:1").code, 3);
  EXPECT_EQ(Locksctl("selftest --model other" + flags_).code, 1);
  const Ran wrong = Locksctl("paths --tenant test --model model --weights-id other" + flags_);
  EXPECT_EQ(wrong.code, 1) << wrong.output;
}

TEST_F(LocksctlTest, DrainEndsTheDaemonIfAskedTo) {
  Start();
  const Ran ran = Locksctl("drain --yes --exit --drain-timeout 5s" + flags_);
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_TRUE(daemon_->Stop().ok());
}

}  // namespace
}  // namespace kvd::testing
