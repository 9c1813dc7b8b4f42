#include "service/config.h"

#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>

#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/first_error.h"
#include "proto/status.h"

namespace kvd {
namespace {

using locks_kvd::v1::ArenaConfig;
using locks_kvd::v1::DaemonConfig;
using locks_kvd::v1::Geometry;

// --- flags ---

struct Flag {
  const char* name;
  const char* value;  // what stands in --help after the flag; null for a switch
  const char* help;
};

constexpr Flag kFlags[] = {
    {"config", "FILE", "configuration, protobuf text or JSON (default: none; an arena needs one)"},
    {"control-address", "HOST:PORT",
     "control.address: gRPC control plane (default 127.0.0.1:7411)"},
    {"health-address", "HOST:PORT", "health_address: grpc.health.v1, plaintext (default: none)"},
    {"metrics-address", "HOST:PORT", "metrics_address: Prometheus endpoint (default: none)"},
    {"socket-dir", "DIR",
     "data.socket_dir: directory of the shared path's socket (default: no shared path)"},
    {"cluster-name", "NAME", "cluster.name: this daemon's name among the members"},
    {"ready-file", "FILE", "ready_file: written when the daemon serves (default: none)"},
    {"log-level", "LEVEL", "log.level: trace, debug, info, warn or error (default info)"},
    {"log-format", "FORMAT", "log.format: json or text (default: text on a terminal, else json)"},
    {"insecure-allow", nullptr,
     "control.insecure_allow: serve beyond loopback without certificates"},
    {"check-config", nullptr, "check the configuration, then exit: 0 good, 2 not"},
    {"print-config", nullptr, "print what is in force, defaults filled in, then exit"},
    {"list-metrics", nullptr, "print the table of all metrics, then exit"},
    {"version", nullptr, "print the version, then exit"},
    {"help", nullptr, "print this, then exit"},
};

const Flag* FindFlag(absl::string_view name) {
  for (const Flag& flag : kFlags) {
    if (name == flag.name) return &flag;
  }
  return nullptr;
}

void ApplyOverride(const std::string& name, const std::string& value, DaemonConfig* config) {
  if (name == "control-address") config->mutable_control()->set_address(value);
  if (name == "health-address") config->set_health_address(value);
  if (name == "metrics-address") config->set_metrics_address(value);
  if (name == "socket-dir") config->mutable_data()->set_socket_dir(value);
  if (name == "cluster-name") config->mutable_cluster()->set_name(value);
  if (name == "ready-file") config->set_ready_file(value);
  if (name == "log-level") config->mutable_log()->set_level(value);
  if (name == "log-format") config->mutable_log()->set_format(value);
  if (name == "insecure-allow") config->mutable_control()->set_insecure_allow(true);
}

// --- files ---

// --- defaults ---

template <typename Message, typename Value>
void Default(Message* message, Value (Message::*get)() const, void (Message::*set)(Value),
             Value value) {
  if ((message->*get)() == Value{}) (message->*set)(value);
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args) {
  CommandLine line;
  for (size_t i = 0; i < args.size(); ++i) {
    absl::string_view text = args[i];
    if (!absl::ConsumePrefix(&text, "--")) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", args[i],
                       "\": expected a flag: the configuration file is --config FILE; see --help"));
    }
    const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    const Flag* flag = FindFlag(parts[0]);
    if (flag == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("--", parts[0], ": unknown flag: see --help"));
    }
    if ((flag->value == nullptr) == (parts.size() == 2)) {
      if (flag->value == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat("--", parts[0], ": takes no value"));
      }
      if (i + 1 >= args.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("--", parts[0], ": expected ", flag->value, " after it"));
      }
    }
    std::string value;
    if (flag->value != nullptr) value = parts.size() == 2 ? parts[1] : args[++i];
    using Action = CommandLine::Action;
    if (parts[0] == "config") {
      line.config_file = value;
    } else if (parts[0] == "help") {
      line.action = Action::kHelp;
    } else if (parts[0] == "version") {
      line.action = Action::kShowVersion;
    } else if (parts[0] == "print-config") {
      line.action = Action::kPrintConfig;
    } else if (parts[0] == "check-config") {
      line.action = Action::kCheckConfig;
    } else if (parts[0] == "list-metrics") {
      line.action = Action::kListMetrics;
    } else {
      line.overrides.emplace_back(parts[0], value);
    }
  }
  return line;
}

std::string HelpText() {
  std::string text =
      "locks-kvd: a pool daemon. It holds KV pages and their summaries, and serves sparse "
      "fetches.\n\n"
      "usage: locks-kvd --config FILE [flags]\n\n";
  for (const Flag& flag : kFlags) {
    const std::string name = absl::StrCat("--", flag.name, flag.value == nullptr ? "" : " ",
                                          flag.value == nullptr ? "" : flag.value);
    absl::StrAppendFormat(&text, "  %-28s %s\n", name, flag.help);
  }
  absl::StrAppend(
      &text,
      "\nFlags override the file. Exit codes: 0 ended in order, 1 failed, 2 wrong flags or "
      "configuration.\n\nexamples:\n"
      "  locks-kvd --config deploy/examples/locks-kvd.textproto\n"
      "  locks-kvd --config /etc/locks-kvd/config.json --log-level debug\n"
      "  locks-kvd --config pool.textproto --control-address '[::1]:0' --ready-file "
      "/run/kvd.ready\n"
      "  locks-kvd --config pool.textproto --check-config\n");
  return text;
}

