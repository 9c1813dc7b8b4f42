// Goal: the peer path, and the host paths' way to a GPU, deliver the sealed bytes or say that they
// are missing.
// Method: an arena in GPU memory, written by this process through its own mapping and read through
// a second, read-only one, as a worker has it. Needs a GPU. Two processes: tests/system.

#include "client/peer_fetcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "client/mirror.h"
#include "client/record_fetch.h"
#include "client/shared_fetcher.h"
#include "client/staged_fetcher.h"
#include "proto/geometry.h"
#include "tests/client/gpu_arena.h"
#include "tests/support/gpu.h"

namespace kvd {
namespace {

using kvd::testing::kGpu;
using kvd::testing::kSlots;
using kvd::testing::SmallShape;
using kvd::testing::TestArena;
using kvd::testing::TwoShards;

constexpr uint8_t kUntouched = 0xEE;

std::vector<FetchEntry> SomeUnits(size_t count) {
  std::vector<FetchEntry> entries;
  for (size_t i = 0; i < count; ++i) {
    const auto slot = static_cast<uint32_t>(i * 7 % kSlots);
    entries.push_back({slot, static_cast<uint16_t>(i % 3), static_cast<uint16_t>(i / 3 % 2),
                       TestArena::GenerationOf(slot)});
  }
  return entries;
}

// A list with destinations on the GPU.
struct GpuList {
  explicit GpuList(std::vector<FetchEntry> entries_in)
      : entries(std::move(entries_in)),
        valid(entries.size(), kUntouched),
        device(*PlacedBytes::Make(OnGpu(kGpu), entries.size() * kUnitBytes, "test")),
        bytes(device.size(), kUntouched) {
    EXPECT_TRUE(CopyBytes(OnGpu(kGpu), device.data(), bytes.data(), bytes.size()).ok());
    for (size_t i = 0; i < entries.size(); ++i)
      destinations.push_back(device.data() + i * kUnitBytes);
    list.entries = entries;
    list.destinations = destinations.data();
    list.valid = valid.data();
    list.deadline = absl::Seconds(5);
  }
  void Download() {
    EXPECT_TRUE(CopyBytes(OnGpu(kGpu), bytes.data(), device.data(), bytes.size()).ok());
  }
  // The unit of entry i, were it of `seed`.
  bool Holds(size_t i, uint64_t seed) const {
    const SlotLayout slot = SmallShape().slot;
    const size_t at = slot.unit_offset(entries[i].layer, entries[i].head);
    return std::memcmp(bytes.data() + i * kUnitBytes, TestArena::Units(seed).data() + at,
                       kUnitBytes) == 0;
  }
  bool IsAll(size_t i, uint8_t value) const {
    return std::all_of(bytes.data() + i * kUnitBytes, bytes.data() + (i + 1) * kUnitBytes,
                       [&](uint8_t b) { return b == value; });
  }

  static constexpr size_t kUnitBytes = 8192;
  std::vector<FetchEntry> entries;
  std::vector<uint8_t> valid;
  PlacedBytes device;
  std::vector<uint8_t> bytes;
  std::vector<uint8_t*> destinations;
  FetchList list;
};

// The peer path, or the shared path through staging memory.
class GpuFetcherTest : public ::testing::TestWithParam<PathKind> {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
    const bool peer = GetParam() == PathKind::kPeer;
    arena_ = std::make_unique<TestArena>(peer ? OnGpu(kGpu) : MemoryPlace{});
    fetcher_ = peer ? Peer() : StagedShared();
    ASSERT_NE(fetcher_, nullptr);
    EXPECT_EQ(fetcher_->path(), GetParam());
    EXPECT_EQ(fetcher_->destination_space(), MemorySpace::kGpu);
    EXPECT_EQ(fetcher_->peer() != nullptr, peer);
  }
  std::unique_ptr<Fetcher> Peer() {
    auto memory = ArenaMemory::MapGpu(SmallShape(), arena_->Descriptors(), kGpu);
    EXPECT_TRUE(memory.ok()) << memory.status();
    if (!memory.ok()) return nullptr;
    auto fetcher = PeerFetcher::Make(*std::move(memory));
    EXPECT_TRUE(fetcher.ok()) << fetcher.status();
    return fetcher.ok() ? *std::move(fetcher) : nullptr;
  }
  std::unique_ptr<Fetcher> StagedShared() {
    auto memory = ArenaMemory::MapShared(SmallShape(), arena_->Descriptors());
    EXPECT_TRUE(memory.ok()) << memory.status();
    auto fetcher = StagedFetcher::Make(std::make_unique<SharedFetcher>(*std::move(memory)),
                                       SmallShape(), OnGpu(kGpu));
    EXPECT_TRUE(fetcher.ok()) << fetcher.status();
    return fetcher.ok() ? *std::move(fetcher) : nullptr;
  }
  void Fetch(GpuList& list) {
    fetcher_->Start(list.list);
    fetcher_->Wait(list.list);
    list.Download();
  }

