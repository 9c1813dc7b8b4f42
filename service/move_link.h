// One end of a communicator with the thread that alone may call it, and the watchdog of every step.
//
// Why a thread: a library of this kind may hang in any call, its abort included. Here only this
// thread does; whoever waits for it stops waiting at the watchdog's limit, and what the transfer
// may still touch is kept until the library has let go of it, for ever if need be.
// Thread safety: Abort and ended are safe; everything else is one caller's. Blocking: Wait, up to
// the watchdog's limit and kStuckAfter; the destructor, up to kEndLimit.

#ifndef LOCKS_KVD_SERVICE_MOVE_LINK_H_
#define LOCKS_KVD_SERVICE_MOVE_LINK_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "service/communicator.h"

namespace kvd {

class MoveLink {
 public:
  // What a transfer uses; dropped when the communicator cannot touch it any more.
  using Keep = std::shared_ptr<void>;
  // A call that takes this much longer than the watchdog allows does not come back.
  static constexpr absl::Duration kStuckAfter = absl::Seconds(1);
  static constexpr absl::Duration kEndLimit = absl::Seconds(5);

  struct Options {
    std::shared_ptr<const CommunicatorLibrary> library;
    std::string id;
    MoveEnd end = MoveEnd::kSource;
    MemoryPlace place;
    absl::Duration watchdog = absl::Seconds(10);
    Keep memory;  // of all pieces; outlives the communicator
  };
  // Begins to join: the first step to wait for.
  explicit MoveLink(Options options);
  // Aborts unless it has finished. What is not quiet by kEndLimit is left to the thread, which then
  // keeps it for ever: destroy a link whose slots are to come back only when it has ended.
  ~MoveLink();
  MoveLink(const MoveLink&) = delete;
  MoveLink& operator=(const MoveLink&) = delete;

  // Each begins the next step. REQUIRES: the step before was waited for and is good.
  void Send(std::vector<MovePiece> pieces, Keep keep);
  void Receive(std::vector<MovePiece> pieces, Keep keep);
  void Finish();
  // Until the step is done. `go_on` is asked every few milliseconds: if it is not OK, the
  // communicator is aborted and that is the result. Errors: kDeadlineExceeded by the watchdog; else
  // what the library says. After any of them the communicator is being aborted.
  absl::Status Wait(const std::function<absl::Status()>& go_on);
  // How the step has failed, if it has by now.
  absl::Status Problem() const;
  // Returns at once.
  void Abort(const absl::Status& why);
  // The communicator is gone: nothing of it touches any memory.
  bool ended() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_MOVE_LINK_H_
