#include "service/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "proto/gpu_memory.h"

namespace kvd {
namespace {

using locks_kvd::v1::DaemonConfig;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kGood[] = R"(
  arenas {
    tenant: "acme" model: "m"
    geometry { num_layers: 2 num_q_heads: 8 num_kv_heads: 2 head_dim: 64 softmax_scale: 0.125 }
    identity { weights_id: "w" }
    bytes: 1000000
  })";

DaemonConfig Good() {
  auto config = ParseConfig(kGood, "test");
  EXPECT_TRUE(config.ok()) << config.status();
  FillDefaults(&*config);
  return *config;
}

TEST(ConfigTest, DefaultsAreFilledInAndGood) {
  const DaemonConfig config = Good();
  EXPECT_THAT(ConfigProblems(config), IsEmpty());
  EXPECT_EQ(config.control().address(), "127.0.0.1:7411");
  EXPECT_TRUE(config.data().ucx());
  EXPECT_EQ(config.times().heartbeat_ms(), 1000u);
  EXPECT_EQ(config.times().session_ttl_ms(), 5000u);
  EXPECT_EQ(config.times().quarantine_ms(), 5000u);
  EXPECT_EQ(config.times().drain_ms(), 60000u);
  EXPECT_EQ(config.limits().leases_per_session(), 1048576u);
  EXPECT_EQ(config.arenas(0).geometry().page_tokens(), 16u);
  EXPECT_EQ(config.arenas(0).geometry().rank(), 8u);
  EXPECT_EQ(config.arenas(0).encoder(), "E1");
  EXPECT_EQ(ArenaEncoder(config.arenas(0)), Encoder::kE1);
}

TEST(ConfigTest, QuarantineFollowsTheSessionTtlAndTheMetricFileChoosesTheEncoder) {
  DaemonConfig config;
  config.mutable_times()->set_session_ttl_ms(7000);
  config.add_arenas()->set_query_metric_file("/x");
  config.mutable_data()->set_ucx(false);
  FillDefaults(&config);
  EXPECT_EQ(config.times().quarantine_ms(), 7000u);
  EXPECT_EQ(config.arenas(0).encoder(), "E1S");
  EXPECT_FALSE(config.data().ucx()) << "false is not a missing value";
}

// Each bad value, and what its one line must begin with and say.
struct BadCase {
  const char* name;
  void (*spoil)(DaemonConfig*);
  const char* text;
};

class ConfigBadTest : public ::testing::TestWithParam<BadCase> {};

TEST_P(ConfigBadTest, IsRefusedInOneLineThatNamesFieldExpectedAndGot) {
  DaemonConfig config = Good();
  GetParam().spoil(&config);
  const std::vector<std::string> problems = ConfigProblems(config);
  EXPECT_THAT(problems, ElementsAre(HasSubstr(GetParam().text)));
}

locks_kvd::v1::ArenaConfig* Second(DaemonConfig* c) {
  *c->add_arenas() = c->arenas(0);
  c->mutable_arenas(1)->set_model("m2");
  return c->mutable_arenas(1);
}

locks_kvd::v1::ClusterConfig* Cluster(DaemonConfig* c) {
  c->mutable_cluster();
  FillDefaults(c);
  return c->mutable_cluster();
}

INSTANTIATE_TEST_SUITE_P(
    Values, ConfigBadTest,
    ::testing::Values(
        BadCase{"Rank", [](DaemonConfig* c) { Second(c)->mutable_geometry()->set_rank(6); },
                "arenas[1].geometry.rank: expected 4 or 8, got 6: "},
        BadCase{"HeadDim",
                [](DaemonConfig* c) { c->mutable_arenas(0)->mutable_geometry()->set_head_dim(80); },
                "arenas[0].geometry.head_dim: expected 64, 96, 128 or 256, got 80: "},
        BadCase{
            "Group",
            [](DaemonConfig* c) { c->mutable_arenas(0)->mutable_geometry()->set_num_q_heads(7); },
            "arenas[0].geometry.num_q_heads: expected 1 to 16 times num_kv_heads (2), got 7"},
        BadCase{
            "Shards",
            [](DaemonConfig* c) { c->mutable_arenas(0)->mutable_geometry()->set_num_shards(3); },
            "arenas[0].geometry.num_shards: expected a divisor of num_kv_heads (2), got 3"},
        BadCase{
            "Scale",
            [](DaemonConfig* c) { c->mutable_arenas(0)->mutable_geometry()->set_softmax_scale(0); },
            "arenas[0].geometry.softmax_scale: expected a finite value above 0, got 0"},
        BadCase{"Bytes", [](DaemonConfig* c) { c->mutable_arenas(0)->set_bytes(10); },
                "arenas[0].bytes: expected at least "},
        BadCase{"Tenant", [](DaemonConfig* c) { c->mutable_arenas(0)->set_tenant("a b"); },
                "arenas[0].tenant: expected 1 to 128 letters"},
        BadCase{
            "Weights",
            [](DaemonConfig* c) { c->mutable_arenas(0)->mutable_identity()->clear_weights_id(); },
            "arenas[0].identity.weights_id: expected"},
        BadCase{"Encoder", [](DaemonConfig* c) { c->mutable_arenas(0)->set_encoder("E2"); },
                "arenas[0].encoder: expected E0, E1 or E1S, got \"E2\""},
        BadCase{"MetricMissing", [](DaemonConfig* c) { c->mutable_arenas(0)->set_encoder("E1S"); },
                "arenas[0].query_metric_file: expected a file with encoder E1S"},
        BadCase{"MetricUnused",
                [](DaemonConfig* c) { c->mutable_arenas(0)->set_query_metric_file("/x"); },
                "arenas[0].query_metric_file: expected"},
        BadCase{"Twice", [](DaemonConfig* c) { *c->add_arenas() = c->arenas(0); },
                "arenas[1]: expected another tenant or model"},
        BadCase{"NoArena", [](DaemonConfig* c) { c->clear_arenas(); },
                "arenas: expected at least one, got none"},
        BadCase{"Ttl", [](DaemonConfig* c) { c->mutable_times()->set_session_ttl_ms(1500); },
                "times.session_ttl_ms: expected 2000 to 600000, got 1500"},
        BadCase{"Address", [](DaemonConfig* c) { c->mutable_control()->set_address("::1:7411"); },
                "control.address: expected host:port or [v6]:port, got \"::1:7411\""},
        BadCase{"HealthAddress", [](DaemonConfig* c) { c->set_health_address("nohost"); },
                "health_address: "},
        BadCase{"OpenWithoutTls",
                [](DaemonConfig* c) { c->mutable_control()->set_address("0.0.0.0:7411"); },
                "control.tls: expected certificates, because 0.0.0.0:7411 can be reached"},
        BadCase{"HalfTls",
                [](DaemonConfig* c) {
                  c->mutable_control()->mutable_tls()->set_certificate_file("c");
                  c->mutable_control()->mutable_tls()->set_key_file("k");
                },
                "control.tls.ca_file: expected a PEM file, got nothing"},
        BadCase{"SocketDir", [](DaemonConfig* c) { c->mutable_data()->set_socket_dir("relative"); },
                "data.socket_dir: expected an absolute path"},
        BadCase{"PortRange", [](DaemonConfig* c) { c->mutable_data()->set_ucx_port_range("9-5"); },
                "data.ucx_port_range: expected \"first-last\""},
        BadCase{"NoMembers", [](DaemonConfig* c) { Cluster(c)->set_name("kv-0"); },
                "cluster: expected one of members, members_file and members_dns, got 0"},
        BadCase{"TwoSources",
                [](DaemonConfig* c) {
                  Cluster(c)->set_members_file("/m");
                  c->mutable_cluster()->set_members_dns("kv:7411");
                },
                "cluster: expected one of members, members_file and members_dns, got 2"},
        BadCase{"Replicas",
                [](DaemonConfig* c) {
                  Cluster(c)->set_members_file("/m");
                  c->mutable_cluster()->set_replicas(3);
                },
                "cluster.replicas: expected 1 to 2, got 3"},
        BadCase{"NcclWatchdog",
                [](DaemonConfig* c) {
                  c->mutable_cluster()->mutable_nccl()->set_watchdog_ms(60000);
                  Cluster(c)->set_members_file("/m");
                },
                "cluster.nccl.watchdog_ms: expected 100 to 30000, got 60000"},
        BadCase{"MemberAddress",
                [](DaemonConfig* c) { Cluster(c)->add_members()->set_address("nohost"); },
                "cluster.members: "},
        BadCase{"LogLevel", [](DaemonConfig* c) { c->mutable_log()->set_level("loud"); },
                "log.level: expected"},
        BadCase{"Limit", [](DaemonConfig* c) { c->mutable_limits()->set_units_per_fetch(9999999); },
                "limits.units_per_fetch: expected 1 to 1048576, got 9999999"}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(ConfigTest, BeyondLoopbackNeedsCertificatesOrAnExplicitWord) {
  DaemonConfig config = Good();
  config.mutable_control()->set_address("0.0.0.0:7411");
  config.mutable_control()->set_insecure_allow(true);
  EXPECT_THAT(ConfigProblems(config), IsEmpty());
  EXPECT_TRUE(IsInsecure(config));
  for (const char* loopback : {"127.0.0.1:0", "[::1]:7411", "localhost:7411"}) {
    config.mutable_control()->set_insecure_allow(false);
    config.mutable_control()->set_address(loopback);
    EXPECT_THAT(ConfigProblems(config), IsEmpty()) << loopback;
  }
}

TEST(ConfigTest, GpusAreOneForAllArenasAndNeedABuildWithCuda) {
  DaemonConfig config = Good();
  *config.add_arenas() = config.arenas(0);
  *config.add_arenas() = config.arenas(0);
  config.mutable_arenas(1)->set_model("second");
  config.mutable_arenas(2)->set_model("third");
  EXPECT_THAT(PrintConfig(config), Not(HasSubstr("gpu:")));
  config.mutable_arenas(0)->set_gpu(0);  // 0 is a GPU, not nothing
  config.mutable_arenas(2)->set_gpu(0);
  EXPECT_THAT(PrintConfig(config), HasSubstr("gpu: 0"));
  if (!kBuiltWithCuda) {
    const auto problems = ConfigProblems(config);
    ASSERT_EQ(problems.size(), 2u);
    EXPECT_THAT(
        problems[1],
        HasSubstr("arenas[2].gpu: expected no GPU, because this locks-kvd was built without CUDA"));
    return;
  }
  EXPECT_THAT(ConfigProblems(config), IsEmpty());
  config.mutable_arenas(2)->set_gpu(1);
  EXPECT_THAT(ConfigProblems(config),
              ElementsAre(HasSubstr("arenas[2].gpu: expected 0, as arenas[0] has, got 1")));
  config.mutable_arenas(2)->clear_gpu();
  config.mutable_arenas(0)->set_gpu(-1);
  EXPECT_THAT(ConfigProblems(config),
              ElementsAre(HasSubstr("arenas[0].gpu: expected 0 or more, got -1")));
}

TEST(ConfigTest, UnknownFieldsAreRefusedInTextAndJsonWithTheirPlace) {
  const auto text = ParseConfig("control {\n  adress: \"x\"\n}", "a.textproto");
  EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(text.status().message(), HasSubstr("a.textproto: line 2"));
  EXPECT_THAT(text.status().message(), HasSubstr("adress"));
  const auto json = ParseConfig(R"({"control": {"adress": "x"}})", "a.json");
  EXPECT_EQ(json.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(json.status().message(), HasSubstr("adress"));
}

TEST(ConfigTest, JsonAndTextSayTheSame) {
  const auto json = ParseConfig(R"({"arenas": [{"tenant": "acme", "model": "m",
      "geometry": {"numLayers": 2, "numQHeads": 8, "numKvHeads": 2, "headDim": 64,
                   "softmaxScale": 0.125},
      "identity": {"weightsId": "w"}, "bytes": "1000000"}]})",
                                "no extension");
  ASSERT_TRUE(json.ok()) << json.status();
  DaemonConfig filled = *json;
  FillDefaults(&filled);
  EXPECT_EQ(PrintConfig(filled), PrintConfig(Good()));
}

