// An arena as a daemon has it, in GPU or host memory, for tests of what reads it: written through
// its own mapping, read through the descriptors that it hands out. Only built with KVD_CUDA.
//
// Thread safety: one writer.

#ifndef LOCKS_KVD_TESTS_CLIENT_GPU_ARENA_H_
#define LOCKS_KVD_TESTS_CLIENT_GPU_ARENA_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "client/device_buffer.h"
#include "kernels/checksum.h"
#include "proto/arena_memory.h"

namespace kvd::testing {

inline constexpr int kGpu = 0;
inline constexpr uint32_t kSlots = 40;

inline KvGeometry TwoShards() {
  KvGeometry g;
  g.num_layers = 3;
  g.num_kv_heads = 4;
  g.num_q_heads = 8;
  g.num_shards = 2;
  g.head_dim = 128;
  g.softmax_scale = 0.1f;
  return g;
}

inline ArenaShape SmallShape() {
  return {MakeSlotLayout(TwoShards()), kSlots, 7};  // 6 slabs, the last one not full
}

// Bytes that belong to one slot and seed only.
inline std::vector<uint8_t> BytesOf(size_t size, uint64_t seed) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size / 8; ++i) {
    const uint64_t word = Mix64(seed * 1000003 + i);
    std::memcpy(bytes.data() + i * 8, &word, 8);
  }
  return bytes;
}

// An arena as its daemon has it, on the host or on a GPU.
class TestArena {
 public:
  explicit TestArena(const MemoryPlace& place) : place_(place) {
    auto made = place.on_gpu() ? ArenaMemory::MakeGpu(SmallShape(), place.gpu)
                               : ArenaMemory::MakeShared(SmallShape());
    EXPECT_TRUE(made.ok()) << made.status();
    memory_ = *std::move(made);
    for (uint32_t slot = 0; slot < kSlots; ++slot) Seal(slot, GenerationOf(slot), slot);
  }
  static uint64_t GenerationOf(uint32_t slot) { return 2 + 2 * (slot % 5); }
  std::vector<UniqueFd> Descriptors() const {
    std::vector<UniqueFd> copies;
    for (const UniqueFd& fd : memory_->descriptors()) copies.emplace_back(dup(fd.get()));
    return copies;
  }
  void Put(void* to, const void* from, size_t size) const {
    EXPECT_TRUE(CopyBytes(place_, to, from, size).ok());
  }
  void SetHeader(uint32_t slot, uint64_t generation, uint64_t checksum) const {
    uint64_t words[8] = {generation, 0, 0, checksum};
    Put(memory_->header(slot), words, sizeof(words));
  }
  void Seal(uint32_t slot, uint64_t generation, uint64_t seed) const {
    SetHeader(slot, generation - 1, 0);
    Put(memory_->slot_base(slot), Units(seed).data(), memory_->shape().slot.slot_bytes());
    Put(memory_->summary(slot), Records(seed).data(), memory_->shape().slot.summary_bytes());
    SetHeader(slot, generation,
              Checksum64(Records(seed).data(), memory_->shape().slot.summary_bytes()));
  }
  static std::vector<uint8_t> Units(uint64_t seed) {
    return BytesOf(SmallShape().slot.slot_bytes(), 2 * seed);
  }
  static std::vector<uint8_t> Records(uint64_t seed) {
    return BytesOf(SmallShape().slot.summary_bytes(), 2 * seed + 1);
  }
  const ArenaMemory& memory() const { return *memory_; }

 private:
  const MemoryPlace place_;
  std::unique_ptr<ArenaMemory> memory_;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_CLIENT_GPU_ARENA_H_
