#include "client/locksctl_options.h"

#include <cstdlib>
#include <fstream>

#include "client/locksctl_output.h"
#include "client/locksctl_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Problem(const std::vector<std::string>& args) {
  const auto options = ParseLocksctl(args, {});
  return options.ok() ? "" : std::string(options.status().message());
}

TEST(LocksctlOptionsTest, FlagsAreReadInBothForms) {
  const auto o = ParseLocksctl({"--daemon=a:1", "stat", "--daemon", "[::1]:2", "-o", "json",
                                "--interval=250ms", "--count", "3", "--timeout", "2s"},
                               {.daemons = "c:3"});
  ASSERT_TRUE(o.ok()) << o.status();
  EXPECT_EQ(o->verb, "stat");
  EXPECT_THAT(o->daemons, ElementsAre("a:1", "[::1]:2"));
  EXPECT_EQ(o->output, OutputForm::kJson);
  EXPECT_EQ(o->interval, absl::Milliseconds(250));
  EXPECT_EQ(o->count, 3);
  EXPECT_EQ(o->timeout, absl::Seconds(2));
}

TEST(LocksctlOptionsTest, DaemonsComeFromFlagsThenTheEnvironmentThenLoopback) {
  EXPECT_THAT(ParseLocksctl({"status"}, {.daemons = "a:1, b:2"})->daemons.size(), 2);
  EXPECT_THAT(ParseLocksctl({"status"}, {.daemons = "a:1,b:2"})->daemons,
              ElementsAre("a:1", "b:2"));
  EXPECT_THAT(ParseLocksctl({"status"}, {})->daemons, ElementsAre("127.0.0.1:7411"));
}

TEST(LocksctlOptionsTest, MistakesAreNamed) {
  EXPECT_THAT(Problem({}), HasSubstr("verb"));
  EXPECT_THAT(Problem({"reboot"}), HasSubstr("reboot"));
  EXPECT_THAT(Problem({"status", "--colour"}), HasSubstr("--colour"));
  EXPECT_THAT(Problem({"status", "paths"}), HasSubstr("'paths'"));
  EXPECT_THAT(Problem({"status", "--timeout", "-1s"}), HasSubstr("--timeout"));
  EXPECT_THAT(Problem({"status", "--timeout"}), HasSubstr("needs a value"));
  EXPECT_THAT(Problem({"status", "-o", "xml"}), HasSubstr("xml"));
  EXPECT_THAT(Problem({"status", "--daemon", "::1:7"}), HasSubstr("--daemon"));
  EXPECT_THAT(Problem({"stat", "--count", "many"}), HasSubstr("many"));
  EXPECT_THAT(Problem({"selftest"}), HasSubstr("--model"));
  EXPECT_THAT(Problem({"drain"}), HasSubstr("--yes"));
  EXPECT_THAT(Problem({"pages", "--model", "m"}), HasSubstr("usage: locksctl pages KEY"));
  EXPECT_THAT(Problem({"placement"}), HasSubstr("placement explain"));
  EXPECT_THAT(Problem({"placement", "guess", "00"}), HasSubstr("placement explain"));
  EXPECT_THAT(Problem({"loglevel", "info", "debug"}), HasSubstr("'debug'"));
  EXPECT_THAT(Problem({"verify", "--watch"}), HasSubstr("not repeated"));
  EXPECT_THAT(Problem({"preflight", "--days", "0"}), HasSubstr("--days"));
  EXPECT_THAT(Problem({"status", "--context", "/nowhere/at/all"}), HasSubstr("/nowhere/at/all"));
}

// A context file of a test, and its folder.
class LocksctlContextTest : public ::testing::Test {
 protected:
  LocksctlContextTest() {
    std::string pattern = ::testing::TempDir() + "/kvd_context_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    file_ = folder_ + "/context.textproto";
  }
  ~LocksctlContextTest() override { EXPECT_EQ(std::system(("rm -r " + folder_).c_str()), 0); }
  void Write(const std::string& text) const { std::ofstream(file_) << text; }

  std::string folder_;
  std::string file_;
};

