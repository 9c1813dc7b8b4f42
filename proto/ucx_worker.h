// One UCX context and worker, and the one thread that drives it. Active messages only.
//
// Why one owner thread: a UCX worker is not shared between threads without locks on its fast path.
// Other threads hand it tasks through a lock-free list and wake it with ucp_worker_signal, the only
// call that UCX allows from anywhere. The thread spins for a short time after work, then sleeps
// until an event. Why active messages only: UCX's software RMA over TCP does not check keys at the
// target, so a context that asks for RMA exposes its whole address space to the network.
// SECURITY.md says what is left.
//
// Thread safety: what is marked "progress thread" may only be called there (from a task, a receiver
// or a poller); the rest from any other thread.
// Ownership: whoever uses a worker (receivers, pollers, endpoints, operations in flight) ends
// before it.

#ifndef LOCKS_KVD_PROTO_UCX_WORKER_H_
#define LOCKS_KVD_PROTO_UCX_WORKER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/memory_space.h"
#include "proto/metrics_text.h"
#include "proto/wire.h"

namespace kvd {

class UcxEndpoint;
struct UcxState;  // proto/ucx_state.h

struct UcxOptions {
  // UCX device names, comma separated ("lo", "eth0", "mlx5_0:1"). Empty: UCX's choice.
  std::string devices;
  // UCX transports, comma separated. Empty: those of the network, never another process's host
  // memory; with `gpu`, what carries messages between GPU memories too, where this UCX has it.
  std::string transports;
  // TCP ports to listen on, "first-last". Empty: any.
  std::string port_range;
  // Large messages are read from their sender, so peers that send to us never get a key to our
  // memory (a daemon). False: UCX's choice.
  bool read_from_sender = false;
  // How long the thread spins after its last work before it sleeps.
  absl::Duration spin = absl::Microseconds(100);
  // GPU whose memory messages may come from and go to, if this UCX has CUDA; -1: host memory alone.
  // Between GPU memories UCX reads or writes as it likes (1.22 writes, whatever `read_from_sender`
  // says).
  int gpu = -1;
};

// Work for the progress thread. Made by its owner, posted as often as needed but never while it is
// still queued; posting allocates nothing.
class UcxTask {
 public:
  virtual ~UcxTask() = default;
  virtual void RunOnProgressThread() = 0;

 private:
  friend struct UcxState;
  UcxTask* next_ = nullptr;
};

// A message on its way out. Header, payload and this object live until OnSent.
class UcxSend {
 public:
  MessageHeader header;
  // Progress thread. False: the peer is gone. What was not received is not sent again.
  virtual void OnSent(bool ok) = 0;
  virtual ~UcxSend() = default;

 private:
  friend struct UcxState;
  UcxEndpoint* endpoint_ = nullptr;
};

// A payload on its way in. The buffer and this object live until OnReceived.
class UcxReceive {
 public:
  // Progress thread. False: the peer is gone and the bytes are not to be used. If the buffer is GPU
  // memory they may still be on their way then: it must not be used for anything else.
  virtual void OnReceived(bool ok) = 0;
  virtual ~UcxReceive() = default;

 private:
  friend struct UcxState;
  friend class UcxPayload;
  UcxState* into_gpu_ = nullptr;  // while the buffer is GPU memory and the bytes are on their way
};

// A payload that has been announced or has come, whose header was seen. Progress thread.
// Dropped by the destructor unless it was received.
class UcxPayload {
 public:
  UcxPayload() = default;
  UcxPayload(UcxPayload&& other) noexcept;
  UcxPayload& operator=(UcxPayload&& other) noexcept;
  ~UcxPayload();

  size_t bytes() const { return bytes_; }
  // Starts receiving all bytes() bytes into `buffer`; OnReceived may run before this returns. Into
  // GPU memory only what was sent from there: else OnReceived(false).
  void ReceiveInto(uint8_t* buffer, UcxReceive& receive, MemorySpace space = MemorySpace::kHost);
  // Keeps it beyond the call of OnMessage, to be received when there is room. The sender waits
  // meanwhile.
  UcxPayload Hold();

 private:
  friend struct UcxState;
  void Drop();

