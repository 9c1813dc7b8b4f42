// A KV trace without a model: the synthetic regimes of kernels/README.md, one a layer. Where
// weights cannot be had it lets the demo run; its figures shape tests, they are never a claim about
// models.
//
// Thread safety: pure function; the same arguments give the same trace on every machine.

#ifndef LOCKS_KVD_BENCH_SYNTHETIC_TRACE_H_
#define LOCKS_KVD_BENCH_SYNTHETIC_TRACE_H_

#include <string>

#include "absl/status/statusor.h"
#include "bench/kv_trace.h"

namespace kvd::bench {

// 6 layers (diffuse, needle, outlier token, sink, head offset, walk), Hk 2, G 3, D 64.
KvTrace MakeSyntheticTrace(int num_tokens, int num_steps);

// KvTrace::Load, or the synthetic trace of 6,144 tokens and 64 steps if `path` is "synthetic".
absl::StatusOr<KvTrace> LoadTrace(const std::string& path);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_SYNTHETIC_TRACE_H_
