// The command line of locksctl.
//
// Thread safety: pure functions and plain values; ParseLocksctl reads the context file.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_OPTIONS_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/client_options.h"

namespace kvd {

// What the process answers its caller with.
enum class ExitCode : int { kOk = 0, kCheckFailed = 1, kUsage = 2, kUnreachable = 3 };

enum class OutputForm { kTable, kJson };

struct LocksctlOptions {
  std::string verb;
  std::vector<std::string> arguments;  // what follows the verb
  bool help = false;
  std::vector<std::string> daemons;
  OutputForm output = OutputForm::kTable;
  absl::Duration timeout = absl::Seconds(5);
  TlsFiles tls;
  // Repetition.
  bool watch = false;
  absl::Duration interval = absl::ZeroDuration();  // zero: once, or each second with --watch
  int64_t count = 0;  // rounds; 0: the verb's own, or until interrupted
  // Which arena, and which sequence in it.
  std::string tenant;
  std::string model;
  std::string weights_id;
  std::string rope;
  std::string salt;
  std::string extra;
  std::string token_file;
  // Single verbs'.
  bool yes = false;
  bool exit = false;
  absl::Duration drain_timeout = absl::ZeroDuration();  // zero: the daemon's own
  int64_t max_pages = 70;                               // selftest
  std::string out;                                      // certs, support-bundle
  std::vector<std::string> hosts;                       // certs: further names of the daemon
  int64_t days = 0;                                     // certs: life; preflight: least life left
  int64_t memlock = 0;                                  // preflight: bytes that must be lockable
};

// What main takes from outside; null or empty: not set.
struct LocksctlEnvironment {
  const char* daemons = nullptr;  // LOCKSCTL_DAEMONS, comma separated
  std::string context_file = {};  // read if it exists and --context names no other
};

// `args` without the program's name. Flags come before the environment, the environment before the
// context file. kInvalidArgument names the flag and what was expected.
absl::StatusOr<LocksctlOptions> ParseLocksctl(const std::vector<std::string>& args,
                                              const LocksctlEnvironment& environment);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_OPTIONS_H_
