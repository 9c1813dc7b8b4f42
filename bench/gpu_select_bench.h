// The part of gpu_kernel_bench that times select and resolve.

#ifndef LOCKS_KVD_BENCH_GPU_SELECT_BENCH_H_
#define LOCKS_KVD_BENCH_GPU_SELECT_BENCH_H_

#include "bench/report.h"

namespace kvd::bench {

// Adds the figures of select and resolve; returns how many results differ from the reference's
// (each is named on stderr).
int AddSelectAndResolve(Report* report);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_GPU_SELECT_BENCH_H_
