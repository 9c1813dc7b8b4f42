// Checks of `locksctl preflight` that need no daemon: what this host and its files offer.
//
// Each answers one row: ok, failed or skipped, what was found, and what to do. Thread safety: safe.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_HOST_CHECKS_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_HOST_CHECKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvd {

struct Check {
  enum class Result { kOk, kFailed, kSkipped };
  std::string name = {};
  std::string about = {};  // which file, daemon or device
  Result result = Result::kOk;
  std::string found = {};
  std::string todo = {};  // empty if there is nothing to do
};

// Memory that this process may lock. `wanted` of 0: 64 MiB if the host has RDMA devices (pages that
// a network card reads must be locked); without them nothing is locked and the check is skipped.
Check CheckMemlock(int64_t wanted);

// GPUs of the host and whether this process may open them. `root` is "/" but in tests.
Check CheckGpus(const std::string& root);

// Whether the GPUs that this process sees may read each other's memory, which the peer path between
// two of them needs: what `nvidia-smi topo -p2p r` says. Skipped without that program or with fewer
// than two GPUs.
Check CheckPeerAccess();
// The pairs that may not, as "GPU0-GPU1 CNS", in the text that it prints; `num_gpus` is set.
std::vector<std::string> PairsWithoutPeerAccess(const std::string& topology, int* num_gpus);

// Life of the first certificate in `pem`. Skipped if there is no openssl program.
Check CheckCertificate(const std::string& about, const std::string& pem, absl::Duration least_left,
                       absl::Time now);
// The same of a file; failed if it cannot be read.
Check CheckCertificateFile(const std::string& file, absl::Duration least_left, absl::Time now);

// The directory of the unix socket: closed to others, open to this process.
Check CheckSocketDirectory(const std::string& socket_path);

// Differs from this host's clock by `ahead`.
Check CheckClock(const std::string& about, absl::Duration ahead);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_HOST_CHECKS_H_
