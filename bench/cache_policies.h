// Which pages a page cache drops: the policies that cache_bench compares. Each step's pages must
// all be in the cache at once, so a page of this step is never dropped in it.
//
// Thread safety: pure functions.

#ifndef LOCKS_KVD_BENCH_CACHE_POLICIES_H_
#define LOCKS_KVD_BENCH_CACHE_POLICIES_H_

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace kvd::bench {

enum class Policy {
  kLru,    // the product's: ref::Resolve
  kClock,  // a bit a slot, set by each use, cleared by a hand that takes the first slot without it
  kOpt,    // Belady: what is needed again last
};
inline constexpr int kNumPolicies = 3;
absl::string_view PolicyName(Policy policy);  // "LRU", "CLOCK", "OPT"

// Hits of all steps but the first, in an empty cache of `num_slots` slots. `steps`: ascending,
// distinct pages below `num_pages`. REQUIRES: no step has more pages than there are slots.
int64_t HitsOf(Policy policy, const std::vector<std::vector<int32_t>>& steps, int num_pages,
               int num_slots);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_CACHE_POLICIES_H_
