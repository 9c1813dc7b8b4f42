// Goal: a mirror on the GPU is filled with the bytes that a copy record by record puts there, and
// only what is proved counts. Method: random summaries of every geometry; the kernel's mirror
// against one filled by plain loops, damaged, shifted and stale slots among them; and slots that a
// host thread rewrites meanwhile.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "kernels/checksum.h"
#include "kernels/store_records.h"
#include "tests/support/gpu.h"

namespace kvd {
namespace {

using kvd::testing::DeviceArray;
using kvd::testing::Graph;
using kvd::testing::Stream;

class StoreRecordsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
  }
};

constexpr uint8_t kUntouched = 0xEE;

// A header as bytes: nothing but the generation and the checksum matters.
struct HeaderBytes {
  uint64_t generation;
  uint64_t key[2];
  uint64_t summary_checksum;
  uint64_t reserved[4];
};
static_assert(sizeof(HeaderBytes) == sizeof(PageHeader));

// Slots in an arena, and mirrors of both kinds.
struct Bed {
  Bed(const KvGeometry& geometry, int num_shards_held, int num_pages_in, int64_t capacity_in)
      : slot(MakeSlotLayout(geometry)),
        shards(num_shards_held),
        num_pages(num_pages_in),
        capacity(capacity_in),
        summaries(static_cast<size_t>(shards * num_pages) * slot.summary_bytes()),
        headers(static_cast<size_t>(shards * num_pages)) {
    std::mt19937_64 random(
        static_cast<uint64_t>(geometry.head_dim * 64 + geometry.page_tokens + geometry.rank));
    for (size_t i = 0; i < summaries.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(summaries.data() + i, &word, 8);
    }
    for (size_t i = 0; i < headers.size(); ++i) {
      headers[i] = {2 * i + 2, {}, Checksum64(summary(i), slot.summary_bytes()), {}};
    }
  }
  int num_heads() const { return shards * slot.shard_heads; }
  size_t mirror_records() const {
    return static_cast<size_t>(slot.num_layers * num_heads()) * static_cast<size_t>(capacity);
  }
  uint8_t* summary(size_t i) { return summaries.data() + i * slot.summary_bytes(); }
  // Slot i holds page i / shards of shard i % shards, and is stored in reverse order of pages.
  int32_t page(size_t i) const {
    return static_cast<int32_t>(num_pages - 1 - static_cast<int>(i) / shards);
  }
  int32_t first_head(size_t i) const {
    return static_cast<int32_t>(static_cast<int>(i) % shards * slot.shard_heads);
  }

  // What the mirror must be once the slots with valid[i] != 0 are stored.
  void Expect(const std::vector<uint8_t>& valid, std::vector<uint8_t>* coarse,
              std::vector<uint8_t>* fine) {
    coarse->assign(mirror_records() * slot.coarse_bytes, kUntouched);
    fine->assign(mirror_records() * slot.fine_bytes, kUntouched);
    for (size_t i = 0; i < headers.size(); ++i) {
      for (int layer = 0; valid[i] != 0 && layer < slot.num_layers; ++layer) {
        for (int h = 0; h < slot.shard_heads; ++h) {
          const auto row = static_cast<size_t>(layer * num_heads() + first_head(i) + h);
          const size_t record = row * static_cast<size_t>(capacity) + static_cast<size_t>(page(i));
          std::memcpy(coarse->data() + record * slot.coarse_bytes,
                      summary(i) + slot.coarse_offset(layer, h), slot.coarse_bytes);
          std::memcpy(fine->data() + record * slot.fine_bytes,
                      summary(i) + slot.fine_offset(layer, h), slot.fine_bytes);
        }
      }
    }
  }

  SlotLayout slot;
  int shards, num_pages;
  int64_t capacity;
  std::vector<uint8_t> summaries;
  std::vector<HeaderBytes> headers;
};

