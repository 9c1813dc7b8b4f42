// KvGeometry and ModelIdentity between their protobuf and C++ forms.

#ifndef LOCKS_KVD_PROTO_GEOMETRY_H_
#define LOCKS_KVD_PROTO_GEOMETRY_H_

#include "absl/status/statusor.h"
#include "kernels/layout.h"

namespace locks_kvd::v1 {
class Geometry;
}

namespace kvd {

// Fills in the defaults (one shard, B = 16, R = 8, bf16) and checks. kInvalidArgument names the
// field.
absl::StatusOr<KvGeometry> FromProto(const locks_kvd::v1::Geometry& proto);
locks_kvd::v1::Geometry ToProto(const KvGeometry& geometry);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_GEOMETRY_H_
