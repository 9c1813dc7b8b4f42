#include "client/tail_sealer.h"

#include <algorithm>
#include <cerrno>
#include <ctime>

namespace kvd {
namespace {

// A seal that failed (a full or lost daemon) is tried again after this.
constexpr long kRetryNanoseconds = 100'000'000;

}  // namespace

TailSealer::TailSealer() {
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

void TailSealer::Loop() {
  bool retry = false;
  while (!stopping_.load()) {
    if (retry) {
      timespec until;
      clock_gettime(CLOCK_MONOTONIC, &until);
      until.tv_nsec += kRetryNanoseconds;
      until.tv_sec += until.tv_nsec / 1'000'000'000;
      until.tv_nsec %= 1'000'000'000;
      while (sem_clockwait(&work_, CLOCK_MONOTONIC, &until) != 0 && errno == EINTR) {
      }
    } else {
      while (sem_wait(&work_) != 0 && errno == EINTR) {
      }
    }
    while (sem_trywait(&work_) == 0) {  // one round serves every wake so far
    }
    retry = !RunJobs();
  }
}

bool TailSealer::RunJobs() {
  bool all_done = true;
  std::unique_lock<std::mutex> lock(mutex_);
  const std::vector<SealJob*> round = jobs_;
  for (SealJob* job : round) {
    if (std::find(jobs_.begin(), jobs_.end(), job) == jobs_.end()) continue;
    running_ = job;
    lock.unlock();
    const bool done = stopping_.load() || job->SealCompletePages();
    lock.lock();
    all_done = all_done && done;
    running_ = nullptr;
    idle_.notify_all();
  }
  return all_done;
}

}  // namespace kvd
