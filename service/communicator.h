// What a bulk move needs of a library that copies between two GPUs of two processes: NCCL, or a
// stand-in in tests.
//
// Why an interface: every way in which a library of this kind fails (joining that never ends, a
// transfer that hangs, an error on one side only, an abort that does not come back) must be
// produced at will, on machines without a GPU.
// Ownership: pieces are views; whoever begins a transfer keeps their memory until it is done, or
// until the communicator is quiet. Thread safety: a library is safe; a communicator is one
// thread's. Blocking: no call is meant to, but a library may be stuck in any of them, so nothing
// that must go on waits for one (service/move_link.h).

#ifndef LOCKS_KVD_SERVICE_COMMUNICATOR_H_
#define LOCKS_KVD_SERVICE_COMMUNICATOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/memory_space.h"

namespace kvd {

// Memory of an arena that is sent or received as a whole.
struct MovePiece {
  uint8_t* data;
  size_t bytes;
};

enum class MoveEnd {
  kSource,       // asks for the move, and sends
  kDestination,  // receives
  kAlone,        // the only end, to see whether the library works here: moves nothing
};

// One end. It joins, makes transfers one after the other, and finishes; each step is begun by one
// call and is over when Poll says kDone. A step that failed, or that nobody wants to wait for any
// longer, is ended by Abort: nothing but IsQuiet and the destructor may follow.
class Communicator {
 public:
  enum class Progress { kBusy, kDone };

  // REQUIRES: finished; or aborted and quiet.
  virtual ~Communicator() = default;
  // Errors: the step has failed; Abort.
  virtual absl::StatusOr<Progress> Poll() = 0;
  // Pieces of the two ends correspond in order and size.
  virtual absl::Status Send(std::span<const MovePiece> pieces) = 0;
  virtual absl::Status Receive(std::span<const MovePiece> pieces) = 0;
  // Gives the library's memory back in order.
  virtual absl::Status Finish() = 0;
  virtual void Abort() = 0;
  // After Abort: true once nothing can read or write a piece of this end any more.
  virtual bool IsQuiet() = 0;
};

class CommunicatorLibrary {
 public:
  virtual ~CommunicatorLibrary() = default;
  // Name and version; both ends must have the same.
  virtual std::string version() const = 0;
  // Name of the device that memory at `place` is on, the same in every process; two ends must be on
  // two devices. kFailedPrecondition if the library cannot move memory of that place.
  virtual absl::StatusOr<std::string> DeviceOf(const MemoryPlace& place) const = 0;
  // Name for a new communicator. Somebody must join by it.
  virtual absl::StatusOr<std::string> MakeId() const = 0;
  // Begins to join. `id` may come from another process: kInvalidArgument if it cannot be one.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Join(const std::string& id, MoveEnd end,
                                                             const MemoryPlace& place) const = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_COMMUNICATOR_H_
