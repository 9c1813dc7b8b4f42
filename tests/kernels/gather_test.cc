// Goal (G1): what a gather calls valid is the sealed bytes of the expected generation. Method:
// pages whose every word is a function of (generation, place), so that a byte of any other write
// names itself; a writer that reseals under a running reader.
#include "kernels/gather.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/checksum.h"

namespace kvd {
namespace {

constexpr size_t kUnitBytes = 8192;
constexpr size_t kWords = kUnitBytes / 8;

uint64_t Word(uint64_t generation, size_t place) { return Mix64(generation * 1000003 + place); }
void Fill(uint64_t generation, size_t first, size_t last, uint64_t* unit) {
  for (size_t i = first; i < last; ++i) unit[i] = Word(generation, i);
}
// True if `unit` holds the bytes of `generation` and of no other.
bool IsUnitOf(uint64_t generation, const uint64_t* unit) {
  for (size_t i = 0; i < kWords; ++i) {
    if (unit[i] != Word(generation, i)) return false;
  }
  return true;
}
bool IsZero(const uint64_t* unit) {
  return std::all_of(unit, unit + kWords, [](uint64_t w) { return w == 0; });
}

// One slot with its header, sealed with generation 2.
struct Slot {
  Slot() {
    header.generation.store(2);
    Fill(2, 0, kWords, unit.data());
  }
  // As the daemon does it: odd before any byte changes, even again when all are written.
  void Reseal() {
    const uint64_t old =
        header.generation.exchange(header.generation.load() + 1, std::memory_order_acq_rel);
    Fill(old + 2, 0, kWords, unit.data());
    header.generation.store(old + 2, std::memory_order_release);
  }
  GatherUnit Expect(uint64_t generation, uint64_t* destination) {
    return {reinterpret_cast<const uint8_t*>(unit.data()), &header, generation,
            reinterpret_cast<uint8_t*>(destination)};
  }
  PageHeader header = {};
  std::vector<uint64_t> unit = std::vector<uint64_t>(kWords);
};

TEST(GatherTest, CopiesSealedUnitsAndZeroesTheOthers) {
  Slot sealed, fenced, resealed, never;
  fenced.header.generation.store(3);
  resealed.Reseal();
  never.header.generation.store(1);
  std::vector<uint64_t> out(5 * kWords, 99);
  const GatherUnit units[] = {
      sealed.Expect(2, &out[0]), fenced.Expect(2, &out[kWords]),
      resealed.Expect(2, &out[2 * kWords]), resealed.Expect(4, &out[3 * kWords]),
      never.Expect(1, &out[4 * kWords])};  // odd is never sealed, expected or not
  uint8_t valid[5] = {9, 9, 9, 9, 9};
  EXPECT_EQ(ref::GatherUnits(units, 5, kUnitBytes, valid), 2);
  const uint8_t expected[] = {1, 0, 0, 1, 0};
  EXPECT_EQ(std::memcmp(valid, expected, 5), 0);
  EXPECT_TRUE(IsUnitOf(2, &out[0]));
  EXPECT_TRUE(IsUnitOf(4, &out[3 * kWords]));
  for (size_t u : {1u, 2u, 4u}) EXPECT_TRUE(IsZero(&out[u * kWords])) << u;
  EXPECT_EQ(ref::GatherUnits(units, 0, kUnitBytes, valid), 0);
}

// What the guard is for: without it the same interleaving yields torn bytes, and the test's own
// check sees them. The steps are forced, so that this does not depend on two threads meeting.
TEST(GatherTest, ACopyWithoutTheGuardIsCaughtByTheByteCheck) {
  Slot slot;
  std::vector<uint64_t> out(kWords);
  std::memcpy(out.data(), slot.unit.data(), kUnitBytes / 2);
  slot.Reseal();
  std::memcpy(out.data() + kWords / 2, slot.unit.data() + kWords / 2, kUnitBytes / 2);
  EXPECT_FALSE(IsUnitOf(2, out.data()));
  EXPECT_FALSE(IsUnitOf(4, out.data()));
  EXPECT_NE(slot.header.generation.load(), 2u) << "the guard would have refused this copy";
}

TEST(GatherTest, UnderARunningWriterEveryValidUnitIsWholeAndOfItsGeneration) {
  Slot slot;
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      slot.Reseal();
      // Stays sealed for about as long as it is being written.
      const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(2);
      while (std::chrono::steady_clock::now() < until) {
      }
    }
  });
  std::vector<uint64_t> out(kWords);
  int64_t num_valid = 0, num_refused = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while ((num_valid < 500 || num_refused < 20) && std::chrono::steady_clock::now() < deadline) {
    const uint64_t generation = slot.header.generation.load(std::memory_order_acquire);
    if (generation % 2 != 0) continue;
    const GatherUnit unit = slot.Expect(generation, out.data());
    uint8_t valid = 0;
    ref::GatherUnits(&unit, 1, kUnitBytes, &valid);
    ASSERT_TRUE(valid ? IsUnitOf(generation, out.data()) : IsZero(out.data()))
        << "generation " << generation;
    ++(valid ? num_valid : num_refused);
  }
  stop = true;
  writer.join();
  EXPECT_GT(num_valid, 0);
  EXPECT_GT(num_refused, 0) << "reader and writer never met";
}

TEST(PackUnitTest, TakesAnyOrderOfPageHeadAndToken) {
  constexpr int kHeads = 3, kTokens = 40, kDim = 64, kPageTokens = 16;
  const auto value = [](int head, int64_t token, int d, bool is_v) {
    return static_cast<uint16_t>(((head * kTokens + token) * kDim + d) * 2 + is_v);
  };
  for (bool tokens_first : {false, true}) {
    // [token][K heads, V heads][D] as fused layouts have it, or separate [head][token][D].
    const int64_t head_stride = (tokens_first ? 1 : kTokens) * kDim * 2;
    const int64_t token_stride = (tokens_first ? 2 * kHeads : 1) * kDim * 2;
    std::vector<uint8_t> memory(2 * kHeads * kTokens * kDim * 2);
    const size_t v_offset = tokens_first ? size_t{kHeads} * kDim * 2 : memory.size() / 2;
    for (int h = 0; h < kHeads; ++h) {
      for (int t = 0; t < kTokens; ++t) {
        for (int d = 0; d < kDim; ++d) {
          const auto at = static_cast<size_t>(h * head_stride + t * token_stride + d * 2);
          const uint16_t k = value(h, t, d, false), v = value(h, t, d, true);
          std::memcpy(&memory[at], &k, 2);
          std::memcpy(&memory[at + v_offset], &v, 2);
        }
      }
    }
    std::vector<uint16_t> unit(2 * kPageTokens * kDim);
    ref::PackUnit({memory.data(), memory.data() + v_offset, head_stride, token_stride}, 2, 11, kDim,
                  kPageTokens, reinterpret_cast<uint8_t*>(unit.data()));
    for (int t = 0; t < kPageTokens; ++t) {
      for (int d = 0; d < kDim; ++d) {
        EXPECT_EQ(unit[static_cast<size_t>(t * kDim + d)], value(2, 11 + t, d, false));
        EXPECT_EQ(unit[static_cast<size_t>((kPageTokens + t) * kDim + d)],
                  value(2, 11 + t, d, true));
      }
    }
  }
}

}  // namespace
}  // namespace kvd
