// The thread that seals sequences' completed tail pages, off the critical path.
//
// Thread safety: safe. Wake makes no allocation and takes no lock, so that a step may call it.

#ifndef LOCKS_KVD_CLIENT_TAIL_SEALER_H_
#define LOCKS_KVD_CLIENT_TAIL_SEALER_H_

#include <semaphore.h>

#include <atomic>
#include <condition_variable>
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
};

class TailSealer {
 public:
  TailSealer();
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
  bool RunJobs();

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
