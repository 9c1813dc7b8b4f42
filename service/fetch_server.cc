#include "service/fetch_server.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "service/fetch_server_impl.h"
#include "service/ucx_shutdown.h"

namespace kvd {
namespace {

constexpr auto kMaxDeadline = std::chrono::seconds(60);

}  // namespace

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
