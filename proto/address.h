// A host and a port: "127.0.0.1:7411", "[::1]:7411", "kv-0.kv.svc:7411".

#ifndef LOCKS_KVD_PROTO_ADDRESS_H_
#define LOCKS_KVD_PROTO_ADDRESS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvd {

struct Address {
  std::string host;  // without brackets
  uint16_t port = 0;

  // kInvalidArgument says what was expected; an unbracketed IPv6 host is refused with the way to
  // write it.
  static absl::StatusOr<Address> Parse(absl::string_view text);
  // With brackets around an IPv6 host.
  std::string ToString() const;
  // True for 127.0.0.0/8, ::1 and "localhost".
  bool IsLoopback() const;
  friend bool operator==(const Address&, const Address&) = default;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_ADDRESS_H_
