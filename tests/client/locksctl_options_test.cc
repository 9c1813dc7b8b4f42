#include "client/locksctl_options.h"

#include "client/locksctl_output.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Problem(const std::vector<std::string>& args) {
  const auto options = ParseLocksctl(args, nullptr);
  return options.ok() ? "" : std::string(options.status().message());
}

TEST(LocksctlOptionsTest, FlagsAreReadInBothForms) {
  const auto o = ParseLocksctl({"--daemon=a:1", "stat", "--daemon", "[::1]:2", "-o", "json",
                                "--interval=250ms", "--count", "3", "--timeout", "2s"},
                               "c:3");
  ASSERT_TRUE(o.ok()) << o.status();
  EXPECT_EQ(o->verb, "stat");
  EXPECT_THAT(o->daemons, ElementsAre("a:1", "[::1]:2"));
  EXPECT_EQ(o->output, OutputForm::kJson);
  EXPECT_EQ(o->interval, absl::Milliseconds(250));
  EXPECT_EQ(o->count, 3);
  EXPECT_EQ(o->timeout, absl::Seconds(2));
}

TEST(LocksctlOptionsTest, DaemonsComeFromFlagsThenTheEnvironmentThenLoopback) {
  EXPECT_THAT(ParseLocksctl({"status"}, "a:1, b:2")->daemons.size(), 2);
  EXPECT_THAT(ParseLocksctl({"status"}, "a:1,b:2")->daemons, ElementsAre("a:1", "b:2"));
  EXPECT_THAT(ParseLocksctl({"status"}, nullptr)->daemons, ElementsAre("127.0.0.1:7411"));
}

TEST(LocksctlOptionsTest, MistakesAreNamed) {
  EXPECT_THAT(Problem({}), HasSubstr("verb"));
  EXPECT_THAT(Problem({"reboot"}), HasSubstr("reboot"));
  EXPECT_THAT(Problem({"status", "--colour"}), HasSubstr("--colour"));
  EXPECT_THAT(Problem({"status", "paths"}), HasSubstr("one verb"));
  EXPECT_THAT(Problem({"status", "--timeout", "-1s"}), HasSubstr("--timeout"));
  EXPECT_THAT(Problem({"status", "--timeout"}), HasSubstr("needs a value"));
  EXPECT_THAT(Problem({"status", "-o", "xml"}), HasSubstr("xml"));
  EXPECT_THAT(Problem({"status", "--daemon", "::1:7"}), HasSubstr("--daemon"));
  EXPECT_THAT(Problem({"stat", "--count", "many"}), HasSubstr("many"));
  EXPECT_THAT(Problem({"selftest"}), HasSubstr("--model"));
  EXPECT_THAT(Problem({"drain"}), HasSubstr("--yes"));
}

TEST(LocksctlOptionsTest, EveryVerbHasHelpAndHelpNeedsNothingElse) {
  for (const char* verb : {"status", "paths", "stat", "selftest", "drain"}) {
    EXPECT_THAT(LocksctlHelp(""), HasSubstr(verb));
    EXPECT_THAT(LocksctlHelp(verb), HasSubstr("--daemon"));
    EXPECT_EQ(Problem({verb, "--help"}), "");
  }
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

}  // namespace
}  // namespace kvd
