// Opens gRPC channels to daemons, for the library and for locksctl.
//
// Thread safety: pure functions.

#ifndef LOCKS_KVD_CLIENT_GRPC_CHANNEL_H_
#define LOCKS_KVD_CLIENT_GRPC_CHANNEL_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/client_options.h"

namespace kvd {

// A channel of its own (no connection is shared), with mutual TLS if `tls` names files; they are
// read now, so a later channel uses renewed certificates. kInvalidArgument: only some of the files
// are given, or one cannot be read.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenGrpcChannel(const std::string& address,
                                                               const TlsFiles& tls);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_GRPC_CHANNEL_H_
