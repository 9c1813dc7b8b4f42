// NCCL as a CommunicatorLibrary: the only place that knows it.
//
// Why loaded at run time: the same daemon runs where NCCL is not installed, and says so. Why so
// small a communicator: it shares the GPU with decoding workers (at most kMaxCtas CTAs, a stream of
// the lowest priority, no multicast). The environment must have NCCL_NVLS_ENABLE=0 before the first
// call (service/main.cc).
// Right because: nothing is registered with NCCL, so what writes to a piece is this end's own
// kernel, on this end's own stream; once that stream is idle after an abort, the communicator is
// quiet, whatever the other end does. See service/communicator.h for contract and thread safety.

#ifndef LOCKS_KVD_SERVICE_NCCL_COMMUNICATOR_H_
#define LOCKS_KVD_SERVICE_NCCL_COMMUNICATOR_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "service/communicator.h"

namespace kvd {

// Loads the library `name` as dlopen finds it; it stays loaded. kFailedPrecondition says why there
// is none: not built in, not found, no GPU, too old.
absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> LoadNccl(const std::string& name);
// OK if a communicator of one end can be made at `place` and finishes within the limit: what an
// installation that does not fit the driver is found by. Blocking: a second or so.
absl::Status ProveAlone(const std::shared_ptr<const CommunicatorLibrary>& library,
                        const MemoryPlace& place, absl::Duration limit);

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_NCCL_COMMUNICATOR_H_
