// Plain TCP for locksctl: whether a port is open, and one page over HTTP.
//
// Thread safety: safe. Blocking: up to `timeout` for each address of the host.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_NET_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_NET_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/address.h"
#include "proto/arena_memory.h"

namespace kvd {

// kUnavailable says why: no such host, refused, no answer.
absl::StatusOr<UniqueFd> ConnectTcp(const Address& address, absl::Duration timeout);

// Body of http://address/path. kUnavailable: cannot be reached; kFailedPrecondition: not answered
// with 200, or with more than 16 MiB.
absl::StatusOr<std::string> HttpGet(const Address& address, const std::string& path,
                                    absl::Duration timeout);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_NET_H_
