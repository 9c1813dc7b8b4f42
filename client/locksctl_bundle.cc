// locksctl support-bundle: what a report of a problem needs, and nothing that it must not hold.
//
// Only answers of daemons go in, and these hold no secret: tokens and page keys are in none of
// them, and a configuration names keys by file.

#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "client/locksctl_daemon.h"
#include "client/locksctl_net.h"
#include "client/locksctl_output.h"
#include "client/locksctl_tool.h"
#include "client/locksctl_verbs.h"
#include "proto/config.pb.h"
#include "proto/ucx_worker.h"

namespace kvd {
namespace {

namespace fs = std::filesystem;
using locks_kvd::v1::Admin;

std::string Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.add_whitespace = true;
  std::string json;
  if (!google::protobuf::util::MessageToJsonString(message, &json, options).ok()) return "";
  return json;
}

// The metrics endpoint as locksctl reaches it: a wildcard address is the daemon's host.
absl::StatusOr<Address> MetricsAddress(const std::string& daemon, const std::string& config_text) {
  locks_kvd::v1::DaemonConfig config;
  google::protobuf::TextFormat::Parser parser;
  parser.AllowUnknownField(true);
  if (!parser.ParseFromString(config_text, &config) || config.metrics_address().empty()) {
    return absl::FailedPreconditionError("the daemon's configuration names no metrics_address");
  }
  KVD_ASSIGN_OR_RETURN(Address metrics, Address::Parse(config.metrics_address()));
  if (metrics.host == "0.0.0.0" || metrics.host == "::") {
    KVD_ASSIGN_OR_RETURN(const Address control, Address::Parse(daemon));
    metrics.host = control.host;
  }
  return metrics;
}

// Writes files into one folder and remembers what could not be had.
class Bundle {
 public:
  explicit Bundle(fs::path folder) : folder_(std::move(folder)) {}

  void Add(const std::string& name, const absl::StatusOr<std::string>& text) {
    if (!text.ok()) {
      absl::StrAppend(&problems_, name, ": ", text.status().ToString(), "\n");
      return;
    }
    const fs::path path = folder_ / name;
    std::error_code ignored;  // the write below reports it
    fs::create_directories(path.parent_path(), ignored);
    std::ofstream out(path, std::ios::binary);
    out << *text;
    out.close();
    if (!out) absl::StrAppend(&problems_, name, ": cannot be written\n");
    if (out) files_.push_back(name);
  }

  void Finish() {
    if (!problems_.empty()) Add("problems.txt", problems_);
  }
  const std::vector<std::string>& files() const { return files_; }
  const std::string& problems() const { return problems_; }

 private:
  const fs::path folder_;
  std::string problems_;
  std::vector<std::string> files_;
};

ExitCode AddDaemon(const LocksctlOptions& options, const std::string& daemon, Bundle* bundle) {
  const std::string folder = absl::StrReplaceAll(daemon, {{":", "_"}, {"/", "_"}});
  const auto name = [&folder](const char* file) { return absl::StrCat(folder, "/", file); };
  const absl::StatusOr<locks_kvd::v1::StatsReply> stats = QueryStats(options, daemon);
  if (!stats.ok()) {
    bundle->Add(name("stats.json"), stats.status());
    return Complain(stats.status());
  }
  bundle->Add(name("stats.json"), Json(*stats));
  const auto slowlog = CallAdmin(options, daemon, &Admin::Stub::Slowlog, {});
  bundle->Add(name("slowlog.json"),
              slowlog.ok() ? absl::StatusOr<std::string>(Json(*slowlog)) : slowlog.status());
  const auto config = CallAdmin(options, daemon, &Admin::Stub::Config, {});
  if (!config.ok()) {
    bundle->Add(name("config.textproto"), config.status());
    return ExitCode::kOk;
  }
  bundle->Add(name("config.textproto"), config->text());
  const absl::StatusOr<Address> metrics = MetricsAddress(daemon, config->text());
  bundle->Add(name("metrics.txt"),
              metrics.ok() ? HttpGet(*metrics, "/metrics", options.timeout) : metrics.status());
  return ExitCode::kOk;
}

std::string Versions(const LocksctlOptions& options) {
  std::string text = absl::StrCat("made at ", absl::FormatTime(absl::Now(), absl::UTCTimeZone()),
                                  "\nlocksctl protocol ", kProtocolVersion, ", layout ",
                                  kLayoutVersion, ", ucx ", UcxWorker::Version(), "\n");
  for (const std::string& daemon : options.daemons) absl::StrAppend(&text, "daemon ", daemon, "\n");
  return text;
}

}  // namespace

ExitCode RunSupportBundle(const LocksctlOptions& options) {
  if (options.out.empty()) {
    std::cerr << "locksctl: support-bundle needs --out FILE.tar.gz or --out DIR\n";
    return ExitCode::kUsage;
  }
  if (fs::exists(options.out) && !options.yes) {
    std::cerr << "locksctl: --out " << options.out << " exists: add --yes to write over it\n";
    return ExitCode::kUsage;
  }
  umask(077);
  const bool packed = absl::EndsWith(options.out, ".tar.gz") || absl::EndsWith(options.out, ".tgz");
  std::string pattern = (fs::temp_directory_path() / "locksctl_XXXXXX").string();
  if (packed && mkdtemp(pattern.data()) == nullptr) {
    std::cerr << "locksctl: no folder can be made in " << fs::temp_directory_path() << "\n";
    return ExitCode::kCheckFailed;
  }
  const fs::path folder = packed ? fs::path(pattern) / "locks-kvd" : fs::path(options.out);
  Bundle bundle(folder);
  ExitCode code = ExitCode::kOk;
  bundle.Add("versions.txt", Versions(options));
  for (const std::string& daemon : options.daemons) {
    code = Worse(code, AddDaemon(options, daemon, &bundle));
  }
  bundle.Finish();
  if (packed) {
    const absl::Status made =
        RunTool({"tar", "-czf", options.out, "-C", pattern, "locks-kvd"}).status();
    fs::remove_all(pattern);
    if (!made.ok()) return Complain(made);
  }
  if (!bundle.problems().empty()) std::cerr << bundle.problems();
  Table table = {{"file"}, {}};
  for (const std::string& file : bundle.files()) table.rows.push_back({file});
  std::cout << Render(table, options.output);
  return code;
}

}  // namespace kvd
