// How the GPU benchmarks time a kernel: many launches in one CUDA graph, so that a figure is what a
// launch costs in a captured step, gaps between launches included.

#ifndef LOCKS_KVD_BENCH_GPU_TIMING_H_
#define LOCKS_KVD_BENCH_GPU_TIMING_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "bench/report.h"
#include "tests/support/gpu.h"

namespace kvd::bench {

// Whether a figure of this name was asked for (--only; gpu_kernel_bench.cc).
bool IsWanted(const std::string& name);

// Median microseconds, over 25 replays, of one of the `num_launches` launches that `enqueue(i,
// stream)` makes. `before_replay`, if given, runs before each of them, untimed; 3 more replays come
// first.
inline double MedianUs(int num_launches, const std::function<void(int, cudaStream_t)>& enqueue,
                       const std::function<void()>& before_replay = nullptr) {
  const kvd::testing::Graph graph([&](cudaStream_t stream) {
    for (int i = 0; i < num_launches; ++i) enqueue(i, stream);
  });
  std::vector<double> us;
  for (int i = 0; i < 28; ++i) {
    if (before_replay) before_replay();
    const double ms = double{graph.ReplayMs()};
    if (i >= 3) us.push_back(ms * 1000 / num_launches);
  }
  return Median(us);
}

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_GPU_TIMING_H_
