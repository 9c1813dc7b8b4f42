// The ucx path from a daemon's GPU arena to a worker's GPU memory: straight between the two where
// UCX has CUDA, through pinned memory otherwise. Two processes, without namespaces of their own:
// cuda_ipc does not cross them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <thread>

#include "tests/support/gpu.h"
#include "tests/support/gpu_geometry.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

using ::testing::StartsWith;

constexpr uint64_t kPages = 400;
constexpr size_t kUnits = 8;  // of a page

KvGeometry Geometry() { return GpuGeometry(/*num_layers=*/4); }

// The parameter: UCX's transports at the worker; empty: its choice, which is cuda_ipc where it has
// it.
class GpuUcxTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
  }
  void Start(uint64_t num_slots) {
    DaemonSpec spec;
    spec.geometry = Geometry();
    spec.gpu = 0;
    spec.session_ttl_ms = 5000;
    spec.arena_bytes = (MakeSlotLayout(spec.geometry).slot_bytes() + (16 << 10)) * num_slots;
    auto daemon = DaemonProcess::Start(spec);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    ClientOptions options = OptionsFor({daemon_->address()}, PathKind::kUcx);
    options.geometry = Geometry();
    options.gpu = 0;
    auto worker = SystemWorker::Make(std::move(options), GetParam());
    ASSERT_TRUE(worker.ok()) << worker.status() << "\n" << daemon_->LogTail();
    worker_ = *std::move(worker);
    attachment_ = worker_->attachment();
    ASSERT_NE(attachment_, nullptr);
    std::printf("UCX %s: %s\n", UcxWorker::Version().c_str(), attachment_->path.memory.c_str());
    if (*GetParam() == '\0' && !worker_->ucx()->has_gpu_memory()) {
      EXPECT_THAT(attachment_->path.memory, StartsWith("through pinned memory: "));
      GTEST_SKIP() << "UCX " << UcxWorker::Version()
                   << " has no CUDA here: " << attachment_->path.memory;
    }
    EXPECT_THAT(
        attachment_->path.memory,
        StartsWith(*GetParam() == '\0' ? "between GPU memories: " : "through pinned memory: "));
  }
  Fetched Fetch(std::span<const SealedVersion> pages, absl::Duration deadline = absl::Seconds(10)) {
    return worker_->Fetch(*attachment_->fetcher, pages, deadline);
  }
  std::vector<SealedVersion> PutPages(uint64_t count) {
    const auto versions = VersionsOf(0, count, 1);
    held_ = worker_->Put(versions);
    EXPECT_EQ(held_.num_failed, 0) << held_.first_failure;
    return NewPages(versions, held_);
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<SystemWorker> worker_;
  std::shared_ptr<Attachment> attachment_;
  PutReport held_;  // leases
};

TEST_P(GpuUcxTest, ListsOfEveryLengthBringTheUnitsThatWerePut) {
  ASSERT_NO_FATAL_FAILURE(Start(kPages + 40));
  if (IsSkipped()) return;
  auto pages = PutPages(kPages);
  ASSERT_EQ(pages.size(), kPages);
  std::mt19937_64 random(5);
  for (const size_t count :
       {size_t{1}, size_t{2}, size_t{63}, size_t{64}, size_t{65}, size_t{130}, pages.size()}) {
    std::shuffle(pages.begin(), pages.end(), random);
    const Fetched fetched = Fetch(std::span(pages).first(count));
    EXPECT_EQ(fetched.code, absl::StatusCode::kOk);
    EXPECT_EQ(fetched.num_exact, static_cast<int64_t>(count * kUnits)) << count;
  }
  // The comparison can fail: the same bytes under another page's name are wrong.
  std::swap(pages[0].ref, pages[1].ref);
  EXPECT_EQ(Fetch(std::span(pages).first(3)).num_wrong, static_cast<int64_t>(2 * kUnits));
}

TEST_P(GpuUcxTest, SeveralThreadsFetchAtOnce) {
  ASSERT_NO_FATAL_FAILURE(Start(kPages + 40));
  if (IsSkipped()) return;
  const auto pages = PutPages(kPages);
  std::vector<std::thread> threads;
  std::atomic<int64_t> num_exact{0};
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t round = 0; round < 10; ++round) {
        num_exact += Fetch(std::span(pages).subspan((t * 10 + round) * 5, 200)).num_exact;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_exact, static_cast<int64_t>(4 * 10 * 200 * kUnits));
}

