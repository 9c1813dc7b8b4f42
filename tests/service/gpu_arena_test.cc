// An arena in GPU memory does what one in host memory does: the same calls, the same bytes, the
// same refusals.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <mutex>
#include <thread>

#include "kernels/arena_io.h"
#include "kernels/gather.h"
#include "service/verifier.h"
#include "tests/service/gpu_arena_fixture.h"

namespace kvd {
namespace {

using testing::ContentOf;
using testing::GpuOptions;
using ::testing::HasSubstr;
using testing::PagePutter;
using testing::SummaryRead;
using testing::UnitsRead;

constexpr SessionId kWriter{1};
constexpr SessionId kMover{2};

class GpuArenaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = testing::WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
  }
  std::unique_ptr<Arena> Make(const KvGeometry& geometry, uint32_t slots,
                              MemoryPlace place = OnGpu(0)) {
    ArenaOptions options = GpuOptions(geometry, slots, &clock_);
    options.place = place;
    return Make(std::move(options));
  }
  std::unique_ptr<Arena> Make(ArenaOptions options) {
    auto arena = testing::MakeArena(std::move(options));
    arena->BeginSession(kWriter);
    arena->BeginSession(kMover, SessionKind::kMover);
    return arena;
  }
  SteadyClock clock_;
};

TEST_F(GpuArenaTest, PagesAreWhatWasWrittenInEverySlotAndCanaryIsThePrf) {
  for (const KvGeometry& geometry : {testing::TinyGeometry(), testing::WideGeometry()}) {
    const auto arena = Make(geometry, 9);
    PagePutter putter(arena.get(), kWriter);
    std::vector<PageLocation> pages;
    for (int i = 0; i < 9; ++i) pages.push_back(putter.Put());
    const UnitsRead read(*arena, pages);
    const SlotLayout& slot = read.slot;
    for (size_t p = 0; p < pages.size(); ++p) {
      for (int layer = 0; layer < slot.num_layers; ++layer) {
        for (int head = 0; head < slot.shard_heads; ++head) {
          EXPECT_EQ(read.valid[p * slot.num_units() + slot.unit_idx(layer, head)], 1);
          EXPECT_TRUE(read.Holds(p, layer, head, ContentOf(slot, pages[p], layer, head)));
          EXPECT_FALSE(
              read.Holds(p, layer, head, ContentOf(slot, pages[(p + 1) % 9], layer, head)));
        }
      }
    }
    const UnitsRead canary(*arena, {{kCanarySlot, kCanaryGeneration}});
    EXPECT_EQ(canary.valid[0], 1);
    for (uint64_t i = 0; i < slot.slot_bytes() / 8; ++i) {
      uint64_t word;
      std::memcpy(&word, canary.buffer.data() + 8 * i, 8);
      ASSERT_EQ(word, CanaryWord(arena->options().incarnation, i));
    }
  }
}

TEST_F(GpuArenaTest, OnlyTheExactSealedGenerationIsValid) {
  const auto arena = Make(testing::WideGeometry(), 3);
  PagePutter putter(arena.get(), kWriter);
  const PageLocation first = putter.Put();
  const PageLocation second = putter.Put();
  const UnitsRead read(*arena, {first,
                                {first.slot, first.generation + 2},
                                {first.slot, first.generation - 1},
                                {first.slot, first.generation + 1},
                                {second.slot + 1, 1},
                                second});
  const size_t units = read.slot.num_units();
  const std::vector<uint8_t> zeros(read.slot.unit_bytes);
  for (size_t p = 0; p < 6; ++p) {
    const bool sealed = p == 0 || p == 5;
    EXPECT_EQ(read.valid[p * units], sealed ? 1 : 0) << p;
    EXPECT_EQ(read.Holds(p, 0, 0, zeros), !sealed) << p;
  }
  EXPECT_EQ(SummaryRead(*arena, first).valid, 1);
  const SummaryRead stale(*arena, {first.slot, first.generation + 2});
  EXPECT_EQ(stale.valid, 0);
  EXPECT_EQ(stale.HeaderField<uint64_t>(0), 0u);
  EXPECT_EQ(Checksum64(stale.records(), 64), Checksum64(zeros.data(), 64));
}

