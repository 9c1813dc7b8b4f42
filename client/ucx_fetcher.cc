#include "client/ucx_fetcher.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "client/ucx_fetcher_impl.h"
#include "kernels/checksum.h"
#include "proto/status.h"

namespace kvd {
namespace {

using Steady = std::chrono::steady_clock;

// Records of one request of FetchSummaries.
constexpr size_t kSummaryBatchBytes = size_t{32} << 20;
// A waiting thread looks this long before it sleeps: two wake-ups cost about as much.
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr auto kShutdownLimit = std::chrono::seconds(1);

// Sleeps while *word == seen, until `deadline` at the latest.
void FutexWait(std::atomic<uint32_t>& word, uint32_t seen, Steady::time_point deadline) {
  static_assert(sizeof(word) == sizeof(uint32_t));
  const auto left =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Steady::now()).count();
  if (left <= 0) return;
  const timespec timeout = {static_cast<time_t>(left / 1000000000),
                            static_cast<long>(left % 1000000000)};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &timeout, nullptr, 0);
}

}  // namespace

UcxFetcher::Impl::Request* UcxFetcher::Impl::Claim() {
  for (Request& request : requests_) {
    int none = 0;
    if (request.holders.compare_exchange_strong(none, 2, std::memory_order_acquire))
      return &request;
  }
  return nullptr;
}

void UcxFetcher::Impl::Start(FetchList& list, uint8_t flags) {
  list.code = absl::StatusCode::kOk;
  list.num_valid = 0;
  list.path_bytes = 0;
  list.in_flight = nullptr;
  const size_t count = list.entries.size();
  if (count == 0) return;
  std::memset(list.valid, 0, count);
  if (lost_.load(std::memory_order_acquire)) {
    list.code = absl::StatusCode::kAborted;
    return;
  }
  if (count > kMaxUnits) {
    list.code = absl::StatusCode::kInvalidArgument;
    return;
  }
  if (ToGpu(flags)) flags |= kFlagGpuMemory;
  Request* request = Claim();
  if (request == nullptr) {
    list.code = absl::StatusCode::kResourceExhausted;
    return;
  }
  std::memcpy(request->entries.get(), list.entries.data(), list.entries.size_bytes());
  std::fill(request->covered.begin(), request->covered.begin() + static_cast<ptrdiff_t>(count),
            false);
  const absl::Duration deadline =
      std::clamp(list.deadline, absl::ZeroDuration(), absl::Seconds(60));
  request->deadline = Steady::now() + absl::ToChronoNanoseconds(deadline);
  const uint64_t number = (sequence_.fetch_add(1) + 1) << kListBits | request->index;
  request->header = link_->Header(MessageType::kFetch, number);
  request->header.flags = flags;
  request->header.count = static_cast<uint32_t>(count);
  request->header.deadline_us = static_cast<uint32_t>(absl::ToInt64Microseconds(deadline));
  request->arrived.store(nullptr, std::memory_order_relaxed);
  request->number.store(number, std::memory_order_release);
  list.in_flight = request;
  link_->worker()->Post(*request);
}

void UcxFetcher::Impl::Wait(FetchList& list, uint8_t flags) {
  auto* request = static_cast<Request*>(std::exchange(list.in_flight, nullptr));
  if (request == nullptr) return;  // done, or refused, in Start
  const uint64_t number = request->number.load(std::memory_order_relaxed);
  size_t left = list.entries.size();
  Steady::time_point spin_until = Steady::now() + kSpin;
  while (left > 0) {
    const uint32_t seen = request->events.load();
    if (!TakePieces(*request, list, flags, left)) list.code = absl::StatusCode::kInternal;
    const uint64_t failure = request->failure.load(std::memory_order_acquire);
    if (left > 0 && failure >> 8 == number)
      list.code = static_cast<absl::StatusCode>(failure & 0xFF);
    if (left > 0 && lost_.load(std::memory_order_acquire)) list.code = absl::StatusCode::kAborted;
    if (left == 0 || list.code != absl::StatusCode::kOk) break;
    const Steady::time_point now = Steady::now();
    if (now >= request->deadline) {
      list.code = absl::StatusCode::kDeadlineExceeded;
      break;
    }
    if (request->events.load() != seen) {
      spin_until = Steady::now() + kSpin;
    } else if (now >= spin_until) {
      request->asleep.store(true);
      FutexWait(request->events, seen, request->deadline);
      request->asleep.store(false);
      spin_until = Steady::now() + kSpin;
    }
  }
  // Bytes of the daemon's GPU memory, which it may use again from the deadline on.
  const bool late =
      ToGpu(flags) && list.code == absl::StatusCode::kOk && Steady::now() >= request->deadline;
  Leave(*request);
  if (late) list.code = absl::StatusCode::kDeadlineExceeded;
  if (late || (ToGpu(flags) && list.code != absl::StatusCode::kOk)) {
    std::memset(list.valid, 0, list.entries.size());
    list.num_valid = 0;
  }
}

