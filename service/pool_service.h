// gRPC handlers of the control plane: each checks what came, makes one call, and maps the outcome.
//
// Every call is checked in the same order: identity, session and incarnation, lengths, ranges. A
// caller's tenant must be its session's: a stolen token is useless without the certificate. Thread
// safety: safe.

#ifndef LOCKS_KVD_SERVICE_POOL_SERVICE_H_
#define LOCKS_KVD_SERVICE_POOL_SERVICE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/clock.h"
#include "proto/pool.grpc.pb.h"
#include "service/auth.h"
#include "service/metrics.h"
#include "service/move_receiver.h"
#include "service/sealer.h"
#include "service/session_stream.h"
#include "service/session_table.h"

namespace kvd {

// What Attach offers besides the arena.
struct PathOffers {
  std::optional<locks_kvd::v1::SharedOffer> shared;  // for arenas in host memory
  std::optional<locks_kvd::v1::PeerOffer> peer;      // for arenas on a GPU
  std::optional<locks_kvd::v1::UcxOffer> ucx;
  std::vector<std::string> report;  // every path with why or why not, for people
};

struct PoolOptions {
  // All of these outlive the service.
  SessionTable* sessions = nullptr;
  Sealer* sealer = nullptr;
  Metrics* metrics = nullptr;
  const Clock* clock = nullptr;
  MoveReceiver* moves = nullptr;  // null: pages come by UCX alone

  std::vector<std::shared_ptr<Arena>> arenas;
  bool tls = false;
  absl::Duration heartbeat = absl::Seconds(1);
  std::string version;
  uint32_t replicas = 1;
};

class PoolService final
    : public locks_kvd::v1::Pool::WithCallbackMethod_Session<locks_kvd::v1::Pool::Service> {
 public:
  explicit PoolService(PoolOptions options);
  // REQUIRES: the gRPC server has ended.
  ~PoolService() override = default;

  // Attach is refused with kUnavailable until this is called.
  void Open(PathOffers offers);
  // Refuses Attach and Reserve from now on and tells every session.
  void StartDraining(const std::string& reason);
  // Refuses Match and Lease too: fetches will be.
  void StopLeasing() { leasing_stopped_.store(true, std::memory_order_release); }
  bool draining() const { return draining_.load(std::memory_order_acquire); }
  // Ends streams whose session has ended, or that never named one. Called every now and then.
  void TickStreams();
  // Ends every stream: the daemon stops.
  void EndStreams();

  // The arenas' figures, also used for metrics.
  const std::vector<std::shared_ptr<Arena>>& arenas() const { return options_.arenas; }

  grpc::Status Attach(grpc::ServerContext* context, const locks_kvd::v1::AttachRequest* request,
                      locks_kvd::v1::AttachReply* reply) override;
  grpc::ServerBidiReactor<locks_kvd::v1::SessionPing, locks_kvd::v1::SessionEvent>* Session(
      grpc::CallbackServerContext* context) override;
  grpc::Status Detach(grpc::ServerContext* context, const locks_kvd::v1::DetachRequest* request,
                      locks_kvd::v1::DetachReply* reply) override;
  grpc::Status Match(grpc::ServerContext* context, const locks_kvd::v1::MatchRequest* request,
                     locks_kvd::v1::MatchReply* reply) override;
  grpc::Status Reserve(grpc::ServerContext* context, const locks_kvd::v1::ReserveRequest* request,
                       locks_kvd::v1::ReserveReply* reply) override;
  grpc::Status Seal(grpc::ServerContext* context, const locks_kvd::v1::SealRequest* request,
                    locks_kvd::v1::SealReply* reply) override;
  grpc::Status Lease(grpc::ServerContext* context, const locks_kvd::v1::LeaseRequest* request,
                     locks_kvd::v1::LeaseReply* reply) override;
  grpc::Status Release(grpc::ServerContext* context, const locks_kvd::v1::ReleaseRequest* request,
                       locks_kvd::v1::ReleaseReply* reply) override;
  grpc::Status Stats(grpc::ServerContext* context, const locks_kvd::v1::StatsRequest* request,
                     locks_kvd::v1::StatsReply* reply) override;
  grpc::Status Move(grpc::ServerContext* context, MoveReceiver::Stream* stream) override;

 private:
  // Identifies the caller, runs `work`, counts and times the call.
  grpc::Status Serve(Rpc rpc, const grpc::ServerContext& context,
                     const std::function<absl::Status(const PeerIdentity&)>& work);
  absl::StatusOr<std::shared_ptr<Arena>> FindArena(const std::string& tenant,
                                                   const std::string& model) const;
  absl::Status CheckFingerprints(const Arena& arena,
                                 const locks_kvd::v1::AttachRequest& request) const;
  absl::StatusOr<SessionHandle> FindSession(const PeerIdentity& peer,
                                            const locks_kvd::v1::SessionRef& session) const;
  absl::Status CheckNotDraining() const;
  absl::Status CheckLeasing() const;

  const PoolOptions options_;
  const absl::Duration started_;
  std::atomic<bool> draining_{false};
  std::atomic<bool> leasing_stopped_{false};
  std::atomic<bool> open_{false};
  PathOffers offers_;  // set once, before open_
  SessionStreams streams_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_POOL_SERVICE_H_