// The largest difference of decoded centroids and coefficients between two slots' records, in units
// of their scale.
float RecordDistance(const KvGeometry& g, const SummaryRead& a, const SummaryRead& b) {
  float worst = 0;
  for (int layer = 0; layer < a.slot.num_layers; ++layer) {
    for (int head = 0; head < a.slot.shard_heads; ++head) {
      DecodedRecord x, y;
      DecodeRecord(a.records() + a.slot.coarse_offset(layer, head),
                   a.records() + a.slot.fine_offset(layer, head), g.head_dim, g.page_tokens, g.rank,
                   &x);
      DecodeRecord(b.records() + b.slot.coarse_offset(layer, head),
                   b.records() + b.slot.fine_offset(layer, head), g.head_dim, g.page_tokens, g.rank,
                   &y);
      float largest = 0, off = std::abs(x.tau - y.tau);
      for (int d = 0; d < g.head_dim; ++d) {
        largest = std::max(largest, std::abs(x.centroid[d]));
        off = std::max(off, std::abs(x.centroid[d] - y.centroid[d]));
      }
      worst = std::max(worst, off / largest);
    }
  }
  return worst;
}

TEST_F(GpuArenaTest, HeaderAndRecordsAreThePagesAndAgreeWithTheHosts) {
  for (const KvGeometry& g : {testing::WideGeometry(), testing::TallGeometry()}) {
    const auto arena = Make(g, 4);
    const auto host = Make(g, 4, {});
    const SummaryLayout summary = MakeSummaryLayout(g);
    for (uint32_t shard = 0; shard < static_cast<uint32_t>(g.num_shards); ++shard) {
      PagePutter putter(arena.get(), kWriter, shard), host_putter(host.get(), kWriter, shard);
      const PageLocation page = putter.Put(), other = putter.Put(), host_page = host_putter.Put();
      ASSERT_EQ(page, host_page);  // the same bytes then
      (void)host_putter.Put();
      const SummaryRead read(*arena, page), host_read(*host, host_page), other_read(*arena, other);
      const SlotLayout& slot = read.slot;
      ASSERT_EQ(read.valid, 1);
      EXPECT_EQ(read.HeaderField<uint64_t>(0), page.generation);
      EXPECT_EQ(read.HeaderField<PageKey>(offsetof(PageHeader, key)), testing::KeyOf(0));
      EXPECT_EQ(read.HeaderField<uint64_t>(offsetof(PageHeader, summary_checksum)),
                Checksum64(read.records(), slot.summary_bytes()));
      for (int layer = 0; layer < slot.num_layers; ++layer) {
        for (int head = 0; head < slot.shard_heads; ++head) {
          const std::vector<uint8_t> unit = ContentOf(slot, page, layer, head);
          EXPECT_EQ(UnitChecksumOf(read.records() + slot.coarse_offset(layer, head), summary),
                    Checksum64(unit.data(), unit.size()));
        }
      }
      EXPECT_LT(RecordDistance(g, read, host_read), 0.02f);
      EXPECT_GT(RecordDistance(g, read, other_read), 0.3f);
    }
  }
}

// A metric whose matrices differ by layer and head.
std::string WriteMetric(const KvGeometry& g) {
  const auto layers = static_cast<uint32_t>(g.num_layers),
             heads = static_cast<uint32_t>(g.num_kv_heads);
  const auto dim = static_cast<size_t>(g.head_dim);
  std::vector<uint8_t> bytes(256 + (4 * layers + 63) / 64 * 64);
  std::memcpy(bytes.data(), "KVDQMETR", 8);
  const uint32_t numbers[] = {1, 256, layers, heads, static_cast<uint32_t>(dim), 200};
  std::memcpy(bytes.data() + 8, numbers, sizeof(numbers));
  std::memcpy(bytes.data() + 32, "test", 4);
  for (uint32_t layer = 0; layer < layers; ++layer)
    std::memcpy(bytes.data() + 256 + 4 * layer, &layer, 4);
  for (size_t matrix = 0; matrix < size_t{layers} * heads; ++matrix) {
    std::vector<float> s(dim * dim, 0.0f);
    for (size_t d = 0; d < dim; ++d) {
      s[d * dim + d] =
          (Mix64(matrix * 1000 + d) % 4 == 0 ? 40.0f : 0.05f) * static_cast<float>(1 + matrix % 5);
    }
    const size_t at = bytes.size();
    bytes.resize(at + 4 * s.size());
    std::memcpy(bytes.data() + at, s.data(), 4 * s.size());
  }
  const uint64_t sum = Checksum64(bytes.data(), bytes.size());
  bytes.resize(bytes.size() + 8);
  std::memcpy(bytes.data() + bytes.size() - 8, &sum, 8);
  const std::string path = ::testing::TempDir() + "/gpu_arena_metric";
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return path;
}

