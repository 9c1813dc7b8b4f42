#include <cstddef>
#include <cstdint>

#include "kernels/checksum.h"
#include "kernels/guard.cuh"
#include "kernels/ptx.cuh"
#include "kernels/store_records.h"

namespace kvd {
namespace {

constexpr int kThreads = 256;
// 16-byte vectors of one slot that a thread has in flight.
constexpr int kVectors = 2;
// A CTA copies the same piece of several slots in turn. They are mostly neighbouring pages, so what
// it writes to one layer and head is one run of the mirror, and where its vectors go is computed
// once.
constexpr int kSlotsPerCta = 8;
// Launches of fewer slots are spread over more CTAs instead.
constexpr int64_t kManySlots = 512;
constexpr int64_t kMostSlots = int64_t{1} << 31;
constexpr int64_t kFullGrid = 1 << 20;

// Where one vector of a slot's summary goes: `to` for page 0 and head 0 of the worker, a record
// further for each page.
struct Target {
  uint8_t* to;
  uint32_t record_bytes;
};

__device__ Target TargetOf(const StoreRecordsArgs& args, uint32_t vector) {
  const uint32_t coarse = args.slot.coarse_bytes / 16, fine = args.slot.fine_bytes / 16;
  const uint32_t num_units = static_cast<uint32_t>(args.slot.num_layers * args.slot.shard_heads);
  const bool is_coarse = vector < num_units * coarse;
  const uint32_t in_part = is_coarse ? vector : vector - num_units * coarse;
  const uint32_t record_vectors = is_coarse ? coarse : fine;
  const uint32_t unit = in_part / record_vectors;
  const uint32_t heads = static_cast<uint32_t>(args.slot.shard_heads);
  const uint64_t row =
      uint64_t{unit / heads} * static_cast<uint32_t>(args.num_heads) + unit % heads;
  const uint32_t record_bytes = record_vectors * 16;
  uint8_t* part = is_coarse ? args.coarse : args.fine;
  return {part + row * static_cast<uint64_t>(args.page_capacity) * record_bytes +
              (in_part - unit * record_vectors) * 16,
          record_bytes};
}

// The share of one vector in the summary's Checksum64.
__device__ __forceinline__ uint64_t SumOf(const uint4& words, uint32_t vector) {
  const uint64_t first = (uint64_t{vector} * 4 + 1) * kGolden64;
  return Mix64(words.x + first) + Mix64(words.y + first + kGolden64) +
         Mix64(words.z + first + 2 * kGolden64) + Mix64(words.w + first + 3 * kGolden64);
}

__device__ __forceinline__ bool Differ(const uint4& a, const uint4& b) {
  return a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
}

__global__ void __launch_bounds__(kThreads)
    ClearKernel(int64_t num_slots, uint64_t* sums, uint8_t* valid) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= num_slots) return;
  sums[i] = 0;
  valid[i] = 1;
}

