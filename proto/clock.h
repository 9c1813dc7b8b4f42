// Monotonic time, real or moved by a test. Wall-clock jumps change nothing (guarantee G4).

#ifndef LOCKS_KVD_PROTO_CLOCK_H_
#define LOCKS_KVD_PROTO_CLOCK_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "absl/time/time.h"

namespace kvd {

// Time since an arbitrary start that never goes back. Thread safety: safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Duration Now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  absl::Duration Now() const override {
    return absl::FromChrono(std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::steady_clock::now().time_since_epoch()));
  }
};

class TestClock final : public Clock {
 public:
  absl::Duration Now() const override { return absl::Nanoseconds(now_ns_.load()); }
  void Advance(absl::Duration by) { now_ns_ += absl::ToInt64Nanoseconds(by); }

 private:
  std::atomic<int64_t> now_ns_{1};
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_CLOCK_H_
