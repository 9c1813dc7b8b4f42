// A communicator library without GPUs, for tests of bulk moves: two ends in one process copy from
// arena to arena in host memory, and every way of failing is a switch that can be set for either
// end.
//
// As with the real one, an end that aborts tells the other nothing: that one waits for ever.
// Thread safety: as CommunicatorLibrary; switches may be set at any time.

#ifndef LOCKS_KVD_TESTS_SERVICE_STAND_IN_COMMUNICATOR_H_
#define LOCKS_KVD_TESTS_SERVICE_STAND_IN_COMMUNICATOR_H_

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/communicator.h"

namespace kvd::testing {

// Of one end; every communicator that its library makes has them.
struct StandInFaults {
  std::atomic<bool> host_memory{false};  // the library cannot move this memory
  std::atomic<bool> never_joins{false};
  std::atomic<bool> never_moves{false};
  std::atomic<bool> alone{false};        // joins without another end
  std::atomic<bool> fails{false};        // an error at the next look
  std::atomic<bool> stuck{false};        // a call does not come back while this is set
  std::atomic<bool> damages{false};      // one bit of what it receives
  std::atomic<bool> never_quiet{false};  // writes on after an abort while this is set
  std::atomic<int> slow_looks{0};        // that a step takes at least
};

struct StandInCounts {
  std::atomic<int> joined{0};
  std::atomic<int> receiving{0};   // batches begun
  std::atomic<uint64_t> bytes{0};  // received
  std::atomic<int> finished{0};
  std::atomic<int> aborted{0};
  std::atomic<int> alive{0};  // communicators
};

// Where the two ends of one id meet.
struct StandInRoom {
  std::mutex mutex;
  std::array<bool, 3> joined{};  // by MoveEnd
  bool posted = false;           // the source sends `pieces`
  std::vector<MovePiece> pieces;
};

class StandInCommunicator final : public Communicator {
 public:
  StandInCommunicator(std::shared_ptr<StandInRoom> room, MoveEnd end, const StandInFaults* faults,
                      StandInCounts* counts)
      : room_(std::move(room)), end_(end), faults_(*faults), counts_(*counts) {
    ++counts_.alive;
  }
  ~StandInCommunicator() override { --counts_.alive; }

  absl::StatusOr<Progress> Poll() override {
    while (faults_.stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (faults_.fails) return absl::UnavailableError("stand-in: remote error");
    if (looks_++ < faults_.slow_looks) return Progress::kBusy;
    const std::lock_guard<std::mutex> lock(room_->mutex);
    if (step_ == Step::kJoin) return Join();
    if (step_ == Step::kFinish) return Progress::kDone;
    return end_ == MoveEnd::kSource ? Sent() : Received();
  }
  absl::Status Send(std::span<const MovePiece> pieces) override {
    Begin(Step::kMove);
    const std::lock_guard<std::mutex> lock(room_->mutex);
    room_->pieces.assign(pieces.begin(), pieces.end());
    room_->posted = !faults_.never_moves;
    return absl::OkStatus();
  }
  absl::Status Receive(std::span<const MovePiece> pieces) override {
    Begin(Step::kMove);
    mine_.assign(pieces.begin(), pieces.end());
    ++counts_.receiving;
    return absl::OkStatus();
  }
  absl::Status Finish() override {
    Begin(Step::kFinish);
    ++counts_.finished;
    return absl::OkStatus();
  }
  void Abort() override {
    ++counts_.aborted;
    const std::lock_guard<std::mutex> lock(room_->mutex);
    if (end_ == MoveEnd::kSource) room_->posted = false;
  }
  bool IsQuiet() override {
    if (!faults_.never_quiet) return true;
    for (const MovePiece& piece : mine_) std::memset(piece.data, 0xEE, piece.bytes);
    return false;
  }

 private:
  enum class Step { kJoin, kMove, kFinish };

  void Begin(Step step) {
    step_ = step;
    looks_ = 0;
  }
  Progress Join() {
    if (faults_.never_joins) return Progress::kBusy;
    room_->joined[static_cast<size_t>(end_)] = true;
    const bool has_other = end_ != MoveEnd::kAlone && !faults_.alone;
    if (has_other && !room_->joined[1 - static_cast<size_t>(end_)]) return Progress::kBusy;
    ++counts_.joined;
    return Progress::kDone;
  }
  Progress Sent() const {
    return faults_.never_moves || room_->posted ? Progress::kBusy : Progress::kDone;
  }
  absl::StatusOr<Progress> Received() {
    if (faults_.never_moves || !room_->posted) return Progress::kBusy;
    if (room_->pieces.size() != mine_.size())
      return absl::InternalError("stand-in: the two ends differ in pieces");
    for (size_t i = 0; i < mine_.size(); ++i) {
      if (mine_[i].bytes != room_->pieces[i].bytes)
        return absl::InternalError("stand-in: the two ends differ in size");
      std::memcpy(mine_[i].data, room_->pieces[i].data, mine_[i].bytes);
      counts_.bytes += mine_[i].bytes;
    }
    if (faults_.damages) mine_.back().data[mine_.back().bytes / 2] ^= 0x10;
    room_->posted = false;
    return Progress::kDone;
  }

  const std::shared_ptr<StandInRoom> room_;
  const MoveEnd end_;
  const StandInFaults& faults_;
  StandInCounts& counts_;
  Step step_ = Step::kJoin;
  int looks_ = 0;
  std::vector<MovePiece> mine_;  // the destination's
};

// One daemon's. Must outlive what it makes.
class StandInLibrary final : public CommunicatorLibrary {
 public:
  explicit StandInLibrary(std::string device, std::string version = "stand-in 1")
      : device_(std::move(device)), version_(std::move(version)) {}

  std::string version() const override { return version_; }
  absl::StatusOr<std::string> DeviceOf(const MemoryPlace&) const override {
    if (faults.host_memory) return absl::FailedPreconditionError("the arena is in host memory");
    return device_;
  }
  absl::StatusOr<std::string> MakeId() const override {
    static std::atomic<int> next{0};
    return absl::StrCat("communicator ", next++);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Join(const std::string& id, MoveEnd end,
                                                     const MemoryPlace&) const override {
    if (id.rfind("communicator ", 0) != 0) {
      return absl::InvalidArgumentError("communicator_id: expected one of the stand-in's");
    }
    return std::make_unique<StandInCommunicator>(RoomOf(id), end, &faults, &counts);
  }

  mutable StandInFaults faults;
  mutable StandInCounts counts;

 private:
  static std::shared_ptr<StandInRoom> RoomOf(const std::string& id) {
    static std::mutex* const mutex = new std::mutex();
    static auto* const rooms = new std::map<std::string, std::shared_ptr<StandInRoom>>();
    const std::lock_guard<std::mutex> lock(*mutex);
    std::shared_ptr<StandInRoom>& room = (*rooms)[id];
    if (room == nullptr) room = std::make_shared<StandInRoom>();
    return room;
  }

  const std::string device_;
  const std::string version_;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SERVICE_STAND_IN_COMMUNICATOR_H_
