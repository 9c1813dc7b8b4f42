// Inside of UcxFetcher: lists on their way and the pieces that come for them.
//
// Two threads meet here without a lock. The *caller's* thread starts a list, takes its pieces and
// waits (ucx_fetcher.cc); the *progress* thread sends requests and receives pieces (ucx_pieces.cc).
// A request is free when both have let go of it; a piece travels progress thread ->
// Request::arrived -> caller -> returned_ -> progress thread. What comes late finds its request
// closed or of another number, and is dropped.

#ifndef LOCKS_KVD_CLIENT_UCX_FETCHER_IMPL_H_
#define LOCKS_KVD_CLIENT_UCX_FETCHER_IMPL_H_

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "client/ucx_fetcher.h"
#include "proto/staging.h"
#include "proto/ucx_link.h"
#if KVD_CUDA
#include "client/unit_scatter.h"
#endif

namespace kvd {

class UcxFetcher::Impl final : public UcxReceiver, public UcxPoller, public UcxTask {
 public:
  Impl(const SlotLayout& slot, const MemoryPlace& place);
  ~Impl() override;
  // For a place on a GPU: its memory of pieces.
  absl::Status MakeGpuPieces();

  void Start(FetchList& list, uint8_t flags);
  void Wait(FetchList& list, uint8_t flags);
  void Shutdown();

  void OnMessage(const MessageHeader& header, UcxPayload& payload) override;
  bool Poll() override;
  void RunOnProgressThread() override;  // pieces came back while payloads wait for room
  bool Idle() const;
  void DropHeld() { held_.clear(); }

  size_t summary_bytes() const { return slot_.summary_bytes(); }
  const MemoryPlace& place() const { return place_; }

  std::unique_ptr<UcxLink> link_;
  std::atomic<uint64_t> num_dropped_{0};
  std::atomic<uint64_t> num_gpu_pieces_{0};
  std::atomic<bool> broken_{false};  // a CUDA error: only another process helps

 private:
  static constexpr int kListBits = 3;
  static_assert(kMaxLists == 1 << kListBits);

  struct Piece final : UcxReceive {
    Impl* impl = nullptr;
    Piece* next = nullptr;  // in a stack of pieces
    MessageHeader header;
    size_t size = 0;
    StagingBuffer bytes;
    uint8_t* gpu = nullptr;  // kMaxPieceBytes of GPU memory, instead of `bytes`
    uint8_t* data() const { return gpu != nullptr ? gpu : bytes.data(); }
    void OnReceived(bool ok) override { impl->OnPiece(*this, ok); }
  };
  static Piece* Closed() { return reinterpret_cast<Piece*>(uintptr_t{1}); }

  // One list on its way. Held by the caller (Start to Wait) and by the progress thread (from the
  // post until the request was sent); free when both have let go.
  struct Request final : UcxTask, UcxSend {
    Impl* impl = nullptr;
    uint64_t index = 0;
    std::atomic<int> holders{0};
    std::atomic<uint64_t> number{0};  // upper bits count up, lower kListBits are the index
    std::unique_ptr<FetchEntry[]> entries;
    std::vector<bool> covered;  // of the caller: entries that were answered
#if KVD_CUDA
    std::unique_ptr<UnitScatter> scatter;  // of the caller; null unless units go to a GPU
#endif
    std::chrono::steady_clock::time_point deadline;
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
    void Wake();
  };

  size_t ItemBytes(uint8_t flags) const {
    return (flags & kFlagSummaries) != 0 ? sizeof(PageHeader) + slot_.summary_bytes()
                                         : slot_.unit_bytes;
  }

  bool ToGpu(uint8_t flags) const { return place_.on_gpu() && (flags & kFlagSummaries) == 0; }

  size_t DestinationBytes(uint8_t flags) const {
    return (flags & kFlagSummaries) != 0 ? slot_.summary_bytes() : slot_.unit_bytes;
  }

  // --- the caller's thread ---
  Request* Claim();
  bool TakePieces(Request& request, FetchList& list, uint8_t flags, size_t& left);
  bool TakePiece(Request& request, const Piece& piece, FetchList& list, uint8_t flags);
  void TakeItem(const uint8_t* item, FetchList& list, size_t entry, uint8_t flags) const;
  void TakeUnitToGpu(Request& request, uint8_t* item, bool valid, FetchList& list,
                     size_t entry) const;
  bool Scatter(Request& request);
  void GiveBack(Piece* first);
  void Leave(Request& request);

  // --- the progress thread ---
  void SendRequest(Request& request);
  void Receive(const MessageHeader& header, UcxPayload& payload);
  void ReceiveInto(Piece& piece, const MessageHeader& header, UcxPayload& payload);
  void OnPiece(Piece& piece, bool ok);
  Piece* MakePiece();
  Piece* TakeFreePiece(bool gpu);

  const SlotLayout slot_;
  const MemoryPlace place_;
  uint8_t* gpu_memory_ = nullptr;  // of the GPU pieces
  std::atomic<bool> lost_{false};
  std::atomic<uint64_t> sequence_{0};
  Request requests_[kMaxLists];

  std::atomic<Piece*> returned_{nullptr};  // a stack that the progress thread empties at once
  std::atomic<bool> room_wanted_{false};   // payloads are held until pieces come back
  std::atomic<bool> room_task_queued_{false};
  std::vector<std::unique_ptr<Piece>> pieces_;
  std::vector<Piece*> free_pieces_;
  std::vector<Piece*> free_gpu_pieces_;
  struct Held {
    MessageHeader header;
    UcxPayload payload;
  };
  std::deque<Held> held_;
  size_t num_receiving_ = 0;
  bool failure_seen_ = false;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_UCX_FETCHER_IMPL_H_
