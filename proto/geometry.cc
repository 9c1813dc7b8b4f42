#include "proto/geometry.h"

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/pool.pb.h"

namespace kvd {
namespace {

constexpr uint32_t kDefaultPageTokens = 16;
constexpr uint32_t kDefaultRank = 8;

// A value that does not fit becomes the largest one, which Problem() refuses by the field's name.
int32_t Int(uint32_t value, uint32_t if_unset) {
  constexpr uint32_t kLargest = std::numeric_limits<int32_t>::max();
  const uint32_t chosen = value == 0 ? if_unset : value;
  return static_cast<int32_t>(chosen > kLargest ? kLargest : chosen);
}

}  // namespace

absl::StatusOr<KvGeometry> FromProto(const locks_kvd::v1::Geometry& proto) {
  KvGeometry geometry;
  geometry.num_layers = Int(proto.num_layers(), 0);
  geometry.num_q_heads = Int(proto.num_q_heads(), 0);
  geometry.num_kv_heads = Int(proto.num_kv_heads(), 0);
  geometry.num_shards = Int(proto.num_shards(), 1);
  geometry.head_dim = Int(proto.head_dim(), 0);
  geometry.page_tokens = Int(proto.page_tokens(), kDefaultPageTokens);
  geometry.rank = Int(proto.rank(), kDefaultRank);
  switch (proto.dtype()) {
    case locks_kvd::v1::DTYPE_UNSPECIFIED:
    case locks_kvd::v1::DTYPE_BF16:
      geometry.dtype = KvDtype::kBf16;
      break;
    case locks_kvd::v1::DTYPE_FP16:
      geometry.dtype = KvDtype::kFp16;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("geometry: dtype must be DTYPE_BF16 or DTYPE_FP16, got ",
                       static_cast<int>(proto.dtype())));
  }
  geometry.rotated = !proto.unrotated();
  geometry.softmax_scale = proto.softmax_scale();
  geometry.logit_softcap = proto.logit_softcap();
  if (const char* problem = Problem(geometry); problem != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("geometry: ", problem, ", got {", proto.ShortDebugString(), "}"));
  }
  return geometry;
}

locks_kvd::v1::Geometry ToProto(const KvGeometry& geometry) {
  locks_kvd::v1::Geometry proto;
  proto.set_num_layers(static_cast<uint32_t>(geometry.num_layers));
  proto.set_num_q_heads(static_cast<uint32_t>(geometry.num_q_heads));
  proto.set_num_kv_heads(static_cast<uint32_t>(geometry.num_kv_heads));
  proto.set_num_shards(static_cast<uint32_t>(geometry.num_shards));
  proto.set_head_dim(static_cast<uint32_t>(geometry.head_dim));
  proto.set_page_tokens(static_cast<uint32_t>(geometry.page_tokens));
  proto.set_rank(static_cast<uint32_t>(geometry.rank));
  proto.set_dtype(geometry.dtype == KvDtype::kBf16 ? locks_kvd::v1::DTYPE_BF16
                                                   : locks_kvd::v1::DTYPE_FP16);
  proto.set_unrotated(!geometry.rotated);
  proto.set_softmax_scale(geometry.softmax_scale);
  proto.set_logit_softcap(geometry.logit_softcap);
  return proto;
}

}  // namespace kvd
