// The file that tells locksctl which daemons and certificates it is about, so that nobody types
// them.
//
// Thread safety: pure functions of the file's text.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_CONTEXT_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_CONTEXT_H_

#include <string>

#include "absl/status/status.h"
#include "client/locksctl_options.h"

namespace kvd {

// Fills what `options` left open from the LocksctlContext (proto/config.proto) in `file`. The
// certificate files go together: any of --ca, --cert and --key leaves the context's out.
// kInvalidArgument names the file: not there (ignored unless `must_exist`), or not such a message.
absl::Status ApplyContext(const std::string& file, bool must_exist, LocksctlOptions* options);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_CONTEXT_H_
