// Resolve on the GPU: one CTA a row. Hits are marked in a copy of the slots' last steps in shared memory; the m-th
// miss takes the m-th oldest slot that this step does not use. Those are found by counting slots by age, which tells
// since when enough of them were not used (by bisecting, where that is long ago), and by ranking these few; where many
// tie (an empty cache), by sorting all. Pages are distinct and a page that is missed is in no slot, so no two threads
// write the same entry of a map.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/resolve.h"

namespace kvd {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kMaxThreads = 1024;
constexpr int kSlotBits = 12;
static_assert(kMaxCacheSlots == 1 << kSlotBits);
constexpr uint64_t kInUse = ~uint64_t{0};  // sorts last
constexpr int kMaxRanked = 512;
constexpr int kAges = 256;  // the last one and all above together

struct Shared {
  uint64_t order[kMaxCacheSlots];  // step << kSlotBits | slot of the slots that this step does not use
  uint64_t oldest[kMaxRanked];
  int32_t ages[kAges];  // slots of each
  int32_t num_oldest;
  int32_t warp_counts[kMaxThreads / 32];
};

__host__ __device__ inline int PowerOfTwo(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// The position of this thread among those of the CTA for which `mine` holds, and how many they are.
struct Place {
  int before;
  int num;
};
__device__ Place PlaceOf(bool mine, Shared* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = static_cast<int>(blockDim.x) / 32;
  const uint32_t ballot = __ballot_sync(kAllLanes, mine);
  __syncthreads();  // the last call's counts have been read
  if (lane == 0) shared->warp_counts[warp] = __popc(ballot);
  __syncthreads();
  const int count = lane < warps ? shared->warp_counts[lane] : 0;
  Place place;
  place.num = __reduce_add_sync(kAllLanes, count);
  place.before = __reduce_add_sync(kAllLanes, lane < warp ? count : 0) + __popc(ballot & ((1u << lane) - 1));
  return place;
}

// Looks up the row's pages, touches the hits and lists the others in order. Returns how many those are.
// `first_slot`: of this thread's first page.
__device__ int LookUp(const ResolveRow& row, uint64_t step, const int32_t* pages, int num_pages, int first_slot,
                      int32_t* slots, int32_t* absent, Shared* shared) {
  int num_absent = 0;
  for (int first = 0; first < num_pages; first += static_cast<int>(blockDim.x)) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int slot = i >= num_pages ? 0 : first == 0 ? first_slot : row.page_slot[pages[i]];
    const bool is_absent = i < num_pages && slot < 0;
    const Place place = PlaceOf(is_absent, shared);
    if (i < num_pages) slots[i] = slot;
    if (is_absent) {
      absent[num_absent + place.before] = i;
    } else if (i < num_pages) {
      row.slot_step[slot] = step;
      shared->order[slot] = kInUse;
    }
    num_absent += place.num;
  }
  __syncthreads();
  return num_absent;
}

// Sorts order[0, size) upwards; size is a power of two.
__device__ void Sort(int size, uint64_t* order) {
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
__device__ int CountUpTo(int size, uint64_t bound, const uint64_t* order) {
  int num = 0;
  for (int first = 0; first < size; first += static_cast<int>(blockDim.x)) {
    const int s = first + static_cast<int>(threadIdx.x);
    num += __syncthreads_count(s < size && order[s] <= bound);
  }
  return num;
}

// The earliest step by whose end `need` of the slots that this step does not use were last used, and how many were.
struct Since {
  uint64_t step;
  int count;
};
__device__ uint64_t Through(uint64_t last_step) { return last_step << kSlotBits | (kMaxCacheSlots - 1); }

// Finds it among steps up to `high`, by whose end `num` >= need slots were last used.
__device__ Since Bisect(int size, int need, uint64_t high, int num, const uint64_t* order) {
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
__device__ Since CountAges(int size, int* need, uint64_t step, Shared* shared) {
  constexpr int kEach = kAges / 32;  // of a lane, the oldest first
  const int lane = threadIdx.x % 32;
  for (int i = static_cast<int>(threadIdx.x); i < kAges; i += static_cast<int>(blockDim.x)) shared->ages[i] = 0;
  __syncthreads();
  for (int s = static_cast<int>(threadIdx.x); s < size; s += static_cast<int>(blockDim.x)) {
    if (shared->order[s] == kInUse) continue;
    const uint64_t age = step - (shared->order[s] >> kSlotBits);
    atomicAdd(&shared->ages[age < kAges ? static_cast<int>(age) : kAges - 1], 1);
  }
  __syncthreads();
  int own = 0;
  for (int i = 0; i < kEach; ++i) own += shared->ages[kAges - 1 - kEach * lane - i];
  int through = own;
  for (int i = 1; i < 32; i *= 2) {
    const int left = __shfl_up_sync(kAllLanes, through, i);
    if (lane >= i) through += left;
  }
  *need = min(*need, __shfl_sync(kAllLanes, through, 31));
  if (*need == 0) return {0, 0};
  const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, through >= *need))) - 1;
  int count = __shfl_sync(kAllLanes, through - own, owner), age = kAges - kEach * owner;
  while (count < *need) count += shared->ages[--age];
  if (age < kAges - 1) return {step - static_cast<uint64_t>(age), count};
  return Bisect(size, *need, step - (kAges - 1), count, shared->order);
}

