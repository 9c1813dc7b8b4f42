#include "service/nccl_mover.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "proto/clock.h"
#include "proto/status.h"

namespace kvd {
namespace {

namespace v1 = locks_kvd::v1;

constexpr std::chrono::milliseconds kAskEvery(5);
// An answer for which the other daemon need not wait for its communicator.
constexpr absl::Duration kAnswerLimit = absl::Seconds(5);

}  // namespace

// The stream of calls, one operation at a time, each with a limit.
class NcclMover::Call {
 public:
  using GoOn = std::function<absl::Status()>;

  ~Call() {
    if (!over_) {
      context_.TryCancel();
      (void)End(kAnswerLimit, [] { return absl::OkStatus(); });
    }
    queue_.Shutdown();
    void* tag = nullptr;
    for (bool ok = false; queue_.Next(&tag, &ok);) {
    }
  }

  absl::Status Start(v1::Pool::Stub* stub, const GoOn& go_on) {
    stream_ = stub->PrepareAsyncMove(&context_, &queue_);
    over_ = false;
    stream_->StartCall(this);
    return Await(kAnswerLimit, go_on);
  }
  absl::Status Say(const v1::MoveRequest& request, const GoOn& go_on) {
    stream_->Write(request, this);
    return Await(kAnswerLimit, go_on);
  }
  absl::Status Expect(v1::MoveReply::State state, absl::Duration limit, const GoOn& go_on) {
    v1::MoveReply reply;
    stream_->Read(&reply, this);
    KVD_RETURN_IF_ERROR(Await(limit, go_on));
    if (reply.state() == state) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("move: expected ", v1::MoveReply::State_Name(state),
                                            ", got ", v1::MoveReply::State_Name(reply.state())));
  }
  // No more requests: the other end finishes.
  absl::Status Close(const GoOn& go_on) {
    stream_->WritesDone(this);
    return Await(kAnswerLimit, go_on);
  }
  // Until the other end has ended, and how.
  absl::Status End(absl::Duration limit, const GoOn& go_on) {
    over_ = true;
    grpc::Status status;
    stream_->Finish(&status, this);
    KVD_RETURN_IF_ERROR(Await(limit, go_on));
    // Cancelled there: kCancelled means that this end wanted it.
    if (status.error_code() == grpc::StatusCode::CANCELLED)
      return absl::UnavailableError(status.error_message());
    return FromGrpc(status);
  }

 private:
  absl::Status Await(absl::Duration limit, const GoOn& go_on) {
    const absl::Duration end = clock_.Now() + limit;
    void* tag = nullptr;
    bool ok = false;
    absl::Status status;
    while (queue_.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + kAskEvery) !=
           grpc::CompletionQueue::GOT_EVENT) {
      status = go_on();
      if (status.ok() && clock_.Now() >= end) {
        status = absl::DeadlineExceededError(
            absl::StrCat("move: no answer in ", absl::ToInt64Milliseconds(limit), " ms"));
      }
      if (status.ok()) continue;
      context_.TryCancel();
      queue_.Next(&tag, &ok);
      return status;
    }
    if (ok) return absl::OkStatus();
    status = End(kAnswerLimit, go_on);
    return status.ok() ? absl::InternalError("move: the other daemon ended it") : status;
  }

  const SteadyClock clock_{};
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::MoveRequest, v1::MoveReply>> stream_;
  bool over_ = true;  // no call, or its end is known
};

NcclMover::NcclMover(Options options)
    : options_(std::move(options)), call_(std::make_unique<Call>()) {}

absl::StatusOr<std::unique_ptr<NcclMover>> NcclMover::Make(Options options) {
  std::unique_ptr<NcclMover> mover(new NcclMover(std::move(options)));
  if (const absl::Status agreed = mover->Agree(); !agreed.ok()) return mover->Failed(agreed);
  return mover;
}

absl::Status NcclMover::GoOn() const {
  if (!options_.go_on()) return absl::CancelledError("the round is over");
  return link_ == nullptr ? absl::OkStatus() : link_->Problem();
}

