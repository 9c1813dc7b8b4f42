// One row of resolve by one CTA: what of a list of pages the page cache holds, and the slots of the
// rest.
//
// The m-th miss takes the m-th oldest slot that this step does not use. Hits are marked in a copy
// of the slots' last steps. For few misses a warp takes the oldest slot out of its registers once
// for each. For more, slots are counted by age, which tells since when enough of them were not used
// (by bisecting, where that is long ago); those that are older are ranked among each other, those
// of that very step go by their number. For very many all are sorted. LaunchResolve does nothing
// else; the step's kernel goes on to fetch and to attend, and every CTA of its cluster finds the
// same slots for itself: so finding reads the maps and writes shared memory alone. Pages are
// distinct and a page that is missed is in no slot, so no two threads write the same entry of a
// map. Device code only. Internal to kernels/.

#ifndef LOCKS_KVD_KERNELS_RESOLVE_ROW_CUH_
#define LOCKS_KVD_KERNELS_RESOLVE_ROW_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/resolve.h"

namespace kvd::resolve_row {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kMaxThreads = 1024;
constexpr int kSlotBits = 12;
static_assert(kMaxCacheSlots == 1 << kSlotBits);
constexpr uint64_t kInUse = ~uint64_t{0};  // sorts last
constexpr int kFew = 16;                   // misses that one warp finds slots for
constexpr int kOwnSlots = 16;              // of a lane of that warp, at most
constexpr int kMaxRanked = 512;
constexpr int kAges = 256;  // the last one and all above together

// What is found, in shared memory.
struct Lists {
  int32_t* pages;     // [K]
  int32_t* slots;     // [K] of each page; below 0: missed without a slot
  uint32_t* is_miss;  // [K] bits: missed, with a slot
};
__host__ __device__ inline int RoundedPages(int max_pages) { return (max_pages + 3) / 4 * 4; }
__host__ __device__ inline int ListBytes(int max_pages) {
  return RoundedPages(max_pages) * 8 + (max_pages + 127) / 128 * 16;
}
__device__ __forceinline__ Lists MakeLists(unsigned char* memory, int max_pages) {
  auto* pages = reinterpret_cast<int32_t*>(memory);
  int32_t* slots = pages + RoundedPages(max_pages);
  return {pages, slots, reinterpret_cast<uint32_t*>(slots + RoundedPages(max_pages))};
}

// Shared memory that is free again when FindSlots has returned.
struct Scratch {
  struct Fixed {
    uint64_t oldest[kMaxRanked];
    int32_t ranked[kMaxRanked];  // slots, the oldest first
    int32_t ages[kAges];         // slots of each
    int32_t warp_counts[kMaxThreads / 32];
    int32_t num;
  };
  Fixed* fixed;
  // [PowerOfTwo(S)] step << kSlotBits | slot, of the slots that this step does not use
  uint64_t* order;
  int32_t* misses;  // [K] positions of the pages that no slot has
};
__host__ __device__ inline int PowerOfTwo(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}
__host__ __device__ inline int ScratchBytes(int max_pages, int max_slots) {
  return static_cast<int>((sizeof(Scratch::Fixed) + 15) / 16 * 16) + PowerOfTwo(max_slots) * 8 +
         RoundedPages(max_pages) * 4;
}
__device__ __forceinline__ Scratch MakeScratch(unsigned char* memory, int max_slots) {
  auto* order = reinterpret_cast<uint64_t*>(memory + (sizeof(Scratch::Fixed) + 15) / 16 * 16);
  return {reinterpret_cast<Scratch::Fixed*>(memory), order,
          reinterpret_cast<int32_t*>(order + PowerOfTwo(max_slots))};
}

// The last steps of a thread's first slots: they can be on their way before the pages are known.
struct FirstSteps {
  static constexpr int kNum = 2;
  uint64_t step[kNum];
};
__device__ __forceinline__ FirstSteps ReadSteps(const ResolveRow& row) {
  FirstSteps first;
#pragma unroll
  for (int k = 0; k < FirstSteps::kNum; ++k) {
    const int s = static_cast<int>(threadIdx.x + k * blockDim.x);
    first.step[k] = s < row.num_slots ? row.slot_step[s] : 0;
  }
  return first;
}

// The position of this thread among those of the CTA for which `mine` holds, and how many they are.
struct Place {
  int before;
  int num;
};
__device__ inline Place PlaceOf(bool mine, Scratch::Fixed* fixed) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32,
            warps = static_cast<int>(blockDim.x) / 32;
  const uint32_t ballot = __ballot_sync(kAllLanes, mine);
  __syncthreads();  // the last call's counts have been read
  if (lane == 0) fixed->warp_counts[warp] = __popc(ballot);
  __syncthreads();
  const int count = lane < warps ? fixed->warp_counts[lane] : 0;
  Place place;
  place.num = __reduce_add_sync(kAllLanes, count);
  place.before =
      __reduce_add_sync(kAllLanes, lane < warp ? count : 0) + __popc(ballot & ((1u << lane) - 1));
  return place;
}

