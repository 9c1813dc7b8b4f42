#include "service/fetch_server.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "proto/staging.h"
#include "service/fair_queue.h"
#include "service/ucx_shutdown.h"

namespace kvd {
namespace {

using Steady = std::chrono::steady_clock;

// Pieces are this large rather than kMaxPieceBytes: the gathered bytes are still in the cache when
// the network copies them, and the gather of one piece overlaps the sending of the last
// (bench/fetch_bench).
constexpr size_t kPieceBytes = size_t{256} << 10;
// Out of a GPU a piece costs a launch and a wait for it (15 us or so) besides its bytes, and comes
// to no cache.
constexpr size_t kGpuPieceBytes = size_t{1} << 20;
constexpr size_t kNumBuffers = 32;
constexpr size_t kBuffersPerSession = 8;
constexpr size_t kMaxJobs = 256;
// What one tenant may have of them: a flood of one leaves room for the others.
constexpr size_t kBuffersPerTenant = kNumBuffers / 4 * 3;
constexpr size_t kJobsPerTenant = kMaxJobs / 4 * 3;
constexpr size_t kMaxRefusals = 64;
// A peer that has not taken its answer this long after its own deadline is cut off, its session
// with it.
constexpr auto kGrace = std::chrono::seconds(2);
constexpr auto kMaxDeadline = std::chrono::seconds(60);

size_t ItemBytes(const SlotLayout& slot, bool summaries) {
  return summaries ? sizeof(PageHeader) + slot.summary_bytes() : slot.unit_bytes;
}

absl::Duration Since(Steady::time_point start) { return absl::FromChrono(Steady::now() - start); }

}  // namespace

class FetchServer::Impl final : public UcxReceiver, public UcxPoller {
 public:
  Impl(UcxWorker* worker, SessionTable* sessions, const FetchLimits& limits,
       FetchObserver* observer)
      : worker_(worker),
        sessions_(sessions),
        limits_(limits),
        observer_(observer),
        jobs_(kMaxJobs),
        refusals_(kMaxRefusals),
        buffers_(kNumBuffers) {
    for (Job& job : jobs_) {
      job.server = this;
      free_jobs_.push_back(&job);
    }
    for (Refusal& refusal : refusals_) {
      refusal.server = this;
      free_refusals_.push_back(&refusal);
    }
    for (Buffer& buffer : buffers_) {
      buffer.server = this;
      free_buffers_.push_back(&buffer);
    }
  }

  void OnMessage(const MessageHeader& header, UcxPayload& payload) override;
  bool Poll() override;
  void AbortAll();
  bool Idle() const { return in_flight_.load() == 0 && free_refusals_.size() == refusals_.size(); }

  std::atomic<bool> draining_{false};
  std::atomic<uint32_t> in_flight_{0};
  std::atomic<uint64_t> num_malformed_{0};
  std::atomic<uint64_t> num_refused_{0};

 private:
  // One fetch, from its arrival until its last piece has left.
  struct Job final : UcxReceive {
    Impl* server = nullptr;
    bool active = false;
    MessageHeader request;
    SessionHandle session;
    UcxEndpoint* peer = nullptr;
    std::vector<FetchEntry> entries;
    std::vector<uint8_t> allowed;  // parallel to entries
    uint64_t reply_bytes = 0;
    Steady::time_point arrived;
    Steady::time_point deadline;
    size_t next = 0;        // first entry that is not sent yet
    uint16_t piece = 0;     // its piece
    uint32_t sending = 0;   // pieces on their way
    bool from_gpu = false;  // pieces are sent from GPU memory while every unit is there
    FetchEvent event;

    void OnReceived(bool ok) override { server->OnEntries(*this, ok); }
    size_t item_bytes() const {
      return ItemBytes(session.arena->memory().shape().slot, (request.flags & kFlagSummaries) != 0);
    }
  };
  // One piece on its way.
  struct Buffer final : UcxSend {
    Impl* server = nullptr;
    Job* job = nullptr;
    StagingBuffer bytes;
    uint8_t* exportable = nullptr;  // of the job's arena, instead of `bytes`
    void OnSent(bool ok) override { server->OnPieceSent(*this, ok); }
  };
  // An answer without units.
  struct Refusal final : UcxSend {
    Impl* server = nullptr;
    UcxEndpoint* peer = nullptr;
    void OnSent(bool) override { server->OnRefusalSent(*this); }
  };

