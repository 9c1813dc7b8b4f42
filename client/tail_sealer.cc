#include "client/tail_sealer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <utility>

namespace kvd {
namespace {

// A seal that failed (a full or lost daemon) is tried again after this.
constexpr int kRetryMs = 100;

}  // namespace

TailSealer::TailSealer(std::function<void()> upkeep) : upkeep_(std::move(upkeep)) {
  sem_init(&work_, /*pshared=*/0, 0);
  thread_ = std::thread([this] { Loop(); });
}

TailSealer::~TailSealer() {
  stopping_.store(true);
  Wake();
  thread_.join();
  sem_destroy(&work_);
}

void TailSealer::Add(SealJob* job) {
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_.push_back(job);
}

void TailSealer::Remove(SealJob* job) {
  std::unique_lock<std::mutex> lock(mutex_);
  jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
  idle_.wait(lock, [this, job] { return running_ != job; });
}

bool TailSealer::WaitForWork(int milliseconds) {
  timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += milliseconds * 1'000'000L;
  until.tv_sec += until.tv_nsec / 1'000'000'000;
  until.tv_nsec %= 1'000'000'000;
  while (sem_clockwait(&work_, CLOCK_MONOTONIC, &until) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

void TailSealer::Loop() {
  using Clock = std::chrono::steady_clock;
  bool retry = false;
  Clock::time_point last_tick = Clock::now();
  while (!stopping_.load()) {
    const bool woken = WaitForWork(retry ? std::min(kRetryMs, kTickMs) : kTickMs);
    while (sem_trywait(&work_) == 0) {  // one round serves every wake so far
    }
    const bool tick = Clock::now() - last_tick >= std::chrono::milliseconds(kTickMs);
    if (!woken && !retry && !tick) continue;
    if (tick) last_tick = Clock::now();
    retry = !RunJobs(tick);
    if (tick && upkeep_ && !stopping_.load()) upkeep_();
  }
}

bool TailSealer::RunJobs(bool tick) {
  bool all_done = true;
  std::unique_lock<std::mutex> lock(mutex_);
  const std::vector<SealJob*> round = jobs_;
  for (SealJob* job : round) {
    if (std::find(jobs_.begin(), jobs_.end(), job) == jobs_.end()) continue;
    running_ = job;
    lock.unlock();
    const bool done = stopping_.load() || job->SealCompletePages();
    if (tick && !stopping_.load()) job->FollowMoves();
    lock.lock();
    all_done = all_done && done;
    running_ = nullptr;
    idle_.notify_all();
  }
  return all_done;
}

}  // namespace kvd
