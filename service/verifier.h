// Compares sealed pages with their checksums, while the arena is in use.
//
// Why: bytes that changed under a sealed page are the one thing that generations cannot show. Right
// because what is compared is a copy proved by its generation, like any reader's: a page that is
// evicted meanwhile counts as evicted, never as wrong. Thread safety: safe. Leases nothing and
// changes no order of eviction.

#ifndef LOCKS_KVD_SERVICE_VERIFIER_H_
#define LOCKS_KVD_SERVICE_VERIFIER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "service/arena.h"

namespace kvd {

struct VerifyOutcome {
  struct Failure {
    PageLocation location;
    std::string what;
  };
  uint32_t next_slot = 0;         // where the next call begins
  bool done = false;              // every slot was looked at
  uint64_t pages = 0;             // compared in full
  uint64_t units = 0;             // compared
  uint64_t evicted = 0;           // sealed pages that went meanwhile
  std::vector<Failure> failures;  // one a page
};

// Looks at slots from `first_slot` on: at most `max_slots` (0: no limit of the caller's) and about
// kVerifyBytes, but at least one. Blocking: for the time it takes to read them.
inline constexpr uint64_t kVerifyBytes = uint64_t{64} << 20;
VerifyOutcome VerifySlots(const Arena& arena, uint32_t first_slot, uint32_t max_slots);

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_VERIFIER_H_
