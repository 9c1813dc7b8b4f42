#include "service/move_receiver.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/status.h"
#include "service/log_setup.h"
#include "service/mover.h"
#include "spdlog/spdlog.h"

namespace kvd {
namespace {

namespace v1 = locks_kvd::v1;

absl::Status Say(v1::MoveReply::State state, MoveReceiver::Stream* stream) {
  v1::MoveReply reply;
  reply.set_state(state);
  return stream->Write(reply) ? absl::OkStatus() : absl::CancelledError("the caller has gone");
}

absl::Status CheckTickets(const v1::MoveRequest& request) {
  const auto& tickets = request.pages().tickets();
  const auto count = static_cast<size_t>(tickets.size());
  if (!request.has_pages() || count == 0 || count > kMaxMovedPages) {
    return absl::InvalidArgumentError(
        absl::StrCat("move: expected pages with 1 to ", kMaxMovedPages, " tickets, got ", count));
  }
  std::vector<uint64_t> sorted(tickets.begin(), tickets.end());
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end()) return absl::OkStatus();
  return absl::InvalidArgumentError("pages.tickets: expected each once, got one twice");
}

void MarkAllReceived(const SlotLayout& slot, ReservationPin& pin) {
  for (int layer = 0; layer < slot.num_layers; ++layer) {
    for (int head = 0; head < slot.shard_heads; ++head) pin.MarkReceived(layer, head);
  }
  pin.MarkRecordsReceived();
}

// Brings one batch into its reservations. All are checked before the caller is told to send.
absl::Status ReceivePages(const v1::MoveRequest& request, const SessionHandle& session,
                          MoveLink* link, const std::function<absl::Status()>& go_on,
                          MoveReceiver::Stream* stream) {
  KVD_RETURN_IF_ERROR(CheckTickets(request));
  const ArenaMemory& memory = session.arena->memory();
  const SlotLayout& slot = memory.shape().slot;
  const auto pins = std::make_shared<std::vector<ReservationPin>>();
  std::vector<MovePiece> pieces;
  for (const uint64_t ticket : request.pages().tickets()) {
    KVD_ASSIGN_OR_RETURN(ReservationPin pin,
                         session.arena->PinReservation(session.id, Ticket{ticket}));
    pieces.push_back({memory.slot_base(pin.slot()), slot.slot_bytes()});
    pieces.push_back({pin.records(), slot.summary_bytes()});
    pins->push_back(std::move(pin));
  }
  link->Receive(std::move(pieces), pins);
  KVD_RETURN_IF_ERROR(Say(v1::MoveReply::STATE_RECEIVING, stream));
  KVD_RETURN_IF_ERROR(link->Wait(go_on));
  for (ReservationPin& pin : *pins) MarkAllReceived(slot, pin);
  pins->clear();
  return Say(v1::MoveReply::STATE_RECEIVED, stream);
}

}  // namespace

class MoveReceiver::Place {
 public:
  Place(MoveReceiver* receiver, grpc::ServerContext* context) : receiver_(receiver) {
    const std::lock_guard<std::mutex> lock(receiver_->mutex_);
    if (receiver_->ending_ || receiver_->moves_.size() + receiver_->aborted_.size() >= kMaxMoves)
      return;
    move_ = receiver_->moves_.insert(receiver_->moves_.end(),
                                     {context, receiver_->options_.clock->Now(), {}});
    taken_ = true;
  }
  ~Place() {
    if (!taken_) return;
    const std::lock_guard<std::mutex> lock(receiver_->mutex_);
    receiver_->moves_.erase(move_);
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  bool taken() const { return taken_; }
  void Name(const SessionKey& session) {
    const std::lock_guard<std::mutex> lock(receiver_->mutex_);
    move_->session = session;
  }

 private:
  MoveReceiver* const receiver_;
  std::list<Move>::iterator move_;
  bool taken_ = false;
};

MoveReceiver::~MoveReceiver() = default;

absl::Status MoveReceiver::CheckWilling(const v1::MoveRequest::Hello& hello,
                                        const Arena& arena) const {
  if (!options_.library.ok())
    return Annotate(options_.library.status(), "no NCCL at the destination");
  const CommunicatorLibrary& library = **options_.library;
  if (hello.library() != library.version()) {
    return absl::FailedPreconditionError(absl::StrCat("the destination has ", library.version(),
                                                      ", the source ", LogQuote(hello.library()),
                                                      ": install the same version"));
  }
  KVD_ASSIGN_OR_RETURN(const std::string device, library.DeviceOf(arena.memory().place()));
  if (hello.device() != device) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("both arenas are on GPU ", device, ", and NCCL has one end on each GPU"));
}

