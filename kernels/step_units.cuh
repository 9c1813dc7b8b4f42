// Where the units of a step's lists are: in a row's page cache, ring and sinks, and in the daemons'
// arenas.
//
// Device code only, but IsValid. Internal to kernels/step_*.cu.

#ifndef LOCKS_KVD_KERNELS_STEP_UNITS_CUH_
#define LOCKS_KVD_KERNELS_STEP_UNITS_CUH_

#include "kernels/step.h"

namespace kvd {

__host__ __device__ __forceinline__ size_t UnitBytes(const StepShape& shape) {
  return static_cast<size_t>(shape.head_dim) * static_cast<size_t>(shape.page_tokens) * 4;
}

// Of a unit in memory laid out [place][L][heads].
__device__ __forceinline__ size_t UnitOffset(const StepShape& shape, int64_t place, int layer,
                                             int head) {
  return static_cast<size_t>((place * shape.num_layers + layer) * shape.num_kv_heads + head) *
         UnitBytes(shape);
}

__device__ __forceinline__ uint8_t* CacheUnit(const FetchArgs& args, const StepRow& row, int head,
                                              int slot) {
  const StepShape& shape = args.shape;
  const int64_t place =
      (int64_t{args.layer} * shape.num_kv_heads + head) * shape.cache_slots + slot;
  return row.cache + static_cast<size_t>(place) * UnitBytes(shape);
}

// A unit of a page in a daemon's arena.
struct Source {
  const uint8_t* unit;  // null: nowhere
  const PageHeader* header;
  uint64_t generation;
};
__device__ inline Source SourceOf(const FetchArgs& args, const PagePlace& place, int head) {
  const StepShape& shape = args.shape;
  if (place.daemon >= static_cast<uint32_t>(shape.num_arenas)) return {};
  const uint32_t lost = args.arena_lost[place.daemon];  // on its way together with the arena
  const PeerArena arena = args.arenas[place.daemon];
  if (lost != 0 || arena.headers == nullptr || place.slot >= arena.num_slots) return {};
  const size_t bytes = UnitBytes(shape);
  const auto unit = static_cast<size_t>(args.layer * shape.shard_heads + head % shape.shard_heads);
  const size_t slot_bytes =
      static_cast<size_t>(shape.num_layers) * static_cast<size_t>(shape.shard_heads) * bytes;
  return {arena.slabs[place.slot / arena.slots_per_slab] +
              (place.slot % arena.slots_per_slab) * slot_bytes + unit * bytes,
          arena.headers + place.slot, place.generation};
}

// The daemons' tables are small, of some lines each, and every miss reads them: brought near while
// select still runs.
__device__ inline void PrefetchArenas(const FetchArgs& args) {
  constexpr int kLine = 128;
  const auto prefetch = [](const void* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); };
  for (int a = static_cast<int>(threadIdx.x); a < args.shape.num_arenas;
       a += static_cast<int>(blockDim.x)) {
    if (a * static_cast<int>(sizeof(uint32_t)) % kLine == 0) prefetch(args.arena_lost + a);
    const PeerArena& arena = args.arenas[a];
    if (arena.headers != nullptr) prefetch(arena.slabs);
  }
}

constexpr int kMaxListed = 4096;  // pages of one row's list

// Host: what every launcher of these lists asks for.
inline bool IsValid(const FetchArgs& args) {
  const StepShape& shape = args.shape;
  const ResolveBatch& resolve = args.resolve;
  return shape.head_dim <= 256 && (shape.page_tokens == 16 || shape.page_tokens == 32) &&
         shape.num_rows >= 0 && shape.num_kv_heads >= 1 && shape.shard_heads >= 1 &&
         shape.num_kv_heads % shape.shard_heads == 0 && shape.num_layers >= 1 && args.layer >= 0 &&
         args.layer < shape.num_layers && args.k != nullptr && args.v != nullptr &&
         resolve.num_rows == shape.num_rows * shape.num_kv_heads && resolve.max_pages >= 0 &&
         resolve.max_pages <= kMaxListed && resolve.max_slots >= 0 &&
         resolve.max_slots <= kMaxCacheSlots;
}

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_STEP_UNITS_CUH_
