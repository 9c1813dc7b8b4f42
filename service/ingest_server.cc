#include "service/ingest_server.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "proto/staging.h"
#include "service/ucx_shutdown.h"

namespace kvd {
namespace {

using Steady = std::chrono::steady_clock;

constexpr size_t kNumBuffers = 16;
constexpr size_t kBuffersPerSession = 4;
constexpr size_t kMaxWaiting = 256;
// A sender whose message does not arrive in this time is cut off.
constexpr auto kReceiveLimit = std::chrono::seconds(5);

// A unit, or all records of a slot.
size_t ItemBytes(const Arena& arena, uint8_t flags) {
  const SlotLayout& slot = arena.memory().shape().slot;
  return flags == kFlagSummaries ? slot.summary_bytes() : slot.unit_bytes;
}

// True if the item may go where its entry says.
bool Belongs(const Arena& arena, const ReservationPin& pin, const IngestEntry& entry,
             uint8_t flags) {
  if (flags == kFlagSummaries) return pin.records() != nullptr;
  return arena.CheckUnit(entry.layer, entry.head).ok();
}

}  // namespace

class IngestServer::Impl final : public UcxReceiver, public UcxPoller {
 public:
  Impl(UcxWorker* worker, SessionTable* sessions)
      : worker_(worker), sessions_(sessions), jobs_(kNumBuffers) {
    for (Job& job : jobs_) job.server = this;
  }

  void OnMessage(const MessageHeader& header, UcxPayload& payload) override;
  bool Poll() override;
  void AbortAll();
  bool Idle() const {
    return std::none_of(jobs_.begin(), jobs_.end(),
                        [](const Job& job) { return job.state != State::kFree; });
  }

  std::atomic<uint64_t> num_bytes_{0};
  std::atomic<uint64_t> num_refused_units_{0};
  std::atomic<uint64_t> num_refused_bytes_{0};
  std::atomic<uint64_t> num_malformed_{0};

 private:
  enum class State { kFree, kReceiving, kAcknowledging };
  // One message: received, copied into place, acknowledged.
  struct Job final : UcxReceive, UcxSend {
    Impl* server = nullptr;
    State state = State::kFree;
    SessionHandle session;
    UcxEndpoint* peer = nullptr;
    Steady::time_point arrived;
    StagingBuffer bytes;
    std::vector<uint8_t> stored;  // bitmap
    void OnReceived(bool ok) override { server->OnUnits(*this, ok); }
    void OnSent(bool) override { server->Finish(*this); }
  };
  struct Waiting {
    MessageHeader header;
    UcxPayload payload;
  };
  // A part of a message, and where it goes.
  struct Item {
    size_t pin;
    int layer;
    int head;
    const uint8_t* bytes;
  };

  Job* FindFree(SessionId session);
  WireStatus Check(const MessageHeader& header, size_t payload_bytes,
                   const SessionHandle& session) const;
  void Begin(Job& job, const MessageHeader& header, SessionHandle session, UcxEndpoint* peer,
             UcxPayload& payload);
  void OnUnits(Job& job, bool ok);
  void Store(Job& job);
  void StoreUnits(Arena& arena, std::vector<ReservationPin>& pins);
  void StoreRecords(Arena& arena, std::vector<ReservationPin>& pins);
  void Finish(Job& job);

