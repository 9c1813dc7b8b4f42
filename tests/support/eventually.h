// Waiting in tests for what another thread or process does.

#ifndef LOCKS_KVD_TESTS_SUPPORT_EVENTUALLY_H_
#define LOCKS_KVD_TESTS_SUPPORT_EVENTUALLY_H_

#include <chrono>
#include <thread>

namespace kvd::testing {

// False after 30 s, which only bound a failing test.
template <class Condition>
bool Eventually(const Condition& condition) {
  for (int i = 0; i < 3000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_EVENTUALLY_H_
