// What a Server is made of. Internal to server*.cc: server.cc starts, drains and stops it,
// server_upkeep.cc watches over it.
//
// Thread safety: the parts are set up by Start before any thread of theirs runs; what changes
// afterwards is atomic or guarded by `mutex`.

#ifndef LOCKS_KVD_SERVICE_SERVER_PARTS_H_
#define LOCKS_KVD_SERVICE_SERVER_PARTS_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/clock.h"
#include "service/admin_service.h"
#include "service/cluster.h"
#include "service/data_plane.h"
#include "service/health.h"
#include "service/metrics.h"
#include "service/move_receiver.h"
#include "service/pool_service.h"
#include "service/sealer.h"
#include "service/server.h"
#include "service/session_table.h"
#include "service/slowlog.h"

namespace kvd {

struct Server::Parts {
  Parts(const locks_kvd::v1::DaemonConfig& c,
        absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> library)
      : config(c), nccl(std::move(library)) {}
  ~Parts();

  absl::Status Start();
  absl::Status StartControl();
  absl::Status StartOutside();
  MetricsSnapshot Snapshot() const;
  locks_kvd::v1::DaemonConfig ConfigInForce() const;
  void UpkeepLoop();
  void WatchLoop();
  bool SleepUnlessStopping(absl::Duration time) const;
  void CheckCertificates();
  uint32_t CountLeases() const;
  bool IsBusy() const;
  PathOffers Offers() const;
  void LogStart() const;

  const locks_kvd::v1::DaemonConfig config;
  // or why bulk moves go by UCX
  const absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> nccl;
  const SteadyClock clock;
  const Incarnation incarnation = RandomBytes16();
  Metrics metrics;
  Slowlog slowlog;
  locks_kvd::v1::ReadyFile ready;
  bool ready_file_written = false;

  // In the order of their start; destroyed by ~Parts in the reverse one.
  std::vector<std::shared_ptr<Arena>> arenas;
  std::unique_ptr<SessionTable> sessions;
  std::unique_ptr<Sealer> sealer;
  std::unique_ptr<MoveReceiver> moves;
  std::unique_ptr<PoolService> pool;
  std::unique_ptr<AdminService> admin;
  std::unique_ptr<grpc::Server> control;
  std::unique_ptr<DataPlane> data_plane;
  std::unique_ptr<Cluster> cluster;  // null: this daemon is alone
  std::unique_ptr<HealthServer> health;
  std::unique_ptr<MetricsServer> metrics_server;
  std::thread upkeep;
  std::thread watch;
  std::atomic<int64_t> last_tick_ns{0};
  std::atomic<bool> serving{false};  // every part above is there

  mutable std::mutex mutex;                 // guards what follows
  mutable std::condition_variable changed;  // stopping or exit_requested
  bool stopping = false;
  bool exit_requested = false;
  std::vector<std::pair<std::string, absl::Time>> certificates;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_SERVER_PARTS_H_
