// The daemon's part in its pool: who the members are, and bringing pages where they belong.
//
// Thread safety: safe. Made only if the configuration names members.

#ifndef LOCKS_KVD_SERVICE_CLUSTER_H_
#define LOCKS_KVD_SERVICE_CLUSTER_H_

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/config.pb.h"
#include "proto/membership.h"
#include "service/arena.h"
#include "service/metrics.h"
#include "service/migrator.h"

namespace kvd {

class Cluster {
 public:
  // Starts. A source that is not there yet (a file, a DNS name) is waited for in the background;
  // other problems are kInvalidArgument. `control_address`: with the real port. `nccl`: null if
  // there is none. `counters` must outlive it.
  static absl::StatusOr<std::unique_ptr<Cluster>> Make(
      const locks_kvd::v1::DaemonConfig& config, const std::string& control_address,
      std::vector<std::shared_ptr<Arena>> arenas, std::shared_ptr<const CommunicatorLibrary> nccl,
      MoveCounters* counters);
  ~Cluster();

  // See Migrator::Drain. Without a view of the pool every page is left.
  Migrator::DrainResult Drain(absl::Duration limit, const std::function<bool()>& go_on);

  // Null until the members are known.
  std::shared_ptr<const MembershipView> View() const;
  MembershipFigures Figures() const;
  const std::string& name() const { return migrator_options_.self; }

 private:
  Cluster() = default;
  absl::Status Join();
  void JoinLoop();

  MembershipOptions membership_options_;
  MigratorOptions migrator_options_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  MoveCounters* counters_ = nullptr;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool stopping_ = false;
  std::unique_ptr<Membership> membership_;
  std::unique_ptr<Migrator> migrator_;  // ends before the membership
  std::thread joining_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_CLUSTER_H_