TEST_P(GpuUcxTest, MissingUnitsAreSaidAndTheOthersCome) {
  ASSERT_NO_FATAL_FAILURE(Start(kPages + 40));
  if (IsSkipped()) return;
  auto pages = PutPages(kPages);
  size_t num_missing = 0;
  for (size_t i = 150; i < pages.size(); i += 7, ++num_missing)
    pages[i].ref.generation += i % 2 == 0 ? 2 : 1;
  const Fetched fetched = Fetch(pages);
  EXPECT_EQ(fetched.code, absl::StatusCode::kOk);
  EXPECT_EQ(fetched.num_missing, static_cast<int64_t>(num_missing * kUnits));
  EXPECT_EQ(fetched.num_exact, static_cast<int64_t>((pages.size() - num_missing) * kUnits));
}

TEST_P(GpuUcxTest, ReadersOfAnArenaThatAlwaysEvictsGetSealedBytesOrNothing) {
  constexpr uint64_t kSlots = 40, kBatch = 8;
  ASSERT_NO_FATAL_FAILURE(Start(kSlots));
  if (IsSkipped()) return;
  std::mutex mutex;
  std::deque<SealedVersion> recent;  // guarded by mutex
  std::atomic<bool> stop{false};
  int64_t num_sealed = 0;
  std::thread writing([&] {
    std::deque<PutReport> held;
    for (uint64_t write = 1; !stop; ++write) {
      const auto versions = VersionsOf(write * kBatch % 64, kBatch, write);
      held.push_back(worker_->Put(versions));
      const auto sealed = NewPages(versions, held.back());
      if (held.size() > 2) held.pop_front();
      const std::lock_guard<std::mutex> lock(mutex);
      num_sealed += static_cast<int64_t>(sealed.size());
      recent.insert(recent.end(), sealed.begin(), sealed.end());
      while (recent.size() > 96) recent.pop_front();
    }
  });
  std::mt19937_64 random(1);
  Fetched total;
  const absl::Time start = absl::Now();
  while (total.num_wrong == 0 && (absl::Now() - start < absl::Seconds(3) ||
                                  ((total.num_exact < 1000 || total.num_missing < 1000) &&
                                   absl::Now() - start < absl::Seconds(30)))) {
    std::vector<SealedVersion> pages;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      for (int i = 0; i < 16 && !recent.empty(); ++i) {
        const size_t newest = std::min<size_t>(recent.size(), 16);
        pages.push_back(i % 2 == 0 ? recent[recent.size() - 1 - random() % newest]
                                   : recent[random() % recent.size()]);
      }
    }
    // Lists of live pages alone, and mixed ones.
    if (random() % 2 == 0 && !pages.empty()) pages.resize(1);
    if (!pages.empty()) total.Add(Fetch(pages));
  }
  stop = true;
  writing.join();
  EXPECT_EQ(total.code, absl::StatusCode::kOk);
  EXPECT_EQ(total.num_wrong, 0);
  EXPECT_GT(total.num_exact, 1000);
  EXPECT_GT(total.num_missing, 1000);
  EXPECT_GT(num_sealed, static_cast<int64_t>(4 * kSlots));
}

TEST_P(GpuUcxTest, AFrozenOrDeadDaemonEndsListsWithAnErrorAndNothingWrong) {
  ASSERT_NO_FATAL_FAILURE(Start(kPages + 40));
  if (IsSkipped()) return;
  const auto pages = PutPages(kPages);
  ASSERT_EQ(Fetch(pages).num_exact, static_cast<int64_t>(pages.size() * kUnits));
  daemon_->Freeze();
  const Fetched frozen = Fetch(pages, absl::Milliseconds(300));
  EXPECT_EQ(frozen.code, absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(frozen.num_exact, 0);
  daemon_->Thaw();
  EXPECT_EQ(Fetch(pages).num_wrong, 0);
  std::thread killing([this] {
    absl::SleepFor(absl::Milliseconds(20));
    daemon_->Kill();
  });
  Fetched fetched;
  for (int i = 0; i < 1000 && fetched.code == absl::StatusCode::kOk; ++i) {
    fetched = Fetch(pages, absl::Seconds(2));
    EXPECT_EQ(fetched.num_wrong, 0);
  }
  killing.join();
  EXPECT_THAT(fetched.code,
              ::testing::AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted,
                               absl::StatusCode::kDeadlineExceeded));
  KVD_CUDA_OK(cudaDeviceSynchronize());
}

INSTANTIATE_TEST_SUITE_P(Ways, GpuUcxTest, ::testing::Values("", "tcp"), [](const auto& way) {
  return std::string(*way.param == '\0' ? "BetweenGpuMemories" : "ThroughPinnedMemory");
});

}  // namespace
}  // namespace kvd::testing
