#include "service/request_check.h"

#include <set>

#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "proto/wire.h"

namespace kvd {
namespace {

// Slots of one answer of Match: keeps it under the 4 MiB that a client receives by default.
constexpr size_t kMaxMatchSlots = 524288;

}  // namespace

absl::Status CheckCount(absl::string_view what, size_t count) {
  if (count <= static_cast<size_t>(kMaxKeysPerCall)) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: expected at most %d in a call, got %d: split the call", what, kMaxKeysPerCall, count));
}

// The keys of a page list, as a view of the message.
absl::StatusOr<std::span<const PageKey>> ParseKeys(const locks_kvd::v1::PageList& pages) {
  const size_t key_bytes = sizeof(PageKey);
  if (pages.keys().size() % key_bytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("pages.keys: expected a multiple of 16 bytes, got %d: a key is 16 bytes",
                        pages.keys().size()));
  }
  const size_t count = pages.keys().size() / key_bytes;
  KVD_RETURN_IF_ERROR(CheckCount("pages.keys", count));
  if (static_cast<size_t>(pages.page_idx_size()) != count) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "pages.page_idx: expected one for each of %d keys, got %d", count, pages.page_idx_size()));
  }
  for (int i = 0; i < pages.page_idx_size(); ++i) {
    if (pages.page_idx(i) >= static_cast<uint32_t>(kMaxPages)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "pages.page_idx[%d]: expected below %d, got %u", i, kMaxPages, pages.page_idx(i)));
    }
  }
  static_assert(alignof(PageKey) == 1);
  return std::span(reinterpret_cast<const PageKey*>(pages.keys().data()), count);
}

absl::Status CheckShard(const Arena& arena, uint32_t shard) {
  if (shard < static_cast<uint32_t>(arena.geometry().num_shards)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("shard: expected below %d, got %u: the model has %d shards",
                      arena.geometry().num_shards, shard, arena.geometry().num_shards));
}

absl::Status CheckShards(const Arena& arena, const RepeatedU32& shards, size_t num_keys) {
  if (shards.empty()) {
    return absl::InvalidArgumentError(
        "shards: expected at least one, got none: name those that the rank reads");
  }
  std::set<uint32_t> distinct;
  for (const uint32_t shard : shards) {
    KVD_RETURN_IF_ERROR(CheckShard(arena, shard));
    if (!distinct.insert(shard).second) {
      return absl::InvalidArgumentError(absl::StrFormat("shards: %u is named twice", shard));
    }
  }
  if (num_keys * distinct.size() <= kMaxMatchSlots) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrFormat("pages times shards: expected at most %d in a call, got %d: split the call",
                      kMaxMatchSlots, num_keys * distinct.size()));
}

absl::StatusOr<std::vector<PageLocation>> ParseLocations(const Arena& arena,
                                                         const RepeatedU32& slots,
                                                         const RepeatedU64& generations) {
  KVD_RETURN_IF_ERROR(CheckCount("slots", static_cast<size_t>(slots.size())));
  if (slots.size() != generations.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("generations: expected one for each of %d slots, got %d", slots.size(),
                        generations.size()));
  }
  std::vector<PageLocation> locations;
  locations.reserve(static_cast<size_t>(slots.size()));
  for (int i = 0; i < slots.size(); ++i) {
    const PageLocation location = {slots.Get(i), generations.Get(i)};
    if (location.slot >= arena.memory().shape().num_slots) {
      return absl::InvalidArgumentError(absl::StrFormat("slots[%d]: expected below %u, got %u", i,
                                                        arena.memory().shape().num_slots,
                                                        location.slot));
    }
    if (location.generation % 2 != 0 || location.generation == 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "generations[%d]: expected an even number above 0, got %u: only sealed pages have leases",
          i, location.generation));
    }
    locations.push_back(location);
  }
  return locations;
}

}  // namespace kvd