// The bed on the device.
struct DeviceBed {
  explicit DeviceBed(Bed& bed_in)
      : bed(bed_in),
        summaries(bed.summaries),
        headers(bed.headers),
        slots(bed.headers.size()),
        coarse(bed.mirror_records() * bed.slot.coarse_bytes),
        fine(bed.mirror_records() * bed.slot.fine_bytes),
        sums(bed.headers.size()),
        valid(bed.headers.size()) {
    coarse.Poison(kUntouched);
    fine.Poison(kUntouched);
    sums.Poison();
    valid.Poison();
    for (size_t i = 0; i < bed.headers.size(); ++i) {
      list.push_back({summaries.data() + i * bed.slot.summary_bytes(),
                      reinterpret_cast<const PageHeader*>(headers.data() + i),
                      bed.headers[i].generation, 0, bed.page(i), bed.first_head(i)});
    }
  }
  std::vector<uint8_t> Run(bool compare_only) {
    slots.Upload(list);
    const Graph graph([&](cudaStream_t stream) {
      KVD_CUDA_OK(LaunchStoreRecords(
          {bed.slot, bed.num_heads(), bed.capacity, static_cast<int64_t>(list.size()), slots.data(),
           coarse.data(), fine.data(), sums.data(), valid.data(), compare_only},
          stream));
    });
    graph.Replay();
    return valid.Download();
  }

  Bed& bed;
  DeviceArray<uint8_t> summaries;
  DeviceArray<HeaderBytes> headers;
  DeviceArray<SlotRecords> slots;
  DeviceArray<uint8_t> coarse, fine;
  DeviceArray<uint64_t> sums;
  DeviceArray<uint8_t> valid;
  std::vector<SlotRecords> list;
};

KvGeometry Geometry(int head_dim, int page_tokens, int rank, int shards) {
  KvGeometry g;
  g.num_layers = 5;
  g.num_kv_heads = 6;
  g.num_q_heads = 12;
  g.num_shards = shards;
  g.head_dim = head_dim;
  g.page_tokens = page_tokens;
  g.rank = rank;
  g.softmax_scale = 0.1f;
  return g;
}

TEST_F(StoreRecordsTest, TheMirrorHoldsTheBytesOfACopyRecordByRecord) {
  for (const int dim : {64, 96, 128, 256}) {
    for (const int tokens : {16, 32}) {
      for (const int rank : {4, 8}) {
        for (const int shards : {1, 3}) {
          // 700 slots: groups of slots, and a last group that is not full. 13: one slot a CTA.
          for (const int pages : {13, shards == 1 && dim == 128 ? 700 : 14}) {
            Bed bed(Geometry(dim, tokens, rank, shards), shards, pages, pages + 3);
            DeviceBed device(bed);
            const std::vector<uint8_t> all(bed.headers.size(), 1);
            EXPECT_EQ(device.Run(false), all)
                << dim << " " << tokens << " " << rank << " " << shards;
            std::vector<uint8_t> coarse, fine;
            bed.Expect(all, &coarse, &fine);
            EXPECT_EQ(device.coarse.Download(), coarse);
            EXPECT_EQ(device.fine.Download(), fine);
            EXPECT_EQ(device.Run(true), all);
          }
        }
      }
    }
  }
}

TEST_F(StoreRecordsTest, AWorkerOfOneShardOfSeveralPutsItsHeadsFirst) {
  Bed bed(Geometry(128, 16, 8, 3), 1, 9, 9);
  DeviceBed device(bed);
  const std::vector<uint8_t> all(bed.headers.size(), 1);
  EXPECT_EQ(device.Run(false), all);
  std::vector<uint8_t> coarse, fine;
  bed.Expect(all, &coarse, &fine);
  EXPECT_EQ(device.coarse.Download(), coarse);
  EXPECT_EQ(device.fine.Download(), fine);
}

