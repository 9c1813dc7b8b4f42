// Hands an arena's memory descriptors to workers of the same host that are attached to it.
//
// Why a session token and not the peer's uid: user namespaces make uids meaningless (operations
// 6.2); the socket's mode and directory keep strangers out, the token says which arena.
// Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_DESCRIPTOR_SERVER_H_
#define LOCKS_KVD_SERVICE_DESCRIPTOR_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/fd_channel.h"
#include "service/session_table.h"

namespace kvd {

class DescriptorServer {
 public:
  // Listens at `socket_path` until destroyed. `sessions` and the arenas behind it must outlive it.
  // Errors: see DescriptorListener::Make.
  static absl::StatusOr<std::unique_ptr<DescriptorServer>> Make(const std::string& socket_path,
                                                                const SessionTable* sessions);
  // Refused or malformed handshakes so far.
  uint64_t num_malformed() const { return listener_->num_malformed(); }

 private:
  explicit DescriptorServer(std::unique_ptr<DescriptorListener> listener)
      : listener_(std::move(listener)) {}
  std::unique_ptr<DescriptorListener> listener_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_DESCRIPTOR_SERVER_H_
