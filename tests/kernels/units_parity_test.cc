// Goal: the kernels that move units give what the reference gives. Method: random units on the host
// and the device; bytes compared exactly. The generation guard is tried against a host thread that
// rewrites the units while they are gathered.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "kernels/append.h"
#include "kernels/checksum.h"
#include "kernels/dtype.h"
#include "kernels/gather.h"
#include "kernels/rotate.h"
#include "tests/support/gpu.h"
#include "tests/support/kv_data.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;
using kvd::testing::RandomKv;
using kvd::testing::Stream;

class UnitsParityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};

std::vector<uint8_t> RandomBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(size);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  return bytes;
}

TEST_F(UnitsParityTest, ChecksumsEqualTheReference) {
  for (const size_t bytes : {size_t{4}, size_t{240}, size_t{8192}, size_t{100000}}) {
    const std::vector<uint8_t> data = RandomBytes(7 * bytes, bytes);
    DeviceArray<uint8_t> d_data(data);
    std::vector<const uint8_t*> pieces;
    for (size_t i = 0; i < 7; ++i) pieces.push_back(d_data.data() + i * bytes);
    DeviceArray<const uint8_t*> d_pieces(pieces);
    DeviceArray<uint64_t> sums(7);
    sums.Poison();
    KVD_CUDA_OK(LaunchChecksum64(d_pieces.data(), 7, bytes, sums.data(), nullptr));
    const std::vector<uint64_t> got = sums.Download();
    for (size_t i = 0; i < 7; ++i) EXPECT_EQ(got[i], Checksum64(data.data() + i * bytes, bytes));
    EXPECT_NE(got[0], Checksum64(data.data() + bytes, bytes));
  }
}

TEST_F(UnitsParityTest, RotatedQueriesHaveTheBitsOfTheReference) {
  for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp16}) {
    for (const int dim : {64, 96, 128, 256}) {
      std::vector<uint16_t> query = RandomKv(37 * dim, dtype, 3.0f, static_cast<uint64_t>(dim));
      query[0] = ToKv(dtype, 60000.0f);
      query[1] = ToKv(dtype, 1e-7f);
      std::vector<uint16_t> want(query.size());
      RotateQuery(query.data(), 37, dim, dtype, want.data());
      DeviceArray<uint16_t> d_query(query);
      KVD_CUDA_OK(LaunchRotateQuery(d_query.data(), 37, dim, dtype, d_query.data(), nullptr));
      EXPECT_EQ(d_query.Download(), want) << dim;
      EXPECT_NE(query, want);
    }
  }
}

TEST_F(UnitsParityTest, GatherCopiesSealedUnitsAndZeroesTheOthers) {
  for (const size_t unit_bytes :
       {size_t{4096}, size_t{6144}, size_t{8192}, size_t{16384}, size_t{32768}}) {
    constexpr size_t kSlots = 40, kUnits = 61;
    const std::vector<uint8_t> arena = RandomBytes(kSlots * unit_bytes, unit_bytes);
    DeviceArray<uint8_t> d_arena(arena), d_out(kUnits * unit_bytes), valid(kUnits);
    std::vector<uint64_t> headers(kSlots * 8);
    for (size_t s = 0; s < kSlots; ++s) headers[8 * s] = 2 * (s + 1);
    DeviceArray<uint64_t> d_headers(headers);
    std::vector<GatherUnit> units;
    std::vector<size_t> slots;
    for (size_t i = 0; i < kUnits; ++i) {
      const size_t slot = i * 17 % kSlots;
      slots.push_back(slot);
      const uint64_t expected =
          2 * (slot + 1) + (i % 5 == 2 ? 2 : 0);  // every fifth is a page that is gone
      units.push_back({d_arena.data() + slot * unit_bytes,
                       reinterpret_cast<const PageHeader*>(d_headers.data() + 8 * slot), expected,
                       d_out.data() + i * unit_bytes});
    }
    DeviceArray<GatherUnit> d_units(units);
    d_out.Poison();
    valid.Poison();
    const Graph graph([&](cudaStream_t stream) {
      KVD_CUDA_OK(LaunchGatherUnits(d_units.data(), kUnits, unit_bytes, valid.data(), stream));
    });
    graph.Replay();
    const std::vector<uint8_t> out = d_out.Download(), flags = valid.Download();
    for (size_t i = 0; i < kUnits; ++i) {
      const bool sealed = i % 5 != 2;
      EXPECT_EQ(flags[i], sealed ? 1 : 0);
      const std::vector<uint8_t> zeros(unit_bytes);
      const uint8_t* want = sealed ? arena.data() + slots[i] * unit_bytes : zeros.data();
      EXPECT_EQ(std::memcmp(out.data() + i * unit_bytes, want, unit_bytes), 0) << i;
      EXPECT_NE(std::memcmp(out.data() + i * unit_bytes,
                            arena.data() + (slots[i] + 1) % kSlots * unit_bytes, unit_bytes),
                0);
    }
  }
  EXPECT_EQ(LaunchGatherUnits(nullptr, 1, 100, nullptr, nullptr), cudaErrorInvalidValue);
}