absl::StatusOr<DaemonConfig> ParseConfig(absl::string_view text, absl::string_view name) {
  DaemonConfig config;
  const absl::string_view start = absl::StripLeadingAsciiWhitespace(text);
  if (absl::EndsWith(name, ".json") || absl::StartsWith(start, "{")) {
    const auto status = google::protobuf::util::JsonStringToMessage(
        google::protobuf::StringPiece(text.data(), text.size()), &config);
    if (status.ok()) return config;
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": JSON: ", std::string(status.message())));
  }
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (parser.ParseFromString(std::string(text), &config)) return config;
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", error.text()));
}

absl::StatusOr<DaemonConfig> ReadConfigFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat(path, ": cannot be read: check the path and its permissions"));
  }
  return ParseConfig(text.str(), path);
}

absl::StatusOr<DaemonConfig> LoadConfig(const CommandLine& command_line) {
  DaemonConfig config;
  if (!command_line.config_file.empty()) {
    KVD_ASSIGN_OR_RETURN(config, ReadConfigFile(command_line.config_file));
  }
  for (const auto& [name, value] : command_line.overrides) ApplyOverride(name, value, &config);
  FillDefaults(&config);
  const std::vector<std::string> problems = ConfigProblems(config);
  if (problems.empty()) return config;
  return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
}

void FillDefaults(DaemonConfig* config) {
  using locks_kvd::v1::LimitConfig;
  using locks_kvd::v1::TimeConfig;
  if (config->control().address().empty()) config->mutable_control()->set_address("127.0.0.1:7411");
  if (!config->data().has_ucx()) config->mutable_data()->set_ucx(true);
  TimeConfig* times = config->mutable_times();
  Default(times, &TimeConfig::heartbeat_ms, &TimeConfig::set_heartbeat_ms, 1000u);
  Default(times, &TimeConfig::session_ttl_ms, &TimeConfig::set_session_ttl_ms, 5000u);
  Default(times, &TimeConfig::quarantine_ms, &TimeConfig::set_quarantine_ms,
          times->session_ttl_ms());
  Default(times, &TimeConfig::drain_ms, &TimeConfig::set_drain_ms, 60000u);
  LimitConfig* limits = config->mutable_limits();
  Default(limits, &LimitConfig::sessions_per_tenant, &LimitConfig::set_sessions_per_tenant, 1024u);
  Default(limits, &LimitConfig::reservations_per_session,
          &LimitConfig::set_reservations_per_session, 65536u);
  Default(limits, &LimitConfig::leases_per_session, &LimitConfig::set_leases_per_session, 1048576u);
  Default(limits, &LimitConfig::units_per_fetch, &LimitConfig::set_units_per_fetch, 65536u);
  Default(limits, &LimitConfig::fetch_bytes_in_flight_per_session,
          &LimitConfig::set_fetch_bytes_in_flight_per_session, uint64_t{268435456});
  if (config->has_cluster()) {
    using locks_kvd::v1::ClusterConfig;
    ClusterConfig* cluster = config->mutable_cluster();
    Default(cluster, &ClusterConfig::poll_ms, &ClusterConfig::set_poll_ms, 5000u);
    Default(cluster, &ClusterConfig::replicas, &ClusterConfig::set_replicas, 1u);
    Default(cluster, &ClusterConfig::moved_grace_ms, &ClusterConfig::set_moved_grace_ms, 60000u);
    if (cluster->has_nccl()) {
      using locks_kvd::v1::NcclConfig;
      NcclConfig* nccl = cluster->mutable_nccl();
      if (nccl->library().empty()) nccl->set_library("libnccl.so.2");
      Default(nccl, &NcclConfig::watchdog_ms, &NcclConfig::set_watchdog_ms, 10000u);
      Default(nccl, &NcclConfig::min_bytes, &NcclConfig::set_min_bytes, uint64_t{67108864});
    }
  }
  if (config->log().level().empty()) config->mutable_log()->set_level("info");
  for (ArenaConfig& arena : *config->mutable_arenas()) {
    Geometry* g = arena.mutable_geometry();
    Default(g, &Geometry::num_shards, &Geometry::set_num_shards, 1u);
    Default(g, &Geometry::page_tokens, &Geometry::set_page_tokens, 16u);
    Default(g, &Geometry::rank, &Geometry::set_rank, 8u);
    if (g->dtype() == locks_kvd::v1::DTYPE_UNSPECIFIED) g->set_dtype(locks_kvd::v1::DTYPE_BF16);
    if (arena.encoder().empty())
      arena.set_encoder(arena.query_metric_file().empty() ? "E1" : "E1S");
  }
}

bool IsInsecure(const DaemonConfig& config) { return !config.control().has_tls(); }

Encoder ArenaEncoder(const ArenaConfig& arena) {
  if (arena.encoder() == "E0") return Encoder::kE0;
  return arena.encoder() == "E1S" ? Encoder::kE1S : Encoder::kE1;
}

std::string EncoderName(Encoder encoder) {
  switch (encoder) {
    case Encoder::kE0:
      return "E0";
    case Encoder::kE1:
      return "E1";
    case Encoder::kE1S:
      return "E1S";
  }
  return "unknown";
}

std::string PrintConfig(const DaemonConfig& config) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(config, &text);
  return text;
}

}  // namespace kvd
