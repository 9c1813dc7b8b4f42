// What UCX may use in this process: transports, devices, settings; whether it reaches GPU memory.
//
// Thread safety: pure functions of their arguments and of this machine. Internal to proto/ucx_*.cc.
// Errors: FAILED_PRECONDITION with UCX's own words.

#ifndef LOCKS_KVD_PROTO_UCX_CONTEXT_H_
#define LOCKS_KVD_PROTO_UCX_CONTEXT_H_

#include <ucp/api/ucp.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/ucx_worker.h"

namespace kvd {

// The transports that `options` name or, if they name none, that this machine has.
std::string UcxTransports(const UcxOptions& options);

absl::Status UcxError(absl::string_view what, ucs_status_t status);

// A context for active messages alone; the caller ends it with ucp_cleanup. What the environment
// says about transports and TCP is not heard.
absl::StatusOr<ucp_context_h> MakeUcxContext(const UcxOptions& options);

// True if messages go between `options.gpu`'s memory and another process's: the transports are
// there, and UCX knows such memory when it sees it.
bool HasGpuMemory(const UcxOptions& options, ucp_context_h context);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_UCX_CONTEXT_H_