// Units of the caller's own memory, device or pinned, carry no header: they are copied whatever the
// generation says.
TEST_F(UnitsParityTest, UnitsWithoutAHeaderAreAlwaysValid) {
  constexpr size_t kUnitBytes = 8192, kUnits = 9;
  const std::vector<uint8_t> bytes = RandomBytes(kUnits * kUnitBytes, 7);
  uint8_t* pinned = nullptr;
  KVD_CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&pinned), bytes.size(), cudaHostAllocMapped));
  std::memcpy(pinned, bytes.data(), bytes.size());
  PageHeader* header = nullptr;
  KVD_CUDA_OK(
      cudaHostAlloc(reinterpret_cast<void**>(&header), sizeof(PageHeader), cudaHostAllocMapped));
  header->generation.store(6);
  DeviceArray<uint8_t> out(bytes.size()), valid(kUnits);
  std::vector<GatherUnit> units;
  for (size_t i = 0; i < kUnits; ++i) {
    // One unit beside them has a header, and is gone.
    units.push_back({pinned + i * kUnitBytes, i == 4 ? header : nullptr, i == 4 ? 8u : 1u,
                     out.data() + i * kUnitBytes});
  }
  DeviceArray<GatherUnit> d_units(units);
  KVD_CUDA_OK(LaunchGatherUnits(d_units.data(), kUnits, kUnitBytes, valid.data(), nullptr));
  const std::vector<uint8_t> got = out.Download();
  EXPECT_EQ(valid.Download(), (std::vector<uint8_t>{1, 1, 1, 1, 0, 1, 1, 1, 1}));
  std::vector<uint8_t> want(bytes.size()), flags(kUnits);
  for (size_t i = 0; i < kUnits; ++i) units[i].destination = want.data() + i * kUnitBytes;
  EXPECT_EQ(ref::GatherUnits(units.data(), kUnits, kUnitBytes, flags.data()), 8);
  EXPECT_EQ(got, want);
  EXPECT_EQ(std::memcmp(got.data() + 5 * kUnitBytes, bytes.data() + 5 * kUnitBytes, kUnitBytes), 0);
  KVD_CUDA_OK(cudaFreeHost(pinned));
  KVD_CUDA_OK(cudaFreeHost(header));
}

// The word that every four bytes of a unit hold when `slot` is sealed for the generation.
uint32_t WordOf(size_t slot, uint64_t generation) {
  return static_cast<uint32_t>(Mix64(slot * 1000003 + generation));
}

// A page header as the test's writer uses it: nothing but the generation matters.
struct WrittenSlots {
  static constexpr size_t kSlots = 16, kUnitBytes = 8192;
  uint32_t* words = nullptr;  // [kSlots][kUnitBytes / 4], pinned host memory that the device reads
  PageHeader* headers = nullptr;  // [kSlots]
  WrittenSlots() {
    KVD_CUDA_OK(
        cudaHostAlloc(reinterpret_cast<void**>(&words), kSlots * kUnitBytes, cudaHostAllocMapped));
    KVD_CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&headers), kSlots * sizeof(PageHeader),
                              cudaHostAllocMapped));
    for (size_t s = 0; s < kSlots; ++s) {
      headers[s].generation.store(0);
      Reseal(s);
    }
  }
  ~WrittenSlots() {
    cudaFreeHost(words);
    cudaFreeHost(headers);
  }
  // Odd before any byte changes, even after all have.
  void Reseal(size_t slot) {
    const uint64_t generation = headers[slot].generation.load(std::memory_order_relaxed);
    headers[slot].generation.store(generation + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t i = 0; i < kUnitBytes / 4; ++i)
      std::atomic_ref(words[slot * kUnitBytes / 4 + i])
          .store(WordOf(slot, generation + 2), std::memory_order_relaxed);
    headers[slot].generation.store(generation + 2, std::memory_order_release);
  }
};