TEST_F(GpuArenaTest, EachUnitIsBuiltWithItsOwnMetric) {
  const KvGeometry g = testing::WideGeometry();
  QueryMetric metric;
  ASSERT_EQ(QueryMetric::Load(WriteMetric(g), g, &metric), "");
  std::unique_ptr<Arena> arenas[2];
  for (const int i : {0, 1}) {
    ArenaOptions options = GpuOptions(g, 3, &clock_);
    if (i == 1) options.place = {};
    options.encoder = Encoder::kE1S;
    options.metric = metric;
    arenas[i] = Make(std::move(options));
  }
  // The same bytes in every unit, so that only the metric can make records differ.
  const auto same = [](const SlotLayout& slot, const PageLocation& at, int, int) {
    return ContentOf(slot, at, 0, 0);
  };
  const SummaryLayout summary = MakeSummaryLayout(g);
  int other_differs = 0;
  for (const uint32_t shard : {0u, 1u}) {
    const PageLocation page = PagePutter(arenas[0].get(), kWriter, shard, same).Put();
    const PageLocation host_page = PagePutter(arenas[1].get(), kWriter, shard, same).Put();
    ASSERT_EQ(page, host_page);
    const SummaryRead gpu(*arenas[0], page), host(*arenas[1], page);
    for (int layer = 0; layer < gpu.slot.num_layers; ++layer) {
      for (int head = 0; head < gpu.slot.shard_heads; ++head) {
        const auto tau = [&](const SummaryRead& read, int of_head) {
          uint16_t bits;
          std::memcpy(
              &bits,
              read.records() + read.slot.coarse_offset(layer, of_head) + summary.coarse[kTau], 2);
          return FromBf16(bits);
        };
        EXPECT_NEAR(tau(gpu, head), tau(host, head), 0.03f * tau(host, head));
        const float next = tau(host, (head + 1) % gpu.slot.shard_heads);
        other_differs += std::abs(tau(gpu, head) - next) > 0.03f * next ? 1 : 0;
      }
    }
  }
  EXPECT_GT(other_differs, 12);  // of 24
}

TEST_F(GpuArenaTest, PageWithNanIsRefusedInTheHostsWords) {
  const KvGeometry g = testing::WideGeometry();
  std::string messages[2];
  for (const int i : {0, 1}) {
    const auto arena = Make(g, 3, i == 0 ? OnGpu(0) : MemoryPlace{});
    const ReserveOutcome::Page reserved = testing::ReserveOne(arena.get(), kWriter, 7, 1);
    testing::WritePage(arena.get(), kWriter, reserved.ticket, 7);
    {
      auto pin = arena->PinReservation(kWriter, reserved.ticket);
      ASSERT_TRUE(pin.ok());
      std::vector<uint8_t> unit = testing::UnitBytes(g, 7, 0, 2, 3);
      const uint16_t nan = 0x7FC1;
      std::memcpy(unit.data() + unit.size() / 2 + 2 * (5 * 128 + 77), &nan, 2);  // V of token 5
      StagingBuffer staging;
      std::memcpy(staging.Reserve(unit.size(), arena->store().place()), unit.data(), unit.size());
      const PageStore::UnitWrite write = {pin->slot(), 2, 3, staging.data()};
      arena->store().WriteUnits({&write, 1});
      pin->MarkReceived(2, 3);
    }
    const auto sealed = arena->Seal(kWriter, reserved.ticket);
    EXPECT_EQ(sealed.status().code(), absl::StatusCode::kInvalidArgument);
    messages[i] = std::string(sealed.status().message());
    EXPECT_EQ(arena->Stats().slots_free, 3u);
    EXPECT_EQ(UnitsRead(*arena, {{reserved.slot, 2}}).valid[0], 0);
  }
  EXPECT_EQ(messages[0], messages[1]);
  EXPECT_THAT(messages[0],
              HasSubstr("layer 2, head 3 of shard 1, token 5: V is NaN or Inf at dimension 77"));
}

