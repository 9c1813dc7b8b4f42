// The daemon's data plane as one object: which paths are offered, their servers, and their figures.
//
// Thread safety: safe once made.

#ifndef LOCKS_KVD_SERVICE_DATA_PLANE_H_
#define LOCKS_KVD_SERVICE_DATA_PLANE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/config.pb.h"
#include "proto/ucx_worker.h"
#include "service/descriptor_server.h"
#include "service/fetch_server.h"
#include "service/ingest_server.h"
#include "service/metrics.h"
#include "service/pool_service.h"
#include "service/session_table.h"
#include "service/slowlog.h"

namespace kvd {

// The daemon's UCX as the configuration has it: its data plane's and its mover's.
UcxOptions UcxOptionsOf(const locks_kvd::v1::DaemonConfig& config);

class DataPlane {
 public:
  // Starts what the configuration asks for; what was asked for and is not there is an error.
  // `control_port` names the socket, so that the daemons of a host can share a directory.
  // `sessions`, `metrics` and `slowlog` outlive it.
  static absl::StatusOr<std::unique_ptr<DataPlane>> Make(const locks_kvd::v1::DaemonConfig& config,
                                                         uint16_t control_port,
                                                         SessionTable* sessions, Metrics* metrics,
                                                         Slowlog* slowlog);
  ~DataPlane();

  PathOffers Offers() const;
  std::string UcxDescription() const;
  const std::string& socket_path() const { return socket_path_; }
  uint32_t num_in_flight() const { return fetch_ == nullptr ? 0 : fetch_->num_in_flight(); }
  // Refuses new fetches over UCX.
  void Drain();
  void Fill(MetricsSnapshot* snapshot) const;

 private:
  class Observer;
  DataPlane() = default;
  absl::Status StartUcx(const locks_kvd::v1::DaemonConfig& config, SessionTable* sessions,
                        Metrics* metrics, Slowlog* slowlog);
  absl::Status StartSocket(const std::string& directory, uint16_t control_port,
                           const SessionTable* sessions);

  std::string socket_path_;  // empty: neither a shared nor a peer path
  std::string host_id_;
  int gpu_ = -1;  // of the arenas on a GPU; -1: there are none
  bool all_on_gpu_ = false;
  std::string gpu_uuid_;
  // Destroyed from the last to the first.
  std::unique_ptr<UcxWorker> worker_;
  std::unique_ptr<Observer> observer_;
  std::unique_ptr<FetchServer> fetch_;
  std::unique_ptr<IngestServer> ingest_;
  std::unique_ptr<DescriptorServer> descriptors_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_DATA_PLANE_H_
