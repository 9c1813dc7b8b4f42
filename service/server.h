// The daemon as one object: starts every part in order, watches over sessions, drains and stops.
//
// Start: arenas, sessions, data plane, control plane, health, metrics, ready file. Stop: the
// reverse. Thread safety: Drain, RequestExit and WaitForExit are safe; Start and the destructor are
// one thread's.

#ifndef LOCKS_KVD_SERVICE_SERVER_H_
#define LOCKS_KVD_SERVICE_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/config.pb.h"
#include "service/communicator.h"

namespace kvd {

struct DrainResult {
  bool clean = false;  // every fetch and lease ended within the limit
  uint32_t leases_left = 0;
};

class Server {
 public:
  // Serves when it returns. REQUIRES: `config` was checked (LoadConfig).
  // Errors: what could not be had and what to do; nothing keeps running.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const locks_kvd::v1::DaemonConfig& config);
  // The same with the library of bulk moves given, or why there is none, instead of the one that
  // cluster.nccl names.
  static absl::StatusOr<std::unique_ptr<Server>> Start(
      const locks_kvd::v1::DaemonConfig& config,
      absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> nccl);
  // Ends every session and gives all memory back.
  ~Server();

  // Addresses with their real ports, and the incarnation.
  const locks_kvd::v1::ReadyFile& ready() const;

  // Refuses new work, tells every session, and waits until fetches and leases have ended, at most
  // for `limit` (the configured one if zero). Once draining, always draining.
  DrainResult Drain(absl::Duration limit, const std::string& reason);
  // Makes WaitForExit return.
  void RequestExit();
  // Blocking: until RequestExit, by whomever.
  void WaitForExit();

 private:
  struct Parts;
  explicit Server(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_SERVER_H_
