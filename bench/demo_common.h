// What the two programs of the demo share: the trace's model as a pool arena, and a client of it.
//
// Thread safety: pure functions.

#ifndef LOCKS_KVD_BENCH_DEMO_COMMON_H_
#define LOCKS_KVD_BENCH_DEMO_COMMON_H_

#include <string>
#include <vector>

#include "bench/kv_trace.h"
#include "client/client_options.h"
#include "kernels/gather.h"

namespace kvd::bench {

inline constexpr int kDemoPageTokens = 16;
inline constexpr int kDemoRank = 8;

// A daemon's configuration for the trace, as protobuf text: one arena that holds the prompt several
// times.
std::string DemoDaemonConfig(const KvTrace& trace, const std::string& metric_path,
                             const std::string& socket_dir, const std::string& ready_file);

// Options of a client of those daemons. `daemons`: host:port, comma separated.
ClientOptions DemoClientOptions(const KvTrace& trace, const std::string& daemons,
                                const std::string& name);

// The prompt's K and V as an engine would register them, one entry a layer.
std::vector<EngineKv> DemoLayers(const KvTrace& trace);

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_DEMO_COMMON_H_
