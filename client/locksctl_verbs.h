// What locksctl does, one function a verb. Each prints its table to standard output, problems to
// standard error, and answers the exit code.
//
// Thread safety: safe. Blocking: up to the options' timeout for each call.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_VERBS_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_VERBS_H_

#include "client/locksctl_options.h"

namespace kvd {

// What daemons tell everybody (locksctl_verbs.cc, locksctl_live.cc).
ExitCode RunStatus(const LocksctlOptions& options);
ExitCode RunMembers(const LocksctlOptions& options);
ExitCode RunStat(const LocksctlOptions& options);
ExitCode RunSessions(const LocksctlOptions& options);
ExitCode RunLeases(const LocksctlOptions& options);
ExitCode RunTenants(const LocksctlOptions& options);
ExitCode RunTop(const LocksctlOptions& options);
// By attaching like a worker (locksctl_live.cc, locksctl_selftest.cc).
ExitCode RunPaths(const LocksctlOptions& options);
ExitCode RunLatency(const LocksctlOptions& options);
ExitCode RunSelftest(const LocksctlOptions& options);
// What needs the admin role (locksctl_admin.cc, locksctl_pages.cc).
ExitCode RunVerify(const LocksctlOptions& options);
ExitCode RunSlowlog(const LocksctlOptions& options);
ExitCode RunConfig(const LocksctlOptions& options);
ExitCode RunLogLevel(const LocksctlOptions& options);
ExitCode RunDrain(const LocksctlOptions& options);
ExitCode RunPages(const LocksctlOptions& options);
ExitCode RunPlacement(const LocksctlOptions& options);
// Around daemons, each in a file of its own.
ExitCode RunPreflight(const LocksctlOptions& options);
ExitCode RunCerts(const LocksctlOptions& options);
ExitCode RunSupportBundle(const LocksctlOptions& options);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_VERBS_H_
