// Checks of our own invariants, on in every build. Nothing that a peer or a user sends may reach
// one.

#ifndef LOCKS_KVD_KERNELS_CHECK_H_
#define LOCKS_KVD_KERNELS_CHECK_H_

#include <cstdio>
#include <cstdlib>

// Ends the process with the place and the condition if `condition` is false.
#define KVD_CHECK(condition)                                                             \
  do {                                                                                   \
    if (!(condition)) [[unlikely]] {                                                     \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

#if defined(__CUDACC__)
#define KVD_HD __host__ __device__
#else
#define KVD_HD
#endif

#endif  // LOCKS_KVD_KERNELS_CHECK_H_