  WireStatus Check(const MessageHeader& header, size_t payload_bytes,
                   const SessionHandle& session) const;
  void Refuse(UcxEndpoint* peer, const MessageHeader& request, WireStatus status,
              SessionId session);
  void OnEntries(Job& job, bool ok);
  void OnPieceSent(Buffer& buffer, bool ok);
  void OnRefusalSent(Refusal& refusal);
  void SendPiece(Job& job, Buffer& buffer);
  size_t GatherPiece(Job& job, size_t count, uint8_t* piece);
  bool SendFromGpu(Job& job, Buffer& buffer);
  void SendReply(Job& job, Buffer& buffer, size_t count, std::span<const uint8_t> piece,
                 MemorySpace space);
  void Finish(Job& job, WireStatus status);
  void CutOffSilentPeers();
  bool HasBufferFor(const Job& job) const;

  UcxWorker* const worker_;
  SessionTable* const sessions_;
  const FetchLimits limits_;
  FetchObserver* const observer_;
  // The rest belongs to the progress thread.
  std::vector<Job> jobs_;
  std::vector<Refusal> refusals_;
  std::vector<Buffer> buffers_;
  std::vector<Job*> free_jobs_;
  std::vector<Refusal*> free_refusals_;
  std::vector<Buffer*> free_buffers_;  // the one used last first: its memory is in the cache
  FairQueue<Job*> ready_;              // by tenant; a piece at a time
  std::vector<PageStore::Read> reads_;
  std::vector<uint8_t> valid_;
  std::vector<uint32_t> places_;
  Steady::time_point last_cut_ = Steady::now();
  Steady::time_point awake_since_ = last_cut_;
};

// kOk if the request may be queued. Nothing in it is trusted; its entries are checked when they are
// here.
WireStatus FetchServer::Impl::Check(const MessageHeader& header, size_t payload_bytes,
                                    const SessionHandle& session) const {
  if ((header.flags & ~(kFlagSummaries | kFlagGpuMemory)) != 0 || header.count == 0 ||
      header.piece != 0) {
    return WireStatus::kInvalid;
  }
  if (payload_bytes != size_t{header.count} * sizeof(FetchEntry)) return WireStatus::kInvalid;
  if (draining_.load(std::memory_order_relaxed)) return WireStatus::kUnavailable;
  if (header.count > limits_.units_per_fetch || free_jobs_.empty()) return WireStatus::kExhausted;
  const SlotLayout& slot = session.arena->memory().shape().slot;
  uint64_t bytes = header.count * ItemBytes(slot, (header.flags & kFlagSummaries) != 0);
  size_t of_tenant = 0;
  for (const Job& job : jobs_) {
    if (!job.active) continue;
    if (job.session.id == session.id) bytes += job.reply_bytes;
    of_tenant += job.session.arena->tenant() == session.arena->tenant() ? 1 : 0;
  }
  if (of_tenant >= kJobsPerTenant) return WireStatus::kExhausted;
  return bytes > limits_.bytes_in_flight_per_session ? WireStatus::kExhausted : WireStatus::kOk;
}

void FetchServer::Impl::OnMessage(const MessageHeader& header, UcxPayload& payload) {
  // The session first: until its token is known to be right, nothing else is looked up by it.
  absl::StatusOr<SessionHandle> session = sessions_->Find(header.session, header.incarnation);
  UcxEndpoint* peer = worker_->FindPeer(header.session, ChannelOf(header.request));
  if (peer == nullptr) {
    // No way back: it never greeted, or that connection has failed.
    sessions_->Lose(header.session, header.incarnation);
    num_malformed_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (!session.ok()) return Refuse(peer, header, WireStatus::kAborted, SessionId{});
  if (const WireStatus status = Check(header, payload.bytes(), *session);
      status != WireStatus::kOk) {
    return Refuse(peer, header, status, session->id);
  }
  Job& job = *free_jobs_.back();
  free_jobs_.pop_back();
  in_flight_.fetch_add(1);
  job.active = true;
  job.request = header;
  job.session = *std::move(session);
  job.peer = peer;
  UcxWorker::Retain(peer);
  job.entries.resize(header.count);
  job.allowed.resize(header.count);
  job.reply_bytes = header.count * job.item_bytes();
  job.arrived = Steady::now();
  job.deadline = job.arrived + std::min<Steady::duration>(
                                   std::chrono::microseconds(header.deadline_us), kMaxDeadline);
  job.next = 0;
  job.piece = 0;
  job.sending = 0;
  job.from_gpu = header.flags == kFlagGpuMemory && worker_->has_gpu_memory();
  job.event = {};
  job.event.session = job.session.id;
  job.event.units = header.count;
  payload.ReceiveInto(reinterpret_cast<uint8_t*>(job.entries.data()), job);
}

void FetchServer::Impl::Refuse(UcxEndpoint* peer, const MessageHeader& request, WireStatus status,
                               SessionId session) {
  if (status == WireStatus::kInvalid) num_malformed_.fetch_add(1, std::memory_order_relaxed);
  if (status == WireStatus::kExhausted) num_refused_.fetch_add(1, std::memory_order_relaxed);
  if (observer_ != nullptr) {
    FetchEvent event;
    event.status = status;
    event.session = session;
    event.units = request.count;
    event.missing_units = request.count;
    observer_->OnFetch(event);
  }
  // Without a free answer the client's own deadline tells it: memory stays bounded.
  if (free_refusals_.empty()) return;
  Refusal& refusal = *free_refusals_.back();
  free_refusals_.pop_back();
  refusal.header = request;
  refusal.header.type = MessageType::kFetchReply;
  refusal.header.flags = 0;
  refusal.header.status = status;
  refusal.header.count = 0;
  refusal.header.first_entry = 0;
  refusal.peer = peer;
  UcxWorker::Retain(peer);
  worker_->Send(peer, refusal, {});
}

void FetchServer::Impl::OnRefusalSent(Refusal& refusal) {
  worker_->Release(std::exchange(refusal.peer, nullptr));
  free_refusals_.push_back(&refusal);
}

void FetchServer::Impl::OnEntries(Job& job, bool ok) {
  if (!ok) return Finish(job, WireStatus::kUnavailable);
  const absl::Status checked =
      job.session.arena->CheckFetch(job.session.id, job.entries, job.allowed);
  if (checked.ok()) {
    ready_.Push(job.session.arena->tenant(), &job);
    return;
  }
  const WireStatus status =
      absl::IsInvalidArgument(checked) ? WireStatus::kInvalid : WireStatus::kAborted;
  UcxEndpoint* peer = job.peer;
  UcxWorker::Retain(peer);
  const MessageHeader request = job.request;
  job.event.units = 0;  // Refuse reports it
  const SessionId session = job.session.id;
  Finish(job, WireStatus::kOk);
  Refuse(peer, request, status, session);
  worker_->Release(peer);
}

bool FetchServer::Impl::HasBufferFor(const Job& job) const {
  if (free_buffers_.empty()) return false;
  size_t of_session = 0;
  size_t of_tenant = 0;
  for (const Buffer& buffer : buffers_) {
    if (buffer.job == nullptr) continue;
    of_session += buffer.job->session.id == job.session.id ? 1 : 0;
    of_tenant += buffer.job->session.arena->tenant() == job.session.arena->tenant() ? 1 : 0;
  }
  return of_session < kBuffersPerSession && of_tenant < kBuffersPerTenant;
}

bool FetchServer::Impl::Poll() {
  if (in_flight_.load(std::memory_order_relaxed) > 0) CutOffSilentPeers();
  const Steady::time_point now = Steady::now();
  const std::optional<Job*> next = ready_.Pop([&](const Job* job) {
    return UcxWorker::Failed(job->peer) || now > job->deadline || HasBufferFor(*job);
  });
  if (!next.has_value()) return false;
  Job& job = **next;
  if (UcxWorker::Failed(job.peer)) {
    job.next = job.entries.size();  // pieces on their way, if any, finish it
    if (job.sending == 0) Finish(job, WireStatus::kUnavailable);
  } else if (now > job.deadline) {
    UcxEndpoint* peer = job.peer;
    job.next = job.entries.size();
    job.event.status = WireStatus::kLate;
    job.event.units = 0;  // Refuse reports it
    Refuse(peer, job.request, WireStatus::kLate, job.session.id);
    if (job.sending == 0) Finish(job, WireStatus::kLate);
  } else {
    Buffer& buffer = *free_buffers_.back();
    free_buffers_.pop_back();
    SendPiece(job, buffer);
  }
  return true;
}

// Copies `count` items of `job` from entry job.next on behind a bitmap. Returns the number of valid
// ones.
size_t FetchServer::Impl::GatherPiece(Job& job, size_t count, uint8_t* piece) {
  const PageStore& store = job.session.arena->store();
  const size_t item_bytes = job.item_bytes();
  uint8_t* const items = piece + BitmapBytes(count);
  std::memset(piece, 0, BitmapBytes(count));
  reads_.clear();
  places_.clear();
  for (size_t i = 0; i < count; ++i) {
    const FetchEntry& entry = job.entries[job.next + i];
    uint8_t* const item = items + i * item_bytes;
    // Odd generations are never sealed: asking for one must not match a slot that is being written.
    if (job.allowed[job.next + i] == 0 || entry.generation % 2 != 0) {
      job.event.unleased_units += job.allowed[job.next + i] == 0 ? 1 : 0;
      std::memset(item, 0, item_bytes);
      continue;
    }
    reads_.push_back({entry, item});
    places_.push_back(static_cast<uint32_t>(i));
  }
  valid_.resize(reads_.size());
  if ((job.request.flags & kFlagSummaries) != 0) {
    store.ReadSummaries(reads_, valid_);
  } else {
    store.ReadUnits(reads_, valid_);
  }
  size_t num_valid = 0;
  for (size_t u = 0; u < reads_.size(); ++u) {
    if (valid_[u] == 0) continue;
    ++num_valid;
    piece[places_[u] / 8] = static_cast<uint8_t>(piece[places_[u] / 8] | 1u << (places_[u] % 8));
  }
  return num_valid;
}

void FetchServer::Impl::SendPiece(Job& job, Buffer& buffer) {
  const size_t item_bytes = job.item_bytes();
  const PageStore& store = job.session.arena->store();
  const size_t piece_bytes = store.place().on_gpu() ? kGpuPieceBytes : kPieceBytes;
  const size_t count =
      std::min(job.entries.size() - job.next, std::max<size_t>(piece_bytes / item_bytes, 1));
  const size_t bytes = BitmapBytes(count) + count * item_bytes;
  if (job.next == 0) job.event.queued = Since(job.arrived);
  if (job.from_gpu && SendFromGpu(job, buffer)) return;
  uint8_t* piece = buffer.bytes.Reserve(bytes, store.place());
  const size_t num_valid = GatherPiece(job, count, piece);
  job.event.missing_units += static_cast<uint32_t>(count - num_valid);
  SendReply(job, buffer, count, {piece, bytes}, MemorySpace::kHost);
}

// A piece of valid units alone, from the arena's GPU memory. False, and nothing is sent: a unit is
// missing, or there is no memory for it; a piece from host memory can say so.
bool FetchServer::Impl::SendFromGpu(Job& job, Buffer& buffer) {
  const PageStore& store = job.session.arena->store();
  const size_t unit_bytes = job.item_bytes();
  uint8_t* const piece = store.TakeExportable();
  if (piece == nullptr) return false;
  const size_t count = std::min(job.entries.size() - job.next, kMaxPieceBytes / unit_bytes);
  reads_.clear();
  for (size_t i = 0; i < count; ++i) {
    const FetchEntry& entry = job.entries[job.next + i];
    if (job.allowed[job.next + i] != 0 && entry.generation % 2 == 0)
      reads_.push_back({entry, piece + i * unit_bytes});
  }
  valid_.assign(count, 0);
  if (reads_.size() == count) store.ReadUnits(reads_, valid_);
  if (std::find(valid_.begin(), valid_.end(), 0) != valid_.end()) {
    job.from_gpu = false;
    store.GiveExportable(piece, Steady::time_point::min());
    return false;
  }
  buffer.exportable = piece;
  SendReply(job, buffer, count, {piece, count * unit_bytes}, MemorySpace::kGpu);
  return true;
}

void FetchServer::Impl::SendReply(Job& job, Buffer& buffer, size_t count,
                                  std::span<const uint8_t> piece, MemorySpace space) {
  job.event.bytes += piece.size();
  buffer.header = job.request;
  buffer.header.flags = space == MemorySpace::kGpu
                            ? uint8_t{kFlagGpuMemory}
                            : static_cast<uint8_t>(job.request.flags & kFlagSummaries);
  buffer.header.type = MessageType::kFetchReply;
  buffer.header.count = static_cast<uint32_t>(count);
  buffer.header.piece = job.piece++;
  buffer.header.first_entry = static_cast<uint32_t>(job.next);
  buffer.job = &job;
  job.next += count;
  ++job.sending;
  if (job.next < job.entries.size()) ready_.Push(job.session.arena->tenant(), &job);
  worker_->Send(job.peer, buffer, piece, space);
}

void FetchServer::Impl::OnPieceSent(Buffer& buffer, bool ok) {
  Job& job = *std::exchange(buffer.job, nullptr);
  free_buffers_.push_back(&buffer);
  if (buffer.exportable != nullptr) {
    // Whose send failed may still read it: a client believes nothing that came after its deadline,
    // which is no later than the job's, and only then may other bytes be in there (guarantee G1).
    job.session.arena->store().GiveExportable(
        std::exchange(buffer.exportable, nullptr),
        ok ? Steady::time_point::min() : job.deadline + kGrace);
  }
  if (!ok && job.event.status == WireStatus::kOk) job.event.status = WireStatus::kUnavailable;
  --job.sending;
  const bool queued =
      job.next < job.entries.size();  // then it is in ready_, which looks at the endpoint
  if (job.sending == 0 && !queued) Finish(job, job.event.status);
}

void FetchServer::Impl::Finish(Job& job, WireStatus status) {
  job.event.status = status;
  job.event.total = Since(job.arrived);
  if (observer_ != nullptr && job.event.units > 0) observer_->OnFetch(job.event);
  worker_->Release(std::exchange(job.peer, nullptr));
  job.session.arena.reset();
  job.active = false;
  free_jobs_.push_back(&job);
  in_flight_.fetch_sub(1);
}

void FetchServer::Impl::CutOffSilentPeers() {
  const Steady::time_point now = Steady::now();
  if (now - last_cut_ < std::chrono::milliseconds(100)) return;
  // A gap: this process itself was stopped, or had nothing in flight. Its peers' grace begins now.
  if (now - last_cut_ > kGrace / 2) awake_since_ = now;
  last_cut_ = now;
  for (const Job& job : jobs_) {
    if (job.active && now > std::max(job.deadline, awake_since_) + kGrace) worker_->Abort(job.peer);
  }
}

void FetchServer::Impl::AbortAll() {
  for (Job& job : jobs_) {
    if (job.active) worker_->Abort(job.peer);
  }
  for (Refusal& refusal : refusals_) {
    if (refusal.peer != nullptr) worker_->Abort(refusal.peer);
  }
  while (!ready_.empty()) Poll();
}

FetchServer::FetchServer(UcxWorker* worker, SessionTable* sessions, const FetchLimits& limits,
                         FetchObserver* observer)
    : impl_(std::make_shared<Impl>(worker, sessions, limits, observer)), worker_(worker) {
  worker->SetReceiver(MessageType::kFetch, impl_.get());
  worker->AddPoller(impl_.get());
}

FetchServer::~FetchServer() { StopUcxServer(*worker_, MessageType::kFetch, impl_); }

void FetchServer::Drain() { impl_->draining_.store(true); }
uint32_t FetchServer::num_in_flight() const { return impl_->in_flight_.load(); }
uint64_t FetchServer::num_malformed() const { return impl_->num_malformed_.load(); }
uint64_t FetchServer::num_refused() const { return impl_->num_refused_.load(); }

}  // namespace kvd