TEST_F(UnitsParityTest, GatherNeverPassesBytesOfAnotherGenerationWhileUnitsAreRewritten) {
  WrittenSlots slots;
  constexpr size_t kUnits = 256, kWords = WrittenSlots::kUnitBytes / 4;
  DeviceArray<uint32_t> out(kUnits * kWords);
  DeviceArray<uint8_t> valid(kUnits);
  DeviceArray<GatherUnit> d_units(kUnits);
  Stream stream;
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (size_t i = 0; !stop.load(); ++i) {
      slots.Reseal(i * 7 % WrittenSlots::kSlots);
      std::this_thread::sleep_for(std::chrono::microseconds(5));
    }
  });
  int num_valid = 0, num_invalid = 0, wrong = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<GatherUnit> units;
    for (size_t i = 0; i < kUnits; ++i) {
      const size_t s = i % WrittenSlots::kSlots;
      // As it is sealed now, or was last: the writer may be at it, or come by before the copy or
      // during it.
      const uint64_t generation = slots.headers[s].generation.load() & ~uint64_t{1};
      units.push_back({reinterpret_cast<const uint8_t*>(slots.words + s * kWords),
                       slots.headers + s, generation,
                       reinterpret_cast<uint8_t*>(out.data() + i * kWords)});
    }
    d_units.Upload(units);
    KVD_CUDA_OK(LaunchGatherUnits(d_units.data(), kUnits, WrittenSlots::kUnitBytes, valid.data(),
                                  stream.get()));
    stream.Wait();
    const std::vector<uint32_t> words = out.Download();
    const std::vector<uint8_t> flags = valid.Download();
    for (size_t i = 0; i < kUnits; ++i) {
      const uint32_t want =
          flags[i] != 0 ? WordOf(i % WrittenSlots::kSlots, units[i].generation) : 0;
      (flags[i] != 0 ? num_valid : num_invalid) += 1;
      for (size_t w = 0; w < kWords; ++w) wrong += words[i * kWords + w] != want;
    }
  }
  stop = true;
  writer.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(num_valid, 0);
  EXPECT_GT(num_invalid, 0);
  std::printf("%d valid, %d refused\n", num_valid, num_invalid);
}

TEST_F(UnitsParityTest, PackingAndAppendingGiveTheReferencesBytes) {
  for (const int dim : {64, 96, 128, 256}) {
    constexpr int kHeads = 3, kTokens = 100, kB = 16;
    const auto row = static_cast<size_t>(dim) * 2;
    // An engine that keeps [token][head][K | V].
    const std::vector<uint8_t> kv =
        RandomBytes(kTokens * kHeads * 2 * row, static_cast<uint64_t>(dim));
    DeviceArray<uint8_t> d_kv(kv);
    const auto view = [&](const uint8_t* base) {
      return EngineKv{base, base + row, static_cast<int64_t>(2 * row),
                      static_cast<int64_t>(2 * row * kHeads)};
    };
    const std::vector<int32_t> heads = {0, 2, 1, 2};
    const std::vector<int64_t> firsts = {0, 16, 48, 84};
    const size_t unit_bytes = MakeUnitLayout(dim, kB).bytes;
    DeviceArray<uint8_t> d_units(4 * unit_bytes);
    std::vector<uint8_t*> out;
    for (size_t i = 0; i < 4; ++i) out.push_back(d_units.data() + i * unit_bytes);
    DeviceArray<uint8_t*> d_out(out);
    DeviceArray<int32_t> d_heads(heads);
    DeviceArray<int64_t> d_firsts(firsts);
    KVD_CUDA_OK(LaunchPackUnits(
        {view(d_kv.data()), 4, d_heads.data(), d_firsts.data(), dim, kB, d_out.data()}, nullptr));
    std::vector<uint8_t> want(4 * unit_bytes);
    for (size_t i = 0; i < 4; ++i)
      ref::PackUnit(view(kv.data()), heads[i], firsts[i], dim, kB, want.data() + i * unit_bytes);
    EXPECT_EQ(d_units.Download(), want);

    // Two sequences of two heads append a token each to these four units.
    const std::vector<uint16_t> k = RandomKv(4 * dim, KvDtype::kBf16, 1, 5),
                                v = RandomKv(4 * dim, KvDtype::kBf16, 1, 6);
    const std::vector<int32_t> token = {15, 3};
    DeviceArray<uint16_t> d_k(k), d_v(v);
    DeviceArray<int32_t> d_token(token);
    KVD_CUDA_OK(LaunchAppend({2, 2, dim, kB, d_k.data(), d_v.data(), d_out.data(), d_token.data()},
                             nullptr));
    const std::vector<uint8_t> before = want;
    std::vector<uint8_t*> tails;
    for (size_t i = 0; i < 4; ++i) tails.push_back(want.data() + i * unit_bytes);
    ref::Append({2, 2, dim, kB, k.data(), v.data(), tails.data(), token.data()});
    EXPECT_EQ(d_units.Download(), want);
    EXPECT_NE(before, want);
  }
}

}  // namespace
}  // namespace kvd
