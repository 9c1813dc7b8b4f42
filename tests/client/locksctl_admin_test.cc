// Verbs that need the admin role, against a daemon with certificates that `locksctl certs dev`
// made.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "client/kv_client.h"
#include "client/locksctl_tool.h"
#include "tests/client/fake_pool.h"
#include "tests/client/locksctl_process.h"
#include "tests/client/locksctl_stand_in.h"
#include "tests/support/daemon_process.h"

namespace kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

std::string ReadText(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

class LocksctlAdminTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    const Ran made = Locksctl("certs dev --tenant test --out " + Certs(""));
    ASSERT_EQ(made.code, 0) << made.output;
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    auto dir = std::make_unique<TempDir>();
    auto config = MakeConfig(spec, dir->path());
    config.set_metrics_address("127.0.0.1:0");
    auto* tls = config.mutable_control()->mutable_tls();
    tls->set_ca_file(Certs("ca.pem"));
    tls->set_certificate_file(Certs("server.pem"));
    tls->set_key_file(Certs("server.key"));
    auto daemon = DaemonProcess::Start(std::move(dir), config);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    admin_ = " --context " + Certs("context.textproto") + " --daemon " + daemon_->address() + " ";
  }
  std::string Certs(const std::string& name) const { return dir_.path() + "/certs/" + name; }
  // The flags of a worker: a client certificate.
  std::string WorkerFlags() const {
    return " --ca " + Certs("ca.pem") + " --cert " + Certs("client.pem") + " --key " +
           Certs("client.key") + " --daemon " + daemon_->address() + " ";
  }
  // Puts `num_pages` pages of constant bytes as the tenant's worker; keeps them leased.
  void PutPages(int num_pages) {
    ClientOptions options;
    options.daemons = {daemon_->address()};
    options.model = "model";
    options.geometry = SmallGeometry();
    options.weights_id = "weights";
    options.rope = "theta=10000";
    options.tls = {Certs("ca.pem"), Certs("client.pem"), Certs("client.key")};
    auto client = KvClient::Make(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    const std::vector<uint32_t> tokens(static_cast<size_t>(num_pages) * 16, 7);
    keys_ = client_->PageKeys(tokens);
    const KvGeometry g = SmallGeometry();
    const int64_t row = int64_t{g.head_dim} * 2;
    const auto num_tokens = static_cast<int64_t>(tokens.size());
    std::vector<uint8_t> bytes(static_cast<size_t>(row * num_tokens * g.num_kv_heads), 0x3c);
    const std::vector<EngineKv> layers(static_cast<size_t>(g.num_layers),
                                       {bytes.data(), bytes.data(), row * num_tokens, row});
    auto report =
        client_->Put({.keys = keys_, .first_page = 0, .num_pages = num_pages, .layers = layers});
    ASSERT_TRUE(report.ok() && report->num_new == num_pages) << report.status();
    report_ = std::make_unique<PutReport>(*std::move(report));
  }

  TempDir dir_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::string admin_;
  std::unique_ptr<KvClient> client_;
  std::vector<PageKey> keys_;
  std::unique_ptr<PutReport> report_;  // before client_
};

TEST_F(LocksctlAdminTest, DevCertificatesServeAndTheRoleIsAskedFor) {
  EXPECT_EQ(JsonRows::Of("status" + admin_).text(0, "security"), "mtls");
  EXPECT_EQ(fs::status(Certs("ca.key")).permissions() & fs::perms::group_read, fs::perms::none);
  for (const char* verb : {"verify", "slowlog", "config", "loglevel debug", "drain --yes"}) {
    const Ran refused = Locksctl(verb + WorkerFlags());
    EXPECT_EQ(refused.code, 1) << verb << refused.output;
    EXPECT_THAT(refused.output, HasSubstr("PERMISSION_DENIED")) << verb;
  }
  EXPECT_THAT(daemon_->LogTail(), HasSubstr("\"event\":\"admin_refused\",\"method\":\"Drain\""));
  EXPECT_EQ(Locksctl("config --daemon " + daemon_->address()).code, 3) << "no certificate";
  EXPECT_EQ(Locksctl("certs dev --out " + Certs("")).code, 2) << "a CA is not written over";
  EXPECT_EQ(Locksctl("certs dev --out " + dir_.path() + "/x --tenant 'a b'").code, 2);
}

TEST_F(LocksctlAdminTest, ConfigShowsWhatIsInForceAsTextAndAsJson) {
  const Ran text = Locksctl("config" + admin_);
  EXPECT_EQ(text.code, 0) << text.output;
  EXPECT_THAT(text.output, HasSubstr("session_ttl_ms: 1000"));
  const JsonRows rows = JsonRows::Of("config" + admin_);
  const auto& config = rows.at(0, "config").struct_value().fields();
  ASSERT_EQ(config.count("control"), 1u);
  const auto& control = config.at("control").struct_value().fields();
  EXPECT_EQ(control.at("address").string_value(), daemon_->address()) << "the real port";
  EXPECT_THAT(text.output, Not(HasSubstr("PRIVATE KEY")));
  EXPECT_THAT(daemon_->LogTail(), HasSubstr("\"subject\":\"locks-kvd admin\""))
      << "the log says who asked";
}