  UcxState* state_ = nullptr;
  const uint8_t* data_ = nullptr;  // eager bytes, valid during OnMessage only
  void* descriptor_ = nullptr;     // UCX's, of a rendezvous
  std::vector<uint8_t> copy_;      // of eager bytes that are held
  size_t bytes_ = 0;
  bool started_ = false;
};

// Takes the messages of one type (daemon) or of one channel (client).
class UcxReceiver {
 public:
  virtual ~UcxReceiver() = default;
  // Progress thread. `header` is of our version and of a known type; nothing else of it is checked.
  virtual void OnMessage(const MessageHeader& header, UcxPayload& payload) = 0;
};

// Work that goes on between messages.
class UcxPoller {
 public:
  virtual ~UcxPoller() = default;
  // Progress thread. Does one bounded piece of work; true if there was any.
  virtual bool Poll() = 0;
};

class UcxWorker {
 public:
  // kFailedPrecondition: UCX cannot run as asked (the message names the device or transport).
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Make(const UcxOptions& options);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  // Address that peers connect to: as UCX packs it, behind a header with its checksum.
  const std::string& address() const { return address_; }
  // Of the library that runs, "1.13.1". Peers with another one are refused at attach.
  static std::string Version();
  // Transports in use, for people.
  const std::string& transports() const { return transports_; }
  // True if messages may travel between memory of UcxOptions::gpu and that of another such worker
  // on this host: this UCX has cuda_ipc, and UCX found it fit for the GPU.
  bool has_gpu_memory() const;
  // From now on it says no: what UCX offers there does not work. Messages on their way go on.
  void LeaveGpuMemory();
  // Turns of the progress thread that took over a millisecond.
  const LatencyHistogram& stalls() const;
  // Messages that were not even a header of ours.
  uint64_t num_malformed() const;

  // Messages of `type` go to `receiver` from now on; null: they are dropped. Returns when it is in
  // force: after null the old receiver is not called again.
  void SetReceiver(MessageType type, UcxReceiver* receiver);
  // Answers (types that end in Reply or Ack) go to the receiver of the channel that is in the upper
  // 16 bits of their request number. A channel number is not used again for a long time.
  // kResourceExhausted: too many.
  absl::StatusOr<uint16_t> OpenChannel(UcxReceiver* receiver);
  void CloseChannel(uint16_t channel);
  void AddPoller(UcxPoller* poller);
  void RemovePoller(UcxPoller* poller);

  void Post(UcxTask& task);
  // Runs `work` on the progress thread and waits for it. Not from the progress thread.
  void Run(const std::function<void()>& work);
  // Keeps `object` alive until UCX is shut down: for memory that UCX may still write to.
  void KeepUntilEnd(std::shared_ptr<void> object);

  // Progress thread. Endpoints are shared by all who open the same address, and counted. A failed
  // one is never used again: opening its address makes another. kInvalidArgument: not an address()
  // of a UcxWorker; kUnavailable: UCX cannot reach it.
  absl::StatusOr<UcxEndpoint*> Open(const std::string& remote_address);
  static void Retain(UcxEndpoint* endpoint);
  void Release(UcxEndpoint* endpoint);
  // Progress thread. Ends every operation on the endpoint soon, with false; for all who share it.
  void Abort(UcxEndpoint* endpoint);
  static bool Failed(const UcxEndpoint* endpoint);  // any thread
  // What a HELLO sent on it says after its channel.
  static uint64_t Connection(const UcxEndpoint* endpoint);
  // Progress thread. Sends message.header and `payload`, which must live until OnSent. OnSent may
  // run before this returns. `space`: where the payload is; kGpu only if has_gpu_memory().
  // OnSent(false) then does not mean that nobody reads it any more: it must stay as it is for as
  // long as the peer could believe what it gets.
  void Send(UcxEndpoint* endpoint, UcxSend& message, std::span<const uint8_t> payload,
            MemorySpace space = MemorySpace::kHost);

  // Of the daemon's end: who may connect. A HELLO with a header that `allow` accepts opens an
  // endpoint to its sender, which FindPeer returns for (session, channel) until it fails.
  // kInvalidArgument: not called.
  using Allow = std::function<absl::Status(const MessageHeader&)>;
  void AcceptPeers(Allow allow);
  // Progress thread. Null if unknown or failed.
  UcxEndpoint* FindPeer(const SessionToken& session, uint16_t channel) const;

 private:
  friend class UcxPayload;
  friend struct UcxState;
  explicit UcxWorker(std::unique_ptr<UcxState> state);

  std::unique_ptr<UcxState> state_;
  std::string address_;
  std::string transports_;
};

constexpr uint16_t ChannelOf(uint64_t request) { return static_cast<uint16_t>(request >> 48); }
// Of a HELLO: which connection of the two workers it came by.
constexpr uint64_t ConnectionOf(uint64_t request) { return request & ((uint64_t{1} << 48) - 1); }

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_UCX_WORKER_H_
