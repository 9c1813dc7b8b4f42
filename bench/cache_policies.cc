#include "bench/cache_policies.h"

#include <algorithm>
#include <limits>

#include "kernels/check.h"
#include "kernels/resolve.h"

namespace kvd::bench {
namespace {

using Steps = std::vector<std::vector<int32_t>>;

int64_t LruHits(const Steps& steps, int num_pages, int num_slots) {
  std::vector<int32_t> page_slot(static_cast<size_t>(num_pages), -1),
      slot_page(static_cast<size_t>(num_slots), -1);
  std::vector<uint64_t> slot_step(static_cast<size_t>(num_slots), 0);
  int64_t hits = 0;
  for (size_t t = 0; t < steps.size(); ++t) {
    std::vector<int32_t> slots(steps[t].size()), misses(steps[t].size());
    const int num_misses = ref::Resolve({.num_slots = num_slots,
                                         .step = t + 1,
                                         .pages = steps[t].data(),
                                         .num_pages = static_cast<int>(steps[t].size()),
                                         .page_slot = page_slot.data(),
                                         .slot_page = slot_page.data(),
                                         .slot_step = slot_step.data(),
                                         .slots = slots.data(),
                                         .miss_idx = misses.data()});
    if (t > 0) hits += static_cast<int64_t>(steps[t].size()) - num_misses;
  }
  return hits;
}

// A cache whose victims `choose` names: choose(step) is a slot whose page is not of this step.
struct Cache {
  Cache(int num_pages, int num_slots)
      : page_slot(static_cast<size_t>(num_pages), -1),
        slot_page(static_cast<size_t>(num_slots), -1),
        slot_step(static_cast<size_t>(num_slots), 0) {}

  template <typename OnUse, typename Choose>
  int64_t Run(const Steps& steps, const OnUse& on_use, const Choose& choose) {
    int64_t hits = 0;
    for (size_t t = 0; t < steps.size(); ++t) {
      std::vector<int32_t> misses;
      for (const int32_t page : steps[t]) {
        const int32_t slot = page_slot[static_cast<size_t>(page)];
        if (slot < 0) {
          misses.push_back(page);
          continue;
        }
        slot_step[static_cast<size_t>(slot)] = t + 1;
        on_use(static_cast<size_t>(slot));
        hits += t > 0 ? 1 : 0;
      }
      for (const int32_t page : misses) {
        const size_t slot = choose(t);
        if (slot_page[slot] >= 0) page_slot[static_cast<size_t>(slot_page[slot])] = -1;
        slot_page[slot] = page;
        page_slot[static_cast<size_t>(page)] = static_cast<int32_t>(slot);
        slot_step[slot] = t + 1;
        on_use(slot);
      }
    }
    return hits;
  }
  std::vector<int32_t> page_slot, slot_page;
  std::vector<size_t> slot_step;  // last step that used it, from 1 on
};

int64_t ClockHits(const Steps& steps, int num_pages, int num_slots) {
  Cache cache(num_pages, num_slots);
  std::vector<bool> used(static_cast<size_t>(num_slots), false);
  size_t hand = 0;
  return cache.Run(
      steps, [&](size_t slot) { used[slot] = true; },
      [&](size_t t) {
        for (;; hand = (hand + 1) % used.size()) {
          if (cache.slot_step[hand] == t + 1) continue;  // of this step
          if (used[hand]) {
            used[hand] = false;
            continue;
          }
          return hand;
        }
      });
}

int64_t OptHits(const Steps& steps, int num_pages, int num_slots) {
  // [page] steps that need it, ascending.
  std::vector<std::vector<size_t>> needs(static_cast<size_t>(num_pages));
  for (size_t t = 0; t < steps.size(); ++t)
    for (const int32_t page : steps[t]) needs[static_cast<size_t>(page)].push_back(t);
  const auto next_need = [&](int32_t page, size_t t) {
    const std::vector<size_t>& of_page = needs[static_cast<size_t>(page)];
    const auto next = std::upper_bound(of_page.begin(), of_page.end(), t);
    return next == of_page.end() ? std::numeric_limits<size_t>::max() : *next;
  };
  Cache cache(num_pages, num_slots);
  return cache.Run(
      steps, [](size_t) {},
      [&](size_t t) {
        size_t victim = cache.slot_page.size(), latest = 0;
        for (size_t slot = 0; slot < cache.slot_page.size(); ++slot) {
          if (cache.slot_page[slot] < 0) return slot;
          if (cache.slot_step[slot] == t + 1) continue;
          const size_t need = next_need(cache.slot_page[slot], t);
          if (victim < cache.slot_page.size() && need <= latest) continue;
          victim = slot;
          latest = need;
        }
        KVD_CHECK(victim < cache.slot_page.size());
        return victim;
      });
}

}  // namespace

absl::string_view PolicyName(Policy policy) {
  switch (policy) {
    case Policy::kLru:
      return "LRU";
    case Policy::kClock:
      return "CLOCK";
    case Policy::kOpt:
      break;
  }
  return "OPT";
}

int64_t HitsOf(Policy policy, const Steps& steps, int num_pages, int num_slots) {
  for (const auto& step : steps) KVD_CHECK(step.size() <= static_cast<size_t>(num_slots));
  switch (policy) {
    case Policy::kLru:
      return LruHits(steps, num_pages, num_slots);
    case Policy::kClock:
      return ClockHits(steps, num_pages, num_slots);
    case Policy::kOpt:
      break;
  }
  return OptHits(steps, num_pages, num_slots);
}

}  // namespace kvd::bench
