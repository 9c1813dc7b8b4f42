// Figures of the daemon: counters that the data and control planes add to, and the Prometheus
// endpoint that folds them when it is asked.
//
// Why our own counters: prometheus-cpp's Histogram::Observe takes a mutex. Here an event is a few
// relaxed additions (one to a bucket, one to a sum), and everything else happens at scrape time.
// Names, labels and units: deploy/docs/metrics.md. Labels are bounded: no page keys, no sessions.
// Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_METRICS_H_
#define LOCKS_KVD_SERVICE_METRICS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/wire.h"
#include "service/arena.h"

namespace kvd {

// A count that only grows.
class Counter {
 public:
  void Add(uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// A level.
class Gauge {
 public:
  void Add(int64_t n) { value_.fetch_add(n, std::memory_order_relaxed); }
  void Set(int64_t n) { value_.store(n, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

// Upper bounds in seconds, the same for every latency.
inline constexpr std::array<double, 23> kLatencyBounds = {
    1e-6,   2e-6, 3e-6, 5e-6, 7.5e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 5e-5, 7.5e-5, 1e-4,
    1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3,   2e-3, 5e-3,   1e-2, 5e-2, 0.1,  1};

class LatencyHistogram {
 public:
  void Observe(absl::Duration latency);
  // Events in the bucket of each bound, then those above all of them. Not cumulative.
  std::array<uint64_t, kLatencyBounds.size() + 1> counts() const;
  double sum_seconds() const;

 private:
  std::array<std::atomic<uint64_t>, kLatencyBounds.size() + 1> counts_{};
  std::atomic<uint64_t> sum_ns_{0};
};

// Label values of fetch sizes: at most 64 KiB, 1 MiB, 16 MiB, more.
enum FetchSize { kLe64K, kLe1M, kLe16M, kMore, kNumFetchSizes };
constexpr FetchSize FetchSizeOf(uint64_t bytes) {
  if (bytes <= uint64_t{64} << 10) return kLe64K;
  if (bytes <= uint64_t{1} << 20) return kLe1M;
  return bytes <= uint64_t{16} << 20 ? kLe16M : kMore;
}

// Why something stale was refused.
enum StaleReason {
  kStaleGeneration,
  kStaleIncarnation,
  kStaleLayout,
  kStaleTenant,
  kNumStaleReasons
};

inline constexpr size_t kNumWireStatuses = static_cast<size_t>(WireStatus::kLate) + 1;

// What became of fetches over ucx. The mapped paths do not pass the daemon.
struct FetchCounters {
  std::array<Counter, kNumWireStatuses> requests;  // by outcome of the whole list
  Counter units_ok;
  Counter units_missing;
  Counter bytes;                                               // of units and records sent
  std::array<LatencyHistogram, kNumFetchSizes> seconds;        // arrived -> last piece sent
  std::array<LatencyHistogram, kNumFetchSizes> queue_seconds;  // arrived -> first unit copied
};

// Methods of the control plane, in the order of kRpcNames.
enum class Rpc {
  kAttach,
  kSession,
  kDetach,
  kMatch,
  kReserve,
  kSeal,
  kLease,
  kRelease,
  kStats,
  kDrain,
  kConfig,
  kCount
};
inline constexpr size_t kNumRpcs = static_cast<size_t>(Rpc::kCount);
inline constexpr size_t kNumCodes = 17;  // canonical codes
// Why a caller was turned away.
enum AuthFailure { kAuthNoIdentity, kAuthRole, kAuthTenant, kNumAuthFailures };
// Caps of a call or a session.
enum Limit { kLimitKeys, kLimitLeases, kLimitFull, kLimitSessions, kNumLimits };

struct Metrics {
  FetchCounters fetch;
  std::array<Counter, kNumStaleReasons> stale_rejects;
  Counter malformed_calls;  // control plane
  std::array<std::array<Counter, kNumCodes>, kNumRpcs> rpc_requests;
  std::array<LatencyHistogram, kNumRpcs> rpc_seconds;
  std::array<Counter, kNumAuthFailures> auth_failures;
  std::array<Counter, kNumLimits> limit_rejects;
  LatencyHistogram match_seconds;
  LatencyHistogram seal_seconds;
  LatencyHistogram summarize_seconds;
};

// What the endpoint asks for at every scrape: figures that others own.
struct MetricsSnapshot {
  struct ArenaFigures {
    std::string tenant;
    std::string model;
    uint64_t num_slots = 0;      // the canary's not counted
    uint64_t slot_bytes = 0;     // units of one slot
    uint64_t summary_bytes = 0;  // records of one slot
    ArenaStats stats;
  };
  std::vector<ArenaFigures> arenas;
  uint64_t sessions = 0;
  bool draining = false;
  uint64_t fetch_inflight = 0;
  uint64_t fetch_refused = 0;  // over a cap
  uint64_t fetch_malformed = 0;
  uint64_t ingest_bytes = 0;
  uint64_t ingest_refused_units = 0;
  uint64_t ingest_malformed = 0;
  uint64_t uds_malformed = 0;
  // Certificate file and when it expires, seconds since 1970.
  std::vector<std::pair<std::string, double>> cert_expiry_seconds;
};

struct MetricsIdentity {
  std::string version;
  std::string ucx;  // version and transports, or "none"
  uint32_t layout_version = 0;
  Incarnation incarnation = {};
  double start_time_seconds = 0;  // since 1970
};

// Serves /metrics.
class MetricsServer {
 public:
  // `snapshot` is called on the server's threads and must be safe; `metrics` and it outlive the
  // server. kUnavailable if the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Make(
      const std::string& address, const Metrics* metrics, MetricsIdentity identity,
      std::function<MetricsSnapshot()> snapshot);
  ~MetricsServer();

  uint16_t port() const;

 private:
  struct Impl;
  explicit MetricsServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_METRICS_H_
