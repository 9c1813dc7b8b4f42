// Fetches from a daemon's GPU arena without a decode step: kernels over the mapped memory, the ucx
// path into GPU memory, and the copies that bound them.
//
// Thread safety: one thread. Only built with KVD_CUDA. Every figure is of lists that were checked.

#ifndef LOCKS_KVD_BENCH_DECODE_FETCH_H_
#define LOCKS_KVD_BENCH_DECODE_FETCH_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "bench/decode_pool.h"

namespace kvd::bench {

// Microseconds a layer of LaunchFetchPages in one graph of `num_layers` layers, each of which
// misses `units_per_head` units of every KV head. Lists differ so that nothing is read from the L2.
absl::StatusOr<double> FetchPagesUs(PoolSession& session, const DecodePool& pool, int num_pages,
                                    int units_per_head, int num_layers);

// Microseconds of LaunchGatherUnits for `num_units` scattered units, the list on the device.
absl::StatusOr<double> GatherUs(PoolSession& session, const DecodePool& pool, int num_pages,
                                int num_units);

// Microseconds of one list of `num_units` scattered units through the session's fetcher into GPU
// memory, by the host's clock: Start and Wait.
absl::StatusOr<double> FetcherUs(PoolSession& session, const DecodePool& pool, int num_pages,
                                 int num_units, int repetitions);

// GB/s, bytes counted once: a copy of 1 GiB from memory of `from_gpu` to memory of `to_gpu`.
double CopyGbPerS(int to_gpu, int from_gpu);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_DECODE_FETCH_H_
