// A small arena with bytes that name their origin, for tests of the service.

#ifndef LOCKS_KVD_TESTS_SERVICE_ARENA_FIXTURE_H_
#define LOCKS_KVD_TESTS_SERVICE_ARENA_FIXTURE_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/dtype.h"
#include "service/arena.h"

namespace kvd::testing {

// Two layers, two shards of one KV head each: four units a page, 8 KiB a slot.
inline KvGeometry TinyGeometry() {
  KvGeometry g;
  g.num_layers = 2;
  g.num_q_heads = 4;
  g.num_kv_heads = 2;
  g.num_shards = 2;
  g.head_dim = 64;
  g.page_tokens = 16;
  g.rank = 8;
  g.softmax_scale = 0.125f;
  return g;
}

inline PageKey KeyOf(int page) {
  PageKey key = {};
  key[0] = static_cast<uint8_t>(page);
  key[1] = static_cast<uint8_t>(page >> 8);
  key[15] = 0xA5;
  return key;
}

// Bytes of an arena that has `slots` slots for pages, besides the canary's.
inline uint64_t BytesForSlots(const KvGeometry& geometry, uint32_t slots) {
  uint64_t bytes = 0;
  while (CarveArena(geometry, bytes).num_slots < slots + 1) bytes += 1024;
  return bytes;
}

inline ArenaOptions TinyOptions(uint32_t slots, const Clock* clock) {
  ArenaOptions options;
  options.tenant = "acme";
  options.model = "tiny";
  options.geometry = TinyGeometry();
  options.bytes = BytesForSlots(options.geometry, slots);
  options.encoder = Encoder::kE0;
  options.quarantine = absl::Seconds(5);
  options.reservation_idle = absl::Seconds(60);
  options.incarnation.fill(7);
  options.clock = clock;
  return options;
}

inline std::unique_ptr<Arena> MakeArena(ArenaOptions options) {
  auto arena = Arena::Make(std::move(options));
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

// One unit of finite values that depend on the page, the write, the layer and the head.
inline std::vector<uint8_t> UnitBytes(const KvGeometry& g, int page, int write, int layer,
                                      int head) {
  const size_t values = static_cast<size_t>(2 * g.page_tokens * g.head_dim);
  std::vector<uint16_t> bits(values);
  uint64_t seed = Mix64(((static_cast<uint64_t>(page) * 64 + static_cast<uint64_t>(write)) * 64 +
                         static_cast<uint64_t>(layer)) *
                            64 +
                        static_cast<uint64_t>(head) + 1);
  for (uint16_t& value : bits) {
    seed = Mix64(seed + kGolden64);
    value = ToBf16(static_cast<float>(seed % 2001) / 1000.0f - 1.0f);
  }
  std::vector<uint8_t> bytes(values * 2);
  std::memcpy(bytes.data(), bits.data(), bytes.size());
  return bytes;
}

// Writes one unit through a pin, as the ingest server does.
inline absl::Status WriteUnit(Arena* arena, SessionId session, Ticket ticket, int page, int write,
                              int layer, int head) {
  absl::StatusOr<ReservationPin> pin = arena->PinReservation(session, ticket);
  if (!pin.ok()) return pin.status();
  const std::vector<uint8_t> bytes = UnitBytes(arena->geometry(), page, write, layer, head);
  thread_local StagingBuffer staging;
  uint8_t* const from = staging.Reserve(bytes.size(), arena->store().place());
  std::memcpy(from, bytes.data(), bytes.size());
  const PageStore::UnitWrite of_unit = {pin->slot(), layer, head, from};
  arena->store().WriteUnits({&of_unit, 1});
  pin->MarkReceived(layer, head);
  return absl::OkStatus();
}

inline void WritePage(Arena* arena, SessionId session, Ticket ticket, int page, int write = 0) {
  for (int layer = 0; layer < arena->geometry().num_layers; ++layer) {
    for (int head = 0; head < arena->geometry().shard_heads(); ++head) {
      ASSERT_TRUE(WriteUnit(arena, session, ticket, page, write, layer, head).ok());
    }
  }
}

inline ReserveOutcome::Page ReserveOne(Arena* arena, SessionId session, int page,
                                       uint32_t shard = 0) {
  const PageKey key = KeyOf(page);
  const auto page_idx = static_cast<uint32_t>(page);
  const auto outcome = arena->Reserve(session, {&key, 1}, {&page_idx, 1}, shard);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  return outcome->pages[0];
}

// Reserve, write and seal one page; leased to the session.
inline PageLocation PutPage(Arena* arena, SessionId session, int page, uint32_t shard = 0,
                            int write = 0) {
  const ReserveOutcome::Page reserved = ReserveOne(arena, session, page, shard);
  EXPECT_EQ(reserved.state, ReserveOutcome::State::kNew);
  WritePage(arena, session, reserved.ticket, page, write);
  const absl::StatusOr<SealOutcome> sealed = arena->Seal(session, reserved.ticket);
  EXPECT_TRUE(sealed.ok()) << sealed.status();
  return sealed.ok() ? sealed->location : PageLocation{};
}

// Ends sessions while their pages are being sealed, at many moments: a slot then looks sealed to
// readers only if the page table says so too. `generation_seen(slot)` is what readers see. The
// arena has one slot for pages.
template <typename GenerationSeen>
void EndSessionsWhileTheySeal(Arena* arena, int rounds, const GenerationSeen& generation_seen) {
  int sealed = 0, cut_off = 0;
  uint64_t last = 0;
  for (int round = 0; round < rounds; ++round) {
    const SessionId session{static_cast<uint64_t>(100 + round)};
    arena->BeginSession(session);
    const ReserveOutcome::Page reserved = ReserveOne(arena, session, round);
    ASSERT_EQ(reserved.state, ReserveOutcome::State::kNew);
    WritePage(arena, session, reserved.ticket, round);
    // Of ten rounds one ends before the seal begins and one after it is over; the others race with
    // it.
    std::atomic<bool> sealing = round % 10 == 0;
    std::thread ender([&] {
      while (!sealing) std::this_thread::yield();
      const auto until =
          std::chrono::steady_clock::now() + std::chrono::microseconds(round % 50 * 3);
      while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
      arena->EndSession(session, SessionEnd::kDetached);
    });
    if (round % 10 == 0) ender.join();
    sealing = round % 10 != 1;
    const absl::StatusOr<SealOutcome> outcome = arena->Seal(session, reserved.ticket);
    sealing = true;
    if (ender.joinable()) ender.join();
    const SlotView view = arena->ViewSlots(reserved.slot, 1)[0];
    EXPECT_EQ(generation_seen(reserved.slot), view.generation);
    EXPECT_EQ(view.state, outcome.ok() ? SlotState::kSealed : SlotState::kFree);
    EXPECT_EQ(view.generation % 2, outcome.ok() ? 0u : 1u);
    EXPECT_GE(view.generation, last);
    last = view.generation;
    ++(outcome.ok() ? sealed : cut_off);
  }
  EXPECT_GT(sealed, 0);
  EXPECT_GT(cut_off, 0);
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SERVICE_ARENA_FIXTURE_H_
