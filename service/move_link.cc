#include "service/move_link.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/check.h"
#include "proto/clock.h"
#include "proto/status.h"

namespace kvd {
namespace {

// A transfer of a batch takes a millisecond or less; joining, hundreds of them. What a step takes
// longer than it must is a sixteenth.
constexpr absl::Duration kShortestPause = absl::Microseconds(20);
constexpr absl::Duration kLongestPause = absl::Milliseconds(1);
constexpr std::chrono::milliseconds kAskEvery(5);

// What a library may touch for as long as the process lives.
void KeepForEver(std::shared_ptr<void> kept) {
  static std::mutex* const mutex = new std::mutex();
  static auto* const all = new std::vector<std::shared_ptr<void>>();
  const std::lock_guard<std::mutex> lock(*mutex);
  all->push_back(std::move(kept));
}

}  // namespace

// Shared with the thread, which may outlive the link.
struct MoveLink::State {
  enum class Step { kJoin, kSend, kReceive, kFinish };

  explicit State(Options o) : options(std::move(o)) {}

  void Run();
  absl::Status Serve();
  absl::Status Begin(Step next, std::unique_ptr<Communicator>* communicator);
  absl::Status PollUntilDone(Step current, Communicator* communicator);
  void Ask(Step next, std::vector<MovePiece> next_pieces, Keep next_keep);
  absl::Status Fail(const absl::Status& why);
  const char* Name(Step step) const;

  const Options options;
  const SteadyClock clock;
  std::unique_ptr<Communicator> communicator;  // the thread's

  mutable std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  Step step = Step::kJoin;
  bool busy = true;  // the step is under way
  std::vector<MovePiece> pieces;
  Keep keep;
  absl::Status problem;  // not OK: abort, no further step
  bool ended = false;
  bool left_alone = false;  // the link is gone
};

const char* MoveLink::State::Name(Step s) const {
  switch (s) {
    case Step::kJoin:
      return "joining the communicator";
    case Step::kSend:
      return "sending a batch";
    case Step::kReceive:
      return "receiving a batch";
    case Step::kFinish:
      return "finishing the communicator";
  }
  return "";
}

void MoveLink::State::Run() {
  if (const absl::Status served = Serve(); !served.ok()) {
    (void)Fail(served);
    if (communicator != nullptr) {
      communicator->Abort();
      while (!communicator->IsQuiet()) absl::SleepFor(kLongestPause);
    }
  }
  communicator.reset();
  Keep done;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    ended = true;
    // If the link is gone, so may be the arena's owner: too late to give anything back.
    if (!left_alone) done = std::move(keep);
    changed.notify_all();
  }
}

absl::Status MoveLink::State::Serve() {
  while (true) {
    Step next;
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return busy || !problem.ok(); });
      KVD_RETURN_IF_ERROR(problem);
      next = step;
    }
    absl::Status done = Begin(next, &communicator);
    if (done.ok()) done = PollUntilDone(next, communicator.get());
    KVD_RETURN_IF_ERROR(Annotate(done, Name(next)));
    if (next == Step::kFinish) communicator.reset();
    Keep over;
    const std::lock_guard<std::mutex> lock(mutex);
    busy = false;
    over = std::move(keep);
    changed.notify_all();
    if (next == Step::kFinish) return absl::OkStatus();
  }
}

absl::Status MoveLink::State::Begin(Step next, std::unique_ptr<Communicator>* made) {
  switch (next) {
    case Step::kJoin: {
      KVD_ASSIGN_OR_RETURN(*made, options.library->Join(options.id, options.end, options.place));
      return absl::OkStatus();
    }
    case Step::kSend:
      return communicator->Send(pieces);
    case Step::kReceive:
      return communicator->Receive(pieces);
    case Step::kFinish:
      return communicator->Finish();
  }
  return absl::InternalError("no such step");
}

absl::Status MoveLink::State::PollUntilDone(Step current, Communicator* polled) {
  const absl::Duration begin = clock.Now();
  while (true) {
    KVD_ASSIGN_OR_RETURN(const Communicator::Progress progress, polled->Poll());
    if (progress == Communicator::Progress::kDone) return absl::OkStatus();
    {
      const std::lock_guard<std::mutex> lock(mutex);
      KVD_RETURN_IF_ERROR(problem);
    }
    const absl::Duration elapsed = clock.Now() - begin;
    if (elapsed >= options.watchdog) {
      return absl::DeadlineExceededError(absl::StrCat(
          "the watchdog ended it after ", absl::ToInt64Milliseconds(options.watchdog), " ms: ",
          current == Step::kJoin ? "can the two hosts reach each other by the library's network?"
                                 : "has the other end died or stopped?"));
    }
    absl::SleepFor(std::clamp(elapsed / 16, kShortestPause, kLongestPause));
  }
}

void MoveLink::State::Ask(Step next, std::vector<MovePiece> next_pieces, Keep next_keep) {
  const std::lock_guard<std::mutex> lock(mutex);
  KVD_CHECK(!busy && !ended);
  step = next;
  busy = true;
  pieces = std::move(next_pieces);
  keep = std::move(next_keep);
  changed.notify_all();
}

absl::Status MoveLink::State::Fail(const absl::Status& why) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (problem.ok()) problem = why;
  changed.notify_all();
  return problem;
}

MoveLink::MoveLink(Options options) : state_(std::make_shared<State>(std::move(options))) {
  thread_ = std::thread([state = state_] { state->Run(); });
}

MoveLink::~MoveLink() {
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (!state_->ended && state_->problem.ok())
      state_->problem = absl::CancelledError("the move is over");
    state_->changed.notify_all();
    ended = state_->changed.wait_for(lock, absl::ToChronoNanoseconds(kEndLimit),
                                     [this] { return state_->ended; });
    state_->left_alone = !ended;
  }
  if (ended) {
    thread_.join();
  } else {
    KeepForEver(state_);
    thread_.detach();
  }
}

void MoveLink::Send(std::vector<MovePiece> pieces, Keep keep) {
  state_->Ask(State::Step::kSend, std::move(pieces), std::move(keep));
}
void MoveLink::Receive(std::vector<MovePiece> pieces, Keep keep) {
  state_->Ask(State::Step::kReceive, std::move(pieces), std::move(keep));
}
void MoveLink::Finish() { state_->Ask(State::Step::kFinish, {}, nullptr); }

absl::Status MoveLink::Wait(const std::function<absl::Status()>& go_on) {
  const absl::Duration stuck = state_->clock.Now() + state_->options.watchdog + kStuckAfter;
  while (true) {
    {
      std::unique_lock<std::mutex> lock(state_->mutex);
      state_->changed.wait_for(lock, kAskEvery,
                               [this] { return !state_->busy || !state_->problem.ok(); });
      if (!state_->problem.ok()) return state_->problem;
      if (!state_->busy) return absl::OkStatus();
    }
    if (const absl::Status go = go_on(); !go.ok()) return state_->Fail(go);
    if (state_->clock.Now() < stuck) continue;
    return state_->Fail(absl::DeadlineExceededError(
        absl::StrCat(state_->Name(state_->step), ": the library does not come back from a call")));
  }
}

absl::Status MoveLink::Problem() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->problem;
}

void MoveLink::Abort(const absl::Status& why) { (void)state_->Fail(why); }

bool MoveLink::ended() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->ended;
}

}  // namespace kvd
