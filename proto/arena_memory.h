// The memory of one arena as descriptors: slabs that its daemon writes and that workers of the same
// host map read-only, in host memory (sealed memfd) or in a GPU's (proto/gpu_memory.h).
//
// Why memfd and seals: a reader can neither write nor truncate what it was given, whatever it
// tries. A slab holds slots_per_slab slots' units, then their records; one more descriptor holds
// all page headers. In a GPU's memory every address below is a device address: nothing of it may be
// read or written by ordinary code.
// Thread safety: immutable after Make / Map; the bytes themselves are guarded by generations
// (design G1).

#ifndef LOCKS_KVD_PROTO_ARENA_MEMORY_H_
#define LOCKS_KVD_PROTO_ARENA_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/layout.h"
#include "kernels/memory_space.h"
#include "proto/gpu_memory.h"
#include "proto/unique_fd.h"

namespace kvd {

// How an arena is carved. Both ends compute it from the same three values.
struct ArenaShape {
  SlotLayout slot;
  uint32_t num_slots = 0;
  uint32_t slots_per_slab = 0;

  size_t summary_stride() const { return (slot.summary_bytes() + 63) / 64 * 64; }
  uint32_t num_slabs() const { return (num_slots + slots_per_slab - 1) / slots_per_slab; }
  size_t slab_bytes() const {
    return static_cast<size_t>(slots_per_slab) * (slot.slot_bytes() + summary_stride());
  }
  size_t header_bytes() const { return static_cast<size_t>(num_slots) * sizeof(PageHeader); }
};

// Slots that `bytes` can hold, headers included, in slabs of at most 1 GiB; num_slots is 0 if not
// even two slots fit (one is the canary's).
ArenaShape CarveArena(const KvGeometry& geometry, uint64_t bytes);

// One mapping of a whole arena, read-only or writable.
class ArenaMemory {
 public:
  // Daemon: creates, sizes, seals (shrink, grow, future write, seal) and maps the slabs, zeroed.
  // kResourceExhausted if the kernel refuses the memory.
  static absl::StatusOr<std::unique_ptr<ArenaMemory>> MakeShared(const ArenaShape& shape);
  // Worker: maps descriptors from the daemon read-only: num_slabs() slabs, then the headers.
  // kFailedPrecondition if a descriptor is not sealed, or has another size than `shape` says.
  static absl::StatusOr<std::unique_ptr<ArenaMemory>> MapShared(const ArenaShape& shape,
                                                                std::vector<UniqueFd> descriptors);
  // The same in the memory of `gpu`: whole granules, mapped there, zeroed. Errors: see GpuMemory;
  // built without CUDA: kFailedPrecondition.
  static absl::StatusOr<std::unique_ptr<ArenaMemory>> MakeGpu(const ArenaShape& shape, int gpu);
  // Worker: maps such descriptors read-only on its own `gpu`, which may be another one than the
  // daemon's; they are closed then. kFailedPrecondition if their number or a size is not what
  // `shape` says, or the GPU cannot map them.
  static absl::StatusOr<std::unique_ptr<ArenaMemory>> MapGpu(const ArenaShape& shape,
                                                             std::vector<UniqueFd> descriptors,
                                                             int gpu);
  ~ArenaMemory();
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

  const ArenaShape& shape() const { return shape_; }
  const MemoryPlace& place() const { return place_; }
  // What Map takes; empty for a mapping of a GPU's memory.
  const std::vector<UniqueFd>& descriptors() const { return descriptors_; }

  // REQUIRES: slot < num_slots and, for units, layer and head in range. The writable forms are for
  // the daemon only: a worker's mapping faults on writing.
  uint8_t* unit(uint32_t slot, int layer, int head) const {
    return slot_base(slot) + shape_.slot.unit_offset(layer, head);
  }
  uint8_t* slot_base(uint32_t slot) const {
    return slabs_[slot / shape_.slots_per_slab] +
           static_cast<size_t>(slot % shape_.slots_per_slab) * shape_.slot.slot_bytes();
  }
  uint8_t* summary(uint32_t slot) const {
    return slabs_[slot / shape_.slots_per_slab] +
           static_cast<size_t>(shape_.slots_per_slab) * shape_.slot.slot_bytes() +
           static_cast<size_t>(slot % shape_.slots_per_slab) * shape_.summary_stride();
  }
  PageHeader* header(uint32_t slot) const { return headers_ + slot; }

 private:
  ArenaMemory() = default;
  absl::Status MapAll(int protection);
  void AddGpuMemory(std::unique_ptr<GpuMemory> memory);

  ArenaShape shape_;
  MemoryPlace place_;
  std::vector<UniqueFd> descriptors_;
  std::vector<std::unique_ptr<GpuMemory>> gpu_memory_;  // slabs, then headers; none in host memory
  std::vector<uint8_t*> slabs_;
  PageHeader* headers_ = nullptr;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_ARENA_MEMORY_H_
