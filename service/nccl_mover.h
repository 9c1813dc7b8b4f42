// The carrier for bulk moves between arenas on two GPUs: NCCL copies from slot to slot, without
// staging memory and without the hosts' cores.
//
// How: over one stream of calls (Pool.Move) the two daemons agree that it can be, join a
// communicator of two that lives for one destination's part of a round, and then take turns: which
// reservations, "receiving", the bytes by NCCL, "received". Whoever fails or is told to stop aborts
// its end and ends the stream, by which the other one learns and aborts too. After an abort every
// page is still here, and the reservations there end with the session. See service/mover.h; the
// other end is service/move_receiver.h.

#ifndef LOCKS_KVD_SERVICE_NCCL_MOVER_H_
#define LOCKS_KVD_SERVICE_NCCL_MOVER_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "proto/pool.grpc.pb.h"
#include "service/arena.h"
#include "service/communicator.h"
#include "service/move_link.h"
#include "service/mover.h"

namespace kvd {

class NcclMover final : public Mover {
 public:
  struct Options {
    locks_kvd::v1::Pool::Stub* stub = nullptr;  // of the destination; must outlive the mover
    locks_kvd::v1::SessionRef session;          // a mover's
    std::shared_ptr<Arena> arena;
    std::shared_ptr<const CommunicatorLibrary> library;
    absl::Duration watchdog = absl::Seconds(10);
    std::function<bool()> go_on;  // asked while it waits: false aborts
  };
  // Asks and joins. kFailedPrecondition, kUnimplemented: these two daemons cannot, and why.
  // kUnavailable, kDeadlineExceeded: joining failed or did not end. kCancelled: go_on.
  static absl::StatusOr<std::unique_ptr<NcclMover>> Make(Options options);
  // Finishes in order if nothing has failed, for at most the watchdog's limit.
  ~NcclMover() override;

  Carrier carrier() const override { return Carrier::kNccl; }
  // REQUIRES: at most kMaxMovedPages; no call before has failed. Errors: as Make, and what the
  // destination says.
  absl::StatusOr<std::vector<uint64_t>> Move(std::span<const MovedPage> pages) override;

 private:
  class Call;
  explicit NcclMover(Options options);
  absl::Status Agree();
  absl::Status MoveBytes(std::span<const MovedPage> pages);
  absl::Status GoOn() const;
  // Ends both sides.
  absl::Status Failed(const absl::Status& why);

  const Options options_;
  std::unique_ptr<Call> call_;
  std::unique_ptr<MoveLink> link_;
  bool failed_ = false;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_NCCL_MOVER_H_
