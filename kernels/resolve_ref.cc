// Resolve: touch the hits, then give each miss the least recently used slot that this step does not
// use.
#include <algorithm>

#include "kernels/check.h"
#include "kernels/resolve.h"

namespace kvd::ref {
namespace {

// Slots not used by this step, the `count` oldest of them first and in order (ties: lowest slot, so
// that the result does not depend on the library's partial sort). Returns how many of `count` there
// are.
int FindVictims(const ResolveArgs& a, int count, int32_t* victims) {
  int num_idle = 0;
  for (int s = 0; s < a.num_slots; ++s) {
    victims[num_idle] = s;
    num_idle += a.slot_step[s] != a.step;
  }
  count = std::min(count, num_idle);
  const auto older = [&a](int32_t x, int32_t y) {
    return a.slot_step[x] != a.slot_step[y] ? a.slot_step[x] < a.slot_step[y] : x < y;
  };
  std::nth_element(victims, victims + count, victims + num_idle, older);
  std::sort(victims, victims + count, older);
  return count;
}

void Claim(const ResolveArgs& a, int slot, int32_t page) {
  const int32_t old_page = a.slot_page[slot];
  if (old_page >= 0) a.page_slot[old_page] = -1;
  a.page_slot[page] = slot;
  a.slot_page[slot] = page;
  a.slot_step[slot] = a.step;
}

}  // namespace

int Resolve(const ResolveArgs& a) {
  KVD_CHECK(a.num_slots >= 0 && a.num_slots <= kMaxCacheSlots && a.step >= 1);
  int num_absent = 0;
  for (int i = 0; i < a.num_pages; ++i) {
    const int32_t slot = a.page_slot[a.pages[i]];
    a.slots[i] = slot;
    if (slot >= 0) {
      a.slot_step[slot] = a.step;
    } else {
      a.miss_idx[num_absent++] = i;
    }
  }
  if (num_absent == 0) return 0;
  int32_t victims[kMaxCacheSlots];
  const int num_misses = FindVictims(a, num_absent, victims);
  for (int m = 0; m < num_misses; ++m) {
    const int i = a.miss_idx[m];
    Claim(a, victims[m], a.pages[i]);
    a.slots[i] = victims[m];
  }
  return num_misses;
}

void Evict(const ResolveArgs& a, int slot) {
  KVD_CHECK(slot >= 0 && slot < a.num_slots);
  const int32_t page = a.slot_page[slot];
  if (page >= 0) a.page_slot[page] = -1;
  a.slot_page[slot] = -1;
  a.slot_step[slot] = 0;
}

}  // namespace kvd::ref
