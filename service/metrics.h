// Figures of the daemon: what its planes count, and the HTTP endpoint that shows it.
//
// An event is a few relaxed additions; everything else happens when somebody asks. Names, types,
// labels and meanings are one table in service/metrics_table.cc, which deploy/docs/metrics.md is
// made from. To add a metric: a row there, its source in Metrics or MetricsSnapshot, one line in an
// Add... function of that file. Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_METRICS_H_
#define LOCKS_KVD_SERVICE_METRICS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/membership.h"
#include "proto/metrics_text.h"
#include "proto/wire.h"
#include "service/arena.h"

namespace kvd {

inline constexpr char kDaemonPrefix[] = "locks_kvd_";
// Every family that a daemon can show.
std::span<const MetricInfo> DaemonMetrics();

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
  kStaleLease,
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

// Why a page was copied to another daemon.
enum class MoveReason { kDrain, kRebalance, kReplica };
inline constexpr size_t kNumMoveReasons = 3;
// How its bytes went there.
enum class Carrier { kUcx, kNccl };
inline constexpr size_t kNumCarriers = 2;

// Copies that this daemon made at others.
struct MoveCounters {
  using ByReason = std::array<Counter, kNumMoveReasons>;
  std::array<ByReason, kNumCarriers> pages;
  std::array<ByReason, kNumCarriers> bytes;  // units and records
  // ucx: rounds that a destination ended; nccl: moves that UCX went on with
  std::array<ByReason, kNumCarriers> aborted;
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
  kMove,
  kDrain,
  kConfig,
  kVerify,
  kPages,
  kSlowlog,
  kLogLevel,
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
  MoveCounters moves;
  std::array<Counter, kNumStaleReasons> stale_rejects;
  Counter malformed_calls;  // control plane
  std::array<std::array<Counter, kNumCodes>, kNumRpcs> rpc_requests;
  std::array<LatencyHistogram, kNumRpcs> rpc_seconds;
  std::array<Counter, kNumAuthFailures> auth_failures;
  std::array<Counter, kNumLimits> limit_rejects;
  LatencyHistogram match_hit_seconds;   // at least one page was resident
  LatencyHistogram match_miss_seconds;  // none was
  LatencyHistogram seal_seconds;
  LatencyHistogram summarize_seconds;
  LatencyHistogram upkeep_stalls;  // by how much a turn of the upkeep loop came late
  // Units and records of Admin.Verify: compared with their checksums, and of these wrong.
  Counter verify_checks;
  Counter verify_failures;
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
  bool live = true;  // the upkeep loop turns
  bool draining = false;
  uint64_t fetch_inflight = 0;
  uint64_t fetch_refused = 0;  // over a cap
  uint64_t fetch_malformed = 0;
  uint64_t ingest_bytes = 0;
  uint64_t ingest_refused_bytes = 0;
  uint64_t ingest_malformed = 0;
  uint64_t uds_malformed = 0;
  const LatencyHistogram* ucx_stalls = nullptr;  // null without UCX
  // The pool that the daemon belongs to; none: it is alone.
  MembershipFigures membership;  // nothing counted if the daemon is alone
  uint64_t members = 0;
  // Certificate file and when it expires, seconds since 1970.
  std::vector<std::pair<std::string, double>> cert_expiry_seconds;
};

struct MetricsIdentity {
  std::string version;
  std::string commit;  // short hash, or "unknown"
  std::string ucx;     // version and transports, or "none"
  uint32_t layout_version = 0;
  Incarnation incarnation = {};
  double start_time_seconds = 0;  // since 1970
};

// Answer to GET /metrics, and to GET /metrics/summary, which is for people.
std::string MetricsPage(const Metrics& metrics, const MetricsIdentity& identity,
                        const MetricsSnapshot& snapshot);
std::string SummaryPage(const Metrics& metrics, const MetricsIdentity& identity,
                        const MetricsSnapshot& snapshot);

// Serves /metrics, /metrics/summary and /healthz: 200 while the daemon is live, else 503.
//
// Plain HTTP, no files, GET only; nothing of a request but its path is used.
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
