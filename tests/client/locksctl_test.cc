// locksctl as a process against real daemons: what it prints and, above all, its exit codes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/kv_client.h"
#include "proto/placement.h"
#include "tests/client/fake_pool.h"
#include "tests/client/locksctl_process.h"
#include "tests/support/daemon_process.h"

namespace kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

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

  // Puts `num_pages` pages of tokens 0, 1, 2 ...; the report keeps them leased.
  void PutPages(int num_pages) {
    ClientOptions options;
    options.daemons = {daemon_->address()};
    options.tenant = "test";
    options.model = "model";
    options.geometry = SmallGeometry();
    options.weights_id = "weights";
    options.rope = "theta=10000";
    options.client_name = "writer\x1b[31m";
    auto client = KvClient::Make(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    const int num_tokens = num_pages * 16;
    std::vector<uint32_t> tokens;
    for (int t = 0; t < num_tokens; ++t) tokens.push_back(static_cast<uint32_t>(t));
    keys_ = client_->PageKeys(tokens);
    const KvGeometry g = SmallGeometry();
    const int64_t row = int64_t{g.head_dim} * 2;
    std::vector<uint8_t> bytes(static_cast<size_t>(row * num_tokens * g.num_kv_heads), 0x3c);
    const std::vector<EngineKv> layers(static_cast<size_t>(g.num_layers),
                                       {bytes.data(), bytes.data(), row * num_tokens, row});
    auto report =
        client_->Put({.keys = keys_, .first_page = 0, .num_pages = num_pages, .layers = layers});
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(report->num_new, num_pages) << report->first_failure;
    report_ = std::make_unique<PutReport>(*std::move(report));
  }
  std::string KeyText(size_t page) const {
    return absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(keys_[page].data()), 16));
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::string flags_;
  std::string model_;
  std::unique_ptr<KvClient> client_;
  std::vector<PageKey> keys_;
  std::unique_ptr<PutReport> report_;  // before client_
};

TEST_F(LocksctlTest, StatusAndStatShowTheArena) {
  Start();
  const Ran status = Locksctl("status" + flags_);
  EXPECT_EQ(status.code, 0) << status.output;
  EXPECT_THAT(status.output, HasSubstr("L2 H6/2 D64 B16 R8"));
  EXPECT_THAT(status.output, Not(HasSubstr("\x1b"))) << "no colour off a terminal";
  const JsonRows rows = JsonRows::Of("status" + flags_);
  ASSERT_EQ(rows.size(), 1);
  EXPECT_EQ(rows.text(0, "state"), "serving");
  EXPECT_EQ(rows.text(0, "security"), "insecure");
  EXPECT_EQ(rows.number(0, "pages_used"), 0);
  EXPECT_GT(rows.number(0, "pages_total"), 0);
  const Ran json = Locksctl("stat -o json --interval 10ms --count 2" + flags_);
  EXPECT_EQ(json.code, 0) << json.output;
  const size_t first = json.output.find("\"model\": \"model\"");
  ASSERT_NE(first, std::string::npos);
  EXPECT_NE(json.output.find("\"model\": \"model\"", first + 1), std::string::npos) << "two rounds";
}

TEST_F(LocksctlTest, SessionsLeasesAndTenantsShowWhoHoldsWhat) {
  Start();
  PutPages(5);
  const JsonRows sessions = JsonRows::Of("sessions" + flags_);
  ASSERT_EQ(sessions.size(), 1);
  EXPECT_EQ(sessions.text(0, "client"), "writer\x1b[31m");
  EXPECT_EQ(sessions.number(0, "leased_pages"), 5);
  EXPECT_THAT(Locksctl("sessions" + flags_).output, HasSubstr("writer?[31m"))
      << "a client's name cannot steer the terminal";
  const JsonRows leases = JsonRows::Of("leases" + flags_);
  ASSERT_EQ(leases.size(), 1);
  EXPECT_EQ(leases.number(0, "leased_pages"), 5);
  EXPECT_GT(leases.number(0, "leased_bytes"), 5 * 2 * 2 * 4096);
  const JsonRows tenants = JsonRows::Of("tenants" + flags_);
  ASSERT_EQ(tenants.size(), 1);
  EXPECT_EQ(tenants.text(0, "tenant"), "test");
  EXPECT_EQ(tenants.number(0, "pages_used"), 5);
  EXPECT_LT(tenants.number(0, "used_bytes"), tenants.number(0, "quota_bytes"));
  report_.reset();
  EXPECT_EQ(JsonRows::Of("leases" + flags_).size(), 0);
}

TEST_F(LocksctlTest, PagesAreFoundByKeyAndByTokens) {
  Start();
  PutPages(3);
  const std::string unknown(32, '0');
  const JsonRows rows =
      JsonRows::Of("pages " + KeyText(0) + " " + unknown + " " + KeyText(2) + flags_ + model_);
  ASSERT_EQ(rows.size(), 3);
  EXPECT_EQ(rows.text(0, "state"), "sealed");
  EXPECT_EQ(rows.text(0, "daemon"), daemon_->address());
  EXPECT_EQ(rows.number(0, "leases"), 1);
  EXPECT_EQ(rows.text(1, "state"), "missing");
  EXPECT_EQ(rows.text(2, "state"), "sealed");
  EXPECT_NE(rows.number(0, "slot"), rows.number(2, "slot"));

  const std::string tokens = daemon_->dir() + "/tokens";
  std::ofstream file(tokens);
  for (int t = 0; t < 4 * 16; ++t) file << t << " ";
  file.close();
  const JsonRows by_tokens = JsonRows::Of("pages --token-file " + tokens + flags_ + model_);
  ASSERT_EQ(by_tokens.size(), 4);
  EXPECT_EQ(by_tokens.text(2, "key"), KeyText(2));
  EXPECT_EQ(by_tokens.text(2, "state"), "sealed");
  EXPECT_EQ(by_tokens.text(3, "state"), "missing");
  // Another salt names other pages.
  const JsonRows salted =
      JsonRows::Of("pages --salt other --token-file " + tokens + flags_ + model_);
  EXPECT_EQ(salted.text(0, "state"), "missing");
  EXPECT_EQ(Locksctl("pages 12345" + flags_ + model_).code, 2);
}