// Copies what has come to where it belongs. False: the daemon breaks the protocol, or a CUDA error.
bool UcxFetcher::Impl::TakePieces(Request& request, FetchList& list, uint8_t flags, size_t& left) {
  Piece* piece = request.arrived.exchange(nullptr, std::memory_order_acquire);
  Piece* taken = nullptr;  // whose units a kernel has still to read
  bool good = true;
  while (piece != nullptr) {
    Piece* next = piece->next;
    // A piece of an earlier list may have slipped in while this request was taken over.
    if (piece->header.request != request.header.request) {
      num_dropped_.fetch_add(1, std::memory_order_relaxed);
    } else if (good && TakePiece(request, *piece, list, flags)) {
      left -= piece->header.count;
    } else {
      good = false;
    }
    if (ToGpu(flags)) {
      piece->next = std::exchange(taken, piece);
    } else {
      piece->next = nullptr;
      GiveBack(piece);
    }
    piece = next;
  }
  if (taken != nullptr) {
    good = Scatter(request) && good;
    GiveBack(taken);
  }
  return good;
}

bool UcxFetcher::Impl::Scatter(Request& request) {
#if KVD_CUDA
  if (request.scatter->Run()) return true;
#else
  (void)request;
#endif
  broken_.store(true, std::memory_order_relaxed);
  return false;
}

bool UcxFetcher::Impl::TakePiece(Request& request, const Piece& piece, FetchList& list,
                                 uint8_t flags) {
  const size_t first = piece.header.first_entry;
  const size_t count = piece.header.count;
  const size_t item_bytes = ItemBytes(flags);
  if (count == 0 || count > list.entries.size() || first > list.entries.size() - count)
    return false;
  const size_t bitmap_bytes = piece.gpu != nullptr ? 0 : BitmapBytes(count);
  if (piece.size != bitmap_bytes + count * item_bytes) return false;
  if (piece.gpu != nullptr && !ToGpu(flags)) return false;
  const uint8_t* bitmap = piece.data();
  uint8_t* item = piece.data() + bitmap_bytes;
  for (size_t i = 0; i < count; ++i, item += item_bytes) {
    if (request.covered[first + i]) return false;  // answered twice
    request.covered[first + i] = true;
    const bool valid = piece.gpu != nullptr || (bitmap[i / 8] >> (i % 8) & 1) != 0;
    if (ToGpu(flags)) {
      TakeUnitToGpu(request, item, valid, list, first + i);
    } else if (valid) {
      TakeItem(item, list, first + i, flags);
    } else {
      std::memset(list.destinations[first + i], 0, DestinationBytes(flags));
    }
  }
  if (piece.gpu != nullptr) num_gpu_pieces_.fetch_add(1, std::memory_order_relaxed);
  list.path_bytes += piece.size;
  return true;
}

// `item` is in GPU memory, or else in pinned memory of this fetcher.
void UcxFetcher::Impl::TakeUnitToGpu(Request& request, uint8_t* item, bool valid, FetchList& list,
                                     size_t entry) const {
  if (!valid) std::memset(item, 0, slot_.unit_bytes);
#if KVD_CUDA
  request.scatter->Add(item, list.destinations[entry]);
#else
  (void)request;
#endif
  if (!valid) return;
  list.valid[entry] = 1;
  ++list.num_valid;
}

void UcxFetcher::Impl::TakeItem(const uint8_t* item, FetchList& list, size_t entry,
                                uint8_t flags) const {
  uint8_t* const destination = list.destinations[entry];
  if ((flags & kFlagSummaries) == 0) {
    std::memcpy(destination, item, slot_.unit_bytes);
  } else {
    const size_t bytes = slot_.summary_bytes();
    uint64_t generation = 0;
    uint64_t checksum = 0;
    std::memcpy(&generation, item + offsetof(PageHeader, generation), sizeof(generation));
    std::memcpy(&checksum, item + offsetof(PageHeader, summary_checksum), sizeof(checksum));
    std::memcpy(destination, item + sizeof(PageHeader), bytes);
    if (generation != list.entries[entry].generation ||
        Checksum64(destination, bytes) != checksum) {
      std::memset(destination, 0, bytes);
      return;
    }
  }
  list.valid[entry] = 1;
  ++list.num_valid;
}

