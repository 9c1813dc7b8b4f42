// Opens gRPC channels to daemons: for workers, for other daemons and for locksctl.
//
// Thread safety: pure functions.

#ifndef LOCKS_KVD_PROTO_GRPC_CHANNEL_H_
#define LOCKS_KVD_PROTO_GRPC_CHANNEL_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace kvd {

// PEM files. All empty: no TLS (loopback, or a daemon that was told to allow it).
struct TlsFiles {
  std::string ca_file;
  std::string certificate_file;
  std::string key_file;
  bool empty() const { return ca_file.empty() && certificate_file.empty() && key_file.empty(); }
};

// A channel of its own (no connection is shared), with mutual TLS if `tls` names files; they are
// read now, so a later channel uses renewed certificates. kInvalidArgument: only some of the files
// are given, or one cannot be read.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenGrpcChannel(const std::string& address,
                                                               const TlsFiles& tls);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_GRPC_CHANNEL_H_
