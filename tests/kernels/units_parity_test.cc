// Goal: the kernels that move and attend units give what the reference gives. Method: random units on the
// host and the device; bytes compared exactly, attention within the tolerance of kernels/README.md. The
// generation guard is tried against a host thread that rewrites the units while they are gathered.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>

#include "kernels/append.h"
#include "kernels/attend.h"
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
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
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
  for (const size_t unit_bytes : {size_t{4096}, size_t{6144}, size_t{8192}, size_t{16384}, size_t{32768}}) {
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
      const uint64_t expected = 2 * (slot + 1) + (i % 5 == 2 ? 2 : 0);  // every fifth is a page that is gone
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
      EXPECT_NE(std::memcmp(out.data() + i * unit_bytes, arena.data() + (slots[i] + 1) % kSlots * unit_bytes, unit_bytes), 0);
    }
  }
  EXPECT_EQ(LaunchGatherUnits(nullptr, 1, 100, nullptr, nullptr), cudaErrorInvalidValue);
}

// The word that every four bytes of a unit hold when `slot` is sealed for the generation.
uint32_t WordOf(size_t slot, uint64_t generation) {
  return static_cast<uint32_t>(Mix64(slot * 1000003 + generation));
}

// A page header as the test's writer uses it: nothing but the generation matters.
struct WrittenSlots {
  static constexpr size_t kSlots = 16, kUnitBytes = 8192;
  uint32_t* words = nullptr;      // [kSlots][kUnitBytes / 4], pinned host memory that the device reads
  PageHeader* headers = nullptr;  // [kSlots]
  WrittenSlots() {
    KVD_CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&words), kSlots * kUnitBytes, cudaHostAllocMapped));
    KVD_CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&headers), kSlots * sizeof(PageHeader), cudaHostAllocMapped));
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
      std::atomic_ref(words[slot * kUnitBytes / 4 + i]).store(WordOf(slot, generation + 2), std::memory_order_relaxed);
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
      // As it is sealed now, or was last: the writer may be at it, or come by before the copy or during it.
      const uint64_t generation = slots.headers[s].generation.load() & ~uint64_t{1};
      units.push_back({reinterpret_cast<const uint8_t*>(slots.words + s * kWords), slots.headers + s, generation,
                       reinterpret_cast<uint8_t*>(out.data() + i * kWords)});
    }
    d_units.Upload(units);
    KVD_CUDA_OK(LaunchGatherUnits(d_units.data(), kUnits, WrittenSlots::kUnitBytes, valid.data(), stream.get()));
    stream.Wait();
    const std::vector<uint32_t> words = out.Download();
    const std::vector<uint8_t> flags = valid.Download();
    for (size_t i = 0; i < kUnits; ++i) {
      const uint32_t want = flags[i] != 0 ? WordOf(i % WrittenSlots::kSlots, units[i].generation) : 0;
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
    const std::vector<uint8_t> kv = RandomBytes(kTokens * kHeads * 2 * row, static_cast<uint64_t>(dim));
    DeviceArray<uint8_t> d_kv(kv);
    const auto view = [&](const uint8_t* base) {
      return EngineKv{base, base + row, static_cast<int64_t>(2 * row), static_cast<int64_t>(2 * row * kHeads)};
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
    KVD_CUDA_OK(LaunchPackUnits({view(d_kv.data()), 4, d_heads.data(), d_firsts.data(), dim, kB, d_out.data()}, nullptr));
    std::vector<uint8_t> want(4 * unit_bytes);
    for (size_t i = 0; i < 4; ++i)
      ref::PackUnit(view(kv.data()), heads[i], firsts[i], dim, kB, want.data() + i * unit_bytes);
    EXPECT_EQ(d_units.Download(), want);

    // Two sequences of two heads append a token each to these four units.
    const std::vector<uint16_t> k = RandomKv(4 * dim, KvDtype::kBf16, 1, 5), v = RandomKv(4 * dim, KvDtype::kBf16, 1, 6);
    const std::vector<int32_t> token = {15, 3};
    DeviceArray<uint16_t> d_k(k), d_v(v);
    DeviceArray<int32_t> d_token(token);
    KVD_CUDA_OK(LaunchAppend({2, 2, dim, kB, d_k.data(), d_v.data(), d_out.data(), d_token.data()}, nullptr));
    const std::vector<uint8_t> before = want;
    std::vector<uint8_t*> tails;
    for (size_t i = 0; i < 4; ++i) tails.push_back(want.data() + i * unit_bytes);
    ref::Append({2, 2, dim, kB, k.data(), v.data(), tails.data(), token.data()});
    EXPECT_EQ(d_units.Download(), want);
    EXPECT_NE(before, want);
  }
}