// Brings the `need` oldest slots that this step does not use to the front of order[0, size), in order. Returns how
// many there are, at most `need`.
__device__ int FindOldest(int size, int need, uint64_t step, Shared* shared) {
  const Since since = CountAges(size, &need, step, shared);
  if (need == 0) return 0;
  const int num = since.count;
  if (num > kMaxRanked) {
    Sort(size, shared->order);
    return need;
  }
  if (threadIdx.x == 0) shared->num_oldest = 0;
  __syncthreads();
  for (int s = static_cast<int>(threadIdx.x); s < size; s += static_cast<int>(blockDim.x))
    if (shared->order[s] <= Through(since.step)) shared->oldest[atomicAdd(&shared->num_oldest, 1)] = shared->order[s];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num; i += static_cast<int>(blockDim.x)) {
    const uint64_t key = shared->oldest[i];
    int rank = 0;
#pragma unroll 8
    for (int k = 0; k < num; ++k) rank += shared->oldest[k] < key;
    if (rank < need) shared->order[rank] = key;
  }
  __syncthreads();
  return need;
}

__global__ void __launch_bounds__(kMaxThreads) ResolveKernel(const __grid_constant__ ResolveBatch batch) {
  __shared__ Shared shared;
  const int64_t index = blockIdx.x;
  AwaitParameters(batch);
  WaitForPredecessor();
  const ResolveRow row = batch.rows[index];
  const uint64_t step = *batch.step;
  const int num_pages = batch.num_pages[index];
  const int32_t* pages = batch.pages + index * batch.max_pages;
  int32_t* slots = batch.slots + index * batch.max_pages;
  int32_t* misses = batch.miss_idx + index * batch.max_pages;
  const int size = PowerOfTwo(row.num_slots);
  const auto i0 = static_cast<int>(threadIdx.x);
  const int first_slot = i0 < num_pages ? row.page_slot[pages[i0]] : 0;  // on its way while the slots' steps are
  for (int s = static_cast<int>(threadIdx.x); s < size; s += static_cast<int>(blockDim.x)) {
    const uint64_t used = s < row.num_slots ? row.slot_step[s] : step;
    shared.order[s] = used == step ? kInUse : used << kSlotBits | static_cast<uint64_t>(s);
  }
  __syncthreads();
  const int num_absent = LookUp(row, step, pages, num_pages, first_slot, slots, misses, &shared);
  const int num_misses = num_absent > 0 ? FindOldest(size, num_absent, step, &shared) : 0;
  LetSuccessorStart();
  for (int first = 0; first < batch.max_pages; first += static_cast<int>(blockDim.x)) {
    const int m = first + static_cast<int>(threadIdx.x);
    if (m < num_misses) {
      const int slot = static_cast<int>(shared.order[m] & (kMaxCacheSlots - 1)), i = misses[m];
      const int32_t page = pages[i], old_page = row.slot_page[slot];
      if (old_page >= 0) row.page_slot[old_page] = -1;
      row.page_slot[page] = slot;
      row.slot_page[slot] = page;
      row.slot_step[slot] = step;
      slots[i] = slot;
    } else if (m < batch.max_pages) {
      misses[m] = -1;
    }
    if (m >= num_pages && m < batch.max_pages) slots[m] = -1;
  }
  if (threadIdx.x == 0) batch.num_misses[index] = num_misses;
}

// A warp a row would do: units that fail are rare.
constexpr int kEvictThreads = 128;

__global__ void __launch_bounds__(kEvictThreads)
    EvictKernel(const __grid_constant__ ResolveBatch batch, const uint8_t* valid) {
  const int64_t index = blockIdx.x;
  const ResolveRow row = batch.rows[index];
  const int num_misses = batch.num_misses[index];
  for (int m = static_cast<int>(threadIdx.x); m < num_misses; m += kEvictThreads) {
    if (valid[index * batch.max_pages + m] != 0) continue;
    const int64_t at = index * batch.max_pages + batch.miss_idx[index * batch.max_pages + m];
    const int slot = batch.slots[at];
    row.page_slot[batch.pages[at]] = -1;
    row.slot_page[slot] = -1;
    row.slot_step[slot] = 0;
    batch.slots[at] = -1;
  }
}

bool IsValid(const ResolveBatch& batch) {
  return batch.num_rows >= 0 && batch.max_pages >= 0 && batch.max_slots >= 0 && batch.max_slots <= kMaxCacheSlots;
}

}  // namespace

cudaError_t LaunchResolve(const ResolveBatch& batch, cudaStream_t stream) {
  if (!IsValid(batch)) return cudaErrorInvalidValue;
  if (batch.num_rows == 0) return cudaSuccess;
  const int work = std::max(batch.max_slots / 2, batch.max_pages);
  const unsigned threads = work <= 128 ? 128 : work <= 256 ? 256 : work <= 512 ? 512 : kMaxThreads;
  return LaunchOverlapped(ResolveKernel, static_cast<unsigned>(batch.num_rows), threads, 0, 0, stream, batch);
}

cudaError_t LaunchEvictInvalid(const ResolveBatch& batch, const uint8_t* valid, cudaStream_t stream) {
  if (!IsValid(batch)) return cudaErrorInvalidValue;
  if (batch.num_rows == 0) return cudaSuccess;
  EvictKernel<<<static_cast<unsigned>(batch.num_rows), kEvictThreads, 0, stream>>>(batch, valid);
  return cudaGetLastError();
}

}  // namespace kvd
