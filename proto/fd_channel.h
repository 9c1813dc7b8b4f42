// Hands file descriptors of an arena to a worker over a unix socket (SCM_RIGHTS).
//
// The socket filters by peer credentials, it does not identify: descriptors pass only for a valid
// session token. Lengths and counts are capped, a handshake takes at most 5 s, and nothing that a
// peer sends is trusted.
// Exchange: client sends DescriptorRequest; server answers DescriptorReply and, if its status is
// kOk, num_descriptors descriptors in messages of at most kMaxDescriptorsPerMessage.

#ifndef LOCKS_KVD_PROTO_FD_CHANNEL_H_
#define LOCKS_KVD_PROTO_FD_CHANNEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/arena_memory.h"
#include "proto/wire.h"

namespace kvd {

inline constexpr uint32_t kDescriptorMagic = 0x444B564Cu;  // "LVKD"
inline constexpr int kMaxDescriptorsPerMessage = 64;

struct DescriptorRequest {
  uint32_t magic = kDescriptorMagic;
  uint32_t version = 1;
  Incarnation incarnation = {};
  SessionToken session = {};
};
static_assert(sizeof(DescriptorRequest) == 40);

struct DescriptorReply {
  uint32_t magic = kDescriptorMagic;
  uint32_t version = 1;
  WireStatus status = WireStatus::kOk;
  uint16_t reserved = 0;
  uint32_t num_descriptors = 0;
};
static_assert(sizeof(DescriptorReply) == 16);

// Client side. kUnavailable: nobody listens; kAborted: the session is unknown there;
// kDeadlineExceeded; kInvalidArgument: the peer spoke another protocol.
absl::StatusOr<std::vector<UniqueFd>> ReceiveDescriptors(const std::string& socket_path,
                                                         const DescriptorRequest& request,
                                                         absl::Duration timeout);

// Server side: one listening socket, one thread.
class DescriptorListener {
 public:
  // Looks a request up: the descriptors to pass, or why not. Called on the listener's thread.
  using Lookup = std::function<absl::StatusOr<std::vector<int>>(const DescriptorRequest&)>;
  // Creates `socket_path` (an old socket file is replaced if nobody listens on it) with mode 0660.
  static absl::StatusOr<std::unique_ptr<DescriptorListener>> Make(const std::string& socket_path,
                                                                  Lookup lookup);
  ~DescriptorListener();  // closes, unlinks, joins

  // Refused or malformed handshakes so far.
  uint64_t num_malformed() const;

 private:
  struct Impl;
  explicit DescriptorListener(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_FD_CHANNEL_H_
