// What locksctl does, one function a verb. Each prints its table to standard output, problems to
// standard error, and answers the exit code.
//
// Thread safety: safe. Blocking: up to the options' timeout for each call.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_VERBS_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_VERBS_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/client_options.h"
#include "client/locksctl_options.h"
#include "proto/pool.pb.h"

namespace kvd {

ExitCode RunStatus(const LocksctlOptions& options);
ExitCode RunPaths(const LocksctlOptions& options);
ExitCode RunStat(const LocksctlOptions& options);
ExitCode RunSelftest(const LocksctlOptions& options);
ExitCode RunDrain(const LocksctlOptions& options);

// Figures of one daemon.
absl::StatusOr<locks_kvd::v1::StatsReply> QueryStats(const LocksctlOptions& options,
                                                     const std::string& daemon);

// What a client must be to attach to --tenant and --model of the first daemon: the geometry comes
// from the daemon. kNotFound if it has no such arena.
absl::StatusOr<ClientOptions> AttachOptions(const LocksctlOptions& options);

// Says it on standard error; kUnreachable for a daemon that does not answer, else kCheckFailed.
ExitCode Complain(const absl::Status& status);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_VERBS_H_