TEST_F(StoreRecordsTest, StaleUnsealedAndDamagedSlotsAreNotValid) {
  Bed bed(Geometry(128, 16, 8, 1), 1, 8, 8);
  bed.headers[1].summary_checksum ^= 1;  // records that do not fit their header
  DeviceBed device(bed);
  device.list[2].generation += 2;  // the page of another time
  device.list[3].generation -= 2;
  bed.headers[4].generation |= 1;  // being written, even under its own generation
  device.headers.Upload(bed.headers);
  device.list[4].generation = bed.headers[4].generation;
  bed.summary(5)[bed.slot.summary_bytes() - 1] ^= 0x10;  // one bit, in the last record
  device.summaries.Upload(bed.summaries);
  device.list[6].summary = nullptr;
  EXPECT_EQ(device.Run(false), (std::vector<uint8_t>{1, 0, 0, 0, 0, 0, 0, 1}));
  // What is known to be gone leaves the mirror alone.
  std::vector<uint8_t> coarse, fine;
  bed.Expect({1, 1, 0, 0, 1, 1, 0, 1}, &coarse, &fine);
  EXPECT_EQ(device.coarse.Download(), coarse);
  EXPECT_EQ(device.fine.Download(), fine);
}

TEST_F(StoreRecordsTest, WithoutAHeaderTheGivenChecksumCounts) {
  Bed bed(Geometry(64, 16, 4, 1), 1, 6, 6);
  DeviceBed device(bed);
  for (size_t i = 0; i < device.list.size(); ++i) {
    device.list[i].header = nullptr;
    device.list[i].checksum = bed.headers[i].summary_checksum;
  }
  std::swap(device.list[1].checksum, device.list[2].checksum);  // the records of another page
  EXPECT_EQ(device.Run(false), (std::vector<uint8_t>{1, 0, 0, 1, 1, 1}));
}

TEST_F(StoreRecordsTest, ComparingNoticesOneByteAndAShiftedPageAndChangesNothing) {
  for (const int pages : {12, 600}) {
    Bed bed(Geometry(96, 32, 8, 1), 1, pages, pages);
    DeviceBed device(bed);
    std::vector<uint8_t> want(bed.headers.size(), 1);
    ASSERT_EQ(device.Run(false), want);
    std::vector<uint8_t> coarse = device.coarse.Download(), fine = device.fine.Download();
    const auto flip = [&](std::vector<uint8_t>& part, size_t record_bytes, int layer, int head,
                          size_t slot, size_t byte) {
      const auto row = static_cast<size_t>(layer * bed.num_heads() + head);
      part[(row * static_cast<size_t>(bed.capacity) + static_cast<size_t>(bed.page(slot))) *
               record_bytes +
           byte] ^= 0x80;
      want[slot] = 0;
    };
    flip(coarse, bed.slot.coarse_bytes, 0, 0, 0, 0);
    flip(coarse, bed.slot.coarse_bytes, 4, 5, 3, bed.slot.coarse_bytes - 1);
    flip(fine, bed.slot.fine_bytes, 2, 3, 5, 17);
    flip(fine, bed.slot.fine_bytes, 4, 5, 8, bed.slot.fine_bytes - 1);
    device.coarse.Upload(coarse);
    device.fine.Upload(fine);
    EXPECT_EQ(device.Run(true), want);
    EXPECT_EQ(device.coarse.Download(), coarse);
    EXPECT_EQ(device.fine.Download(), fine);
    // The right records of neighbouring pages, each in the other's place.
    std::swap(device.list[9].page, device.list[10].page);
    want[9] = want[10] = 0;
    EXPECT_EQ(device.Run(true), want);
  }
}

TEST_F(StoreRecordsTest, CountsOutOfBoundsAreRefused) {
  StoreRecordsArgs args = {};
  args.slot = MakeSlotLayout(Geometry(128, 16, 8, 1));
  args.num_heads = 6;
  args.page_capacity = 16;
  args.num_slots = -1;
  EXPECT_EQ(LaunchStoreRecords(args, nullptr), cudaErrorInvalidValue);
  args.num_slots = 1;
  args.page_capacity = int64_t{1} << 31;
  EXPECT_EQ(LaunchStoreRecords(args, nullptr), cudaErrorInvalidValue);
  args.num_slots = 0;
  args.page_capacity = 16;
  EXPECT_EQ(LaunchStoreRecords(args, nullptr), cudaSuccess);
}

