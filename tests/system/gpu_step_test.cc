// The decode step on a GPU over a real daemon's GPU arena, whose process has PID, IPC and mount
// namespaces of its own: captured and host-driven, on the peer and on the ucx path, each step
// beside exact attention.

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/system/gpu_worker.h"

namespace kvd::testing {
namespace {

constexpr int kRows = 3;
constexpr int kMaxTokens = 1024;

class GpuStepTest : public ::testing::TestWithParam<GpuWay> {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    auto daemon = StartGpuDaemon(GpuDaemonSpec());
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    auto worker = GpuWorker::Make(GpuOptions(daemon_->address(), GetParam().path),
                                  CoveringBatch(GetParam().mode, kRows, kMaxTokens));
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }
  void Put(const Prompt& prompt) {
    const auto report = worker_->Put(prompt);
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(report->num_new, prompt.num_pages) << report->first_failure;
  }
  int Join(const Prompt& prompt) {
    const auto row = worker_->Join(prompt);
    EXPECT_TRUE(row.ok()) << row.status();
    return row.ok() ? *row : 0;
  }
  void ExpectExact(int row) const {
    const Distance distance = worker_->FromAll(row);
    EXPECT_TRUE(distance.Within(GpuWorker::kTolerance))
        << "step " << worker_->num_steps() << " row " << row << ": o " << distance.o << ", lse "
        << distance.lse;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<GpuWorker> worker_;
};

TEST_P(GpuStepTest, EqualsFullAttentionWhileSequencesGrowJoinAndLeave) {
  const Prompt longer(1, 40, 5, 60), shorter(2, 17, 0, 60);
  ASSERT_NO_FATAL_FAILURE(Put(longer));
  ASSERT_NO_FATAL_FAILURE(Put(shorter));
  const int a = Join(longer);
  int b = Join(shorter);
  ASSERT_NE(a, b);
  const auto step = [&](std::vector<int> rows) {
    const absl::Status status = worker_->Step();
    ASSERT_TRUE(status.ok()) << status;
    for (int row = 0; row < kRows; ++row) {
      if (std::count(rows.begin(), rows.end(), row) != 0) {
        ExpectExact(row);
      } else {
        EXPECT_TRUE(worker_->IsPadding(row)) << row;
      }
    }
  };
  for (int i = 0; i < 20; ++i)
    ASSERT_NO_FATAL_FAILURE(step({a, b}));  // beyond a page boundary of either
  // The distances tell layers and heads apart: a mixed-up step would not pass.
  EXPECT_FALSE(worker_->FromAll(a, 1, 0).Within(.02));
  EXPECT_FALSE(worker_->FromAll(a, 0, 1).Within(.02));
  worker_->Leave(b);
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(step({a}));
  b = Join(shorter);
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(step({a, b}));
  worker_->Leave(a);
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(step({b}));
  const BatchReport& report = worker_->batch().report();
  EXPECT_EQ(report.failed, 0u);
  EXPECT_GT(report.hits, 0u);
}

TEST_P(GpuStepTest, CompletedPagesAreSealedInTheGpuArenaAndAttendedFromThere) {
  const Prompt prompt(3, 8, 3, 100);
  ASSERT_NO_FATAL_FAILURE(Put(prompt));
  const int row = Join(prompt);
  for (int i = 0; i < 90; ++i) {
    const absl::Status status = worker_->Step();
    ASSERT_TRUE(status.ok()) << status;
    ExpectExact(row);
  }
  for (int tries = 0; tries < 1000 && worker_->sequence(row).num_unsealed_pages() > 0; ++tries)
    absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(worker_->sequence(row).num_unsealed_pages(), 0);
  ASSERT_TRUE(worker_->Step().ok());  // takes over the last one
  ExpectExact(row);
}

INSTANTIATE_TEST_SUITE_P(Ways, GpuStepTest,
                         ::testing::Values(GpuWay{BatchMode::kCaptured, PathKind::kPeer},
                                           GpuWay{BatchMode::kHostDriven, PathKind::kPeer},
                                           GpuWay{BatchMode::kHostDriven, PathKind::kUcx}),
                         GpuWayName);

class GpuCapturedTest : public GpuStepTest {};
INSTANTIATE_TEST_SUITE_P(Ways, GpuCapturedTest,
                         ::testing::Values(GpuWay{BatchMode::kCaptured, PathKind::kPeer}),
                         GpuWayName);

TEST_P(GpuCapturedTest, TheDaemonHasNamespacesOfItsOwn) {
  if (OwnNamespaces().empty()) GTEST_SKIP() << "this machine allows no namespaces";
  for (const char* space : {"ipc", "mnt", "pid_for_children"}) {
    const auto of = [&](const std::string& process) {
      return std::filesystem::read_symlink(absl::StrCat("/proc/", process, "/ns/", space)).string();
    };
    EXPECT_NE(of("self"), of(absl::StrCat(daemon_->pid()))) << space;
  }
}

// Equal inputs on two batches of one client: the captured step and the host-driven one agree far
// closer than either is to the truth.
TEST_P(GpuCapturedTest, EqualsTheHostDrivenStep) {
  const Prompt prompt(4, 30, 7, 40);
  ASSERT_NO_FATAL_FAILURE(Put(prompt));
  auto other = GpuWorker::Make(GpuOptions(daemon_->address(), PathKind::kPeer),
                               CoveringBatch(BatchMode::kHostDriven, kRows, kMaxTokens));
  ASSERT_TRUE(other.ok()) << other.status();
  const int row = Join(prompt);
  const auto other_row = (*other)->Join(prompt);
  ASSERT_TRUE(other_row.ok()) << other_row.status();
  ASSERT_EQ(row, *other_row);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(worker_->Step().ok());
    ASSERT_TRUE((*other)->Step().ok());
    ExpectExact(row);
    const auto o = worker_->o(), other_o = (*other)->o();
    const auto heads = static_cast<size_t>(GpuGeometry().num_q_heads);
    for (size_t layer = 0; layer < 3; ++layer) {
      const size_t first = (layer * kRows + static_cast<size_t>(row)) * heads * 128;
      for (size_t j = first; j < first + heads * 128; ++j)
        ASSERT_NEAR(o[j], other_o[j], 1e-4) << "step " << i << ", " << j;
    }
  }
}

TEST_P(GpuCapturedTest, TenThousandReplaysTakeNoMoreGpuMemory) {
  constexpr int kReplays = 10000;
  worker_.reset();
  auto worker = GpuWorker::Make(GpuOptions(daemon_->address(), PathKind::kPeer),
                                CoveringBatch(BatchMode::kCaptured, 1, kReplays + 2048));
  ASSERT_TRUE(worker.ok()) << worker.status();
  worker_ = *std::move(worker);
  const Prompt prompt(5, 20, 0, 1);
  ASSERT_NO_FATAL_FAILURE(Put(prompt));
  const int row = Join(prompt);
  const auto replays = [&](int count) {
    for (int i = 0; i < count; ++i) {
      absl::Status status = worker_->step().Step();
      for (int tries = 0; status.code() == absl::StatusCode::kResourceExhausted && tries < 2000;
           ++tries) {
        absl::SleepFor(absl::Milliseconds(5));
        status = worker_->step().Step();
      }
      ASSERT_TRUE(status.ok()) << i << ": " << status;
    }
    worker_->step().Wait();
  };
  const auto free_bytes = [] {
    size_t free = 0, total = 0;
    KVD_CUDA_OK(cudaMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  };
  ASSERT_NO_FATAL_FAILURE(replays(500));  // what is made at first use
  const int64_t before = free_bytes();
  ASSERT_NO_FATAL_FAILURE(replays(kReplays));
  EXPECT_GE(free_bytes(), before - (int64_t{2} << 20));  // the driver's own granule
  EXPECT_EQ(worker_->sequence(row).num_tokens(), 320 + 500 + kReplays);
}

}  // namespace
}  // namespace kvd::testing
