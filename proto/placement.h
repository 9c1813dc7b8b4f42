// Which daemon owns a page: rendezvous hashing over the members, in stripes of consecutive pages.
//
// Why stripes: a sequence spreads over the pool, and one fetch uses several daemons' links at once. Why
// rendezvous: a member that joins or leaves moves only its own share.
// hrw-v1: weight of member m for key k = Mix64(Checksum64(name) ^ first 8 bytes of k ^ rotl(last 8 bytes of
// k, 32)); the highest wins, ties to the lower name. All shards of a page are on one daemon.
// Thread safety: pure functions.

#ifndef LOCKS_KVD_PROTO_PLACEMENT_H_
#define LOCKS_KVD_PROTO_PLACEMENT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proto/page_key.h"

namespace kvd {

inline constexpr int kStripePages = 32;

// Index of the owner of `key` among `members` (names, not empty).
int OwnerOf(const PageKey& key, std::span<const std::string> members);

// Owner of each page of a sequence: the owner of its stripe's first page.
std::vector<int> PlacePages(std::span<const PageKey> keys, std::span<const std::string> members);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_PLACEMENT_H_