constexpr char kContext[] =
    "daemons: \"c:3\" daemons: \"d:4\" tenant: \"acme\" model: \"m\" salt: \"s\"\n"
    "tls { ca_file: \"ca.pem\" certificate_file: \"/abs/me.pem\" key_file: \"me.key\" }\n"
    "identity { weights_id: \"w\" rope: \"r\" }\n";

TEST_F(LocksctlContextTest, FillsWhatFlagsAndEnvironmentLeftOpen) {
  Write(kContext);
  const auto o = ParseLocksctl({"paths", "--context", file_}, {});
  ASSERT_TRUE(o.ok()) << o.status();
  EXPECT_THAT(o->daemons, ElementsAre("c:3", "d:4"));
  EXPECT_EQ(o->tls.ca_file, folder_ + "/ca.pem") << "relative to the context file";
  EXPECT_EQ(o->tls.certificate_file, "/abs/me.pem");
  EXPECT_EQ(o->tenant, "acme");
  EXPECT_EQ(o->model, "m");
  EXPECT_EQ(o->weights_id, "w");
  EXPECT_EQ(o->rope, "r");
  EXPECT_EQ(o->salt, "s");
}

TEST_F(LocksctlContextTest, FlagsWinAndCertificatesGoTogether) {
  Write(kContext);
  const auto o = ParseLocksctl({"paths", "--daemon", "a:1", "--ca", "x.pem", "--tenant", "rival"},
                               {.daemons = "b:2", .context_file = file_});
  ASSERT_TRUE(o.ok()) << o.status();
  EXPECT_THAT(o->daemons, ElementsAre("a:1"));
  EXPECT_EQ(o->tls.ca_file, "x.pem");
  EXPECT_EQ(o->tls.key_file, "") << "not half of the context's";
  EXPECT_EQ(o->tenant, "rival");
  EXPECT_THAT(ParseLocksctl({"status"}, {.daemons = "b:2", .context_file = file_})->daemons,
              ElementsAre("b:2"));
  EXPECT_THAT(ParseLocksctl({"status", "--context=none"}, {.context_file = file_})->daemons,
              ElementsAre("127.0.0.1:7411"));
}

TEST_F(LocksctlContextTest, TheDefaultFileMayBeMissingButNotWrong) {
  EXPECT_TRUE(ParseLocksctl({"status"}, {.context_file = file_}).ok());
  Write("daemon: \"c:3\"");
  const auto o = ParseLocksctl({"status"}, {.context_file = file_});
  EXPECT_EQ(o.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(o.status().message()), HasSubstr("daemon"));
}

TEST(LocksctlOptionsTest, EveryVerbHasHelpAndHelpNeedsNothingElse) {
  for (const Verb& verb : Verbs()) {
    EXPECT_THAT(LocksctlHelp(""), HasSubstr(std::string("\n  ") + verb.name + " "));
    EXPECT_THAT(LocksctlHelp(verb.name), HasSubstr(std::string("locksctl ") + verb.usage));
    EXPECT_THAT(LocksctlHelp(verb.name), HasSubstr("--daemon"));
    EXPECT_EQ(Problem({verb.name, "--help"}), "");
  }
  EXPECT_GE(Verbs().size(), 20u);
}

TEST(LocksctlOutputTest, RowsAreOneTableOrOneJsonArray) {
  const Table table = {{"name", "count", "on"},
                       {{"a\"b", int64_t{12}, true}, {"c", int64_t{3}, false}}};
  EXPECT_EQ(Render(table, OutputForm::kTable),
            "name  count  on\na\"b   12     true\nc     3      false\n");
  EXPECT_EQ(Render(table, OutputForm::kJson),
            "[\n  {\"name\": \"a\\\"b\", \"count\": 12, \"on\": true},\n"
            "  {\"name\": \"c\", \"count\": 3, \"on\": false}\n]\n");
}

TEST(LocksctlOutputTest, AClientsNameCannotSteerTheTerminal) {
  const Table table = {{"client"}, {{"evil\x1b[2J\n"}}};
  EXPECT_EQ(Render(table, OutputForm::kTable), "client\nevil?[2J?\n");
  EXPECT_EQ(Render(table, OutputForm::kJson).find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace kvd
