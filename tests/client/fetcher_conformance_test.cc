// One suite for every path, alone and through staging memory: the same lists must have the same
// outcome, whoever carries the bytes. The peer path and staging for a GPU: peer_fetcher_test.cc.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <thread>

#include "absl/time/clock.h"
#include "client/shared_fetcher.h"
#include "client/staged_fetcher.h"
#include "client/ucx_fetcher.h"
#include "tests/support/data_plane.h"

namespace kvd {
namespace {

// A list with its memory. Destinations start as 0xEE, so that untouched bytes are seen.
struct OwnedList {
  OwnedList(const SlotLayout& slot_in, std::vector<FetchEntry> entries_in, size_t item_bytes = 0)
      : slot(slot_in),
        entries(std::move(entries_in)),
        item(item_bytes == 0 ? slot.unit_bytes : item_bytes),
        bytes(entries.size() * item, 0xEE),
        valid(entries.size(), 0xEE) {
    for (size_t i = 0; i < entries.size(); ++i) destinations.push_back(bytes.data() + i * item);
    list.entries = entries;
    list.destinations = destinations.data();
    list.valid = valid.data();
    list.deadline = absl::Seconds(5);
  }
  bool Holds(size_t i, const std::vector<uint8_t>& expected) const {
    return std::memcmp(destinations[i], expected.data(), expected.size()) == 0;
  }
  bool IsAll(size_t i, uint8_t value) const {
    return std::all_of(destinations[i], destinations[i] + item,
                       [&](uint8_t b) { return b == value; });
  }

  SlotLayout slot;
  std::vector<FetchEntry> entries;
  size_t item;
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> valid;
  std::vector<uint8_t*> destinations;
  FetchList list;
};

std::vector<FetchEntry> AllUnits(const SlotLayout& slot, const std::vector<TestPage>& pages) {
  std::vector<FetchEntry> entries;
  for (const TestPage& page : pages) {
    for (int layer = 0; layer < slot.num_layers; ++layer) {
      for (int head = 0; head < slot.shard_heads; ++head) {
        entries.push_back({page.slot, static_cast<uint16_t>(layer), static_cast<uint16_t>(head),
                           page.generation});
      }
    }
  }
  return entries;
}

std::unique_ptr<UcxWorker> ClientWorker() {
  UcxOptions options;
  options.devices = "lo";
  auto worker = UcxWorker::Make(options);
  EXPECT_TRUE(worker.ok()) << worker.status();
  return *std::move(worker);
}

std::unique_ptr<Fetcher> Connect(PathKind path, const locks_kvd::v1::AttachReply& offer,
                                 UcxWorker* worker) {
  const ArenaShape shape = ShapeOf(offer);
  if (path == PathKind::kUcx) {
    auto fetcher = UcxFetcher::Connect(worker, offer.ucx().worker_address(), IncarnationOf(offer),
                                       TokenOf(offer), shape.slot, absl::Seconds(5));
    EXPECT_TRUE(fetcher.ok()) << fetcher.status();
    return fetcher.ok() ? *std::move(fetcher) : nullptr;
  }
  DescriptorRequest request;
  request.incarnation = IncarnationOf(offer);
  request.session = TokenOf(offer);
  auto descriptors = ReceiveDescriptors(offer.shared().socket_path(), request, absl::Seconds(5));
  EXPECT_TRUE(descriptors.ok()) << descriptors.status();
  auto memory = ArenaMemory::MapShared(shape, *std::move(descriptors));
  EXPECT_TRUE(memory.ok()) << memory.status();
  return std::make_unique<SharedFetcher>(*std::move(memory));
}

struct Way {
  PathKind path;
  bool staged = false;
};

// Staging memory of the host: everything of a StagedFetcher but the upload's kernel.
std::unique_ptr<Fetcher> Staged(std::unique_ptr<Fetcher> inner, const ArenaShape& shape) {
  if (inner == nullptr) return nullptr;
  auto staged = StagedFetcher::Make(std::move(inner), shape, {});
  EXPECT_TRUE(staged.ok()) << staged.status();
  return *std::move(staged);
}

class FetcherTest : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    TestDaemon::Options options;
    options.bytes = 64 << 20;
    daemon_ = std::make_unique<TestDaemon>(options);
    offer_ = daemon_->Attach();
    slot_ = ShapeOf(offer_).slot;
    for (uint64_t page = 0; page < 8; ++page) pages_.push_back(daemon_->PutPage(offer_, page, 1));
    if (GetParam().path == PathKind::kUcx) worker_ = ClientWorker();
    fetcher_ = Connect(GetParam().path, offer_, worker_.get());
    if (GetParam().staged) fetcher_ = Staged(std::move(fetcher_), ShapeOf(offer_));
    ASSERT_NE(fetcher_, nullptr);
    EXPECT_EQ(fetcher_->path(), GetParam().path);
  }
  void TearDown() override {
    fetcher_.reset();
    worker_.reset();
  }
  void Fetch(OwnedList& list) {
    fetcher_->Start(list.list);
    fetcher_->Wait(list.list);
  }
  std::vector<uint8_t> Expected(const TestPage& page, const FetchEntry& entry) const {
    return UnitBytes(slot_, page.page, page.write, entry.layer, entry.head);
  }

