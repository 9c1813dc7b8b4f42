// G3 and G7 on the peer path: the daemon is killed while a graph that reads its GPU memory is
// replayed. The worker lives, learns which pages are gone, and attends nothing wrong; what comes
// back at the same address is a stranger.

#include <gtest/gtest.h>

#include <atomic>

#include "tests/system/gpu_worker.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

constexpr int kPages = 400;
constexpr int kBudget = 200;
constexpr int kMaxTokens = 12000;
constexpr int kLayersAndHeads = 6;
// Steps whose chosen units together are a million, all of which are proved to be right by what the
// step answers.
constexpr int kStepsBefore = 1000000 / (kBudget * kLayersAndHeads) + 1;

class GpuLossTest : public ::testing::TestWithParam<GpuWay> {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    auto daemon = StartGpuDaemon(GpuDaemonSpec());
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    ClientOptions options = GpuOptions(daemon_->address(), GetParam().path);
    options.on_event = [this](const ClientEvent& event) {
      if (event.kind == ClientEvent::Kind::kDaemonLost) ++num_lost_;
      if (event.kind == ClientEvent::Kind::kDaemonBack) ++num_back_;
    };
    BatchOptions batch = CoveringBatch(GetParam().mode, 1, kMaxTokens);
    // Some misses in each step: the mapped arena is read until the end.
    batch.step.budget = kBudget;
    batch.step.cache_ratio = 1;
    auto worker = GpuWorker::Make(std::move(options), batch);
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    held_ = Put();
    const auto row = worker_->Join(prompt_);
    ASSERT_TRUE(row.ok()) << row.status();
    ASSERT_EQ(*row, 0);
  }
  PutReport Put() {
    auto report = worker_->Put(prompt_);
    EXPECT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->num_failed, 0) << report->first_failure;
    return *std::move(report);
  }
  void ExpectRightUnits() const {
    ASSERT_EQ(worker_->WrongHeads(), 0) << "step " << worker_->num_steps();
  }
  // Pages that are attended once the daemon's are gone: the sink, and the window and what follows,
  // whose first page depends on how much had been sealed.
  bool IsExactOverWhatTheWorkerHolds() const {
    for (auto first = static_cast<int>(worker_->num_tokens(0) / 16); first >= kPages - 1; --first) {
      if (worker_->From(0, {0}, int64_t{first} * 16).Within(GpuWorker::kTolerance)) return true;
    }
    return false;
  }
  void LoseTheDaemon() {
    for (int i = 0; i < kStepsBefore; ++i) {
      const absl::Status status = worker_->Step();
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_NO_FATAL_FAILURE(ExpectRightUnits());
    }
    ASSERT_GT(worker_->batch().report().misses, 0u);
    daemon_->Kill();
    // Until the loss is known, and a while longer.
    absl::Status status;
    for (int i = 0; i < 200 && status.ok(); ++i) {
      status = worker_->Step();
      ASSERT_NO_FATAL_FAILURE(ExpectRightUnits());
      if (GetParam().mode == BatchMode::kCaptured) absl::SleepFor(absl::Milliseconds(20));
    }
    ASSERT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    ASSERT_TRUE(WaitFor([&] { return num_lost_ == 1; }));
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::atomic<int> num_lost_{0};
  std::atomic<int> num_back_{0};
  std::unique_ptr<GpuWorker> worker_;
  Prompt prompt_ = MarkedPrompt(7, kPages, 5, 3000);
  PutReport held_;
};

TEST_P(GpuLossTest, TheWorkerLivesReportsThePagesAndAttendsNothingWrong) {
  ASSERT_NO_FATAL_FAILURE(LoseTheDaemon());
  const std::vector<int> missing = worker_->sequence(0).MissingPages();
  EXPECT_GE(missing.size(), static_cast<size_t>(kPages));
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(worker_->Step().code(), absl::StatusCode::kUnavailable);
    ASSERT_NO_FATAL_FAILURE(ExpectRightUnits());
    EXPECT_TRUE(IsExactOverWhatTheWorkerHolds()) << "step " << worker_->num_steps();
  }
  EXPECT_FALSE(worker_->FromAll(0).Within(.02))
      << "the truth over the rest must differ from that over all pages";
  worker_->Leave(0);
  KVD_CUDA_OK(cudaDeviceSynchronize());
}

TEST_P(GpuLossTest, WhatComesBackAtTheAddressIsAStrangerUntilThePagesArePutAgain) {
  ASSERT_NO_FATAL_FAILURE(LoseTheDaemon());
  ASSERT_TRUE(daemon_->Restart().ok());
  ASSERT_TRUE(WaitFor([&] { return num_back_ == 1; }));
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(worker_->Step().code(), absl::StatusCode::kUnavailable);
    ASSERT_NO_FATAL_FAILURE(ExpectRightUnits());
    EXPECT_TRUE(IsExactOverWhatTheWorkerHolds()) << "step " << worker_->num_steps();
  }
  // Put again, page by page as they were: the same slots and generations in another process.
  const PutReport again = Put();
  EXPECT_EQ(again.num_new, kPages);
  const std::vector<int> missing = worker_->sequence(0).MissingPages();
  const auto repaired = worker_->sequence(0).Repair(missing);
  ASSERT_TRUE(repaired.ok()) << repaired.status();
  EXPECT_EQ(repaired->num_repaired, kPages);
  for (int i = 0; i < 10; ++i) {
    const absl::Status status = worker_->Step();
    // Pages that decoding made are nobody's to put again.
    EXPECT_TRUE(status.ok() || !repaired->still_missing.empty()) << status;
    ASSERT_NO_FATAL_FAILURE(ExpectRightUnits());
  }
  EXPECT_GT(worker_->batch().report().hits + worker_->batch().report().misses, 0u);
  EXPECT_EQ(worker_->batch().report().failed, 0u);
}

INSTANTIATE_TEST_SUITE_P(Ways, GpuLossTest,
                         ::testing::Values(GpuWay{BatchMode::kCaptured, PathKind::kPeer},
                                           GpuWay{BatchMode::kHostDriven, PathKind::kPeer},
                                           GpuWay{BatchMode::kHostDriven, PathKind::kUcx}),
                         GpuWayName);

}  // namespace
}  // namespace kvd::testing
