#include "client/tail_sealer.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "gtest/gtest.h"

namespace kvd {
namespace {

class CountingJob final : public SealJob {
 public:
  bool SealCompletePages() override {
    running = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(time_ms));
    running = false;
    return ++num_runs > num_failures;
  }
  int time_ms = 0;
  int num_failures = 0;
  std::atomic<int> num_runs{0};
  std::atomic<bool> running{false};
};

bool WaitFor(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

TEST(TailSealerTest, AWakeRunsEveryJobAndAFailedOneIsRetriedByItself) {
  TailSealer sealer;
  CountingJob good;
  CountingJob bad;
  bad.num_failures = 2;
  sealer.Add(&good);
  sealer.Add(&bad);
  EXPECT_EQ(good.num_runs, 0);
  sealer.Wake();
  EXPECT_TRUE(WaitFor([&] { return bad.num_runs >= 3; }));
  EXPECT_GE(good.num_runs, 1);
  sealer.Remove(&good);
  sealer.Remove(&bad);
}

TEST(TailSealerTest, RemoveWaitsForARunningJobAndItNeverRunsAgain) {
  TailSealer sealer;
  CountingJob job;
  job.time_ms = 50;
  sealer.Add(&job);
  sealer.Wake();
  ASSERT_TRUE(WaitFor([&] { return job.running.load(); }));
  sealer.Remove(&job);
  EXPECT_FALSE(job.running);
  const int runs = job.num_runs;
  sealer.Wake();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(job.num_runs, runs);
}

TEST(TailSealerTest, EndsWhileAJobKeepsFailing) {
  CountingJob job;
  job.num_failures = 1 << 20;
  TailSealer sealer;
  sealer.Add(&job);
  sealer.Wake();
  EXPECT_TRUE(WaitFor([&] { return job.num_runs > 0; }));
  sealer.Remove(&job);
}

}  // namespace
}  // namespace kvd