  std::unique_ptr<TestArena> arena_;
  std::unique_ptr<Fetcher> fetcher_;
};

TEST_P(GpuFetcherTest, DeliversEveryUnitToItsOwnDestination) {
  for (const size_t count : {size_t{1}, size_t{128}, size_t{5000}}) {
    GpuList list(SomeUnits(count));
    Fetch(list);
    ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
    EXPECT_EQ(list.list.num_valid, static_cast<int64_t>(count));
    EXPECT_EQ(list.list.path_bytes, count * GpuList::kUnitBytes);
    for (size_t i = 0; i < std::min<size_t>(count, 300); ++i) {
      const size_t at = count - 1 - i;
      ASSERT_TRUE(list.valid[at] == 1 && list.Holds(at, list.entries[at].slot)) << at;
      ASSERT_FALSE(list.Holds(at, list.entries[at].slot + 1)) << "slots do not differ";
    }
  }
}

TEST_P(GpuFetcherTest, AListLongerThanALaunchArrivesWhole) {
  GpuList list(SomeUnits(20000));
  for (size_t i = 0; i < list.entries.size(); i += 1000) list.entries[i].generation += 2;
  Fetch(list);
  ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.list.num_valid, 20000 - 20);
  for (size_t i = 0; i < list.entries.size(); i += 250) {
    ASSERT_EQ(list.valid[i], i % 1000 == 0 ? 0 : 1) << i;
    ASSERT_TRUE(i % 1000 == 0 ? list.IsAll(i, 0) : list.Holds(i, list.entries[i].slot)) << i;
  }
}

TEST_P(GpuFetcherTest, AnotherGenerationIsMissingAndZeroedBesideValidUnits) {
  GpuList list(SomeUnits(6));
  list.entries[1].generation += 2;
  list.entries[2].generation -= 2;
  arena_->SetHeader(list.entries[4].slot, list.entries[4].generation + 1,
                    0);  // being written, or evicted
  list.entries[5].generation = arena_->GenerationOf(list.entries[5].slot) + 1;
  Fetch(list);
  ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.valid, (std::vector<uint8_t>{1, 0, 0, 1, 0, 0}));
  EXPECT_EQ(list.list.num_valid, 2);
  for (const size_t i : {1, 2, 4, 5}) EXPECT_TRUE(list.IsAll(i, 0)) << i;
  EXPECT_TRUE(list.Holds(3, list.entries[3].slot));
}

