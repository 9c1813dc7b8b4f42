// The part of gpu_kernel_bench that times the big kernels of a decode step one after the other, as a captured step
// enqueues them: what their launches cost beside the kernels themselves.

#ifndef LOCKS_KVD_BENCH_GPU_CHAIN_BENCH_H_
#define LOCKS_KVD_BENCH_GPU_CHAIN_BENCH_H_

#include "bench/report.h"

namespace kvd::bench {

// Adds the time of score, select, resolve and attend of one layer, in a graph of 32. Synthetic records; what the
// kernels give is checked elsewhere.
void AddChain(Report* report);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_GPU_CHAIN_BENCH_H_