TEST_F(GpuArenaTest, CopiesBetweenHostAndGpuAreTheSameBytesAndDamagedOnesAreRefused) {
  const KvGeometry g = testing::WideGeometry();
  for (const bool to_gpu : {true, false}) {
    const auto from = Make(g, 3, to_gpu ? MemoryPlace{} : OnGpu(0));
    const auto to = Make(g, 3, to_gpu ? OnGpu(0) : MemoryPlace{});
    const PageLocation page = PagePutter(from.get(), kWriter).Put();
    StagingBuffer staging, copy;
    const PageStore::PageBytes bytes = from->store().ReadPage(page.slot, &staging);
    const SlotLayout& slot = from->memory().shape().slot;
    enum Damage { kNone, kUnit, kRecords, kChecksum };
    for (const Damage damage : {kUnit, kRecords, kChecksum, kNone}) {
      const ReserveOutcome::Page reserved = testing::ReserveOne(to.get(), kMover, 0);
      ASSERT_EQ(reserved.state, ReserveOutcome::State::kNew);
      uint8_t* const units =
          copy.Reserve(slot.slot_bytes() + slot.summary_bytes(), to->store().place());
      uint8_t* const records = units + slot.slot_bytes();
      std::memcpy(units, bytes.units, slot.slot_bytes());
      std::memcpy(records, bytes.records, slot.summary_bytes());
      if (damage == kUnit) units[slot.unit_offset(2, 1) + 4001] ^= 4;
      if (damage == kRecords) records[slot.summary_bytes() - 100] ^= 1;
      {
        auto pin = to->PinReservation(kMover, reserved.ticket);
        ASSERT_TRUE(pin.ok());
        for (int layer = 0; layer < slot.num_layers; ++layer) {
          for (int head = 0; head < slot.shard_heads; ++head) {
            const PageStore::UnitWrite write = {pin->slot(), layer, head,
                                                units + slot.unit_offset(layer, head)};
            to->store().WriteUnits({&write, 1});
            pin->MarkReceived(layer, head);
          }
        }
        const PageStore::RecordsWrite write = {pin->slot(), records};
        to->store().WriteRecords({&write, 1});
        pin->MarkRecordsReceived();
      }
      const auto sealed = to->SealCopy(kMover, reserved.ticket,
                                       bytes.summary_checksum + (damage == kChecksum ? 1 : 0));
      if (damage != kNone) {
        EXPECT_EQ(sealed.status().code(), absl::StatusCode::kDataLoss) << damage;
        const char* what = damage == kUnit ? "layer 2, head 1" : "the records' checksum";
        EXPECT_THAT(sealed.status().message(), HasSubstr(what));
        continue;
      }
      ASSERT_TRUE(sealed.ok()) << sealed.status();
      StagingBuffer again;
      const PageStore::PageBytes got = to->store().ReadPage(sealed->location.slot, &again);
      EXPECT_EQ(std::memcmp(got.units, bytes.units, slot.slot_bytes()), 0);
      EXPECT_EQ(std::memcmp(got.records, bytes.records, slot.summary_bytes()), 0);
      EXPECT_EQ(got.summary_checksum, bytes.summary_checksum);
    }
  }
}

TEST_F(GpuArenaTest, ManyThreadsSealAtOnce) {
  const auto arena = Make(testing::TallGeometry(), 48);
  const SlotLayout& slot = arena->memory().shape().slot;
  std::vector<ReserveOutcome::Page> reserved;
  for (int page = 0; page < 48; ++page) {
    reserved.push_back(testing::ReserveOne(arena.get(), kWriter, page));
    testing::WritePage(arena.get(), kWriter, reserved.back().ticket, page);
  }
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = t; i < reserved.size(); i += 4) {
        const auto sealed = arena->Seal(kWriter, reserved[i].ticket);
        EXPECT_TRUE(sealed.ok()) << sealed.status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const VerifyOutcome outcome = VerifySlots(*arena, 0, 0);  // every record against header and units
  EXPECT_EQ(outcome.pages, 48u);
  EXPECT_TRUE(outcome.failures.empty());
  for (size_t i = 0; i < reserved.size(); i += 5) {
    const UnitsRead read(*arena, {{reserved[i].slot, 2}});
    EXPECT_TRUE(read.Holds(
        0, slot.num_layers - 1, 7,
        testing::UnitBytes(arena->geometry(), static_cast<int>(i), 0, slot.num_layers - 1, 7)));
  }
}