TEST_F(LocksctlTest, PlacementNamesTheOwnerThatWorkersUse) {
  const std::vector<std::string> members = {"a:1", "b:2", "c:3"};
  PageKey key = {};
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(0x10 + i);
  const std::string text = absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(key.data()), key.size()));
  const JsonRows rows =
      JsonRows::Of("placement explain " + text + " --daemon a:1 --daemon b:2 --daemon c:3");
  ASSERT_EQ(rows.size(), 3);
  const std::string owner = members[static_cast<size_t>(OwnerOf(key, members))];
  EXPECT_EQ(rows.text(0, "member"), owner);
  EXPECT_EQ(rows.number(0, "rank"), 1);
  std::vector<std::string> left = members;
  left.erase(std::find(left.begin(), left.end(), owner));
  EXPECT_EQ(rows.text(1, "member"), left[static_cast<size_t>(OwnerOf(key, left))])
      << "the second is who owns it without the first";
}

TEST_F(LocksctlTest, MembersAreListedWithTheLostOnes) {
  Start();
  const JsonRows rows = JsonRows::Of("members --daemon 127.0.0.1:1" + flags_, 3);
  ASSERT_EQ(rows.size(), 2);
  EXPECT_EQ(rows.text(0, "state"), "unreachable");
  EXPECT_EQ(rows.text(1, "state"), "serving");
  EXPECT_EQ(rows.text(1, "incarnation"), daemon_->ready().incarnation().substr(0, 12));
}

TEST_F(LocksctlTest, TopCountsRatesBetweenRounds) {
  Start();
  const Ran ran = Locksctl("top --interval 20ms --count 3" + flags_);
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("fetches_per_s"));
  EXPECT_THAT(ran.output, Not(HasSubstr("\x1b"))) << "redrawn on a terminal only";
  EXPECT_EQ(JsonRows::Of("top --count 1" + flags_).number(0, "fetches_per_s"), 0);
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
  const JsonRows rows = JsonRows::Of("paths" + flags_ + model_);
  EXPECT_EQ(rows.text(0, "path"), "ucx");
  EXPECT_THAT(rows.text(0, "rejected"), HasSubstr("shared: "));
}

TEST_F(LocksctlTest, LatencyTimesEveryPathThatWorks) {
  Start();
  const JsonRows rows = JsonRows::Of("latency --count 2" + flags_ + model_);
  ASSERT_EQ(rows.size(), 4);
  EXPECT_EQ(rows.number(rows.Find("what", "control"), "rounds"), 2);
  for (const std::string path : {"shared", "ucx"}) {
    const int row = rows.Find("what", path);
    EXPECT_EQ(rows.number(row, "rounds"), 2) << path << rows.text(row, "problem");
    EXPECT_GT(rows.number(row, "mb_per_s"), 0);
    EXPECT_LE(rows.number(row, "min_us"), rows.number(row, "max_us"));
  }
  const int peer = rows.Find("what", "peer");
  EXPECT_EQ(rows.number(peer, "rounds"), 0);
  EXPECT_NE(rows.text(peer, "problem"), "");
}

TEST_F(LocksctlTest, ExitCodesTellUsageUnreachableAndFailureApart) {
  Start();
  EXPECT_EQ(Locksctl("reboot").code, 2);
  EXPECT_EQ(Locksctl("drain" + flags_).code, 2);
  EXPECT_EQ(Locksctl("status --daemon 127.0.0.1:1").code, 3);
  EXPECT_EQ(Locksctl("verify --daemon 127.0.0.1:1").code, 3);
  EXPECT_EQ(Locksctl("selftest --model other" + flags_).code, 1);
  const Ran wrong = Locksctl("paths --tenant test --model model --weights-id other" + flags_);
  EXPECT_EQ(wrong.code, 1) << wrong.output;
  daemon_->Freeze();
  EXPECT_EQ(Locksctl("status --timeout 200ms" + flags_).code, 3) << "a timeout";
  daemon_->Thaw();
}

TEST_F(LocksctlTest, AContextFileStandsForTheFlags) {
  Start();
  const std::string file = daemon_->dir() + "/context.textproto";
  std::ofstream(file) << "daemons: \"" << daemon_->address()
                      << "\" tenant: \"test\" model: \"model\" identity { weights_id: "
                         "\"weights\" rope: \"theta=10000\" }";
  EXPECT_EQ(JsonRows::Of("paths --context " + file).text(0, "path"), "shared");
  std::ofstream(file) << "daemons: 7";
  EXPECT_EQ(Locksctl("status --context " + file).code, 2);
}

TEST_F(LocksctlTest, DrainEndsTheDaemonIfAskedTo) {
  Start();
  const Ran ran = Locksctl("drain --yes --exit --drain-timeout 5s" + flags_);
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_TRUE(daemon_->Stop().ok());
}

}  // namespace
}  // namespace kvd::testing
