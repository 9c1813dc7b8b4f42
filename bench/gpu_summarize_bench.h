// The part of gpu_kernel_bench that times summarize.

#ifndef LOCKS_KVD_BENCH_GPU_SUMMARIZE_BENCH_H_
#define LOCKS_KVD_BENCH_GPU_SUMMARIZE_BENCH_H_

#include "bench/report.h"

namespace kvd::bench {

// Adds the rates at which records are built; the limit is what `read_rate` (bytes a microsecond, of
// a plain read) gives for the bytes of the units. Returns how many of the rates' records differ
// from the reference's (named on stderr).
int AddSummarize(double read_rate, Report* report);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_GPU_SUMMARIZE_BENCH_H_