TEST(ConfigTest, PrintedConfigIsReadBackAsTheSame) {
  const auto again = ParseConfig(PrintConfig(Good()), "printed");
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(PrintConfig(*again), PrintConfig(Good()));
}

TEST(ConfigTest, FlagsOverrideTheFile) {
  const std::string path = ::testing::TempDir() + "/kvd_config_test.textproto";
  std::ofstream(path) << kGood << " control { address: '127.0.0.1:1' }";
  const auto line =
      ParseCommandLine({"--config", path, "--control-address=[::1]:0", "--log-level", "debug"});
  ASSERT_TRUE(line.ok());
  const auto config = LoadConfig(*line);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->control().address(), "[::1]:0");
  EXPECT_EQ(config->log().level(), "debug");
}

TEST(ConfigTest, EveryProblemIsListed) {
  const std::string path = ::testing::TempDir() + "/kvd_config_test_bad.textproto";
  std::ofstream(path) << "log { level: 'loud' } health_address: 'x'";
  const auto config = LoadConfig({.config_file = path, .overrides = {}});
  EXPECT_THAT(config.status().message(), HasSubstr("log.level"));
  EXPECT_THAT(config.status().message(), HasSubstr("health_address"));
  EXPECT_THAT(config.status().message(), HasSubstr("arenas: "));
  EXPECT_EQ(LoadConfig({.config_file = "/nowhere", .overrides = {}}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(ConfigTest, WrongFlagsAreNamed) {
  EXPECT_THAT(ParseCommandLine({"--bogus"}).status().message(), HasSubstr("--bogus: unknown flag"));
  EXPECT_THAT(ParseCommandLine({"config.textproto"}).status().message(),
              HasSubstr("expected a flag"));
  EXPECT_THAT(ParseCommandLine({"--config"}).status().message(),
              HasSubstr("expected FILE after it"));
  EXPECT_THAT(ParseCommandLine({"--help=yes"}).status().message(), HasSubstr("takes no value"));
  EXPECT_EQ(ParseCommandLine({"--check-config"})->action, CommandLine::Action::kCheckConfig);
  EXPECT_EQ(ParseCommandLine({"--list-metrics"})->action, CommandLine::Action::kListMetrics);
}

TEST(ConfigTest, HelpNamesEveryFlag) {
  for (const char* flag :
       {"--config", "--control-address", "--health-address", "--metrics-address", "--socket-dir",
        "--ready-file", "--log-level", "--log-format", "--insecure-allow", "--check-config",
        "--print-config", "--list-metrics", "--version", "--help"}) {
    EXPECT_THAT(HelpText(), HasSubstr(flag));
  }
}

// The binary itself: exit codes, and the example of deploy/examples.
int Exit(const std::string& arguments) {
  const int status =
      std::system((std::string(KVD_DAEMON) + " " + arguments + " >/dev/null 2>&1").c_str());
  return WEXITSTATUS(status);
}

TEST(ConfigTest, BinaryAcceptsTheExampleAndRefusesWithExitCodeTwo) {
  const std::string example =
      std::string("--config ") + KVD_SOURCE_DIR + "/deploy/examples/locks-kvd.textproto";
  EXPECT_EQ(Exit(example + " --check-config"), 0);
  EXPECT_EQ(Exit(example + " --print-config"), 0);
  EXPECT_EQ(Exit("--help"), 0);
  EXPECT_EQ(Exit("--version"), 0);
  EXPECT_EQ(Exit("--bogus"), 2);
  EXPECT_EQ(Exit(example + " --control-address 0.0.0.0:0"), 2)
      << "not beyond loopback without certificates";
}

}  // namespace
}  // namespace kvd