__device__ __forceinline__ void PutSteps(const ResolveRow& row, const FirstSteps& first,
                                         const Scratch& scratch) {
  const auto put = [&](int s, uint64_t step) {
    scratch.order[s] = step << kSlotBits | static_cast<uint64_t>(s);
  };
  const auto i0 = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
#pragma unroll
  for (int k = 0; k < FirstSteps::kNum; ++k)
    if (i0 + k * threads < row.num_slots) put(i0 + k * threads, first.step[k]);
  for (int s = i0 + FirstSteps::kNum * threads; s < row.num_slots; s += threads)
    put(s, row.slot_step[s]);
}

// Looks up the row's pages, marks the hits' slots and lists the other pages in order. Returns how
// many those are. `first_page`: this thread's first page, if it has one; `with_page(i, page)` may
// start loads of its own.
template <class WithPage>
__device__ __forceinline__ int LookUp(const ResolveRow& row, const FirstSteps& steps,
                                      const int32_t* pages, int num_pages, int first_page,
                                      const WithPage& with_page, const Lists& lists,
                                      const Scratch& scratch) {
  int num_absent = 0;
  for (int first = 0; first < num_pages; first += static_cast<int>(blockDim.x)) {
    const int i = first + static_cast<int>(threadIdx.x);
    int page = 0, slot = 0;
    if (i < num_pages) {
      page = first == 0 ? first_page : pages[i];
      slot = row.page_slot[page];
      with_page(i, page);
    }
    if (first == 0) PutSteps(row, steps, scratch);
    const bool is_absent = slot < 0;
    const Place place = PlaceOf(is_absent, scratch.fixed);
    if (i < num_pages) {
      lists.pages[i] = page;
      lists.slots[i] = slot;
    }
    if (is_absent) {
      scratch.misses[num_absent + place.before] = i;
    } else if (i < num_pages) {
      scratch.order[slot] = kInUse;
    }
    num_absent += place.num;
  }
  __syncthreads();
  return num_absent;
}

__device__ __forceinline__ void Take(int m, int slot, const Lists& lists, const Scratch& scratch) {
  const int i = scratch.misses[m];
  lists.slots[i] = slot;
  atomicOr(&lists.is_miss[i / 32], 1u << (i % 32));
}

