// Chooses how a session's fetches travel, and proves it before it is used.
//
// Why: a silently slower path is the most common complaint about other stores. The choice is made
// once, at attach, by a canary fetch (right content, measured rate), reported with the reason why a
// better path is not possible, and refused if the caller requires a better one.

#ifndef LOCKS_KVD_CLIENT_PATH_H_
#define LOCKS_KVD_CLIENT_PATH_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/fetcher.h"
#include "proto/arena_memory.h"
#include "proto/pool.pb.h"

namespace kvd {

class UcxWorker;

// Why a path is not used, as metrics say it.
enum class PathRefusal {
  kHostMemory,    // peer: the arena is not on a GPU
  kNoGpu,         // peer: this worker has no GPU
  kNotOffered,    // the daemon is configured without it
  kOtherHost,     // peer, shared: the daemon is on another host
  kNoUcx,         // ucx: this process runs without it
  kOtherVersion,  // ucx: the two ends run different versions
  kByOptions,     // the caller left it out
  kFailed,        // it should work and does not
};
inline constexpr size_t kNumPathRefusals = static_cast<size_t>(PathRefusal::kFailed) + 1;
absl::string_view PathRefusalName(PathRefusal reason);  // "host_memory", ...

struct PathReport {
  PathKind path;
  // Of ucx to a worker with a GPU: through which memory, and why or how much faster that is; else
  // empty.
  std::string memory;
  double canary_bytes_per_second = 0;
  double canary_seconds = 0;
  std::vector<std::string> rejected;  // "shared: <why not>" for each better path that is not used
  std::vector<std::pair<PathKind, PathRefusal>> refusals;  // the same for machines
};

struct ChosenPath {
  std::unique_ptr<Fetcher> fetcher;
  PathReport report;
};

// Bytes a second, beside a millisecond for the launch, which a busy GPU may take.
inline constexpr double kPeerFloor = 1e9;

struct PathOptions {
  // refuse anything slower: kFailedPrecondition says why it is impossible
  std::optional<PathKind> required;
  // try nothing faster: to measure or test a path that is not the best one
  std::optional<PathKind> best;
  absl::Duration timeout = absl::Seconds(5);
  int gpu = -1;  // the worker's, CUDA ordinal: where units are delivered to; -1: to host memory
};

// Tries peer, then shared, then ucx (`ucx` null: no UCX in this process), each proved by a fetch of
// the canary slot to where the worker's units go; to a GPU, shared goes through staging memory, and
// ucx too unless it can go between the GPU memories and its canary is then not clearly slower. A
// peer path that is slower than kPeerFloor is refused: something else than NVLink or PCIe carries
// it. Blocking: up to the timeout. Errors: kFailedPrecondition if no allowed path works, with every
// reason; kDataLoss if a path delivered wrong canary bytes.
absl::StatusOr<ChosenPath> ChoosePath(const locks_kvd::v1::AttachReply& offer,
                                      const ArenaShape& shape, UcxWorker* ucx,
                                      const PathOptions& options);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_PATH_H_
