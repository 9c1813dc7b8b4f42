// The daemon's configuration: a file (protobuf text or JSON) and a few flags that override it,
// checked as a whole before anything starts.
//
// Unknown fields and flags are refused. Every problem is one line: field, expected, got, what to
// do. Thread safety: pure functions.

#ifndef LOCKS_KVD_SERVICE_CONFIG_H_
#define LOCKS_KVD_SERVICE_CONFIG_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/summarize.h"
#include "proto/config.pb.h"

namespace kvd {

inline constexpr char kVersion[] = "0.1.0";

struct CommandLine {
  enum class Action { kServe, kHelp, kShowVersion, kPrintConfig, kCheckConfig, kListMetrics };
  Action action = Action::kServe;
  std::string config_file;
  // Field path and text of every overriding flag, in order.
  std::vector<std::pair<std::string, std::string>> overrides;
};

// `args` without the program's name; "--flag=value" and "--flag value". kInvalidArgument names the
// flag.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args);
// Every flag with its meaning and default, and examples.
std::string HelpText();

// Reads a configuration: JSON if the name ends in .json or the text begins with '{', else protobuf
// text. kNotFound, kInvalidArgument with file, line and column.
absl::StatusOr<locks_kvd::v1::DaemonConfig> ReadConfigFile(const std::string& path);
absl::StatusOr<locks_kvd::v1::DaemonConfig> ParseConfig(absl::string_view text,
                                                        absl::string_view name);

// File, then flags, then defaults, then checks: what will be in force.
absl::StatusOr<locks_kvd::v1::DaemonConfig> LoadConfig(const CommandLine& command_line);

// Sets every field that was left empty to its default.
void FillDefaults(locks_kvd::v1::DaemonConfig* config);
// One line a problem; empty if there is none. REQUIRES: FillDefaults.
std::vector<std::string> ConfigProblems(const locks_kvd::v1::DaemonConfig& config);

// True if control calls are not authenticated.
bool IsInsecure(const locks_kvd::v1::DaemonConfig& config);
// The encoder that an arena's config asks for. REQUIRES: no problem.
Encoder ArenaEncoder(const locks_kvd::v1::ArenaConfig& arena);
std::string EncoderName(Encoder encoder);
// Protobuf text. The configuration holds no secret: keys are named by file.
std::string PrintConfig(const locks_kvd::v1::DaemonConfig& config);

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_CONFIG_H_
