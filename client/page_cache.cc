#include "client/page_cache.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/resolve.h"
#include "proto/status.h"

namespace kvd {

absl::StatusOr<std::unique_ptr<PageCache>> PageCache::Make(const WorkerShape& shape,
                                                           int page_capacity,
                                                           std::span<const int> slots_per_layer) {
  KVD_CHECK(static_cast<int>(slots_per_layer.size()) == shape.num_layers());
  auto cache = std::unique_ptr<PageCache>(new PageCache(shape, page_capacity));
  cache->slots_per_layer_.assign(slots_per_layer.begin(), slots_per_layer.end());
  size_t num_slots = 0;
  for (const int slots : slots_per_layer) {
    cache->layer_slot_base_.push_back(num_slots);
    num_slots += static_cast<size_t>(slots) * static_cast<size_t>(shape.num_heads());
  }
  const size_t page_entries = shape.units_per_page() * static_cast<size_t>(page_capacity);
  constexpr char kWhat[] = "page cache";
  KVD_ASSIGN_OR_RETURN(cache->page_slot_, Buffer<int32_t>::Make(page_entries, kWhat));
  KVD_ASSIGN_OR_RETURN(cache->slot_page_, Buffer<int32_t>::Make(num_slots, kWhat));
  KVD_ASSIGN_OR_RETURN(cache->slot_step_, Buffer<uint64_t>::Make(num_slots, kWhat));
  KVD_ASSIGN_OR_RETURN(cache->slot_version_, Buffer<uint32_t>::Make(num_slots, kWhat));
  KVD_ASSIGN_OR_RETURN(cache->units_, Buffer<uint8_t>::Make(num_slots * shape.unit_bytes(), kWhat));
  std::fill(cache->page_slot_.begin(), cache->page_slot_.end(), -1);
  std::fill(cache->slot_page_.begin(), cache->slot_page_.end(), -1);
  std::fill(cache->slot_step_.begin(), cache->slot_step_.end(), 0);
  std::fill(cache->slot_version_.begin(), cache->slot_version_.end(), 0);
  return cache;
}

int PageCache::Resolve(int layer, int head, uint64_t step, std::span<const int32_t> pages,
                       const uint32_t* versions, int32_t* slots, int32_t* miss_idx) {
  KVD_CHECK(static_cast<int>(pages.size()) <= num_slots(layer));
  const size_t base = slot_base(layer, head);
  const ResolveArgs args = {.num_slots = num_slots(layer),
                            .step = step,
                            .pages = pages.data(),
                            .num_pages = static_cast<int>(pages.size()),
                            .page_slot = page_slot_.data() + page_base(layer, head),
                            .slot_page = slot_page_.data() + base,
                            .slot_step = slot_step_.data() + base,
                            .slots = slots,
                            .miss_idx = miss_idx};
  // A claimed slot loses its former page's version, so that one comparison finds both the misses
  // and the hits whose bytes belong to an earlier row of the page.
  uint32_t* slot_version = slot_version_.data() + base;
  const int num_claimed = ref::Resolve(args);
  for (int i = 0; i < num_claimed; ++i) slot_version[slots[miss_idx[i]]] = kNoVersion;
  int num_misses = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    KVD_CHECK(slots[i] >= 0);  // S >= K, and hits are touched before misses claim
    if (slot_version[slots[i]] == versions[pages[i]]) continue;
    slot_version[slots[i]] = versions[pages[i]];
    miss_idx[num_misses++] = static_cast<int32_t>(i);
  }
  return num_misses;
}

void PageCache::Evict(int layer, int head, int32_t slot) {
  const size_t base = slot_base(layer, head);
  const ResolveArgs args = {.num_slots = num_slots(layer),
                            .step = 0,
                            .pages = nullptr,
                            .num_pages = 0,
                            .page_slot = page_slot_.data() + page_base(layer, head),
                            .slot_page = slot_page_.data() + base,
                            .slot_step = slot_step_.data() + base,
                            .slots = nullptr,
                            .miss_idx = nullptr};
  ref::Evict(args, slot);
  slot_version_[base + static_cast<size_t>(slot)] = kNoVersion;
}

uint8_t* PageCache::unit(int layer, int head, int32_t slot) {
  return units_.data() + (slot_base(layer, head) + static_cast<size_t>(slot)) * shape_.unit_bytes();
}

int32_t PageCache::slot_of(int layer, int head, int32_t page) const {
  return page_slot_[page_base(layer, head) + static_cast<size_t>(page)];
}

int32_t PageCache::page_in(int layer, int head, int32_t slot) const {
  return slot_page_[slot_base(layer, head) + static_cast<size_t>(slot)];
}

}  // namespace kvd