// By one warp, for at most kFew misses of at most 32 * kOwnSlots slots. Returns how many there are;
// -1 if a slot was not used for so long that its age has no room beside its number.
__device__ inline int TakeFew(int num_slots, int need, uint64_t step, const Lists& lists,
                              const Scratch& scratch) {
  constexpr uint32_t kOldest = (1u << (32 - kSlotBits)) - 2, kNone = ~0u;
  const int lane = threadIdx.x % 32;
  uint32_t own[kOwnSlots];  // ~age | slot: the smallest is the oldest
  bool fits = true;
#pragma unroll
  for (int k = 0; k < kOwnSlots; ++k) {
    const int s = lane + 32 * k;
    const uint64_t order = s < num_slots ? scratch.order[s] : kInUse;
    const uint64_t age = step - (order >> kSlotBits);
    own[k] = order == kInUse
                 ? kNone
                 : (kOldest - static_cast<uint32_t>(age)) << kSlotBits | static_cast<uint32_t>(s);
    fits = fits && (order == kInUse || age <= kOldest);
  }
  if (!__all_sync(kAllLanes, fits)) return -1;
  for (int m = 0; m < need; ++m) {
    uint32_t oldest = kNone;
#pragma unroll
    for (const uint32_t key : own) oldest = min(oldest, key);
    oldest = __reduce_min_sync(kAllLanes, oldest);
    if (oldest == kNone) return m;
    if (lane == 0) Take(m, static_cast<int>(oldest & (kMaxCacheSlots - 1)), lists, scratch);
#pragma unroll
    for (uint32_t& key : own) key = key == oldest ? kNone : key;
  }
  return need;
}

// Sorts order[0, size) upwards; size is a power of two.
__device__ inline void Sort(int size, uint64_t* order) {
  for (int run = 2; run <= size; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += static_cast<int>(blockDim.x)) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const uint64_t a = order[low], b = order[high];
        if ((a > b) == ((low & run) == 0)) {
          order[low] = b;
          order[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

// How many of order[0, size) are at most `bound`; the same in all threads.
__device__ inline int CountUpTo(int size, uint64_t bound, const uint64_t* order) {
  int num = 0;
  for (int first = 0; first < size; first += static_cast<int>(blockDim.x)) {
    const int s = first + static_cast<int>(threadIdx.x);
    num += __syncthreads_count(s < size && order[s] <= bound);
  }
  return num;
}

// The earliest step by whose end `need` of the slots that this step does not use were last used,
// and how many were.
struct Since {
  uint64_t step;
  int count;
};
__device__ inline uint64_t Through(uint64_t last_step) {
  return last_step << kSlotBits | (kMaxCacheSlots - 1);
}

// Finds it among steps up to `high`, by whose end `num` >= need slots were last used.
__device__ inline Since Bisect(int size, int need, uint64_t high, int num, const uint64_t* order) {
  uint64_t low = 0;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    const int up_to = CountUpTo(size, Through(middle), order);
    if (up_to >= need) {
      high = middle;
      num = up_to;
    } else {
      low = middle + 1;
    }
  }
  return {high, num};
}

// Finds it from a count of slots by age; lowers `need` to how many slots there are.
__device__ inline Since CountAges(int size, int* need, uint64_t step, const Scratch& scratch) {
  constexpr int kEach = kAges / 32;  // of a lane, the oldest first
  const int lane = threadIdx.x % 32;
  for (int i = static_cast<int>(threadIdx.x); i < kAges; i += static_cast<int>(blockDim.x))
    scratch.fixed->ages[i] = 0;
  __syncthreads();
  for (int s = static_cast<int>(threadIdx.x); s < size; s += static_cast<int>(blockDim.x)) {
    if (scratch.order[s] == kInUse) continue;
    const uint64_t age = step - (scratch.order[s] >> kSlotBits);
    atomicAdd(&scratch.fixed->ages[age < kAges ? static_cast<int>(age) : kAges - 1], 1);
  }
  __syncthreads();
  int own = 0;
  for (int i = 0; i < kEach; ++i) own += scratch.fixed->ages[kAges - 1 - kEach * lane - i];
  int through = own;
  for (int i = 1; i < 32; i *= 2) {
    const int left = __shfl_up_sync(kAllLanes, through, i);
    if (lane >= i) through += left;
  }
  *need = min(*need, __shfl_sync(kAllLanes, through, 31));
  if (*need == 0) return {0, 0};
  const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, through >= *need))) - 1;
  int count = __shfl_sync(kAllLanes, through - own, owner), age = kAges - kEach * owner;
  while (count < *need) count += scratch.fixed->ages[--age];
  if (age < kAges - 1) return {step - static_cast<uint64_t>(age), count};
  return Bisect(size, *need, step - (kAges - 1), count, scratch.order);
}