  UcxWorker* const worker_;
  SessionTable* const sessions_;
  // The rest belongs to the progress thread.
  std::vector<Job> jobs_;
  std::deque<Waiting> waiting_;
  std::vector<Item> items_;  // of the message that is being stored
};

IngestServer::Impl::Job* IngestServer::Impl::FindFree(SessionId session) {
  Job* found = nullptr;
  size_t used = 0;
  for (Job& job : jobs_) {
    if (job.state == State::kFree)
      found = &job;
    else if (job.session.id == session)
      ++used;
  }
  return used < kBuffersPerSession ? found : nullptr;
}

WireStatus IngestServer::Impl::Check(const MessageHeader& header, size_t payload_bytes,
                                     const SessionHandle& session) const {
  const bool records = header.flags == kFlagSummaries;
  const bool allowed = header.flags == 0 || (records && session.kind == SessionKind::kMover);
  const bool fits = allowed && header.count > 0 && payload_bytes <= kMaxPieceBytes &&
                    payload_bytes == header.count * (sizeof(IngestEntry) +
                                                     ItemBytes(*session.arena, header.flags));
  return fits ? WireStatus::kOk : WireStatus::kInvalid;
}

void IngestServer::Impl::OnMessage(const MessageHeader& header, UcxPayload& payload) {
  absl::StatusOr<SessionHandle> session = sessions_->Find(header.session, header.incarnation);
  UcxEndpoint* peer = worker_->FindPeer(header.session, ChannelOf(header.request));
  if (peer == nullptr) {
    // No way back: it never greeted, or that connection has failed.
    sessions_->Lose(header.session, header.incarnation);
    num_malformed_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  WireStatus status =
      session.ok() ? Check(header, payload.bytes(), *session) : WireStatus::kAborted;
  if (status == WireStatus::kInvalid) num_malformed_.fetch_add(1, std::memory_order_relaxed);
  Job* job = FindFree(session.ok() ? session->id : SessionId{});
  if (status == WireStatus::kOk && job == nullptr) {
    if (waiting_.size() < kMaxWaiting) waiting_.push_back({header, payload.Hold()});
    return;  // over kMaxWaiting it is dropped: the sender's deadline tells it
  }
  if (status == WireStatus::kOk) return Begin(*job, header, *std::move(session), peer, payload);
  if (job == nullptr) return;
  // A refusal travels in a job of its own, without payload.
  job->header = header;
  job->header.status = status;
  job->stored.clear();
  job->state = State::kAcknowledging;
  job->peer = peer;
  UcxWorker::Retain(peer);
  job->arrived = Steady::now();
  job->header.type = MessageType::kIngestAck;
  job->header.count = 0;
  worker_->Send(peer, *job, {});
}

void IngestServer::Impl::Begin(Job& job, const MessageHeader& header, SessionHandle session,
                               UcxEndpoint* peer, UcxPayload& payload) {
  job.header = header;
  job.session = std::move(session);
  job.peer = peer;
  UcxWorker::Retain(peer);
  job.arrived = Steady::now();
  job.state = State::kReceiving;
  uint8_t* buffer = job.bytes.Reserve(payload.bytes(), job.session.arena->store().place());
  payload.ReceiveInto(buffer, job);
}

void IngestServer::Impl::OnUnits(Job& job, bool ok) {
  if (!ok) return Finish(job);
  Store(job);
  job.state = State::kAcknowledging;
  job.header.type = MessageType::kIngestAck;
  job.header.status = WireStatus::kOk;
  worker_->Send(job.peer, job, job.stored);
}

// Copies each item to the slot that its ticket names, if that is this session's and still open. The
// pins are held until all bytes are there.
void IngestServer::Impl::Store(Job& job) {
  Arena& arena = *job.session.arena;
  const size_t count = job.header.count;
  const size_t item_bytes = ItemBytes(arena, job.header.flags);
  const uint8_t* const items = job.bytes.data() + count * sizeof(IngestEntry);
  job.stored.assign(BitmapBytes(count), 0);
  items_.clear();
  uint64_t pinned = 0;
  // the ticket `pinned`, by the last of the pins; a page's units come together
  bool is_pinned = false;
  std::vector<ReservationPin> pins;
  for (size_t i = 0; i < count; ++i) {
    IngestEntry entry;
    std::memcpy(&entry, job.bytes.data() + i * sizeof(entry), sizeof(entry));
    if (i == 0 || pinned != entry.ticket) {
      pinned = entry.ticket;
      absl::StatusOr<ReservationPin> taken =
          arena.PinReservation(job.session.id, Ticket{entry.ticket});
      is_pinned = taken.ok();
      if (is_pinned) pins.push_back(*std::move(taken));
    }
    if (!is_pinned || !Belongs(arena, pins.back(), entry, job.header.flags)) continue;
    items_.push_back({pins.size() - 1, entry.layer, entry.head, items + i * item_bytes});
    job.stored[i / 8] = static_cast<uint8_t>(job.stored[i / 8] | 1u << (i % 8));
  }
  if (job.header.flags == kFlagSummaries) {
    StoreRecords(arena, pins);
  } else {
    StoreUnits(arena, pins);
  }
  const size_t num_stored = items_.size();
  num_bytes_.fetch_add(num_stored * item_bytes, std::memory_order_relaxed);
  num_refused_units_.fetch_add(count - num_stored, std::memory_order_relaxed);
  num_refused_bytes_.fetch_add((count - num_stored) * item_bytes, std::memory_order_relaxed);
}

void IngestServer::Impl::StoreUnits(Arena& arena, std::vector<ReservationPin>& pins) {
  std::vector<PageStore::UnitWrite> writes;
  writes.reserve(items_.size());
  for (const Item& item : items_)
    writes.push_back({pins[item.pin].slot(), item.layer, item.head, item.bytes});
  arena.store().WriteUnits(writes);
  for (const Item& item : items_) pins[item.pin].MarkReceived(item.layer, item.head);
}

void IngestServer::Impl::StoreRecords(Arena& arena, std::vector<ReservationPin>& pins) {
  std::vector<PageStore::RecordsWrite> writes;
  writes.reserve(items_.size());
  for (const Item& item : items_) writes.push_back({pins[item.pin].slot(), item.bytes});
  arena.store().WriteRecords(writes);
  for (const Item& item : items_) pins[item.pin].MarkRecordsReceived();
}

void IngestServer::Impl::Finish(Job& job) {
  worker_->Release(std::exchange(job.peer, nullptr));
  job.session = {};
  job.state = State::kFree;
}

bool IngestServer::Impl::Poll() {
  const Steady::time_point now = Steady::now();
  for (const Job& job : jobs_) {
    if (job.state != State::kFree && now - job.arrived > kReceiveLimit) worker_->Abort(job.peer);
  }
  // In order of arrival, except past sessions that have all the buffers they may have.
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    absl::StatusOr<SessionHandle> session =
        sessions_->Find(it->header.session, it->header.incarnation);
    UcxEndpoint* peer = worker_->FindPeer(it->header.session, ChannelOf(it->header.request));
    Job* job = session.ok() && peer != nullptr ? FindFree(session->id) : nullptr;
    if (session.ok() && peer != nullptr && job == nullptr) continue;
    Waiting next = std::move(*it);
    waiting_.erase(it);
    if (job != nullptr) Begin(*job, next.header, *std::move(session), peer, next.payload);
    return true;
  }
  return false;
}

void IngestServer::Impl::AbortAll() {
  waiting_.clear();
  for (Job& job : jobs_) {
    if (job.state != State::kFree) worker_->Abort(job.peer);
  }
}

IngestServer::IngestServer(UcxWorker* worker, SessionTable* sessions)
    : impl_(std::make_shared<Impl>(worker, sessions)), worker_(worker) {
  worker->SetReceiver(MessageType::kIngest, impl_.get());
  worker->AddPoller(impl_.get());
}

IngestServer::~IngestServer() { StopUcxServer(*worker_, MessageType::kIngest, impl_); }

uint64_t IngestServer::num_bytes() const { return impl_->num_bytes_.load(); }
uint64_t IngestServer::num_refused_units() const { return impl_->num_refused_units_.load(); }
uint64_t IngestServer::num_refused_bytes() const { return impl_->num_refused_bytes_.load(); }
uint64_t IngestServer::num_malformed() const { return impl_->num_malformed_.load(); }

}  // namespace kvd
