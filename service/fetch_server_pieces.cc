// FetchServer: gathers and sends the pieces of queued fetches, in turns of the tenants.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "service/fetch_server_impl.h"

namespace kvd {
namespace {

// Pieces are this large rather than kMaxPieceBytes: the gathered bytes are still in the cache when
// the network copies them, and the gather of one piece overlaps the sending of the last
// (bench/fetch_bench).
constexpr size_t kPieceBytes = size_t{256} << 10;
// Out of a GPU a piece costs a launch and a wait for it (15 us or so) besides its bytes, and comes
// to no cache.
constexpr size_t kGpuPieceBytes = size_t{1} << 20;
constexpr size_t kBuffersPerSession = 8;
// A peer that has not taken its answer this long after its own deadline is cut off, its session
// with it.
constexpr auto kGrace = std::chrono::seconds(2);

}  // namespace

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

}  // namespace kvd
