// UcxFetcher on the progress thread: requests out, pieces in.

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/ucx_fetcher_impl.h"
#include "proto/gpu_memory.h"
#include "proto/status.h"

namespace kvd {
namespace {

// Memory for pieces that have come and were not looked at yet; beyond it their sender waits.
constexpr size_t kMaxPieces = 1024;
constexpr size_t kFirstPieces = 16;
constexpr size_t kUsualPieceBytes = size_t{320} << 10;

absl::StatusCode CodeOf(WireStatus status) {
  switch (status) {
    case WireStatus::kOk:
      return absl::StatusCode::kOk;
    case WireStatus::kInvalid:
      return absl::StatusCode::kInvalidArgument;
    case WireStatus::kAborted:
      return absl::StatusCode::kAborted;
    case WireStatus::kExhausted:
      return absl::StatusCode::kResourceExhausted;
    case WireStatus::kLate:
      return absl::StatusCode::kDeadlineExceeded;
    case WireStatus::kUnavailable:
      break;
  }
  return absl::StatusCode::kUnavailable;
}

void FutexWake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

UcxFetcher::Impl::Impl(const SlotLayout& slot, const MemoryPlace& place)
    : slot_(slot), place_(place) {
  for (int i = 0; i < kMaxLists; ++i) {
    requests_[i].impl = this;
    requests_[i].index = static_cast<uint64_t>(i);
    requests_[i].entries.reset(new FetchEntry[kMaxUnits]);
    requests_[i].covered.resize(kMaxUnits);
  }
  for (size_t i = 0; i < kFirstPieces; ++i) MakePiece()->bytes.Reserve(kUsualPieceBytes, place_);
  for (auto& piece : pieces_) free_pieces_.push_back(piece.get());
}

UcxFetcher::Impl::~Impl() { FreeExportable(place_.gpu, gpu_memory_); }

absl::Status UcxFetcher::Impl::MakeGpuPieces() {
  gpu_memory_ = AllocateExportable(place_.gpu, kGpuPieces * kMaxPieceBytes);
  if (gpu_memory_ == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "GPU ", place_.gpu, ": no room for ", kGpuPieces * kMaxPieceBytes, " bytes of pieces"));
  }
  for (size_t i = 0; i < kGpuPieces; ++i) {
    Piece* piece = MakePiece();
    piece->gpu = gpu_memory_ + i * kMaxPieceBytes;
    free_gpu_pieces_.push_back(piece);
  }
#if KVD_CUDA
  for (Request& request : requests_) {
    KVD_ASSIGN_OR_RETURN(request.scatter, UnitScatter::Make(place_.gpu, slot_.unit_bytes));
  }
#endif
  return absl::OkStatus();
}

void UcxFetcher::Impl::Request::Wake() {
  events.fetch_add(1);
  if (asleep.load()) FutexWake(events);
}

void UcxFetcher::Impl::SendRequest(Request& request) {
  link_->Send(request, {reinterpret_cast<const uint8_t*>(request.entries.get()),
                        request.header.count * sizeof(FetchEntry)});
}

UcxFetcher::Impl::Piece* UcxFetcher::Impl::MakePiece() {
  pieces_.push_back(std::make_unique<Piece>());
  pieces_.back()->impl = this;
  return pieces_.back().get();
}

UcxFetcher::Impl::Piece* UcxFetcher::Impl::TakeFreePiece(bool gpu) {
  std::vector<Piece*>& free = gpu ? free_gpu_pieces_ : free_pieces_;
  if (free.empty()) {
    for (Piece* piece = returned_.exchange(nullptr, std::memory_order_acquire); piece != nullptr;
         piece = piece->next) {
      (piece->gpu != nullptr ? free_gpu_pieces_ : free_pieces_).push_back(piece);
    }
  }
  if (!free.empty()) {
    Piece* piece = free.back();
    free.pop_back();
    return piece;
  }
  return !gpu && pieces_.size() < kMaxPieces ? MakePiece() : nullptr;
}