// --- attend ----------------------------------------------------------------------------------------

struct AttendCase {
  int head_dim, page_tokens, group;
  KvDtype dtype;
  float softcap;
};

struct Attention {
  std::vector<float> o, lse;
};

// Three sequences of two KV heads over units of random keys; the last unit of a list is partly filled, its
// other rows are NaN. One list is empty.
class AttendBatch {
 public:
  static constexpr int kN = 3, kHeads = 2, kMaxUnits = 150;
  explicit AttendBatch(const AttendCase& c) : case_(c), bytes_(MakeUnitLayout(c.head_dim, c.page_tokens).bytes) {
    constexpr int kUnits = 80;
    const int64_t values = static_cast<int64_t>(bytes_ / 2);
    std::vector<uint16_t> all = RandomKv(kUnits * values, c.dtype, 1.0f, 3);
    for (int64_t i = 0; i < values; ++i) {  // the last unit: five tokens
      const int64_t token = i / c.head_dim % c.page_tokens;
      if (token >= 5) all[static_cast<size_t>((kUnits - 1) * values + i)] = 0x7FFF;
    }
    units_.resize(all.size() * 2);
    std::memcpy(units_.data(), all.data(), units_.size());
    d_units_ = std::make_unique<DeviceArray<uint8_t>>(units_);
    query_ = RandomKv(int64_t{kN} * kHeads * c.group * c.head_dim, c.dtype, 2.0f, 4);
    d_query_ = std::make_unique<DeviceArray<uint16_t>>(query_);
    counts_ = {150, 37, 1, 0, 64, 65};
    std::mt19937 random(7);
    host_.resize(kN * kHeads * kMaxUnits);
    for (size_t row = 0; row < counts_.size(); ++row) {
      for (int i = 0; i < counts_[row]; ++i) {
        const bool last = i + 1 == counts_[row];
        const size_t unit = last ? kUnits - 1 : random() % (kUnits - 1);
        host_[row * kMaxUnits + static_cast<size_t>(i)] = {units_.data() + unit * bytes_, last ? 5 : c.page_tokens};
      }
    }
    std::vector<UnitRef> on_device = host_;
    for (UnitRef& ref : on_device)
      if (ref.unit != nullptr) ref.unit = d_units_->data() + (ref.unit - units_.data());
    d_refs_ = std::make_unique<DeviceArray<UnitRef>>(on_device);
    d_counts_ = std::make_unique<DeviceArray<int32_t>>(counts_);
  }
  size_t Rows() const { return static_cast<size_t>(kN * kHeads * case_.group); }

  Attention Ref() const {
    Attention out = {std::vector<float>(Rows() * static_cast<size_t>(case_.head_dim)), std::vector<float>(Rows())};
    ref::Attend(Args(query_.data(), host_.data(), counts_.data(), out.o.data(), out.lse.data()));
    return out;
  }
  Attention Gpu() const {
    DeviceArray<float> o(Rows() * static_cast<size_t>(case_.head_dim)), lse(Rows());
    o.Poison();
    lse.Poison();
    const Graph graph([&](cudaStream_t stream) {
      KVD_CUDA_OK(LaunchAttend(Args(d_query_->data(), d_refs_->data(), d_counts_->data(), o.data(), lse.data()), stream));
    });
    graph.Replay();
    return {o.Download(), lse.Download()};
  }

 private:
  AttendArgs Args(const uint16_t* query, const UnitRef* units, const int32_t* counts, float* o, float* lse) const {
    return {kN, kHeads, case_.group, case_.head_dim, case_.page_tokens, case_.dtype,
            1.0f / std::sqrt(static_cast<float>(case_.head_dim)), case_.softcap, query, kMaxUnits, units, counts, o, lse};
  }
  AttendCase case_;
  size_t bytes_;
  std::vector<uint8_t> units_;
  std::vector<uint16_t> query_;
  std::vector<int32_t> counts_;
  std::vector<UnitRef> host_;
  std::unique_ptr<DeviceArray<uint8_t>> d_units_;
  std::unique_ptr<DeviceArray<uint16_t>> d_query_;
  std::unique_ptr<DeviceArray<UnitRef>> d_refs_;
  std::unique_ptr<DeviceArray<int32_t>> d_counts_;
};