TEST_F(GpuArenaTest, SessionThatEndsWhileItsPageIsSealedLeavesNoSlotThatLooksSealed) {
  const auto arena = Make(testing::TinyGeometry(), 1);
  testing::EndSessionsWhileTheySeal(arena.get(), 500, [&](uint32_t slot) {
    uint64_t generation = 0;
    KVD_CUDA_OK(cudaMemcpy(&generation, arena->memory().header(slot), sizeof(generation),
                           cudaMemcpyDeviceToHost));
    return generation;
  });
}

TEST_F(GpuArenaTest, VerifierFindsAFlippedBitOfAUnitAndOfARecord) {
  const auto arena = Make(testing::WideGeometry(), 5);
  PagePutter putter(arena.get(), kWriter);
  std::vector<PageLocation> pages;
  for (int i = 0; i < 4; ++i) pages.push_back(putter.Put());
  EXPECT_TRUE(VerifySlots(*arena, 0, 0).failures.empty());
  const auto flip = [](uint8_t* at) {
    uint8_t byte;
    KVD_CUDA_OK(cudaMemcpy(&byte, at, 1, cudaMemcpyDeviceToHost));
    byte ^= 16;
    KVD_CUDA_OK(cudaMemcpy(at, &byte, 1, cudaMemcpyHostToDevice));
  };
  flip(arena->memory().unit(pages[1].slot, 1, 2) + 8000);
  flip(arena->memory().summary(pages[3].slot) + 333);
  const VerifyOutcome outcome = VerifySlots(*arena, 0, 0);
  ASSERT_EQ(outcome.failures.size(), 2u);
  EXPECT_EQ(outcome.failures[0].location, pages[1]);
  EXPECT_THAT(outcome.failures[0].what, HasSubstr("1 units, the first of layer 1, head 2"));
  EXPECT_EQ(outcome.failures[1].location, pages[3]);
  EXPECT_EQ(outcome.failures[1].what, "its records");
  EXPECT_EQ(outcome.pages, 2u);
}

// --- G1 ---

// Pages that a writer seals, releases and lets go, and readers take without a lock.
class Churn {
 public:
  explicit Churn(Arena* arena)
      : arena_(*arena), putter_(arena, kWriter), slot_(arena->memory().shape().slot) {}

  void PutOne() {
    const PageLocation at = putter_.Put();
    putter_.Release(at);
    const std::lock_guard<std::mutex> lock(mutex_);
    recent_.push_back(at);
    if (recent_.size() > 3) recent_.erase(recent_.begin());
  }
  std::vector<PageLocation> Recent() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return recent_;
  }
  bool IsRight(const PageLocation& at, size_t unit, const uint8_t* bytes) const {
    const auto heads = static_cast<size_t>(slot_.shard_heads);
    const std::vector<uint8_t> want =
        ContentOf(slot_, at, static_cast<int>(unit / heads), static_cast<int>(unit % heads));
    return std::memcmp(bytes, want.data(), want.size()) == 0;
  }

 private:
  Arena& arena_;
  PagePutter putter_;
  const SlotLayout slot_;
  std::mutex mutex_;
  std::vector<PageLocation> recent_;
};

struct Tally {
  std::atomic<int> valid{0}, refused{0}, wrong{0}, unguarded_wrong{0};
};