void UcxFetcher::Impl::OnMessage(const MessageHeader& header, UcxPayload& payload) {
  const uint64_t number = header.request & ((uint64_t{1} << 48) - 1);
  Request& request = requests_[number & (kMaxLists - 1)];
  const bool current = request.number.load(std::memory_order_acquire) == number &&
                       request.arrived.load(std::memory_order_acquire) != Closed();
  const size_t most = std::max(kMaxPieceBytes, BitmapBytes(1) + ItemBytes(kFlagSummaries));
  if (!current || header.type != MessageType::kFetchReply || payload.bytes() > most) {
    num_dropped_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (header.status != WireStatus::kOk) return request.Fail(number, CodeOf(header.status));
  const bool gpu = (header.flags & kFlagGpuMemory) != 0;
  const bool fits = gpu ? gpu_memory_ != nullptr && payload.bytes() <= kMaxPieceBytes
                        : payload.bytes() >= BitmapBytes(1);
  if (!fits) return request.Fail(number, absl::StatusCode::kInternal);
  Receive(header, payload);
}

void UcxFetcher::Impl::Receive(const MessageHeader& header, UcxPayload& payload) {
  Piece* piece = held_.empty() ? TakeFreePiece((header.flags & kFlagGpuMemory) != 0) : nullptr;
  if (piece == nullptr) {
    held_.push_back({header, payload.Hold()});
    room_wanted_.store(true);
    // A piece that came back before `room_wanted_` was seen woke nobody.
    if (returned_.load() != nullptr && !room_task_queued_.exchange(true))
      link_->worker()->Post(*this);
    return;
  }
  ReceiveInto(*piece, header, payload);
}

void UcxFetcher::Impl::ReceiveInto(Piece& piece, const MessageHeader& header, UcxPayload& payload) {
  piece.header = header;
  piece.size = payload.bytes();
  ++num_receiving_;
  if (piece.gpu != nullptr) return payload.ReceiveInto(piece.gpu, piece, MemorySpace::kGpu);
  uint8_t* buffer = piece.bytes.Reserve(piece.size, place_);
  payload.ReceiveInto(buffer, piece);
}

void UcxFetcher::Impl::RunOnProgressThread() {
  room_task_queued_.store(false);
  while (!held_.empty()) {
    Piece* piece = TakeFreePiece((held_.front().header.flags & kFlagGpuMemory) != 0);
    if (piece == nullptr) return;
    Held next = std::move(held_.front());
    held_.pop_front();
    ReceiveInto(*piece, next.header, next.payload);
  }
  room_wanted_.store(false);
}

void UcxFetcher::Impl::OnPiece(Piece& piece, bool ok) {
  --num_receiving_;
  const uint64_t number = piece.header.request & ((uint64_t{1} << 48) - 1);
  Request& request = requests_[number & (kMaxLists - 1)];
  bool wanted = ok && request.number.load(std::memory_order_acquire) == number;
  Piece* head = request.arrived.load(std::memory_order_relaxed);
  while (wanted) {
    if (head == Closed()) {
      wanted = false;
      break;
    }
    piece.next = head;
    if (request.arrived.compare_exchange_weak(head, &piece, std::memory_order_acq_rel))
      return request.Wake();
  }
  if (!ok) request.Fail(number, absl::StatusCode::kUnavailable);
  num_dropped_.fetch_add(1, std::memory_order_relaxed);
  if (piece.gpu == nullptr) {
    free_pieces_.push_back(&piece);
  } else if (ok) {
    free_gpu_pieces_.push_back(&piece);
  }
  // Else a copy into it may still be under way: it is not used again (the connection has failed,
  // and the fetcher with it).
}

// The only news that comes without a message: the endpoint has failed.
bool UcxFetcher::Impl::Poll() {
  if (failure_seen_ || !link_->failed()) return false;
  failure_seen_ = true;
  held_.clear();
  for (Request& request : requests_) {
    request.Fail(request.number.load(std::memory_order_acquire), absl::StatusCode::kUnavailable);
  }
  return true;
}

bool UcxFetcher::Impl::Idle() const {
  return num_receiving_ == 0 && !room_task_queued_.load() &&
         std::all_of(std::begin(requests_), std::end(requests_),
                     [](const Request& request) { return request.holders.load() == 0; });
}

}  // namespace kvd
