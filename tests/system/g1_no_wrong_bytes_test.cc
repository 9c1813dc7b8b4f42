// G1: a fetch returns the sealed bytes of that page or says that it is missing. A writer reseals an
// arena that is far too small while readers fetch with live and stale generations on both paths.

#include <gtest/gtest.h>

#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "tests/support/path_parameter.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

// The versions sealed last, newest at the end. Old ones stay in it on purpose.
class Recent {
 public:
  void Add(std::span<const SealedVersion> pages) {
    std::lock_guard<std::mutex> lock(mutex_);
    pages_.insert(pages_.end(), pages.begin(), pages.end());
    while (pages_.size() > kKept) pages_.pop_front();
  }
  // The version that was sealed at `ref`, if it is known yet: a generation of a slot names one page
  // for ever.
  std::optional<SealedVersion> Find(const SlotRef& ref) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const SealedVersion& page : pages_) {
      if (page.ref.slot == ref.slot && page.ref.generation == ref.generation) return page;
    }
    return std::nullopt;
  }
  // Half from the newest few, which live, half from anywhere.
  std::vector<SealedVersion> Sample(size_t count, std::mt19937_64& random) const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<SealedVersion> sample;
    if (pages_.empty()) return sample;
    const size_t newest = std::min<size_t>(pages_.size(), 16);
    for (size_t i = 0; i < count; ++i) {
      const size_t at = i % 2 == 0 ? pages_.size() - 1 - random() % newest  //
                                   : random() % pages_.size();
      sample.push_back(pages_[at]);
    }
    return sample;
  }

 private:
  static constexpr size_t kKept = 96;
  mutable std::mutex mutex_;
  std::deque<SealedVersion> pages_;
};

class NoWrongBytesTest : public ::testing::TestWithParam<PathKind> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    spec.session_ttl_ms = 10000;  // the machine may be busy; nothing here waits for it
    spec.arena_bytes = MakeSlotLayout(spec.geometry).slot_bytes() * kSlots;
    auto daemon = DaemonProcess::Start(spec);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  std::unique_ptr<SystemWorker> Connect(PathKind path) {
    auto worker = SystemWorker::Make(OptionsFor({daemon_->address()}, path));
    EXPECT_TRUE(worker.ok()) << worker.status();
    return worker.ok() ? *std::move(worker) : nullptr;
  }

  static locks_kvd::v1::MatchRequest MatchOf(uint64_t first_page, uint64_t request_id) {
    locks_kvd::v1::MatchRequest match;
    match.set_request_id(request_id);
    match.add_shards(0);
    for (uint64_t page = first_page; page < first_page + kBatch; ++page) {
      const PageKey key = KeyOf(page);
      match.mutable_pages()->mutable_keys()->append(key.begin(), key.end());
      match.mutable_pages()->add_page_idx(static_cast<uint32_t>(page));
    }
    return match;
  }

  static constexpr uint64_t kSlots = 40;
  // Five seconds, and on a busy machine as many as are needed to see enough.
  static bool GoOn(absl::Time start, bool seen_enough) {
    const absl::Duration so_far = absl::Now() - start;
    return so_far < absl::Seconds(5) || (!seen_enough && so_far < absl::Seconds(60));
  }

  static constexpr uint64_t kPages = 64;  // more than fit, so that each is put again and again
  static constexpr uint64_t kBatch = 8;
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_P(NoWrongBytesTest, ReadersOfAnArenaThatAlwaysEvictsGetSealedBytesOrNothing) {
  // One session: over ucx a daemon serves a session only what it leases, and what it leased a
  // moment ago is what races with the evictor.
  auto worker = Connect(GetParam());
  ASSERT_NE(worker, nullptr);
  Recent recent;
  std::atomic<bool> stop{false};
  std::atomic<int64_t> num_sealed{0};
  int64_t num_failed = 0;
  std::thread writing([&] {
    // leases of the newest batches; older pages may be evicted while they are read
    std::deque<PutReport> held;
    for (uint64_t write = 1; !stop; ++write) {
      const auto versions = VersionsOf(write * kBatch % kPages, kBatch, write);
      held.push_back(worker->Put(versions));
      num_failed += held.back().num_failed;
      const auto sealed = NewPages(versions, held.back());
      num_sealed += static_cast<int64_t>(sealed.size());
      recent.Add(sealed);
      if (held.size() > 2) held.pop_front();
    }
  });
  std::mt19937_64 random(1);
  Fetched total;
  const std::shared_ptr<Attachment> attachment = worker->attachment();
  const absl::Time start = absl::Now();
  const auto seen_enough = [&] {
    return total.num_exact > 1000 && total.num_missing > 1000 &&
           num_sealed > static_cast<int64_t>(4 * kSlots);
  };
  while (total.num_wrong == 0 && GoOn(start, seen_enough())) {
    const auto pages = recent.Sample(16, random);
    total.Add(worker->Fetch(*attachment->fetcher, pages, absl::Seconds(10)));
  }
  stop = true;
  writing.join();
  EXPECT_EQ(total.code, absl::StatusCode::kOk);
  EXPECT_EQ(total.num_wrong, 0);
  EXPECT_GT(total.num_exact, 1000);
  EXPECT_GT(total.num_missing, 1000);
  EXPECT_GT(num_sealed.load(), static_cast<int64_t>(4 * kSlots));  // every slot was reused
  EXPECT_EQ(num_failed, 0);
  RecordProperty("exact", static_cast<int>(total.num_exact));
  RecordProperty("missing", static_cast<int>(total.num_missing));
}

