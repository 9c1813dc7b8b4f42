// Brings every sealed page to the daemons that own it by the pool's placement: one loop that serves
// joining (rebalance), leaving (drain) and replicas.
//
// How: a round lists the sealed pages, asks the placement who should hold each, and copies what is
// missing. A page that is owned elsewhere stays here, and is served, until its owner has published
// it and clients have had time to learn of that owner; then it is dropped unless somebody leases
// it. Nothing is remembered that a restart would lose: each daemon is the truth for its own slots.
// Thread safety: safe. One thread, which never runs in the data path; a UCX worker of its own.

#ifndef LOCKS_KVD_SERVICE_MIGRATOR_H_
#define LOCKS_KVD_SERVICE_MIGRATOR_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/clock.h"
#include "proto/grpc_channel.h"
#include "proto/membership.h"
#include "proto/placement.h"
#include "proto/ucx_worker.h"
#include "service/arena.h"
#include "service/metrics.h"
#include "service/peer_session.h"

namespace kvd {

struct MigratorOptions {
  std::string self;                         // this daemon's name among the members
  int replicas = 1;                         // daemons that hold each page; 1 or 2
  bool rebalance = true;                    // bring pages to daemons that join
  absl::Duration grace = absl::Minutes(1);  // how long a moved page is kept here too
  uint64_t bytes_per_second = 0;            // limit of copying except in a drain; 0: none
  absl::Duration interval = absl::Seconds(1);
  absl::Duration timeout = absl::Seconds(5);  // of one call to another daemon
  TlsFiles tls;
  UcxOptions ucx;
  std::shared_ptr<const CommunicatorLibrary> nccl;  // null: every move goes by UCX
  absl::Duration nccl_watchdog = absl::Seconds(10);
  uint64_t nccl_min_bytes = 0;  // smaller moves go by UCX
};

class Migrator {
 public:
  // `arenas`, `membership` and `metrics` must outlive it. Starts the thread.
  Migrator(MigratorOptions options, std::vector<std::shared_ptr<Arena>> arenas,
           const Membership* membership, MoveCounters* counters);
  // Stops in the middle of a round: what was published stays published.
  ~Migrator();

  struct DrainResult {
    uint64_t moved = 0;    // pages that another daemon holds now
    uint64_t left = 0;     // pages that none does
    absl::Status problem;  // the last one met
  };
  // Gives every page to its next owner; new ones are expected to be refused by now. Returns when
  // all are there, when nobody takes the rest, or after `limit`. `go_on` is asked between batches.
  // From then on rounds go on as a drain's.
  DrainResult Drain(absl::Duration limit, const std::function<bool()>& go_on);

 private:
  // What is known of the copies of the page in one slot, while its generation stands.
  struct Mark {
    uint64_t generation = 0;
    uint64_t holders[2] = {};  // hashes of the names of daemons that had it when last asked
    absl::Duration asked;
  };
  struct Wanted {
    size_t arena;
    SealedCopy page;
    MoveReason reason;
  };
  struct Plan {
    std::map<std::string, std::vector<Wanted>> copies;  // by destination
    std::vector<std::vector<PageLocation>> drops;       // [arena] moved a grace ago
  };

  struct Refusal {
    absl::Duration until;  // not tried before
    bool unreachable;      // gone or draining, as clients see it too; else full, or without such an
                           // arena
  };

  struct NcclOff {
    absl::Duration until;
    std::string reason;
  };

  void Loop();
  bool Stopping();
  void SleepBriefly();
  // The refusal of a member that stands, or null.
  const Refusal* RefusalOf(const std::string& name) const;
  Plan MakePlan(const MembershipView& view, bool draining);
  void PlanPage(size_t arena, const SealedCopy& page, const Placement& placement,
                const std::vector<Member>& members, bool draining, Plan* plan);
  // Copies one destination's part; kOk if all that is still here is there.
  absl::Status Execute(const Member& to, std::span<const Wanted> wanted, bool draining,
                       const std::function<bool()>& go_on);
  // A session for pages of one arena; by NCCL where that is possible and worth it.
  absl::StatusOr<std::unique_ptr<PeerSession>> OpenSession(const Member& to,
                                                           std::span<const Wanted> wanted,
                                                           const std::function<bool()>& go_on);
  size_t BatchPages(const PeerSession& session, const SlotLayout& slot, bool draining) const;
  absl::Status CopyRun(PeerSession& session, const std::string& to, std::span<const Wanted> run,
                       bool draining);
  // NCCL has failed or been refused: UCX is used for this destination for a while. Logged once a
  // reason.
  void LeaveNccl(const std::string& to, MoveReason reason, const absl::Status& why);
  absl::Status Round(bool draining, const std::function<bool()>& go_on);
  absl::Duration Believed() const { return 2 * options_.grace; }
  bool IsKnown(const Mark& mark, const SealedCopy& page, uint64_t name, bool draining) const;
  void Remember(const Wanted& wanted, uint64_t name);
  absl::StatusOr<UcxWorker*> Worker();
  void Complain(const std::string& to, const absl::Status& status);

  const MigratorOptions options_;
  const std::vector<std::shared_ptr<Arena>> arenas_;
  const Membership* const membership_;
  MoveCounters* const counters_;
  const SteadyClock clock_;

  std::mutex round_mutex_;  // one round at a time; guards what follows
  std::unique_ptr<UcxWorker> worker_;
  std::vector<std::vector<Mark>> marks_;    // [arena][slot]
  std::map<std::string, Refusal> refused_;  // by member
  std::map<std::string, absl::StatusCode> complained_;
  std::map<std::string, NcclOff> nccl_off_;  // by member
  uint64_t moved_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool stopping_ = false;
  std::atomic<bool> draining_{false};
  std::thread thread_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_MIGRATOR_H_
