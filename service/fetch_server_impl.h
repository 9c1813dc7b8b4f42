// FetchServer's inside: a fetch's way from its arrival to its last piece.
//
// Thread safety: everything but the atomics belongs to the UCX progress thread.
// Internal to fetch_server*.cc.

#ifndef LOCKS_KVD_SERVICE_FETCH_SERVER_IMPL_H_
#define LOCKS_KVD_SERVICE_FETCH_SERVER_IMPL_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/time/time.h"
#include "proto/staging.h"
#include "service/fair_queue.h"
#include "service/fetch_server.h"

namespace kvd {

class FetchServer::Impl final : public UcxReceiver, public UcxPoller {
 public:
  static constexpr size_t kNumBuffers = 32;
  static constexpr size_t kMaxJobs = 256;
  static constexpr size_t kMaxRefusals = 64;
  // What one tenant may have of them: a flood of one leaves room for the others.
  static constexpr size_t kBuffersPerTenant = kNumBuffers / 4 * 3;
  static constexpr size_t kJobsPerTenant = kMaxJobs / 4 * 3;

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
  using Steady = std::chrono::steady_clock;

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

  static absl::Duration Since(Steady::time_point start) {
    return absl::FromChrono(Steady::now() - start);
  }
  static size_t ItemBytes(const SlotLayout& slot, bool summaries) {
    return summaries ? sizeof(PageHeader) + slot.summary_bytes() : slot.unit_bytes;
  }
  // Arrival: fetch_server.cc.
  WireStatus Check(const MessageHeader& header, size_t payload_bytes,
                   const SessionHandle& session) const;
  void Refuse(UcxEndpoint* peer, const MessageHeader& request, WireStatus status,
              SessionId session);
  void OnEntries(Job& job, bool ok);
  void OnRefusalSent(Refusal& refusal);
  void Finish(Job& job, WireStatus status);
  // Pieces: fetch_server_pieces.cc.
  bool HasBufferFor(const Job& job) const;
  void SendPiece(Job& job, Buffer& buffer);
  size_t GatherPiece(Job& job, size_t count, uint8_t* piece);
  bool SendFromGpu(Job& job, Buffer& buffer);
  void SendReply(Job& job, Buffer& buffer, size_t count, std::span<const uint8_t> piece,
                 MemorySpace space);
  void OnPieceSent(Buffer& buffer, bool ok);
  void CutOffSilentPeers();

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

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_FETCH_SERVER_IMPL_H_
