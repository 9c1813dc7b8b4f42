// Arenas on a GPU whose units tell slot and generation by their bytes, so that any reader, in this
// process or another, can judge what it read.
//
// Built with KVD_CUDA only. Thread safety: as Arena.

#ifndef LOCKS_KVD_TESTS_SERVICE_GPU_ARENA_FIXTURE_H_
#define LOCKS_KVD_TESTS_SERVICE_GPU_ARENA_FIXTURE_H_

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/checksum.h"
#include "tests/service/arena_fixture.h"
#include "tests/support/gpu.h"

namespace kvd::testing {

// Three layers, two shards of four KV heads: twelve units of 8 KiB a slot.
inline KvGeometry WideGeometry() {
  KvGeometry g;
  g.num_layers = 3;
  g.num_q_heads = 16;
  g.num_kv_heads = 8;
  g.num_shards = 2;
  g.head_dim = 128;
  g.softmax_scale = 0.088f;
  return g;
}

// Ninety-six units of 8 KiB a slot: its records are summed by a thread group of their own.
inline KvGeometry TallGeometry() {
  KvGeometry g = WideGeometry();
  g.num_layers = 12;
  g.num_shards = 1;
  return g;
}

inline ArenaOptions GpuOptions(const KvGeometry& geometry, uint32_t slots, const Clock* clock) {
  ArenaOptions options = TinyOptions(1, clock);
  options.geometry = geometry;
  options.bytes = BytesForSlots(geometry, slots);
  options.place = OnGpu(0);
  options.encoder = Encoder::kE1;
  options.leases_per_session = 1 << 20;
  return options;
}

// What the unit holds when its slot is sealed as `at`: bf16 values below 2 in magnitude.
inline std::vector<uint8_t> ContentOf(const SlotLayout& slot, const PageLocation& at, int layer,
                                      int head) {
  std::vector<uint8_t> bytes(slot.unit_bytes);
  const uint64_t seed =
      Mix64(uint64_t{at.slot} << 32 ^ at.generation) + slot.unit_idx(layer, head) * kGolden64;
  for (size_t i = 0; i < bytes.size() / sizeof(uint64_t); ++i) {
    const uint64_t word = Mix64(seed + i) & 0xBFFFBFFFBFFFBFFFull;
    std::memcpy(bytes.data() + i * sizeof(word), &word, sizeof(word));
  }
  return bytes;
}

// Puts pages under keys that were never used before, one after the other.
class PagePutter {
 public:
  // `content`: what a unit holds, if not ContentOf.
  using Content = std::function<std::vector<uint8_t>(const SlotLayout&, const PageLocation&,
                                                     int layer, int head)>;
  PagePutter(Arena* arena, SessionId session, uint32_t shard = 0, Content content = ContentOf)
      : arena_(*arena), session_(session), shard_(shard), content_(std::move(content)) {}

  // Reserves, which may evict a page, writes what ContentOf says, and seals; leased to the session.
  PageLocation Put() {
    const ReserveOutcome::Page reserved = ReserveOne(&arena_, session_, next_page_++, shard_);
    EXPECT_EQ(reserved.state, ReserveOutcome::State::kNew);
    uint64_t& generation = generations_[reserved.slot];
    generation += 2;
    Write(reserved, {reserved.slot, generation});
    const absl::StatusOr<SealOutcome> sealed = arena_.Seal(session_, reserved.ticket);
    EXPECT_TRUE(sealed.ok()) << sealed.status();
    EXPECT_EQ(sealed->location, (PageLocation{reserved.slot, generation}));
    return sealed->location;
  }
  void Release(const PageLocation& at) { EXPECT_TRUE(arena_.Release(session_, {&at, 1}).ok()); }

 private:
  void Write(const ReserveOutcome::Page& reserved, const PageLocation& at) {
    absl::StatusOr<ReservationPin> pin = arena_.PinReservation(session_, reserved.ticket);
    ASSERT_TRUE(pin.ok()) << pin.status();
    const SlotLayout& slot = arena_.memory().shape().slot;
    uint8_t* const staging = staging_.Reserve(slot.slot_bytes(), arena_.store().place());
    std::vector<PageStore::UnitWrite> writes;
    for (int layer = 0; layer < slot.num_layers; ++layer) {
      for (int head = 0; head < slot.shard_heads; ++head) {
        uint8_t* const from = staging + slot.unit_offset(layer, head);
        const std::vector<uint8_t> content = content_(slot, at, layer, head);
        std::memcpy(from, content.data(), content.size());
        writes.push_back({pin->slot(), layer, head, from});
      }
    }
    arena_.store().WriteUnits(writes);
    for (const PageStore::UnitWrite& write : writes) pin->MarkReceived(write.layer, write.head);
  }

  Arena& arena_;
  const SessionId session_;
  const uint32_t shard_;
  const Content content_;
  int next_page_ = 0;
  std::map<uint32_t, uint64_t> generations_;  // of each slot, as last sealed
  StagingBuffer staging_;
};

// All units of pages, read through the store.
struct UnitsRead {
  UnitsRead(const Arena& arena, const std::vector<PageLocation>& pages)
      : slot(arena.memory().shape().slot) {
    size_t count = 0;
    uint8_t* const to = buffer.Reserve(pages.size() * slot.slot_bytes(), arena.store().place());
    std::memset(to, 0xEE, pages.size() * slot.slot_bytes());
    std::vector<PageStore::Read> reads;
    for (const PageLocation& page : pages) {
      for (int layer = 0; layer < slot.num_layers; ++layer) {
        for (int head = 0; head < slot.shard_heads; ++head) {
          reads.push_back({{page.slot, static_cast<uint16_t>(layer), static_cast<uint16_t>(head),
                            page.generation},
                           to + count++ * slot.unit_bytes});
        }
      }
    }
    valid.assign(count, 0xEE);
    arena.store().ReadUnits(reads, valid);
  }
  const uint8_t* unit(size_t page, int layer, int head) const {
    return buffer.data() + page * slot.slot_bytes() + slot.unit_offset(layer, head);
  }
  bool Holds(size_t page, int layer, int head, const std::vector<uint8_t>& bytes) const {
    return std::memcmp(unit(page, layer, head), bytes.data(), bytes.size()) == 0;
  }
  SlotLayout slot;
  StagingBuffer buffer;
  std::vector<uint8_t> valid;  // [pages][L][shard heads]
};

// One slot's header and records, read through the store.
struct SummaryRead {
  SummaryRead(const Arena& arena, const PageLocation& page) : slot(arena.memory().shape().slot) {
    const PageStore::Read read = {
        {page.slot, 0, 0, page.generation},
        buffer.Reserve(sizeof(PageHeader) + slot.summary_bytes(), arena.store().place())};
    arena.store().ReadSummaries({&read, 1}, {&valid, 1});
  }
  const uint8_t* records() const { return buffer.data() + sizeof(PageHeader); }
  template <typename T>
  T HeaderField(size_t offset) const {
    T value;
    std::memcpy(&value, buffer.data() + offset, sizeof(value));
    return value;
  }
  SlotLayout slot;
  StagingBuffer buffer;
  uint8_t valid = 0xEE;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SERVICE_GPU_ARENA_FIXTURE_H_
