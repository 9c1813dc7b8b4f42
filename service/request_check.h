// Checks of what clients send, before any of it is used: lengths, counts, ranges, parity.
//
// kInvalidArgument for what no correct client sends, kResourceExhausted for what is over a cap; the
// message names the field, what was expected and what came. Thread safety: pure functions.

#ifndef LOCKS_KVD_SERVICE_REQUEST_CHECK_H_
#define LOCKS_KVD_SERVICE_REQUEST_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/page_key.h"
#include "proto/pool.pb.h"
#include "service/arena.h"

namespace kvd {

using RepeatedU32 = google::protobuf::RepeatedField<uint32_t>;
using RepeatedU64 = google::protobuf::RepeatedField<uint64_t>;

// At most kMaxKeysPerCall.
absl::Status CheckCount(absl::string_view what, size_t count);

// The keys of a page list, as a view of the message; every page index is below kMaxPages.
absl::StatusOr<std::span<const PageKey>> ParseKeys(const locks_kvd::v1::PageList& pages);

absl::Status CheckShard(const Arena& arena, uint32_t shard);

// At least one, each of the model and named once, and few enough for one answer about `num_keys`
// pages.
absl::Status CheckShards(const Arena& arena, const RepeatedU32& shards, size_t num_keys);

// Slots and generations as locations: slots in range, generations even and above 0.
absl::StatusOr<std::vector<PageLocation>> ParseLocations(const Arena& arena,
                                                         const RepeatedU32& slots,
                                                         const RepeatedU64& generations);

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_REQUEST_CHECK_H_