// The `need` oldest slots that are not in use, at most kMaxRanked of them, to the first misses.
// Returns how many there are.
__device__ inline int TakeRanked(int num_slots, int need, uint64_t step, const Lists& lists,
                                 const Scratch& scratch) {
  const auto i0 = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const Since since = CountAges(num_slots, &need, step, scratch);
  if (need == 0) return 0;
  Scratch::Fixed* fixed = scratch.fixed;
  if (i0 == 0) fixed->num = 0;
  __syncthreads();
  const uint64_t end = since.step << kSlotBits;  // of those that are older
  for (int s = i0; s < num_slots; s += threads)
    if (scratch.order[s] < end) fixed->oldest[atomicAdd(&fixed->num, 1)] = scratch.order[s];
  __syncthreads();
  int num = fixed->num;  // fewer than are needed
  for (int i = i0; i < num; i += threads) {
    const uint64_t key = fixed->oldest[i];
    int rank = 0;
#pragma unroll 8
    for (int k = 0; k < num; ++k) rank += fixed->oldest[k] < key;
    fixed->ranked[rank] = static_cast<int>(key & (kMaxCacheSlots - 1));
  }
  for (int first = 0; num < need; first += threads) {
    const int s = first + i0;
    const bool is_next = s < num_slots && scratch.order[s] >> kSlotBits == since.step;
    const Place place = PlaceOf(is_next, fixed);
    if (is_next && num + place.before < need) fixed->ranked[num + place.before] = s;
    num += place.num;
  }
  __syncthreads();
  for (int m = i0; m < need; m += threads) Take(m, fixed->ranked[m], lists, scratch);
  return need;
}

// The same for any number, by sorting all slots.
__device__ inline int TakeSorted(int num_slots, int need, const Lists& lists,
                                 const Scratch& scratch) {
  const int size = PowerOfTwo(num_slots), threads = static_cast<int>(blockDim.x);
  for (int s = num_slots + static_cast<int>(threadIdx.x); s < size; s += threads)
    scratch.order[s] = kInUse;
  __syncthreads();
  Sort(size, scratch.order);
  int taken = 0;
  for (int first = 0; first < need; first += threads) {
    const int m = first + static_cast<int>(threadIdx.x);
    const bool is_free = m < min(need, num_slots) && scratch.order[m] != kInUse;
    if (is_free) Take(m, static_cast<int>(scratch.order[m] & (kMaxCacheSlots - 1)), lists, scratch);
    taken += __syncthreads_count(is_free);
  }
  return taken;
}

// Finds the slots of `num_pages` pages. Returns the number of misses that got one; the first so
// many of scratch.misses. `first_page`, `with_page`: as LookUp's.
template <class WithPage>
__device__ __forceinline__ int FindSlots(const ResolveRow& row, uint64_t step,
                                         const FirstSteps& steps, const int32_t* pages,
                                         int num_pages, int first_page, const WithPage& with_page,
                                         const Lists& lists, const Scratch& scratch) {
  for (int w = static_cast<int>(threadIdx.x); w < (num_pages + 31) / 32;
       w += static_cast<int>(blockDim.x))
    lists.is_miss[w] = 0;
  const int num_absent =
      LookUp(row, steps, pages, num_pages, first_page, with_page, lists, scratch);
  if (num_absent == 0) return 0;
  int num = -1;
  if (num_absent <= kFew && row.num_slots <= 32 * kOwnSlots) {
    if (threadIdx.x < 32) {
      num = TakeFew(row.num_slots, num_absent, step, lists, scratch);
      if (threadIdx.x == 0) scratch.fixed->num = num;
    }
    __syncthreads();
    num = scratch.fixed->num;
  }
  if (num >= 0) return num;
  __syncthreads();  // what TakeFew left has been read
  num = num_absent <= kMaxRanked ? TakeRanked(row.num_slots, num_absent, step, lists, scratch)
                                 : TakeSorted(row.num_slots, num_absent, lists, scratch);
  __syncthreads();
  return num;
}

}  // namespace kvd::resolve_row

#endif  // LOCKS_KVD_KERNELS_RESOLVE_ROW_CUH_