  std::unique_ptr<TestDaemon> daemon_;
  locks_kvd::v1::AttachReply offer_;
  SlotLayout slot_;
  std::vector<TestPage> pages_;
  std::unique_ptr<UcxWorker> worker_;
  std::unique_ptr<Fetcher> fetcher_;
};

TEST_P(FetcherTest, DeliversEveryUnitToItsOwnDestination) {
  OwnedList list(slot_, AllUnits(slot_, pages_));
  std::reverse(list.entries.begin(), list.entries.end());  // any order of the list
  Fetch(list);
  ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.list.num_valid, static_cast<int64_t>(list.entries.size()));
  EXPECT_GE(list.list.path_bytes, list.entries.size() * slot_.unit_bytes);
  for (size_t i = 0; i < list.entries.size(); ++i) {
    const auto page = std::find_if(pages_.begin(), pages_.end(), [&](const TestPage& p) {
      return p.slot == list.entries[i].slot;
    });
    EXPECT_EQ(list.valid[i], 1);
    EXPECT_TRUE(list.Holds(i, Expected(*page, list.entries[i]))) << i;
    if (i == 0) continue;
    EXPECT_FALSE(list.Holds(i, Expected(*page, list.entries[i - 1]))) << "order is not checked";
  }
}

TEST_P(FetcherTest, AnEmptyListIsDoneAtOnce) {
  OwnedList list(slot_, {});
  Fetch(list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.list.num_valid, 0);
}

TEST_P(FetcherTest, OneUnitArrives) {
  OwnedList list(slot_, {{pages_[3].slot, 2, 1, pages_[3].generation}});
  Fetch(list);
  ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.list.num_valid, 1);
  EXPECT_TRUE(list.Holds(0, Expected(pages_[3], list.entries[0])));
}

TEST_P(FetcherTest, ManyUnitsArriveInSeveralPieces) {
  std::vector<FetchEntry> entries;
  const std::vector<FetchEntry> all = AllUnits(slot_, pages_);
  for (size_t i = 0; i < 4096; ++i) entries.push_back(all[(i * 37) % all.size()]);
  OwnedList list(slot_, entries);
  for (int round = 0; round < 3; ++round) {
    Fetch(list);
    ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
    ASSERT_EQ(list.list.num_valid, 4096);
    for (size_t i = 0; i < entries.size(); ++i) {
      ASSERT_TRUE(
          list.Holds(i, Expected(pages_[(i * 37) % all.size() / slot_.num_units()], entries[i])))
          << i;
    }
    std::fill(list.bytes.begin(), list.bytes.end(), uint8_t{0xEE});
  }
}

TEST_P(FetcherTest, AnotherGenerationIsMissingAndZeroedBesideValidUnits) {
  OwnedList list(slot_, {{pages_[0].slot, 0, 0, pages_[0].generation},
                         {pages_[1].slot, 0, 0, pages_[1].generation + 2},
                         {pages_[2].slot, 0, 0, pages_[2].generation - 2},
                         {pages_[3].slot, 0, 0, pages_[3].generation + 1},
                         {pages_[4].slot, 0, 0, pages_[4].generation}});
  Fetch(list);
  ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.list.num_valid, 2);
  EXPECT_EQ(list.valid, (std::vector<uint8_t>{1, 0, 0, 0, 1}));
  for (const size_t i : {1u, 2u, 3u}) EXPECT_TRUE(list.IsAll(i, 0)) << i;
  EXPECT_TRUE(list.Holds(4, Expected(pages_[4], list.entries[4])));
}

