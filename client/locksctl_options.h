// The command line of locksctl.
//
// Thread safety: pure functions and plain values.

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
  bool help = false;
  std::vector<std::string> daemons;
  OutputForm output = OutputForm::kTable;
  absl::Duration timeout = absl::Seconds(5);
  TlsFiles tls;
  // stat
  absl::Duration interval = absl::ZeroDuration();  // zero: once
  int64_t count = 0;                               // 0: until interrupted
  // paths, selftest
  std::string tenant;
  std::string model;
  std::string weights_id;
  std::string rope;
  int64_t max_pages = 70;
  // drain
  bool yes = false;
  bool exit = false;
  absl::Duration drain_timeout = absl::ZeroDuration();  // zero: the daemon's own
};

// `args` without the program's name. `env_daemons`: LOCKSCTL_DAEMONS, comma separated, used if no
// --daemon is given; null if unset. kInvalidArgument names the flag and what was expected.
absl::StatusOr<LocksctlOptions> ParseLocksctl(const std::vector<std::string>& args,
                                              const char* env_daemons);

// Help of one verb, or of the program for "".
std::string LocksctlHelp(const std::string& verb);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_OPTIONS_H_
