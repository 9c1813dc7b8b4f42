// The destination's end of bulk moves: one call of Pool.Move is one move, with one communicator.
//
// Right because: it receives only into slots that the caller's session has reserved and not sealed,
// and each slot stays pinned until the communicator cannot write to it any more, however the move
// ends (MoveLink); a slot whose library never lets go is never used again. What has come is a page
// only once the seal has proved its checksums.
// Bounds: kMaxMoves at once, those included that are being aborted; a call that names no session
// within a session TTL, or whose session ends, is cancelled.
// Thread safety: safe.

#ifndef LOCKS_KVD_SERVICE_MOVE_RECEIVER_H_
#define LOCKS_KVD_SERVICE_MOVE_RECEIVER_H_

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/clock.h"
#include "proto/pool.grpc.pb.h"
#include "service/communicator.h"
#include "service/move_link.h"
#include "service/session_stream.h"
#include "service/session_table.h"

namespace kvd {

class MoveReceiver {
 public:
  static constexpr size_t kMaxMoves = 8;

  struct Options {
    // Both outlive it.
    const SessionTable* sessions = nullptr;
    const Clock* clock = nullptr;
    absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> library;  // or why there is none
    absl::Duration watchdog = absl::Seconds(10);
  };
  explicit MoveReceiver(Options options) : options_(std::move(options)) {}
  // REQUIRES: every call has ended. See ~MoveLink for communicators that hang.
  ~MoveReceiver();

  using Stream = grpc::ServerReaderWriter<locks_kvd::v1::MoveReply, locks_kvd::v1::MoveRequest>;
  using FindSession =
      std::function<absl::StatusOr<SessionHandle>(const locks_kvd::v1::SessionRef&)>;
  // One call, from its first message to its end. kFailedPrecondition: there can be no communicator
  // of these two, and why; kResourceExhausted: too many moves; kPermissionDenied: not a mover's
  // session; kInvalidArgument: what no correct daemon sends; kNotFound, kFailedPrecondition: no
  // such reservation, or it is being sealed; kDeadlineExceeded, kUnavailable: the communicator;
  // kCancelled: the caller.
  absl::Status Serve(grpc::ServerContext* context, Stream* stream, const FindSession& find);

  // Cancels calls whose session has ended. Called every now and then.
  void Tick();
  // Cancels every call and refuses new ones: the daemon stops.
  void EndAll();
  // Under way, or being aborted.
  size_t num_moves() const;

 private:
  struct Move {
    grpc::ServerContext* context;
    absl::Duration opened;
    std::optional<SessionKey> session;
  };
  // Takes a place among the moves, for as long as it lives.
  class Place;

  absl::Status CheckWilling(const locks_kvd::v1::MoveRequest::Hello& hello,
                            const Arena& arena) const;
  absl::Status ServeSession(grpc::ServerContext* context, Stream* stream,
                            const SessionHandle& session);
  absl::Status ServeLink(grpc::ServerContext* context, Stream* stream, const SessionHandle& session,
                         MoveLink* link);
  void Reap();

  const Options options_;
  mutable std::mutex mutex_;  // guards what follows
  bool ending_ = false;
  std::list<Move> moves_;
  std::vector<std::unique_ptr<MoveLink>> aborted_;  // not ended yet
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_MOVE_RECEIVER_H_
