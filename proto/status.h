// Statuses across the libraries' borders, and the two macros that pass them on.

#ifndef LOCKS_KVD_PROTO_STATUS_H_
#define LOCKS_KVD_PROTO_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#define KVD_RETURN_IF_ERROR(expr)                             \
  do {                                                        \
    if (absl::Status kvd_status = (expr); !kvd_status.ok()) { \
      return kvd_status;                                      \
    }                                                         \
  } while (false)

#define KVD_STATUS_CONCAT_INNER(a, b) a##b
#define KVD_STATUS_CONCAT(a, b) KVD_STATUS_CONCAT_INNER(a, b)
#define KVD_ASSIGN_OR_RETURN(lhs, expr) \
  KVD_ASSIGN_OR_RETURN_IMPL(KVD_STATUS_CONCAT(kvd_statusor_, __LINE__), lhs, expr)
#define KVD_ASSIGN_OR_RETURN_IMPL(statusor, lhs, expr) \
  auto statusor = (expr);                              \
  if (!statusor.ok()) return statusor.status();        \
  lhs = *std::move(statusor)

namespace kvd {

// Codes are the same numbers on both sides.
grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// The same code with "<context>: " before the message.
absl::Status Annotate(const absl::Status& status, absl::string_view context);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_STATUS_H_
