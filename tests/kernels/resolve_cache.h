// The page cache of one (layer, KV head) on the host, as Resolve keeps it.

#ifndef LOCKS_KVD_TESTS_KERNELS_RESOLVE_CACHE_H_
#define LOCKS_KVD_TESTS_KERNELS_RESOLVE_CACHE_H_

#include <vector>

#include "kernels/resolve.h"

namespace kvd::testing {

struct ResolveCache {
  ResolveCache(int num_slots, int num_pages)
      : page_slot(static_cast<size_t>(num_pages), -1),
        slot_page(static_cast<size_t>(num_slots), -1),
        slot_step(static_cast<size_t>(num_slots), 0) {}

  // Returns the number of misses; what of `slots` and `miss_idx` is not written stays -7.
  int Resolve(uint64_t step, const std::vector<int32_t>& pages) {
    slots.assign(pages.size(), -7);
    miss_idx.assign(pages.size(), -7);
    return ref::Resolve(Args(step, pages));
  }
  void Evict(int slot) { ref::Evict(Args(1, {}), slot); }

  std::vector<int32_t> page_slot, slot_page;
  std::vector<uint64_t> slot_step;
  std::vector<int32_t> slots, miss_idx;

 private:
  ResolveArgs Args(uint64_t step, const std::vector<int32_t>& pages) {
    return {static_cast<int>(slot_page.size()),
            step,
            pages.data(),
            static_cast<int>(pages.size()),
            page_slot.data(),
            slot_page.data(),
            slot_step.data(),
            slots.data(),
            miss_idx.data()};
  }
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_KERNELS_RESOLVE_CACHE_H_