absl::Status NcclMover::Failed(const absl::Status& why) {
  failed_ = true;
  if (link_ != nullptr) link_->Abort(why);
  call_.reset();
  return why;
}

absl::Status NcclMover::Agree() {
  const auto go_on = [this] { return GoOn(); };
  KVD_ASSIGN_OR_RETURN(const std::string device,
                       options_.library->DeviceOf(options_.arena->memory().place()));
  v1::MoveRequest hello;
  *hello.mutable_hello()->mutable_session() = options_.session;
  hello.mutable_hello()->set_library(options_.library->version());
  hello.mutable_hello()->set_device(device);
  KVD_RETURN_IF_ERROR(call_->Start(options_.stub, go_on));
  KVD_RETURN_IF_ERROR(call_->Say(hello, go_on));
  KVD_RETURN_IF_ERROR(call_->Expect(v1::MoveReply::STATE_WILLING, kAnswerLimit, go_on));
  // Not before: a name that nobody joins by leaves something of the library waiting.
  KVD_ASSIGN_OR_RETURN(const std::string id, options_.library->MakeId());
  v1::MoveRequest join;
  join.mutable_join()->set_communicator_id(id);
  KVD_RETURN_IF_ERROR(call_->Say(join, go_on));
  link_ = std::make_unique<MoveLink>(MoveLink::Options{.library = options_.library,
                                                       .id = id,
                                                       .end = MoveEnd::kSource,
                                                       .place = options_.arena->memory().place(),
                                                       .watchdog = options_.watchdog,
                                                       .memory = options_.arena});
  KVD_RETURN_IF_ERROR(
      call_->Expect(v1::MoveReply::STATE_JOINED, options_.watchdog + MoveLink::kStuckAfter, go_on));
  return link_->Wait(go_on);
}

absl::StatusOr<std::vector<uint64_t>> NcclMover::Move(std::span<const MovedPage> pages) {
  KVD_CHECK(!failed_ && pages.size() <= kMaxMovedPages);
  if (const absl::Status moved = MoveBytes(pages); !moved.ok()) return Failed(moved);
  std::vector<uint32_t> slots;
  for (const MovedPage& page : pages) slots.push_back(page.slot);
  return options_.arena->store().SummaryChecksums(slots);
}

absl::Status NcclMover::MoveBytes(std::span<const MovedPage> pages) {
  const auto go_on = [this] { return GoOn(); };
  const ArenaMemory& memory = options_.arena->memory();
  const SlotLayout& slot = memory.shape().slot;
  v1::MoveRequest request;
  std::vector<MovePiece> pieces;
  for (const MovedPage& page : pages) {
    request.mutable_pages()->add_tickets(page.ticket);
    pieces.push_back({memory.slot_base(page.slot), slot.slot_bytes()});
    pieces.push_back({memory.summary(page.slot), slot.summary_bytes()});
  }
  KVD_RETURN_IF_ERROR(call_->Say(request, go_on));
  KVD_RETURN_IF_ERROR(call_->Expect(v1::MoveReply::STATE_RECEIVING, kAnswerLimit, go_on));
  link_->Send(std::move(pieces), nullptr);
  KVD_RETURN_IF_ERROR(call_->Expect(v1::MoveReply::STATE_RECEIVED,
                                    options_.watchdog + MoveLink::kStuckAfter, go_on));
  return link_->Wait(go_on);
}

NcclMover::~NcclMover() {
  if (failed_) return;
  const auto go_on = [this] { return GoOn(); };
  // Nothing can be lost any more: what goes wrong from here on only ends by abort instead.
  absl::Status closed = call_->Close(go_on);
  if (closed.ok()) {
    link_->Finish();
    closed = link_->Wait(go_on);
  }
  if (closed.ok()) closed = call_->End(options_.watchdog + MoveLink::kStuckAfter, go_on);
  if (!closed.ok()) (void)Failed(closed);
}

}  // namespace kvd