// Slots in pinned host memory whose records a host thread rewrites, every word the same.
TEST_F(StoreRecordsTest, RecordsThatAreRewrittenMeanwhileAreWholeOrNotValid) {
  constexpr int kSlots = 16;
  const SlotLayout slot = MakeSlotLayout(Geometry(128, 16, 8, 1));
  const size_t bytes = slot.summary_bytes(), words = bytes / 4;
  uint32_t* summaries = nullptr;
  HeaderBytes* headers = nullptr;
  KVD_CUDA_OK(
      cudaHostAlloc(reinterpret_cast<void**>(&summaries), kSlots * bytes, cudaHostAllocMapped));
  KVD_CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&headers), kSlots * sizeof(HeaderBytes),
                            cudaHostAllocMapped));
  // The checksum of a slot of equal words, for each generation that may come; one table serves all
  // slots.
  const auto word_of = [](uint64_t generation) {
    return static_cast<uint32_t>(Mix64(generation % 64));
  };
  std::vector<uint64_t> checksums;
  for (uint64_t g = 0; g < 64; ++g) {
    const std::vector<uint32_t> all(words, word_of(g));
    checksums.push_back(Checksum64(all.data(), bytes));
  }
  const auto reseal = [&](int s) {
    HeaderBytes& header = headers[s];
    const uint64_t generation = header.generation;
    std::atomic_ref(header.generation).store(generation + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t w = 0; w < words; ++w) {
      std::atomic_ref(summaries[static_cast<size_t>(s) * words + w])
          .store(word_of(generation + 2), std::memory_order_relaxed);
    }
    std::atomic_ref(header.summary_checksum)
        .store(checksums[(generation + 2) % 64], std::memory_order_relaxed);
    std::atomic_ref(header.generation).store(generation + 2, std::memory_order_release);
  };
  for (int s = 0; s < kSlots; ++s) {
    headers[s].generation = 0;
    reseal(s);
  }
  DeviceArray<uint8_t> coarse(slot.num_units() * kSlots * slot.coarse_bytes),
      fine(slot.num_units() * kSlots * slot.fine_bytes);
  DeviceArray<uint8_t> valid(kSlots);
  DeviceArray<uint64_t> sums(kSlots);
  DeviceArray<SlotRecords> d_slots(kSlots);
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (int i = 0; !stop.load(); ++i) {
      reseal(i * 7 % kSlots);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  const Stream stream;
  int num_valid = 0, num_invalid = 0, wrong = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<SlotRecords> list;
    for (int s = 0; s < kSlots; ++s) {
      const uint64_t generation = std::atomic_ref(headers[s].generation).load() & ~uint64_t{1};
      list.push_back({reinterpret_cast<const uint8_t*>(summaries + static_cast<size_t>(s) * words),
                      reinterpret_cast<const PageHeader*>(headers + s), generation, 0, s, 0});
    }
    d_slots.Upload(list);
    KVD_CUDA_OK(LaunchStoreRecords({slot, slot.shard_heads, kSlots, kSlots, d_slots.data(),
                                    coarse.data(), fine.data(), sums.data(), valid.data(), false},
                                   stream.get()));
    stream.Wait();
    const std::vector<uint8_t> got_coarse = coarse.Download(), got_fine = fine.Download(),
                               flags = valid.Download();
    for (size_t s = 0; s < kSlots; ++s) {
      (flags[s] != 0 ? num_valid : num_invalid) += 1;
      if (flags[s] == 0) continue;
      const uint32_t want = word_of(list[s].generation);
      for (size_t unit = 0; unit < slot.num_units(); ++unit) {
        const size_t record = unit * kSlots + s;
        for (size_t at = 0; at < slot.coarse_bytes; at += 4)
          wrong += std::memcmp(&got_coarse[record * slot.coarse_bytes + at], &want, 4) != 0;
        for (size_t at = 0; at < slot.fine_bytes; at += 4)
          wrong += std::memcmp(&got_fine[record * slot.fine_bytes + at], &want, 4) != 0;
      }
    }
  }
  stop = true;
  writer.join();
  KVD_CUDA_OK(cudaFreeHost(summaries));
  KVD_CUDA_OK(cudaFreeHost(headers));
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(num_valid, 0);
  EXPECT_GT(num_invalid, 0);
  std::printf("%d valid, %d refused\n", num_valid, num_invalid);
}

}  // namespace
}  // namespace kvd
