// The thread that seals sequences' completed tail pages, off the critical path.
//
// Thread safety: safe. Wake makes no allocation and takes no lock, so that a step may call it.

#ifndef LOCKS_KVD_CLIENT_TAIL_SEALER_H_
#define LOCKS_KVD_CLIENT_TAIL_SEALER_H_

#include <semaphore.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvd {

// A sequence, as the sealer sees it.
class SealJob {
 public:
  virtual ~SealJob() = default;
  // Sealer's thread. Seals what is complete; false if something is left (it failed, and is
  // retried).
  virtual bool SealCompletePages() = 0;
  // Sealer's thread, every kTick. Follows pages to where they have moved.
  virtual void FollowMoves() {}
};

class TailSealer {
 public:
  static constexpr int kTickMs = 200;

  // `upkeep` runs on the sealer's thread every kTick; may be empty.
  explicit TailSealer(std::function<void()> upkeep = {});
  ~TailSealer();
  TailSealer(const TailSealer&) = delete;
  TailSealer& operator=(const TailSealer&) = delete;

  void Add(SealJob* job);
  // Returns when the job is not and will not be running. Blocking: up to the time of one job.
  void Remove(SealJob* job);
  // Some job has work.
  void Wake() { sem_post(&work_); }

 private:
  void Loop();
  // False if the time came first.
  bool WaitForWork(int milliseconds);
  bool RunJobs(bool tick);

  const std::function<void()> upkeep_;
  sem_t work_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // of what follows
  std::condition_variable idle_;
  std::vector<SealJob*> jobs_;
  SealJob* running_ = nullptr;
  std::thread thread_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_TAIL_SEALER_H_
