// Which daemons own a page: weighted rendezvous hashing over the members, in stripes of consecutive
// pages.
//
// Why stripes: a sequence spreads over the pool, and one fetch uses several daemons' links at once.
// Why rendezvous: a member that joins or leaves moves only its own share, and the owner of rank 1
// is who owns the stripe once rank 0 has left. All shards of a page are on one daemon.
//
// hrw-v1, in integers alone, so that every language and machine gives the same answer:
//   word(k) = w0 ^ rotl(w1, 32), w0 and w1 the little-endian halves of the key of the first page
//             of the stripe
//   h(m, k) = Mix64(Checksum64(name of m) ^ word(k)), 64 bits (kernels/checksum.h)
//   W(m)    = floor(weight * 2^20 + 0.5), at least 1
//   T[i]    = floor(2^48 log2(1 + i / 256)), i = 0 .. 256
//   L(h)    = 2^48 (64 - log2 h), linear between the T:
//             x = max(h, 1), e = floor(log2 x), f = the 64 bits below the leading one of x, that is
//             x = 2^e (1 + f / 2^64), i = f >> 56, r = (f >> 8) & (2^48 - 1)
//             L = 64 * 2^48 - (e * 2^48 + T[i] + ((T[i+1] - T[i]) * r >> 48)), which is never 0
// Order of preference: larger W / L (compared as W_a L_b > W_b L_a), then larger h, then lower
// name.
// L falls as h grows, so equal weights give the order of the plain hashes and need no logarithm.
// The linear pieces are within 0.2% of w / -ln(u), the exact score. tests/golden/placement_v1.txt
// holds answers of a second implementation, bench/pool_model.py.
// Thread safety: pure functions; a Placement does not change.

#ifndef LOCKS_KVD_PROTO_PLACEMENT_H_
#define LOCKS_KVD_PROTO_PLACEMENT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proto/page_key.h"

namespace kvd {

inline constexpr int kStripePages = 32;
inline constexpr double kMaxMemberWeight = 1e6;

struct PlacedMember {
  std::string name;   // no two alike
  double weight = 1;  // relative capacity; > 0 and <= kMaxMemberWeight
};

// What is hashed of the key of a stripe's first page; daemons store it with each page.
uint64_t PlacementWord(const PageKey& stripe_key);

// The members of one view with their names hashed once.
class Placement {
 public:
  // REQUIRES: weights in range. The order of the list changes no owner, only the indices.
  explicit Placement(std::span<const PlacedMember> members);

  int num_members() const { return static_cast<int>(members_.size()); }
  // Index of the owner. REQUIRES: a member.
  int Owner(uint64_t word) const;
  // The first `count` owners in order of preference (rank 0 = Owner) replace `out`; fewer if there
  // are fewer members.
  void Owners(uint64_t word, int count, std::vector<int>* out) const;

 private:
  struct Hashed {
    uint64_t name_hash;
    uint64_t weight;  // W
    int name_rank;    // place of the name in the sorted list
  };
  struct Score;
  Score ScoreOf(const Hashed& member, uint64_t word) const;

  std::vector<Hashed> members_;
  bool equal_weights_ = true;
};

// Owner of rank `rank` of each page of a sequence: that of its stripe's first page; -1 if there are
// not so many members. REQUIRES: `keys` starts at a stripe's first page.
std::vector<int> PlacePages(std::span<const PageKey> keys, const Placement& placement,
                            int rank = 0);

// The same over names of equal weight. REQUIRES: a member.
int OwnerOf(const PageKey& key, std::span<const std::string> members);
std::vector<int> PlacePages(std::span<const PageKey> keys, std::span<const std::string> members);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_PLACEMENT_H_