// As a worker's kernel reads, into device memory; and once more without the guard.
void ReadOnDevice(const Arena& arena, Churn* churn, std::atomic<bool>* stop, Tally* tally) {
  KVD_CUDA_OK(cudaSetDevice(0));
  const SlotLayout slot = arena.memory().shape().slot;
  const size_t most = 3 * slot.num_units();
  const testing::Stream stream;
  testing::DeviceArray<uint8_t> out(most * slot.unit_bytes), plain(most * slot.unit_bytes),
      valid(most);
  testing::DeviceArray<GatherUnit> d_units(most);
  testing::DeviceArray<PieceCopy> d_copies(most);
  while (!stop->load()) {
    const std::vector<PageLocation> pages = churn->Recent();
    std::vector<GatherUnit> units;
    std::vector<PieceCopy> copies;
    for (const PageLocation& page : pages) {
      for (size_t u = 0; u < slot.num_units(); ++u) {
        const uint8_t* source = arena.memory().slot_base(page.slot) + u * slot.unit_bytes;
        copies.push_back({source, plain.data() + units.size() * slot.unit_bytes});
        units.push_back({source, arena.memory().header(page.slot), page.generation,
                         out.data() + units.size() * slot.unit_bytes});
      }
    }
    if (units.empty()) continue;
    const auto count = static_cast<int64_t>(units.size());
    d_units.Upload(units);
    d_copies.Upload(copies);
    KVD_CUDA_OK(
        LaunchGatherUnits(d_units.data(), count, slot.unit_bytes, valid.data(), stream.get()));
    KVD_CUDA_OK(LaunchCopyPieces(d_copies.data(), count, slot.unit_bytes, stream.get()));
    stream.Wait();
    const std::vector<uint8_t> bytes = out.Download(), flags = valid.Download(),
                               torn = plain.Download();
    for (size_t i = 0; i < units.size(); ++i) {
      const PageLocation& page = pages[i / slot.num_units()];
      const size_t unit = i % slot.num_units();
      tally->unguarded_wrong +=
          churn->IsRight(page, unit, torn.data() + i * slot.unit_bytes) ? 0 : 1;
      (flags[i] != 0 ? tally->valid : tally->refused) += 1;
      if (flags[i] != 0)
        tally->wrong += churn->IsRight(page, unit, bytes.data() + i * slot.unit_bytes) ? 0 : 1;
    }
  }
}

// As the daemon itself reads, into staging memory.
void ReadThroughStore(const Arena& arena, Churn* churn, std::atomic<bool>* stop, Tally* tally) {
  while (!stop->load()) {
    const std::vector<PageLocation> pages = churn->Recent();
    if (pages.empty()) continue;
    const UnitsRead read(arena, pages);
    for (size_t i = 0; i < read.valid.size(); ++i) {
      (read.valid[i] != 0 ? tally->valid : tally->refused) += 1;
      if (read.valid[i] == 0) continue;
      tally->wrong += churn->IsRight(pages[i / read.slot.num_units()], i % read.slot.num_units(),
                                     read.buffer.data() + i * read.slot.unit_bytes)
                          ? 0
                          : 1;
    }
    const SummaryRead summary(arena, pages[0]);
    if (summary.valid == 0) continue;
    const bool proved = summary.HeaderField<uint64_t>(offsetof(PageHeader, summary_checksum)) ==
                        Checksum64(summary.records(), summary.slot.summary_bytes());
    tally->wrong += proved ? 0 : 1;
  }
}

TEST_F(GpuArenaTest, NoReaderOfAnyKindPassesBytesOfAnotherGenerationWhileSlotsAreResealed) {
  for (const KvGeometry& geometry : {testing::TinyGeometry(), testing::WideGeometry()}) {
    const auto arena = Make(geometry, 3);
    Churn churn(arena.get());
    std::atomic<bool> stop = false;
    Tally on_device, in_store;
    std::thread device_reader([&] { ReadOnDevice(*arena, &churn, &stop, &on_device); });
    std::thread store_reader([&] { ReadThroughStore(*arena, &churn, &stop, &in_store); });
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2500);
    int reseals = 0;
    while (std::chrono::steady_clock::now() < end && reseals < 60000) {
      churn.PutOne();
      ++reseals;
    }
    stop = true;
    device_reader.join();
    store_reader.join();
    std::printf(
        "%d reseals; kernels: %d valid, %d refused, %d wrong without the guard; store: %d valid, "
        "%d refused\n",
        reseals, on_device.valid.load(), on_device.refused.load(), on_device.unguarded_wrong.load(),
        in_store.valid.load(), in_store.refused.load());
    EXPECT_EQ(on_device.wrong, 0);
    EXPECT_EQ(in_store.wrong, 0);
    EXPECT_GT(on_device.valid, 0);
    EXPECT_GT(on_device.refused, 0);
    EXPECT_GT(in_store.valid, 0);
    EXPECT_GT(on_device.unguarded_wrong, 0);  // there was something to guard against
  }
}

}  // namespace
}  // namespace kvd