// Copies (or compares) pieces of slots and adds up their checksums. A slot found to differ loses
// its `valid`.
template <bool kCompareOnly>
__global__ void __launch_bounds__(kThreads)
    StoreKernel(const StoreRecordsArgs args, uint32_t num_vectors, int64_t num_pieces,
                int slots_per_cta) {
  const int64_t num_groups = (args.num_slots + slots_per_cta - 1) / slots_per_cta;
  for (int64_t task = blockIdx.x; task < num_groups * num_pieces; task += gridDim.x) {
    const int64_t first = task / num_pieces * slots_per_cta;
    const int64_t end =
        first + slots_per_cta < args.num_slots ? first + slots_per_cta : args.num_slots;
    const uint32_t vector =
        static_cast<uint32_t>(task % num_pieces) * (kThreads * kVectors) + threadIdx.x;
    Target targets[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const uint32_t v = vector + k * kThreads;
      if (v < num_vectors) targets[k] = TargetOf(args, v);
    }
    for (int64_t i = first; i < end; ++i) {
      const SlotRecords slot = args.slots[i];
      const auto* source = reinterpret_cast<const uint4*>(slot.summary);
      if (source == nullptr) continue;
      const auto place = static_cast<uint32_t>(slot.first_head * args.page_capacity + slot.page);
      uint64_t generation = slot.generation;
      if (slot.header != nullptr) {
        const uint4 head = guard::Load(reinterpret_cast<const uint4*>(slot.header));
        generation = uint64_t{head.y} << 32 | head.x;
      }
      uint4 words[kVectors];
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const uint32_t v = vector + k * kThreads;
        if (v < num_vectors) words[k] = guard::Load(source + v);
      }
      // Only an early exit: what is known to be gone leaves the mirror as it is.
      if (!__all_sync(ptx::kAllLanes, generation == slot.generation)) continue;
      uint64_t sum = 0;
      bool differs = false;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const uint32_t v = vector + k * kThreads;
        if (v >= num_vectors) continue;
        sum += SumOf(words[k], v);
        auto* to =
            reinterpret_cast<uint4*>(targets[k].to + uint64_t{place} * targets[k].record_bytes);
        if constexpr (kCompareOnly) {
          differs |= Differ(words[k], __ldcg(to));
        } else {
          __stcg(to, words[k]);
        }
      }
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ptx::kAllLanes, sum, step);
      if (kCompareOnly) differs = __any_sync(ptx::kAllLanes, differs) != 0;
      if (threadIdx.x % 32 != 0) continue;
      atomicAdd(reinterpret_cast<unsigned long long*>(args.sums + i),
                static_cast<unsigned long long>(sum));
      if (kCompareOnly && differs) args.valid[i] = 0;
    }
  }
}

// After every byte was copied: does it count?
__global__ void __launch_bounds__(kThreads) ProveKernel(const StoreRecordsArgs args) {
  static_assert(offsetof(PageHeader, summary_checksum) == 24);
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.num_slots) return;
  const SlotRecords slot = args.slots[i];
  uint64_t expected = slot.checksum;
  bool sealed = slot.summary != nullptr;
  if (slot.header != nullptr) {
    const uint4 words = guard::Load(reinterpret_cast<const uint4*>(slot.header) + 1);
    expected = uint64_t{words.w} << 32 | words.z;
    sealed = guard::StillSealed(slot.header, slot.generation) && sealed;
  }
  if (!sealed || args.sums[i] != expected) args.valid[i] = 0;
}

}  // namespace

cudaError_t LaunchStoreRecords(const StoreRecordsArgs& args, cudaStream_t stream) {
  const uint64_t num_vectors = args.slot.summary_bytes() / 16;
  if (args.num_slots < 0 || args.num_slots >= kMostSlots || num_vectors >= (uint64_t{1} << 31) ||
      args.page_capacity < 0 || args.page_capacity * args.num_heads >= (int64_t{1} << 31))
    return cudaErrorInvalidValue;
  if (args.num_slots == 0) return cudaSuccess;
  const auto small_grid = static_cast<unsigned>((args.num_slots + kThreads - 1) / kThreads);
  ClearKernel<<<small_grid, kThreads, 0, stream>>>(args.num_slots, args.sums, args.valid);
  const int slots_per_cta = args.num_slots >= kManySlots ? kSlotsPerCta : 1;
  const int64_t num_pieces =
      static_cast<int64_t>((num_vectors + kThreads * kVectors - 1) / (kThreads * kVectors));
  const int64_t tasks = (args.num_slots + slots_per_cta - 1) / slots_per_cta * num_pieces;
  const auto grid = static_cast<unsigned>(tasks < kFullGrid ? tasks : kFullGrid);
  const auto vectors = static_cast<uint32_t>(num_vectors);
  if (args.compare_only) {
    StoreKernel<true><<<grid, kThreads, 0, stream>>>(args, vectors, num_pieces, slots_per_cta);
  } else {
    StoreKernel<false><<<grid, kThreads, 0, stream>>>(args, vectors, num_pieces, slots_per_cta);
  }
  ProveKernel<<<small_grid, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvd
