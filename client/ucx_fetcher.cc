#include "client/ucx_fetcher.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "kernels/checksum.h"
#include "proto/staging.h"
#include "proto/status.h"
#include "proto/ucx_link.h"

namespace kvd {
namespace {

using Steady = std::chrono::steady_clock;

// Memory for pieces that have come and were not looked at yet; beyond it their sender waits.
constexpr size_t kMaxPieces = 1024;
constexpr size_t kFirstPieces = 16;
constexpr size_t kUsualPieceBytes = size_t{320} << 10;
// Records of one request of FetchSummaries.
constexpr size_t kSummaryBatchBytes = size_t{32} << 20;
// A waiting thread looks this long before it sleeps: two wake-ups cost about as much.
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr auto kShutdownLimit = std::chrono::seconds(1);
constexpr int kListBits = 3;
static_assert(UcxFetcher::kMaxLists == 1 << kListBits);

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

// Sleeps while *word == seen, until `deadline` at the latest.
void FutexWait(std::atomic<uint32_t>& word, uint32_t seen, Steady::time_point deadline) {
  static_assert(sizeof(word) == sizeof(uint32_t));
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Steady::now()).count();
  if (left <= 0) return;
  const timespec timeout = {static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &timeout, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

class UcxFetcher::Impl final : public UcxReceiver, public UcxPoller, public UcxTask {
 public:
  explicit Impl(const SlotLayout& slot) : slot_(slot) {
    for (int i = 0; i < kMaxLists; ++i) {
      requests_[i].impl = this;
      requests_[i].index = static_cast<uint64_t>(i);
      requests_[i].entries.reset(new FetchEntry[kMaxUnits]);
      requests_[i].covered.resize(kMaxUnits);
    }
    for (size_t i = 0; i < kFirstPieces; ++i) MakePiece()->bytes.Reserve(kUsualPieceBytes);
    for (auto& piece : pieces_) free_pieces_.push_back(piece.get());
  }

  void Start(FetchList& list, uint8_t flags);
  void Wait(FetchList& list, uint8_t flags);
  void Shutdown();

  void OnMessage(const MessageHeader& header, UcxPayload& payload) override;
  bool Poll() override;
  void RunOnProgressThread() override;  // pieces came back while payloads wait for room
  bool Idle() const;
  void DropHeld() { held_.clear(); }

  size_t summary_bytes() const { return slot_.summary_bytes(); }

  std::unique_ptr<UcxLink> link_;
  std::atomic<uint64_t> num_dropped_{0};

 private:
  struct Piece final : UcxReceive {
    Impl* impl = nullptr;
    Piece* next = nullptr;  // in a stack of pieces
    MessageHeader header;
    size_t size = 0;
    StagingBuffer bytes;
    void OnReceived(bool ok) override { impl->OnPiece(*this, ok); }
  };
  static Piece* Closed() { return reinterpret_cast<Piece*>(uintptr_t{1}); }

  // One list on its way. Held by the caller (Start to Wait) and by the progress thread (from the post until
  // the request was sent); free when both have let go.
  struct Request final : UcxTask, UcxSend {
    Impl* impl = nullptr;
    uint64_t index = 0;
    std::atomic<int> holders{0};
    std::atomic<uint64_t> number{0};  // upper bits count up, lower kListBits are the index
    std::unique_ptr<FetchEntry[]> entries;
    std::vector<bool> covered;  // of the caller: entries that were answered
    Steady::time_point deadline;
    // Pieces that came, newest first; Closed() once the caller has left.
    std::atomic<Piece*> arrived{Closed()};
    std::atomic<uint64_t> failure{0};  // number << 8 | code
    std::atomic<uint32_t> events{0};   // futex word: grows with each piece or failure
    std::atomic<bool> asleep{false};

    void RunOnProgressThread() override { impl->SendRequest(*this); }
    void OnSent(bool ok) override {
      if (!ok) Fail(number.load(), absl::StatusCode::kUnavailable);
      holders.fetch_sub(1, std::memory_order_release);
    }
    void Fail(uint64_t which, absl::StatusCode code) {
      failure.store(which << 8 | static_cast<uint64_t>(code), std::memory_order_release);
      Wake();
    }
    void Wake() {
      events.fetch_add(1);
      if (asleep.load()) FutexWake(events);
    }
  };

  size_t ItemBytes(uint8_t flags) const {
    return (flags & kFlagSummaries) != 0 ? sizeof(PageHeader) + slot_.summary_bytes() : slot_.unit_bytes;
  }

  size_t DestinationBytes(uint8_t flags) const {
    return (flags & kFlagSummaries) != 0 ? slot_.summary_bytes() : slot_.unit_bytes;
  }

  // --- the caller's thread ---
  Request* Claim();
  bool TakePieces(Request& request, FetchList& list, uint8_t flags, size_t& left);
  bool TakePiece(Request& request, const Piece& piece, FetchList& list, uint8_t flags);
  void TakeItem(const uint8_t* item, FetchList& list, size_t entry, uint8_t flags) const;
  void GiveBack(Piece* first);
  void Leave(Request& request);

  // --- the progress thread ---
  void SendRequest(Request& request);
  void Receive(const MessageHeader& header, UcxPayload& payload);
  void OnPiece(Piece& piece, bool ok);
  Piece* MakePiece();
  Piece* TakeFreePiece();

  const SlotLayout slot_;
  std::atomic<bool> lost_{false};
  std::atomic<uint64_t> sequence_{0};
  Request requests_[kMaxLists];

  std::atomic<Piece*> returned_{nullptr};    // a stack that the progress thread empties at once
  std::atomic<bool> room_wanted_{false};     // payloads are held until pieces come back
  std::atomic<bool> room_task_queued_{false};
  std::vector<std::unique_ptr<Piece>> pieces_;
  std::vector<Piece*> free_pieces_;
  struct Held {
    MessageHeader header;
    UcxPayload payload;
  };
  std::deque<Held> held_;
  size_t num_receiving_ = 0;
  bool failure_seen_ = false;
};

// --- the caller's thread ------------------------------------------------------------------------------

UcxFetcher::Impl::Request* UcxFetcher::Impl::Claim() {
  for (Request& request : requests_) {
    int none = 0;
    if (request.holders.compare_exchange_strong(none, 2, std::memory_order_acquire)) return &request;
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
  Request* request = Claim();
  if (request == nullptr) {
    list.code = absl::StatusCode::kResourceExhausted;
    return;
  }
  std::memcpy(request->entries.get(), list.entries.data(), list.entries.size_bytes());
  std::fill(request->covered.begin(), request->covered.begin() + static_cast<ptrdiff_t>(count), false);
  const absl::Duration deadline = std::clamp(list.deadline, absl::ZeroDuration(), absl::Seconds(60));
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
    if (left > 0 && failure >> 8 == number) list.code = static_cast<absl::StatusCode>(failure & 0xFF);
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
  Leave(*request);
}

// Copies what has come to where it belongs. False: the daemon breaks the protocol.
bool UcxFetcher::Impl::TakePieces(Request& request, FetchList& list, uint8_t flags, size_t& left) {
  Piece* piece = request.arrived.exchange(nullptr, std::memory_order_acquire);
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
    piece->next = nullptr;
    GiveBack(piece);
    piece = next;
  }
  return good;
}

bool UcxFetcher::Impl::TakePiece(Request& request, const Piece& piece, FetchList& list, uint8_t flags) {
  const size_t first = piece.header.first_entry;
  const size_t count = piece.header.count;
  const size_t item_bytes = ItemBytes(flags);
  if (count == 0 || count > list.entries.size() || first > list.entries.size() - count) return false;
  if (piece.size != BitmapBytes(count) + count * item_bytes) return false;
  const uint8_t* bitmap = piece.bytes.data();
  const uint8_t* item = bitmap + BitmapBytes(count);
  for (size_t i = 0; i < count; ++i, item += item_bytes) {
    if (request.covered[first + i]) return false;  // answered twice
    request.covered[first + i] = true;
    if ((bitmap[i / 8] >> (i % 8) & 1) != 0) {
      TakeItem(item, list, first + i, flags);
    } else {
      std::memset(list.destinations[first + i], 0, DestinationBytes(flags));
    }
  }
  list.path_bytes += piece.size;
  return true;
}

void UcxFetcher::Impl::TakeItem(const uint8_t* item, FetchList& list, size_t entry, uint8_t flags) const {
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
    if (generation != list.entries[entry].generation || Checksum64(destination, bytes) != checksum) {
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

// --- the progress thread ------------------------------------------------------------------------------

void UcxFetcher::Impl::SendRequest(Request& request) {
  link_->Send(request, {reinterpret_cast<const uint8_t*>(request.entries.get()),
                        request.header.count * sizeof(FetchEntry)});
}

UcxFetcher::Impl::Piece* UcxFetcher::Impl::MakePiece() {
  pieces_.push_back(std::make_unique<Piece>());
  pieces_.back()->impl = this;
  return pieces_.back().get();
}

UcxFetcher::Impl::Piece* UcxFetcher::Impl::TakeFreePiece() {
  if (free_pieces_.empty()) {
    for (Piece* piece = returned_.exchange(nullptr, std::memory_order_acquire); piece != nullptr;
         piece = piece->next) {
      free_pieces_.push_back(piece);
    }
  }
  if (!free_pieces_.empty()) {
    Piece* piece = free_pieces_.back();
    free_pieces_.pop_back();
    return piece;
  }
  return pieces_.size() < kMaxPieces ? MakePiece() : nullptr;
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
  if (payload.bytes() < BitmapBytes(1)) return request.Fail(number, absl::StatusCode::kInternal);
  Receive(header, payload);
}

void UcxFetcher::Impl::Receive(const MessageHeader& header, UcxPayload& payload) {
  Piece* piece = held_.empty() ? TakeFreePiece() : nullptr;
  if (piece == nullptr) {
    held_.push_back({header, payload.Hold()});
    room_wanted_.store(true);
    // A piece that came back before `room_wanted_` was seen woke nobody.
    if (returned_.load() != nullptr && !room_task_queued_.exchange(true)) link_->worker()->Post(*this);
    return;
  }
  piece->header = header;
  piece->size = payload.bytes();
  ++num_receiving_;
  uint8_t* buffer = piece->bytes.Reserve(piece->size);
  payload.ReceiveInto(buffer, *piece);
}

void UcxFetcher::Impl::RunOnProgressThread() {
  room_task_queued_.store(false);
  while (!held_.empty()) {
    Piece* piece = TakeFreePiece();
    if (piece == nullptr) return;
    Held next = std::move(held_.front());
    held_.pop_front();
    piece->header = next.header;
    piece->size = next.payload.bytes();
    ++num_receiving_;
    uint8_t* buffer = piece->bytes.Reserve(piece->size);
    next.payload.ReceiveInto(buffer, *piece);
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
    if (request.arrived.compare_exchange_weak(head, &piece, std::memory_order_acq_rel)) return request.Wake();
  }
  if (!ok) request.Fail(number, absl::StatusCode::kUnavailable);
  num_dropped_.fetch_add(1, std::memory_order_relaxed);
  free_pieces_.push_back(&piece);
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

// --- the fetcher --------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<UcxFetcher>> UcxFetcher::Connect(UcxWorker* worker,
                                                                const std::string& remote_address,
                                                                const Incarnation& incarnation,
                                                                const SessionToken& session,
                                                                const SlotLayout& slot,
                                                                absl::Duration timeout) {
  auto impl = std::make_shared<Impl>(slot);
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
void UcxFetcher::Shutdown() { impl_->Shutdown(); }
uint64_t UcxFetcher::num_dropped_pieces() const { return impl_->num_dropped_.load(std::memory_order_relaxed); }

void UcxFetcher::FetchSummaries(FetchList& list) {
  const auto deadline = Steady::now() + absl::ToChronoNanoseconds(list.deadline);
  const size_t batch = std::max<size_t>(kSummaryBatchBytes / impl_->summary_bytes(), 1);
  list.code = absl::StatusCode::kOk;
  list.num_valid = 0;
  list.path_bytes = 0;
  if (!list.entries.empty()) std::memset(list.valid, 0, list.entries.size());
  for (size_t first = 0; first < list.entries.size() && list.code == absl::StatusCode::kOk; first += batch) {
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