// A reader in another session than the writer's, as decode workers are: it matches pages by key,
// fetches them while it leases them, gives the leases up and fetches them again while the writer
// takes their slots.
TEST_P(NoWrongBytesTest, AReaderInAnotherSessionGetsWhatItLeasesWholeAndNothingElse) {
  auto writer = Connect(GetParam());
  auto reader = Connect(GetParam());
  ASSERT_TRUE(writer != nullptr && reader != nullptr);
  Recent recent;
  std::jthread writing([&](const std::stop_token& stop) {
    for (uint64_t write = 1; !stop.stop_requested(); ++write) {
      const auto versions = VersionsOf(write * kBatch % kPages, kBatch, write);
      const PutReport held = writer->Put(versions);  // held until its pages are known to the reader
      recent.Add(NewPages(versions, held));
    }
  });
  const std::shared_ptr<Attachment> attachment = reader->attachment();
  PoolChannel& channel = reader->pool().channel(0);
  Recent given_up;  // just now, and a while ago
  std::mt19937_64 random(1);
  Fetched leased, released;
  const absl::Time start = absl::Now();
  const auto seen_enough = [&] { return leased.num_exact > 1000 && released.num_missing > 0; };
  for (uint64_t turn = 1; leased.num_wrong + released.num_wrong == 0 && GoOn(start, seen_enough());
       ++turn) {
    const auto matched = channel.Match(*attachment, MatchOf(turn * kBatch % kPages, turn));
    ASSERT_TRUE(matched.ok()) << matched.status();
    locks_kvd::v1::ReleaseRequest release;
    *release.mutable_slots() = matched->slots();
    *release.mutable_generations() = matched->generations();
    std::vector<SealedVersion> pages;
    for (int i = 0; i < matched->slots_size(); ++i) {
      const auto page =
          recent.Find({.slot = matched->slots(i), .generation = matched->generations(i)});
      if (page.has_value()) pages.push_back(*page);
    }
    leased.Add(reader->Fetch(*attachment->fetcher, pages, absl::Seconds(10)));
    ASSERT_TRUE(channel.Release(*attachment, release).ok());
    given_up.Add(pages);
    released.Add(
        reader->Fetch(*attachment->fetcher, given_up.Sample(16, random), absl::Seconds(10)));
  }
  writing.request_stop();
  writing.join();
  EXPECT_EQ(leased.code, absl::StatusCode::kOk);
  EXPECT_EQ(leased.num_wrong, 0);
  EXPECT_EQ(leased.num_missing, 0);  // G2: what is leased stays
  EXPECT_GT(leased.num_exact, 1000);
  EXPECT_EQ(released.num_wrong, 0);
  EXPECT_GT(released.num_missing, 0);
  // Over ucx a session is served only what it leases.
  EXPECT_EQ(released.num_exact == 0, GetParam() == PathKind::kUcx);
}

// The comparison above is able to fail: a version is not its successor.
TEST_P(NoWrongBytesTest, AnotherVersionOfThePageIsToldApart) {
  auto worker = Connect(GetParam());
  ASSERT_NE(worker, nullptr);
  const auto versions = VersionsOf(0, 4, 1);
  const PutReport report = worker->Put(versions);
  auto sealed = NewPages(versions, report);
  ASSERT_EQ(sealed.size(), 4u) << report.first_failure;
  const std::shared_ptr<Attachment> attachment = worker->attachment();
  const auto units = static_cast<int64_t>(4 * worker->shape().units_per_page());
  EXPECT_EQ(worker->Fetch(*attachment->fetcher, sealed, absl::Seconds(10)).num_exact, units);
  auto other = sealed;
  for (SealedVersion& page : other) ++page.version.write;
  EXPECT_EQ(worker->Fetch(*attachment->fetcher, other, absl::Seconds(10)).num_wrong, units);
  std::swap(sealed[0].ref.slot, sealed[1].ref.slot);
  EXPECT_EQ(worker->Fetch(*attachment->fetcher, sealed, absl::Seconds(10)).num_exact, units / 2);
  for (SealedVersion& page : other) page.ref.generation += 2;
  EXPECT_EQ(worker->Fetch(*attachment->fetcher, other, absl::Seconds(10)).num_missing, units);
}

INSTANTIATE_TEST_SUITE_P(Paths, NoWrongBytesTest,
                         ::testing::Values(PathKind::kShared, PathKind::kUcx), PathParameterName);

}  // namespace
}  // namespace kvd::testing
