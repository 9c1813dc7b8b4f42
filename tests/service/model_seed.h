// Seed of a model test: random, printed, and set by KVD_TEST_SEED to repeat a failure.

#ifndef LOCKS_KVD_TESTS_SERVICE_MODEL_SEED_H_
#define LOCKS_KVD_TESTS_SERVICE_MODEL_SEED_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace kvd::testing {

inline uint64_t ModelSeed() {
  const char* text = std::getenv("KVD_TEST_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
  std::printf("KVD_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SERVICE_MODEL_SEED_H_