// Rows whose lse is off by more than 1e-5 (relative above 1), or whose o is off by more than 4e-5 of its
// largest component.
int CountWrong(const Attention& got, const Attention& want) {
  const size_t dim = want.o.size() / want.lse.size();
  int wrong = 0;
  for (size_t row = 0; row < want.lse.size(); ++row) {
    const float w = want.lse[row], g = got.lse[row];
    bool bad = !(w == g || std::abs(w - g) <= 1e-5f * std::max(1.0f, std::abs(w)));
    float largest = 0;
    for (size_t d = 0; d < dim; ++d) largest = std::max(largest, std::abs(want.o[row * dim + d]));
    for (size_t d = 0; d < dim; ++d) bad |= !(std::abs(want.o[row * dim + d] - got.o[row * dim + d]) <= 4e-5f * largest);
    if (bad && ++wrong <= 3) std::printf("row %zu: lse %.9g, want %.9g; o %.9g, want %.9g\n", row, double{g}, double{w},
                                         double{got.o[row * dim]}, double{want.o[row * dim]});
  }
  return wrong;
}

TEST_F(UnitsParityTest, AttentionEqualsTheReference) {
  for (const AttendCase& c : {AttendCase{128, 16, 4, KvDtype::kBf16, 0}, {128, 32, 12, KvDtype::kFp16, 0},
                              {64, 16, 3, KvDtype::kBf16, 0}, {64, 32, 16, KvDtype::kFp16, 30}, {96, 16, 7, KvDtype::kBf16, 20},
                              {96, 32, 1, KvDtype::kFp16, 0}, {256, 16, 5, KvDtype::kBf16, 0}, {256, 32, 16, KvDtype::kBf16, 50}}) {
    const AttendBatch batch(c);
    const Attention want = batch.Ref(), got = batch.Gpu(), again = batch.Gpu();
    EXPECT_EQ(CountWrong(got, want), 0) << "D " << c.head_dim << " B " << c.page_tokens << " G " << c.group;
    EXPECT_EQ(got.o, again.o);
    EXPECT_EQ(got.lse, again.lse);
    Attention swapped = got;  // the first two heads
    std::swap(swapped.lse[0], swapped.lse[static_cast<size_t>(c.group)]);
    EXPECT_EQ(CountWrong(swapped, want), 2);
    Attention shifted = got;
    std::rotate(shifted.o.begin(), shifted.o.begin() + 1, shifted.o.end());
    EXPECT_GT(CountWrong(shifted, want), static_cast<int>(batch.Rows()) / 2);
  }
}

TEST_F(UnitsParityTest, MergedPartsEqualTheReferenceAndEmptyPartsAreNeutral) {
  constexpr size_t kRows = 6, kDim = 96;
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> o1(kRows * kDim), o2(kRows * kDim), o(kRows * kDim), lse(kRows);
  for (size_t i = 0; i < o1.size(); ++i) {
    o1[i] = std::sin(static_cast<float>(i));
    o2[i] = std::cos(static_cast<float>(3 * i));
  }
  std::vector<float> lse1 = {1, 2, -infinity, 5, -infinity, 80}, lse2 = {2, 1, 3, -infinity, -infinity, -80};
  for (size_t i = 2 * kDim; i < 3 * kDim; ++i) o1[i] = 0;
  ref::MergeAttention({kRows, kDim, o1.data(), lse1.data(), o2.data(), lse2.data(), o.data(), lse.data()});
  DeviceArray<float> d_o1(o1), d_o2(o2), d_lse1(lse1), d_lse2(lse2);
  KVD_CUDA_OK(LaunchMergeAttention({kRows, kDim, d_o1.data(), d_lse1.data(), d_o2.data(), d_lse2.data(), d_o1.data(),
                                    d_lse1.data()}, nullptr));
  const std::vector<float> got_o = d_o1.Download(), got_lse = d_lse1.Download();
  for (size_t i = 0; i < o.size(); ++i) EXPECT_NEAR(got_o[i], o[i], 2e-6);
  for (size_t i = 0; i < lse.size(); ++i) EXPECT_TRUE(got_lse[i] == lse[i] || std::abs(got_lse[i] - lse[i]) < 1e-5f) << i;
}

}  // namespace
}  // namespace kvd