// The generation that a reserved slot has is odd: naming it must not show a page that is being
// written.
TEST_P(FetcherTest, ASlotThatIsBeingWrittenIsMissingEvenUnderItsOwnGeneration) {
  const auto slot = static_cast<uint32_t>(daemon_->Reserve(offer_, 77) & 0xFFFFFFFFu);
  const uint64_t generation = daemon_->arena->memory().header(slot)->generation.load();
  ASSERT_EQ(generation % 2, 1u);
  OwnedList list(slot_, {{slot, 0, 0, generation}});
  Fetch(list);
  EXPECT_EQ(list.list.num_valid, 0);
  EXPECT_TRUE(list.IsAll(0, 0) || list.list.code != absl::StatusCode::kOk);
}

TEST_P(FetcherTest, OutOfRangeEntriesAreRefusedAndTouchNothing) {
  for (const FetchEntry bad : {FetchEntry{1u << 30, 0, 0, 2}, FetchEntry{pages_[0].slot, 4, 0, 2},
                               FetchEntry{pages_[0].slot, 0, 2, 2}}) {
    OwnedList list(slot_, {{pages_[0].slot, 0, 0, pages_[0].generation}, bad});
    Fetch(list);
    EXPECT_EQ(list.list.code, absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(list.list.num_valid, 0);
    EXPECT_EQ(list.valid[0] + list.valid[1], 0);
    EXPECT_TRUE(list.IsAll(1, 0xEE));
  }
}

TEST_P(FetcherTest, TwoListsInFlightKeepTheirDestinations) {
  OwnedList a(slot_, AllUnits(slot_, {pages_[0], pages_[1]}));
  OwnedList b(slot_, AllUnits(slot_, {pages_[2], pages_[3]}));
  for (int round = 0; round < 50; ++round) {
    fetcher_->Start(a.list);
    fetcher_->Start(b.list);
    fetcher_->Wait(b.list);
    fetcher_->Wait(a.list);
    ASSERT_EQ(a.list.num_valid, static_cast<int64_t>(a.entries.size()));
    ASSERT_EQ(b.list.num_valid, static_cast<int64_t>(b.entries.size()));
    ASSERT_TRUE(a.Holds(9, Expected(pages_[1], a.entries[9])));
    ASSERT_TRUE(b.Holds(9, Expected(pages_[3], b.entries[9])));
  }
}

TEST_P(FetcherTest, ManyThreadsFetchAtOnce) {
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      OwnedList list(slot_, AllUnits(slot_, {pages_[t], pages_[t + 4]}));
      for (int round = 0; round < 50; ++round) {
        Fetch(list);
        ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
        ASSERT_TRUE(list.Holds(3, Expected(pages_[t], list.entries[3])));
        ASSERT_TRUE(list.Holds(12, Expected(pages_[t + 4], list.entries[12])));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(FetcherTest, SummariesAreTheSealedRecords) {
  std::vector<FetchEntry> entries;
  for (const TestPage& page : pages_) entries.push_back({page.slot, 0, 0, page.generation});
  entries[5].generation += 2;
  OwnedList list(slot_, entries, slot_.summary_bytes());
  fetcher_->FetchSummaries(list.list);
  ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.list.num_valid, 7);
  for (size_t i = 0; i < pages_.size(); ++i) {
    const uint8_t* sealed = daemon_->arena->memory().summary(pages_[i].slot);
    const std::vector<uint8_t> records(sealed, sealed + slot_.summary_bytes());
    EXPECT_EQ(list.Holds(i, records), i != 5) << i;
    EXPECT_FALSE(list.Holds((i + 1) % 8, records)) << "the records do not differ";
  }
  EXPECT_TRUE(list.IsAll(5, 0));
}

// Records that do not fit the header's checksum are not delivered, although the generation fits.
TEST_P(FetcherTest, DamagedRecordsAreMissing) {
  daemon_->arena->memory().summary(pages_[2].slot)[17] ^= 1;
  OwnedList list(
      slot_,
      {{pages_[2].slot, 0, 0, pages_[2].generation}, {pages_[3].slot, 0, 0, pages_[3].generation}},
      slot_.summary_bytes());
  fetcher_->FetchSummaries(list.list);
  ASSERT_EQ(list.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.valid, (std::vector<uint8_t>{0, 1}));
  EXPECT_TRUE(list.IsAll(0, 0));
}

TEST_P(FetcherTest, AfterShutdownFetchesAreAborted) {
  fetcher_->Shutdown();
  OwnedList list(slot_, {{pages_[0].slot, 0, 0, pages_[0].generation}});
  Fetch(list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kAborted);
  EXPECT_TRUE(list.IsAll(0, 0xEE));
  fetcher_->FetchSummaries(list.list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kAborted);
}

// More lists than slots, begun by one thread: those without a slot are fetched in their Wait.
TEST_P(FetcherTest, ManyListsInFlightArriveOrAreRefused) {
  std::vector<std::unique_ptr<OwnedList>> lists;
  for (size_t i = 0; i < 7; ++i) {
    lists.push_back(std::make_unique<OwnedList>(slot_, AllUnits(slot_, {pages_[i]})));
    fetcher_->Start(lists.back()->list);
  }
  for (size_t i = 0; i < lists.size(); ++i) {
    OwnedList& list = *lists[i];
    fetcher_->Wait(list.list);
    ASSERT_EQ(list.list.code, absl::StatusCode::kOk) << i;
    EXPECT_EQ(list.list.num_valid, 8);
    EXPECT_TRUE(list.Holds(5, Expected(pages_[i], list.entries[5])));
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, FetcherTest,
                         testing::Values(Way{PathKind::kShared}, Way{PathKind::kUcx},
                                         Way{PathKind::kShared, true}, Way{PathKind::kUcx, true}),
                         [](const auto& way) {
                           const absl::string_view path = PathName(way.param.path);
                           return std::string(way.param.staged ? "staged_" : "") +
                                  std::string(path.data(), path.size());
                         });

// --- what only staging can get wrong -------------------------------------------------------------

// Delivers the inner fetcher's units, and then fails the parts of a list from the `fail_from`-th
// on.
class FailingFetcher final : public Fetcher {
 public:
  FailingFetcher(std::unique_ptr<Fetcher> inner, int fail_from)
      : inner_(std::move(inner)), left_(fail_from) {}
  PathKind path() const override { return inner_->path(); }
  void Start(FetchList& list) override {
    if (left_-- > 0) return inner_->Start(list);
    list.code = absl::StatusCode::kUnavailable;
    list.num_valid = 0;
    std::memset(list.valid, 0, list.entries.size());
    for (uint8_t* const* to = list.destinations; to != list.destinations + list.entries.size();
         ++to)
      **to = 0x77;
  }
  void Wait(FetchList& list) override {
    if (list.code != absl::StatusCode::kUnavailable) inner_->Wait(list);
  }
  void FetchSummaries(FetchList& list) override { inner_->FetchSummaries(list); }
  bool failed() const override { return false; }
  void Shutdown() override { inner_->Shutdown(); }

 private:
  const std::unique_ptr<Fetcher> inner_;
  int left_;
};

class StagedFetcherTest : public FetcherTest {};

TEST_P(StagedFetcherTest, AnErrorInAPartEndsTheListAndItsStagingMemoryIsNotDelivered) {
  const size_t part = (4 << 20) / slot_.unit_bytes;
  const std::vector<FetchEntry> all = AllUnits(slot_, pages_);
  std::vector<FetchEntry> entries;
  for (size_t i = 0; i < 5 * part; ++i) entries.push_back(all[i % all.size()]);
  OwnedList list(slot_, entries);
  const auto failing =
      Staged(std::make_unique<FailingFetcher>(Connect(GetParam().path, offer_, nullptr), 2),
             ShapeOf(offer_));
  failing->Start(list.list);
  failing->Wait(list.list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kUnavailable);
  EXPECT_EQ(list.list.num_valid, static_cast<int64_t>(2 * part));
  for (size_t i = 0; i < entries.size(); ++i) {
    ASSERT_EQ(list.valid[i], i < 2 * part ? 1 : 0) << i;
    ASSERT_TRUE(i < 2 * part ? list.Holds(i, Expected(pages_[i % all.size() / 8], entries[i]))
                             : list.IsAll(i, 0xEE))
        << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Staged, StagedFetcherTest, testing::Values(Way{PathKind::kShared, true}));

// --- what only the network path can get wrong ----------------------------------------------------

class UcxFetcherTest : public FetcherTest {};

TEST_P(UcxFetcherTest, APageThatTheSessionDoesNotLeaseIsMissing) {
  const locks_kvd::v1::AttachReply other = daemon_->Attach();
  std::unique_ptr<Fetcher> fetcher = Connect(PathKind::kUcx, other, worker_.get());
  OwnedList list(slot_, AllUnits(slot_, {pages_[0]}));
  fetcher->Start(list.list);
  fetcher->Wait(list.list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(list.list.num_valid, 0);
  EXPECT_TRUE(list.IsAll(0, 0));
}

TEST_P(UcxFetcherTest, AnEndedSessionIsAborted) {
  ASSERT_TRUE(daemon_->sessions->Detach(TokenOf(offer_), daemon_->incarnation).ok());
  OwnedList list(slot_, AllUnits(slot_, {pages_[0]}));
  Fetch(list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kAborted);
}

TEST_P(UcxFetcherTest, AForeignSessionOrIncarnationCannotConnect) {
  SessionToken token = TokenOf(offer_);
  token[15] ^= 1;
  EXPECT_EQ(UcxFetcher::Connect(worker_.get(), offer_.ucx().worker_address(), IncarnationOf(offer_),
                                token, slot_, absl::Milliseconds(200))
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  Incarnation incarnation = IncarnationOf(offer_);
  incarnation[0] ^= 1;
  EXPECT_EQ(UcxFetcher::Connect(worker_.get(), offer_.ucx().worker_address(), incarnation,
                                TokenOf(offer_), slot_, absl::Milliseconds(200))
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_P(UcxFetcherTest, AGpuIsRefusedWhereUcxHasNoCuda) {
  ASSERT_FALSE(worker_->has_gpu_memory());
  EXPECT_EQ(UcxFetcher::Connect(worker_.get(), offer_.ucx().worker_address(), IncarnationOf(offer_),
                                TokenOf(offer_), slot_, absl::Seconds(1), OnGpu(0))
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(UcxFetcherTest, AListThatIsTooLongIsRefused) {
  OwnedList list(slot_,
                 std::vector<FetchEntry>(UcxFetcher::kMaxUnits + 1,
                                         {pages_[0].slot, 0, 0, pages_[0].generation}),
                 1);  // refused before a destination is looked at
  Fetch(list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kInvalidArgument);
}

TEST_P(UcxFetcherTest, TooManyListsInFlightAreRefusedAndTheOthersArrive) {
  std::vector<std::unique_ptr<OwnedList>> lists;
  for (int i = 0; i < UcxFetcher::kMaxLists + 1; ++i) {
    lists.push_back(std::make_unique<OwnedList>(slot_, AllUnits(slot_, {pages_[0]})));
    fetcher_->Start(lists.back()->list);
  }
  EXPECT_EQ(lists.back()->list.code, absl::StatusCode::kResourceExhausted);
  for (auto& list : lists) fetcher_->Wait(list->list);
  for (int i = 0; i < UcxFetcher::kMaxLists; ++i)
    EXPECT_EQ(lists[static_cast<size_t>(i)]->list.num_valid, 8);
}

INSTANTIATE_TEST_SUITE_P(Ucx, UcxFetcherTest, testing::Values(Way{PathKind::kUcx}));

// --- a daemon that dies or freezes ---------------------------------------------------------------

class DyingDaemonTest : public testing::Test {
 protected:
  void SetUp() override {
    child_ = std::make_unique<ChildDaemon>(8);
    worker_ = ClientWorker();
    slot_ = ShapeOf(child_->offer).slot;
  }
  void Open(PathKind path) { fetcher_ = Connect(path, child_->offer, worker_.get()); }
  absl::Duration Fetch(OwnedList& list) {
    const absl::Time start = absl::Now();
    fetcher_->Start(list.list);
    fetcher_->Wait(list.list);
    return absl::Now() - start;
  }
  std::unique_ptr<ChildDaemon> child_;
  std::unique_ptr<UcxWorker> worker_;
  std::unique_ptr<Fetcher> fetcher_;
  SlotLayout slot_;
};

TEST_F(DyingDaemonTest, AKilledDaemonEndsUcxFetchesWithinTheDeadline) {
  Open(PathKind::kUcx);
  OwnedList list(slot_, AllUnits(slot_, child_->pages));
  list.list.deadline = absl::Seconds(2);
  Fetch(list);
  ASSERT_EQ(list.list.num_valid, static_cast<int64_t>(list.entries.size()));
  child_->Kill();
  EXPECT_LT(Fetch(list), absl::Seconds(3));
  EXPECT_TRUE(list.list.code == absl::StatusCode::kUnavailable ||
              list.list.code == absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(list.list.num_valid, 0);
  Fetch(list);  // and again, on the endpoint that has failed
  EXPECT_NE(list.list.code, absl::StatusCode::kOk);
}

// The memory of a dead daemon stays readable: only Shutdown, which the heartbeat calls, fences it.
TEST_F(DyingDaemonTest, AKilledDaemonsMemoryIsFencedByShutdownOnTheSharedPath) {
  Open(PathKind::kShared);
  child_->Kill();
  OwnedList list(slot_, AllUnits(slot_, child_->pages));
  Fetch(list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kOk);
  fetcher_->Shutdown();
  Fetch(list);
  EXPECT_EQ(list.list.code, absl::StatusCode::kAborted);
  EXPECT_EQ(list.list.num_valid, 0);
}

TEST_F(DyingDaemonTest, AFrozenDaemonMeetsTheDeadlineAndItsLatePiecesReachNoDestination) {
  Open(PathKind::kUcx);
  OwnedList list(slot_, AllUnits(slot_, child_->pages));
  Fetch(list);
  ASSERT_EQ(list.list.num_valid, static_cast<int64_t>(list.entries.size()));
  child_->Signal(SIGSTOP);
  std::fill(list.bytes.begin(), list.bytes.end(), uint8_t{0xEE});
  list.list.deadline = absl::Milliseconds(200);
  EXPECT_LT(Fetch(list), absl::Seconds(2));
  EXPECT_EQ(list.list.code, absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(list.list.num_valid, 0);
  child_->Signal(SIGCONT);
  // The daemon answers the late request in its own way; nothing of it may be written.
  OwnedList next(slot_, AllUnits(slot_, {child_->pages[0]}));
  next.list.deadline = absl::Seconds(10);
  Fetch(next);
  EXPECT_EQ(next.list.code, absl::StatusCode::kOk);
  EXPECT_EQ(next.list.num_valid, 8);
  for (size_t i = 0; i < list.entries.size(); ++i) EXPECT_TRUE(list.IsAll(i, 0xEE)) << i;
}

TEST_F(DyingDaemonTest, ShutdownEndsAFetchThatWaitsForAFrozenDaemon) {
  Open(PathKind::kUcx);
  child_->Signal(SIGSTOP);
  OwnedList list(slot_, AllUnits(slot_, child_->pages));
  list.list.deadline = absl::Seconds(30);
  std::thread later([&] {
    absl::SleepFor(absl::Milliseconds(100));
    fetcher_->Shutdown();
  });
  EXPECT_LT(Fetch(list), absl::Seconds(10));
  later.join();
  EXPECT_EQ(list.list.code, absl::StatusCode::kAborted);
}

TEST_F(DyingDaemonTest, AFetcherOfAFrozenDaemonCanBeDestroyedWithMuchInFlight) {
  Open(PathKind::kUcx);
  child_->Signal(SIGSTOP);
  for (int i = 0; i < 4; ++i) {
    std::vector<FetchEntry> many(60000, {child_->pages[0].slot, 0, 0, child_->pages[0].generation});
    OwnedList list(slot_, many, 1);
    list.list.deadline = absl::Milliseconds(20);
    Fetch(list);
    EXPECT_EQ(list.list.code, absl::StatusCode::kDeadlineExceeded);
  }
  fetcher_.reset();
  worker_.reset();
}

}  // namespace
}  // namespace kvd

int main(int argc, char** argv) {
  kvd::RunAsChildDaemonIfAsked(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