absl::Status MoveReceiver::Serve(grpc::ServerContext* context, Stream* stream,
                                 const FindSession& find) {
  Place place(this, context);
  if (!place.taken()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("moves: ", kMaxMoves, " are under way: try again later, or use UCX"));
  }
  v1::MoveRequest request;
  if (!stream->Read(&request)) return absl::CancelledError("the caller has gone");
  if (!request.has_hello()) return absl::InvalidArgumentError("move: expected hello first");
  KVD_ASSIGN_OR_RETURN(const SessionHandle session, find(request.hello().session()));
  if (session.kind != SessionKind::kMover) {
    return absl::PermissionDeniedError("move: expected a mover's session, got a worker's");
  }
  KVD_ASSIGN_OR_RETURN(const SessionKey key, ParseSessionRef(request.hello().session()));
  place.Name(key);
  KVD_RETURN_IF_ERROR(CheckWilling(request.hello(), *session.arena));
  KVD_RETURN_IF_ERROR(Say(v1::MoveReply::STATE_WILLING, stream));
  const absl::Status served = ServeSession(context, stream, session);
  if (!served.ok()) {
    spdlog::warn("move_aborted session={} reason={}", static_cast<uint64_t>(session.id),
                 LogQuote(served.message()));
  }
  return served;
}

absl::Status MoveReceiver::ServeSession(grpc::ServerContext* context, Stream* stream,
                                        const SessionHandle& session) {
  v1::MoveRequest request;
  if (!stream->Read(&request)) return absl::CancelledError("the caller has gone");
  if (!request.has_join()) return absl::InvalidArgumentError("move: expected join after hello");
  auto link = std::make_unique<MoveLink>(MoveLink::Options{.library = *options_.library,
                                                           .id = request.join().communicator_id(),
                                                           .end = MoveEnd::kDestination,
                                                           .place = session.arena->memory().place(),
                                                           .watchdog = options_.watchdog,
                                                           .memory = session.arena});
  const absl::Status served = ServeLink(context, stream, session, link.get());
  if (!served.ok()) {
    link->Abort(served);
    // Destroying it would wait for the library.
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_.push_back(std::move(link));
  }
  return served;
}

absl::Status MoveReceiver::ServeLink(grpc::ServerContext* context, Stream* stream,
                                     const SessionHandle& session, MoveLink* link) {
  const auto go_on = [context] {
    return context->IsCancelled()
               ? absl::CancelledError("the caller has gone, or its session has ended")
               : absl::OkStatus();
  };
  KVD_RETURN_IF_ERROR(link->Wait(go_on));
  KVD_RETURN_IF_ERROR(Say(v1::MoveReply::STATE_JOINED, stream));
  for (v1::MoveRequest request; stream->Read(&request);) {
    KVD_RETURN_IF_ERROR(ReceivePages(request, session, link, go_on, stream));
  }
  KVD_RETURN_IF_ERROR(go_on());
  link->Finish();
  return link->Wait(go_on);
}

void MoveReceiver::Reap() {
  std::vector<std::unique_ptr<MoveLink>> ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& link : aborted_) {
    if (link->ended()) ended.push_back(std::move(link));
  }
  std::erase(aborted_, nullptr);
}

void MoveReceiver::Tick() {
  Reap();
  const absl::Duration now = options_.clock->Now();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Move& move : moves_) {
    const bool lives =
        move.session.has_value()
            ? options_.sessions->Find(move.session->token, move.session->incarnation).ok()
            : now - move.opened < options_.sessions->ttl();
    if (!lives) move.context->TryCancel();
  }
}

void MoveReceiver::EndAll() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ending_ = true;
  for (const Move& move : moves_) move.context->TryCancel();
}

size_t MoveReceiver::num_moves() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return moves_.size() + aborted_.size();
}

}  // namespace kvd