TEST_P(GpuFetcherTest, OutOfRangeEntriesAreRefusedAndTouchNothing) {
  for (const FetchEntry bad :
       {FetchEntry{kSlots, 0, 0, 2}, FetchEntry{0, 3, 0, 2}, FetchEntry{0, 0, 2, 2}}) {
    GpuList list({{0, 0, 0, 2}, bad});
    Fetch(list);
    EXPECT_EQ(list.list.code, absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(list.list.num_valid, 0);
    EXPECT_EQ(list.valid, (std::vector<uint8_t>{0, 0}));
    EXPECT_TRUE(list.IsAll(0, kUntouched) && list.IsAll(1, kUntouched));
  }
}

TEST_P(GpuFetcherTest, AnEmptyListIsDoneAtOnce) {
  FetchList list;
  fetcher_->Start(list);
  fetcher_->Wait(list);
  EXPECT_EQ(list.code, absl::StatusCode::kOk);
}

TEST_P(GpuFetcherTest, MoreListsThanSlotsAndManyThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::unique_ptr<GpuList>> lists;
      for (size_t i = 0; i < 4; ++i)
        lists.push_back(std::make_unique<GpuList>(SomeUnits(50 + 10 * t + i)));
      for (int round = 0; round < 20; ++round) {
        for (auto& list : lists) fetcher_->Start(list->list);
        for (auto& list : lists) {
          fetcher_->Wait(list->list);
          wrong += list->list.code != absl::StatusCode::kOk ||
                   list->list.num_valid != static_cast<int64_t>(list->entries.size());
        }
      }
      for (auto& list : lists) {
        list->Download();
        for (size_t i = 0; i < list->entries.size(); i += 7)
          wrong += !list->Holds(i, list->entries[i].slot);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_FALSE(fetcher_->failed());
}

// Every word of a unit that is called valid is of the generation that was asked for, while its
// owner reseals.
TEST_P(GpuFetcherTest, UnitsOfAnotherGenerationNeverPassWhileSlotsAreResealed) {
  std::atomic<uint64_t> sealed[4];
  for (uint32_t slot = 0; slot < 4; ++slot) {
    arena_->Seal(slot, 100, 100 * kSlots + slot);
    sealed[slot] = 100;
  }
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (uint64_t round = 0; !stop; ++round) {
      const auto slot = static_cast<uint32_t>(round % 4);
      const uint64_t generation = sealed[slot] + 2;
      arena_->Seal(slot, generation, generation * kSlots + slot);
      sealed[slot] = generation;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  int num_valid = 0;
  int num_refused = 0;
  int wrong = 0;
  GpuList list(SomeUnits(96));
  for (int round = 0; round < 200; ++round) {
    for (uint32_t i = 0; i < 96; ++i) {
      const uint32_t slot = i % 4;
      list.entries[i] = {slot, static_cast<uint16_t>(i / 4 % 3), static_cast<uint16_t>(i % 2),
                         sealed[slot]};
    }
    Fetch(list);
    ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
    for (size_t i = 0; i < list.entries.size(); i += 5) {
      if (list.valid[i] == 1) {
        ++num_valid;
        wrong += !list.Holds(i, list.entries[i].generation * kSlots + list.entries[i].slot);
      } else {
        ++num_refused;
        wrong += !list.IsAll(i, 0);
      }
    }
  }
  stop = true;
  writer.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(num_valid, 0);
  std::printf("%d valid, %d refused\n", num_valid, num_refused);
}

TEST_P(GpuFetcherTest, SummariesComeToTheHostAndDamagedOnesDoNot) {
  const size_t bytes = SmallShape().slot.summary_bytes();
  std::vector<FetchEntry> entries;
  for (uint32_t slot = 0; slot < kSlots; ++slot)
    entries.push_back({slot, 0, 0, arena_->GenerationOf(slot)});
  entries[3].generation += 2;
  arena_->SetHeader(5, arena_->GenerationOf(5), 12345);
  std::vector<uint8_t> out(kSlots * bytes, kUntouched), valid(kSlots);
  std::vector<uint8_t*> destinations;
  for (uint32_t slot = 0; slot < kSlots; ++slot) destinations.push_back(out.data() + slot * bytes);
  FetchList list;
  list.entries = entries;
  list.destinations = destinations.data();
  list.valid = valid.data();
  fetcher_->FetchSummaries(list);
  ASSERT_EQ(list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.num_valid, kSlots - 2);
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    const std::vector<uint8_t> got(destinations[slot], destinations[slot] + bytes);
    EXPECT_EQ(valid[slot], slot == 3 || slot == 5 ? 0 : 1) << slot;
    EXPECT_EQ(got, valid[slot] == 1 ? TestArena::Records(slot) : std::vector<uint8_t>(bytes))
        << slot;
  }
}

TEST_P(GpuFetcherTest, AfterShutdownNothingIsDelivered) {
  GpuList begun(SomeUnits(64));
  fetcher_->Start(begun.list);
  fetcher_->Shutdown();
  fetcher_->Wait(begun.list);
  if (GetParam() == PathKind::kPeer) {
    EXPECT_EQ(begun.list.code, absl::StatusCode::kAborted);
    EXPECT_EQ(begun.list.num_valid, 0);
    EXPECT_EQ(begun.valid, std::vector<uint8_t>(64));
  }
  GpuList list(SomeUnits(64));
  Fetch(list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kAborted);
  EXPECT_EQ(list.list.num_valid, 0);
  EXPECT_TRUE(list.IsAll(0, kUntouched));
  uint8_t valid = 7;
  const RecordList::Entry entry = {0, arena_->GenerationOf(0), 0, 0};
  RecordList records;
  records.entries = {&entry, 1};
  records.valid = &valid;
  fetcher_->StoreRecords(records);
  EXPECT_EQ(records.code, absl::StatusCode::kAborted);
  EXPECT_EQ(valid, 0);
  if (fetcher_->peer() == nullptr) return;
  uint32_t word = 0;  // as a kernel reads it
  EXPECT_TRUE(CopyBytes(OnGpu(kGpu), &word, fetcher_->peer()->arena().lost, sizeof(word)).ok());
  EXPECT_NE(word, 0u);
}

TEST_P(GpuFetcherTest, ADeadlineThatHasPassedNeverLeavesAnUndecidedList) {
  GpuList list(SomeUnits(20000));
  list.list.deadline = absl::ZeroDuration();
  Fetch(list);
  EXPECT_TRUE(list.list.code == absl::StatusCode::kOk ||
              list.list.code == absl::StatusCode::kDeadlineExceeded);
  const auto num_valid = std::count(list.valid.begin(), list.valid.end(), uint8_t{1});
  EXPECT_EQ(num_valid, list.list.num_valid);
  for (size_t i = 0; i < list.entries.size(); i += 777) {
    if (list.valid[i] == 1) {
      EXPECT_TRUE(list.Holds(i, list.entries[i].slot)) << i;
    }
  }
  GpuList next(SomeUnits(10));
  Fetch(next);
  EXPECT_EQ(next.list.num_valid, 10);
}

// --- a mirror on the GPU -------------------------------------------------------------------------

class GpuRecordsTest : public GpuFetcherTest {
 protected:
  static constexpr int kPages = kSlots / 2;

  void SetUp() override {
    GpuFetcherTest::SetUp();
    if (fetcher_ == nullptr) return;
    attachment_ = std::make_shared<Attachment>();
    attachment_->address = "here";
    *attachment_->reply.mutable_arena()->mutable_geometry() = ToProto(TwoShards());
    attachment_->fetcher = std::move(fetcher_);
    view_.attachments = {attachment_};
    auto shape = WorkerShape::Make(TwoShards(), {});
    ASSERT_TRUE(shape.ok());
    shape_ = *std::move(shape);
    shape_.place = OnGpu(kGpu);
    mirror_ = *Mirror::Make(shape_, kPages + 3);
    // Page p has its shards in slots p and kSlots - 1 - p.
    for (int p = 0; p < kPages; ++p) {
      const auto slot = static_cast<uint32_t>(p), other = kSlots - 1 - slot;
      slots_.push_back({slot, TestArena::GenerationOf(slot)});
      slots_.push_back({other, TestArena::GenerationOf(other)});
    }
    for (int p = 0; p < kPages; ++p) requests_.push_back({p, 0, {slots_.data() + 2 * p, 2}});
  }
  bool IsPage(int page, int as) const {
    return mirror_->Equals(page, 0,
                           TestArena::Records(slots_[static_cast<size_t>(2 * as)].slot).data()) &&
           mirror_->Equals(page, 1,
                           TestArena::Records(slots_[static_cast<size_t>(2 * as + 1)].slot).data());
  }

  std::shared_ptr<Attachment> attachment_;
  PoolView view_;
  WorkerShape shape_;
  std::unique_ptr<Mirror> mirror_;
  std::vector<SlotRef> slots_;
  std::vector<RecordRequest> requests_;
};

TEST_P(GpuRecordsTest, AMirrorIsFilledAndComparedOnTheGpu) {
  std::vector<uint8_t> all(kPages, 1);
  EXPECT_EQ(FetchRecords(view_, requests_, absl::Seconds(5), *mirror_, shape_), all);
  WorkerShape host_shape = shape_;
  host_shape.place = {};
  auto host = *Mirror::Make(host_shape, kPages + 3);
  for (int p = 0; p < kPages; ++p) {
    EXPECT_TRUE(IsPage(p, p)) << p;
    EXPECT_FALSE(IsPage(p, (p + 1) % kPages)) << p;
    for (int s = 0; s < 2; ++s) {
      ASSERT_TRUE(
          host->Store(p, s, TestArena::Records(slots_[static_cast<size_t>(2 * p + s)].slot).data())
              .ok());
    }
    EXPECT_EQ(mirror_->unit_checksum(2, 3, p), host->unit_checksum(2, 3, p));
  }
  // A layer of the whole mirror, beyond the pages too: nothing but the pages was written to.
  std::vector<uint8_t> layer(host->page_capacity() * shape_.summary.coarse_bytes);
  ASSERT_TRUE(CopyBytes(shape_.place, layer.data(), mirror_->coarse(1), layer.size()).ok());
  EXPECT_EQ(
      std::memcmp(layer.data(), host->coarse(1), size_t{kPages} * shape_.summary.coarse_bytes), 0);
  EXPECT_EQ(CompareRecords(view_, requests_, absl::Seconds(5), *mirror_, shape_), all);
  // One page has other records than its daemon.
  ASSERT_TRUE(mirror_->Store(6, 1, TestArena::Records(3).data()).ok());
  all[6] = 0;
  EXPECT_EQ(CompareRecords(view_, requests_, absl::Seconds(5), *mirror_, shape_), all);
}

TEST_P(GpuRecordsTest, PagesThatAreGoneAreNotCountedAndLeaveTheMirrorAlone) {
  std::vector<uint8_t> good(kPages, 1);
  ASSERT_EQ(FetchRecords(view_, requests_, absl::Seconds(5), *mirror_, shape_), good);
  slots_[2 * 4].generation += 2;
  arena_->SetHeader(slots_[2 * 7 + 1].slot, slots_[2 * 7 + 1].generation + 1, 0);
  good[4] = good[7] = 0;
  EXPECT_EQ(FetchRecords(view_, requests_, absl::Seconds(5), *mirror_, shape_), good);
  EXPECT_EQ(CompareRecords(view_, requests_, absl::Seconds(5), *mirror_, shape_), good);
  EXPECT_TRUE(IsPage(4, 4) && IsPage(7, 7));
  slots_[0].slot = kSlots;  // out of range: nothing of that list
  EXPECT_EQ(FetchRecords(view_, requests_, absl::Seconds(5), *mirror_, shape_)[0], 0);
}

TEST_P(GpuRecordsTest, UnitsOfOpeningASequenceComeToEitherKindOfMemory) {
  GpuList list(SomeUnits(100));
  std::vector<UnitRequest> requests;
  for (size_t i = 0; i < 100; ++i) requests.push_back({0, list.entries[i], list.destinations[i]});
  ASSERT_TRUE(FetchUnits(view_, requests, absl::Seconds(5)).ok());
  list.Download();
  for (size_t i = 0; i < 100; ++i) EXPECT_TRUE(list.Holds(i, list.entries[i].slot)) << i;
  std::fill(list.bytes.begin(), list.bytes.end(), kUntouched);
  for (size_t i = 0; i < 100; ++i)
    requests[i].destination = list.bytes.data() + i * GpuList::kUnitBytes;
  ASSERT_TRUE(FetchUnits(view_, requests, absl::Seconds(5)).ok());
  for (size_t i = 0; i < 100; ++i) EXPECT_TRUE(list.Holds(i, list.entries[i].slot)) << i;
  requests[50].entry.generation += 2;
  EXPECT_EQ(FetchUnits(view_, requests, absl::Seconds(5)).code(), absl::StatusCode::kUnavailable);
}

const auto kNameOf = [](const auto& path) {
  return std::string(path.param == PathKind::kPeer ? "peer" : "staged_shared");
};
INSTANTIATE_TEST_SUITE_P(Paths, GpuFetcherTest,
                         ::testing::Values(PathKind::kPeer, PathKind::kShared), kNameOf);
INSTANTIATE_TEST_SUITE_P(Paths, GpuRecordsTest,
                         ::testing::Values(PathKind::kPeer, PathKind::kShared), kNameOf);

}  // namespace
}  // namespace kvd
