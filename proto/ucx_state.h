// What a UcxWorker holds: the UCX handles, the endpoints and the task list. Included by
// proto/ucx_*.cc only.
//
// Thread safety: everything belongs to the progress thread, except what is marked "any thread".

#ifndef LOCKS_KVD_PROTO_UCX_STATE_H_
#define LOCKS_KVD_PROTO_UCX_STATE_H_

#include <ucp/api/ucp.h>

#include <atomic>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/ucx_worker.h"

namespace kvd {

// A connection to one remote worker. Deleted when it is closed, nobody uses it and nothing is in
// flight.
class UcxEndpoint {
 public:
  UcxState* state = nullptr;
  std::string remote_address;
  uint64_t connection = 0;  // which of the two workers' connections; chosen by the end that greets
  ucp_ep_h ep = nullptr;    // null once it is being closed
  void* close_request = nullptr;  // UCX's, of the close
  int users = 0;
  int in_flight = 0;
  std::atomic<bool> failed{false};  // read by any thread
};

struct UcxState {
  explicit UcxState(const UcxOptions& options_in) : options(options_in) {}
  ~UcxState();

  absl::Status Start();
  absl::Status StartUcx();
  absl::StatusOr<std::string> PackedAddress() const;

  // --- the thread (ucx_worker.cc) ---
  void Loop();
  bool RunTasks();
  void SleepUntilEvent();
  void Post(UcxTask& task);  // any thread

  // --- messages (ucx_am.cc) ---
  struct Handler {
    UcxState* state;
    MessageType type;
  };
  absl::Status RegisterHandlers();
  static ucs_status_t OnActiveMessage(void* arg, const void* header, size_t header_bytes,
                                      void* data, size_t bytes, const ucp_am_recv_param_t* param);
  void Deliver(const MessageHeader& header, UcxPayload& payload);
  static void OnSendDone(void* request, ucs_status_t status, void* user);
  static void OnReceiveDone(void* request, ucs_status_t status, size_t bytes, void* user);
  static void Finish(UcxSend& message, bool ok);
  static void Finish(UcxReceive& receive, bool ok);
  void Send(UcxEndpoint* endpoint, UcxSend& message, std::span<const uint8_t> payload,
            MemorySpace space = MemorySpace::kHost);

  // --- endpoints (ucx_endpoint.cc) ---
  static std::string SealAddress(const void* address, size_t bytes);
  // `connection` 0: any that is open, or a new one.
  absl::StatusOr<UcxEndpoint*> Open(const std::string& remote_address, uint64_t connection = 0);
  void Release(UcxEndpoint* endpoint);
  void Fail(UcxEndpoint* endpoint);
  static void OnEndpointError(void* arg, ucp_ep_h ep, ucs_status_t status);
  void CloseFailed();
  void OnHello(const MessageHeader& header, UcxPayload& payload);

  const UcxOptions options;
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  int event_fd = -1;
  std::thread thread;
  std::atomic<bool> gpu_memory{false};  // UcxWorker::has_gpu_memory; any thread
  // Copies between GPUs end without an event: the thread does not sleep meanwhile.
  int num_gpu_receives = 0;

  std::atomic<UcxTask*> tasks{
      nullptr};  // any thread: a stack that the progress thread empties at once
  std::atomic<bool> sleeping{false};       // any thread
  std::atomic<uint64_t> num_malformed{0};  // any thread
  LatencyHistogram stalls;                 // any thread
  bool stop = false;

  Handler handlers[kNumMessageTypes] = {};
  UcxReceiver* receivers[kNumMessageTypes] = {};
  std::unordered_map<uint16_t, UcxReceiver*> channels;
  uint16_t last_channel = 0;
  std::vector<UcxPoller*> pollers;
  std::vector<std::shared_ptr<void>> kept;

  std::vector<UcxEndpoint*> endpoints;  // open ones
  std::vector<UcxEndpoint*> failed;     // to be closed, or closed and still used
  UcxWorker::Allow allow;
  struct Peer {
    MessageHeader hello;  // what it was let in with, to be asked again
    UcxEndpoint* endpoint;
  };
  // Hashed with a salt of the process: the time of a lookup tells nothing about tokens.
  absl::flat_hash_map<std::pair<SessionToken, uint16_t>, Peer> peers;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_UCX_STATE_H_