TEST_F(LocksctlAdminTest, LogLevelChangesLive) {
  JsonRows rows = JsonRows::Of("loglevel" + admin_);
  EXPECT_EQ(rows.text(0, "level"), "info");
  rows = JsonRows::Of("loglevel error" + admin_);
  EXPECT_EQ(rows.text(0, "before"), "info");
  EXPECT_EQ(rows.text(0, "level"), "error");
  const std::string quiet = daemon_->LogTail();
  EXPECT_EQ(JsonRows::Of("loglevel" + admin_).text(0, "level"), "error");
  EXPECT_EQ(daemon_->LogTail(), quiet) << "calls are logged at info";
  EXPECT_EQ(Locksctl("loglevel loud" + admin_).code, 2);
}

TEST_F(LocksctlAdminTest, VerifyReadsEverySealedPage) {
  PutPages(9);
  const JsonRows rows = JsonRows::Of("verify" + admin_);
  ASSERT_EQ(rows.size(), 1);
  EXPECT_EQ(rows.number(0, "pages"), 9);
  EXPECT_EQ(rows.number(0, "units"), 9 * 2 * 2);
  EXPECT_EQ(rows.number(0, "wrong"), 0);
}

TEST(LocksctlVerifyTest, AWrongPageFailsAndIsNamed) {
  StandInDaemon daemon;
  daemon.verify.set_done(true);
  daemon.verify.set_pages(3);
  auto* failure = daemon.verify.add_failures();
  failure->set_slot(41);
  failure->set_generation(6);
  failure->set_what("its records");
  const Ran ran = Locksctl("verify" + daemon.flags());
  EXPECT_EQ(ran.code, 1) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("its records"));
  EXPECT_THAT(ran.output, HasSubstr("41"));
  EXPECT_EQ(JsonRows::Of("verify" + daemon.flags(), 1).number(0, "wrong"), 1);
  // A daemon that never comes to an end does not keep the operator waiting.
  daemon.verify.set_done(false);
  EXPECT_EQ(Locksctl("verify" + daemon.flags()).code, 1);
}

TEST_F(LocksctlAdminTest, SlowlogIsEmptyWhereNothingWasSlow) {
  EXPECT_EQ(Locksctl("slowlog --count 5" + admin_).code, 0);
}

TEST_F(LocksctlAdminTest, SupportBundleHoldsTheStateAndNoSecret) {
  PutPages(4);
  const std::string file = dir_.path() + "/bundle.tar.gz";
  const Ran made = Locksctl("support-bundle --out " + file + admin_);
  ASSERT_EQ(made.code, 0) << made.output;
  EXPECT_EQ(Locksctl("support-bundle --out " + file + admin_).code, 2) << "not written over";
  const auto unpacked = RunTool({"tar", "-xzf", file, "-C", dir_.path()});
  ASSERT_TRUE(unpacked.ok()) << unpacked.status();

  std::string all;
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(dir_.path() + "/locks-kvd")) {
    if (!entry.is_regular_file()) continue;
    names.push_back(entry.path().filename().string());
    all += ReadText(entry.path());
  }
  for (const char* name :
       {"versions.txt", "stats.json", "config.textproto", "slowlog.json", "metrics.txt"}) {
    EXPECT_THAT(names, ::testing::Contains(name));
  }
  EXPECT_THAT(names, Not(::testing::Contains("problems.txt"))) << made.output;
  EXPECT_THAT(all, HasSubstr("locks_kvd_sessions")) << "the metrics are in";
  // Secrets: private keys, tokens, page keys; as bytes, hex and base64.
  const auto attachment_keys = {Certs("server.key"), Certs("client.key"), Certs("admin.key"),
                                Certs("ca.key")};
  for (const std::string& key : attachment_keys) {
    const std::string pem = ReadText(key);
    ASSERT_GT(pem.size(), 100u);
    EXPECT_THAT(all, Not(HasSubstr(pem.substr(40, 40)))) << key;
  }
  EXPECT_THAT(all, Not(HasSubstr("PRIVATE KEY")));
  for (const PageKey& key : keys_) {
    const absl::string_view bytes(reinterpret_cast<const char*>(key.data()), key.size());
    for (const std::string& form :
         {std::string(bytes), absl::BytesToHexString(bytes), absl::Base64Escape(bytes)}) {
      EXPECT_FALSE(absl::StrContains(all, form)) << "a page key";
    }
  }
}

TEST_F(LocksctlAdminTest, ABundleWithoutTheRoleSaysWhatIsMissing) {
  const std::string folder = dir_.path() + "/bundle";
  const Ran made = Locksctl("support-bundle --out " + folder + WorkerFlags());
  EXPECT_EQ(made.code, 0) << made.output;
  EXPECT_THAT(ReadText(folder + "/problems.txt"), HasSubstr("PERMISSION_DENIED"));
  EXPECT_EQ(Locksctl("support-bundle --daemon 127.0.0.1:1 --out " + folder + "2").code, 3);
}

}  // namespace
}  // namespace kvd::testing