// Gives a chain of pieces back to the progress thread, and wakes it only if it waits for them.
void UcxFetcher::Impl::GiveBack(Piece* first) {
  Piece* last = first;
  while (last->next != nullptr) last = last->next;
  Piece* head = returned_.load(std::memory_order_relaxed);
  do {
    last->next = head;
  } while (!returned_.compare_exchange_weak(head, first));
  if (room_wanted_.load() && !room_task_queued_.exchange(true)) link_->worker()->Post(*this);
}

// From here on a piece of this request finds it closed, and goes back unread.
void UcxFetcher::Impl::Leave(Request& request) {
  Piece* unread = request.arrived.exchange(Closed(), std::memory_order_acquire);
  if (unread != nullptr) GiveBack(unread);
  request.holders.fetch_sub(1, std::memory_order_release);
}

void UcxFetcher::Impl::Shutdown() {
  lost_.store(true, std::memory_order_release);
  for (Request& request : requests_) request.Wake();
}

// --- the fetcher ---------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<UcxFetcher>> UcxFetcher::Connect(
    UcxWorker* worker, const std::string& remote_address, const Incarnation& incarnation,
    const SessionToken& session, const SlotLayout& slot, absl::Duration timeout,
    const MemoryPlace& place) {
  if (place.on_gpu() && !worker->has_gpu_memory()) {
    return absl::FailedPreconditionError(
        "UCX: messages into GPU memory are wanted, and it has no CUDA here");
  }
  auto impl = std::make_shared<Impl>(slot, place);
  if (place.on_gpu()) KVD_RETURN_IF_ERROR(impl->MakeGpuPieces());
  KVD_ASSIGN_OR_RETURN(impl->link_, UcxLink::Connect(worker, remote_address, incarnation, session,
                                                     impl.get(), timeout));
  worker->AddPoller(impl.get());
  return std::unique_ptr<UcxFetcher>(new UcxFetcher(std::move(impl)));
}

UcxFetcher::UcxFetcher(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

UcxFetcher::~UcxFetcher() {
  UcxWorker* worker = impl_->link_->worker();
  impl_->Shutdown();
  bool idle = false;
  worker->Run([&] { idle = impl_->Idle(); });
  const auto limit = Steady::now() + kShutdownLimit;
  while (!idle && Steady::now() < limit) {
    // What is in flight may never end by itself if the daemon is frozen.
    worker->Run([&] {
      impl_->link_->Abort();
      idle = impl_->Idle();
    });
    if (!idle) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  worker->RemovePoller(impl_.get());
  worker->Run([&] { impl_->DropHeld(); });
  impl_->link_.reset();
  if (!idle) worker->KeepUntilEnd(impl_);
}

void UcxFetcher::Start(FetchList& list) { impl_->Start(list, 0); }
void UcxFetcher::Wait(FetchList& list) { impl_->Wait(list, 0); }
bool UcxFetcher::failed() const {
  return impl_->broken_.load(std::memory_order_relaxed) || impl_->link_->failed();
}
MemorySpace UcxFetcher::destination_space() const { return impl_->place().space; }
void UcxFetcher::Shutdown() { impl_->Shutdown(); }
uint64_t UcxFetcher::num_dropped_pieces() const {
  return impl_->num_dropped_.load(std::memory_order_relaxed);
}
uint64_t UcxFetcher::num_gpu_pieces() const {
  return impl_->num_gpu_pieces_.load(std::memory_order_relaxed);
}

void UcxFetcher::FetchSummaries(FetchList& list) {
  const auto deadline = Steady::now() + absl::ToChronoNanoseconds(list.deadline);
  const size_t batch = std::max<size_t>(kSummaryBatchBytes / impl_->summary_bytes(), 1);
  list.code = absl::StatusCode::kOk;
  list.num_valid = 0;
  list.path_bytes = 0;
  if (!list.entries.empty()) std::memset(list.valid, 0, list.entries.size());
  for (size_t first = 0; first < list.entries.size() && list.code == absl::StatusCode::kOk;
       first += batch) {
    FetchList part;
    part.entries = list.entries.subspan(first, std::min(batch, list.entries.size() - first));
    part.destinations = list.destinations + first;
    part.valid = list.valid + first;
    part.deadline = absl::FromChrono(deadline - Steady::now());
    impl_->Start(part, kFlagSummaries);
    impl_->Wait(part, kFlagSummaries);
    list.code = part.code;
    list.num_valid += part.num_valid;
    list.path_bytes += part.path_bytes;
  }
}

}  // namespace kvd
