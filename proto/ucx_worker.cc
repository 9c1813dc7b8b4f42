#include "proto/ucx_worker.h"

#include <poll.h>
#include <sched.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "proto/status.h"
#include "proto/ucx_state.h"

namespace kvd {
namespace {

// How long shutting down waits for UCX to close its connections.
constexpr auto kCloseLimit = std::chrono::seconds(1);
// A turn of the thread longer than this is counted: peers wait meanwhile.
constexpr auto kStall = std::chrono::milliseconds(1);

absl::Status UcxError(absl::string_view what, ucs_status_t status) {
  return absl::FailedPreconditionError(absl::StrCat("UCX: ", what, ": ", ucs_status_string(status)));
}

// Only transports of the network: shared-memory ones would map or read another process's memory. "ib" is
// named only where there is a device, since UCX warns about names that it cannot use.
std::string NetworkTransports() {
  std::error_code error;
  const bool has_device = !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
  return has_device ? "tcp,ib" : "tcp";
}

absl::Status Configure(const UcxOptions& options, ucp_config_t* config) {
  const std::pair<const char*, std::string> settings[] = {
      {"TLS", options.transports.empty() ? NetworkTransports() : options.transports},
      {"NET_DEVICES", options.devices.empty() ? "all" : options.devices},
      {"RNDV_SCHEME", options.read_from_sender ? "get_zcopy" : "auto"},
      {"PORT_RANGE", options.port_range.empty() ? "0" : options.port_range},
      // UCX's own defaults, and never what the environment says: a process whose TCP receive segment is smaller
      // than its peer's is ended by UCX with the first long message.
      {"RX_SEG_SIZE", "64k"},
      {"TX_SEG_SIZE", "8k"},
  };
  for (const auto& [name, value] : settings) {
    if (const ucs_status_t status = ucp_config_modify(config, name, value.c_str()); status != UCS_OK) {
      return UcxError(absl::StrCat("cannot set ", name, "=", value), status);
    }
  }
  return absl::OkStatus();
}

// Runs a closure once, for calls that may wait.
class BlockingTask final : public UcxTask {
 public:
  explicit BlockingTask(const std::function<void()>& work) : work_(work) {}
  void RunOnProgressThread() override {
    work_();
    done_.set_value();
  }
  void Wait() { done_.get_future().wait(); }

 private:
  const std::function<void()>& work_;
  std::promise<void> done_;
};

}  // namespace

absl::Status UcxState::Start() {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
    return UcxError("cannot read its configuration", status);
  }
  absl::Status configured = Configure(options, config);
  ucs_status_t status = UCS_OK;
  if (configured.ok()) {
    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    status = ucp_init(&params, config, &context);
  }
  ucp_config_release(config);
  KVD_RETURN_IF_ERROR(configured);
  if (status != UCS_OK) {
    return UcxError(absl::StrCat("cannot start with devices '", options.devices, "', transports '",
                                 options.transports, "': name devices of this host or leave both empty"),
                    status);
  }
  ucp_worker_params_t params = {};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  if (status = ucp_worker_create(context, &params, &worker); status != UCS_OK) {
    return UcxError("cannot make a worker", status);
  }
  if (status = ucp_worker_get_efd(worker, &event_fd); status != UCS_OK) {
    return UcxError("a transport has no events to wait for", status);
  }
  KVD_RETURN_IF_ERROR(RegisterHandlers());
  thread = std::thread([this] { Loop(); });
  return absl::OkStatus();
}

absl::StatusOr<std::string> UcxState::PackedAddress() const {
  ucp_address_t* packed = nullptr;
  size_t bytes = 0;
  if (const ucs_status_t status = ucp_worker_get_address(worker, &packed, &bytes); status != UCS_OK) {
    return UcxError("cannot get the worker's address", status);
  }
  std::string address = SealAddress(packed, bytes);
  ucp_worker_release_address(worker, packed);
  return address;
}

UcxState::~UcxState() {
  if (worker != nullptr) ucp_worker_destroy(worker);
  if (context != nullptr) ucp_cleanup(context);
  // UCX has let go of all memory: what was kept for it may end.
  kept.clear();
  for (UcxEndpoint* endpoint : failed) delete endpoint;
}

void UcxState::Loop() {
  using Clock = std::chrono::steady_clock;
  const auto spin = absl::ToChronoNanoseconds(options.spin);
  Clock::time_point last_work = Clock::now();
  Clock::time_point turn = last_work;
  while (!stop) {
    bool active = ucp_worker_progress(worker) != 0;
    active |= RunTasks();
    for (UcxPoller* poller : pollers) active |= poller->Poll();
    if (!failed.empty()) CloseFailed();
    const Clock::time_point now = Clock::now();
    if (now - turn > kStall) stalls.Observe(absl::FromChrono(now - turn));
    turn = now;
    if (active) {
      last_work = now;
    } else if (now - last_work < spin) {
      sched_yield();
    } else {
      SleepUntilEvent();
      turn = Clock::now();
    }
  }
}

bool UcxState::RunTasks() {
  UcxTask* newest = tasks.exchange(nullptr, std::memory_order_acquire);
  if (newest == nullptr) return false;
  UcxTask* oldest = nullptr;
  while (newest != nullptr) {
    UcxTask* next = std::exchange(newest->next_, oldest);
    oldest = std::exchange(newest, next);
  }
  while (oldest != nullptr) {
    UcxTask* task = oldest;
    oldest = std::exchange(task->next_, nullptr);  // before it runs: it may be posted again at once
    task->RunOnProgressThread();
  }
  return true;
}

void UcxState::SleepUntilEvent() {
  // Either Post sees `sleeping`, or this thread sees its task: both orders are sequentially consistent.
  sleeping.store(true);
  if (tasks.load() == nullptr && ucp_worker_arm(worker) == UCS_OK) {
    pollfd event = {event_fd, POLLIN, 0};
    // UCX closes failed endpoints by its own progress, which may need no event; and pollers look at the
    // clock, to cut off peers that went silent.
    poll(&event, 1, failed.empty() ? 100 : 10);
  }
  sleeping.store(false);
}

void UcxState::Post(UcxTask& task) {
  UcxTask* head = tasks.load(std::memory_order_relaxed);
  do {
    task.next_ = head;
  } while (!tasks.compare_exchange_weak(head, &task));
  if (sleeping.load() && sleeping.exchange(false)) ucp_worker_signal(worker);
}

UcxWorker::UcxWorker(std::unique_ptr<UcxState> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Make(const UcxOptions& options) {
  auto state = std::make_unique<UcxState>(options);
  KVD_RETURN_IF_ERROR(state->Start());
  std::unique_ptr<UcxWorker> worker(new UcxWorker(std::move(state)));
  absl::StatusOr<std::string> address = absl::InternalError("not asked yet");
  worker->Run([&] { address = worker->state_->PackedAddress(); });
  KVD_ASSIGN_OR_RETURN(worker->address_, std::move(address));
  worker->transports_ = absl::StrCat(options.transports.empty() ? NetworkTransports() : options.transports,
                                     " on ", options.devices.empty() ? "all devices" : options.devices);
  return worker;
}

UcxWorker::~UcxWorker() {
  UcxState* state = state_.get();
  if (!state->thread.joinable()) return;
  Run([state] {
    for (auto& [key, peer] : state->peers) state->Release(peer.endpoint);
    state->peers.clear();
    while (!state->endpoints.empty()) state->Fail(state->endpoints.front());
  });
  const auto limit = std::chrono::steady_clock::now() + kCloseLimit;
  bool closed = false;
  while (!closed && std::chrono::steady_clock::now() < limit) {
    Run([state, &closed] {
      state->CloseFailed();
      closed = std::none_of(state->failed.begin(), state->failed.end(), [](const UcxEndpoint* endpoint) {
        return endpoint->close_request != nullptr || endpoint->in_flight > 0;
      });
    });
    if (!closed) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Run([state] { state->stop = true; });
  state->thread.join();
}

std::string UcxWorker::Version() { return ucp_get_version_string(); }

const LatencyHistogram& UcxWorker::stalls() const { return state_->stalls; }

uint64_t UcxWorker::num_malformed() const {
  return state_->num_malformed.load(std::memory_order_relaxed);
}

void UcxWorker::SetReceiver(MessageType type, UcxReceiver* receiver) {
  Run([&] { state_->receivers[static_cast<int>(type) - 1] = receiver; });
}

absl::StatusOr<uint16_t> UcxWorker::OpenChannel(UcxReceiver* receiver) {
  uint16_t channel = 0;
  Run([&] {
    if (state_->channels.size() >= 60000) return;
    do {
      ++state_->last_channel;
    } while (state_->last_channel == 0 || state_->channels.contains(state_->last_channel));
    channel = state_->last_channel;
    state_->channels[channel] = receiver;
  });
  if (channel == 0) {
    return absl::ResourceExhaustedError("UCX: 60000 channels are open: close sessions first");
  }
  return channel;
}

void UcxWorker::CloseChannel(uint16_t channel) {
  Run([&] { state_->channels.erase(channel); });
}

void UcxWorker::AddPoller(UcxPoller* poller) {
  Run([&] { state_->pollers.push_back(poller); });
}

void UcxWorker::RemovePoller(UcxPoller* poller) {
  // Run's work is done between two rounds of the pollers, so erasing is safe.
  Run([&] { std::erase(state_->pollers, poller); });
}

void UcxWorker::Post(UcxTask& task) { state_->Post(task); }

void UcxWorker::Run(const std::function<void()>& work) {
  KVD_CHECK(std::this_thread::get_id() != state_->thread.get_id());
  BlockingTask task(work);
  state_->Post(task);
  task.Wait();
}

void UcxWorker::KeepUntilEnd(std::shared_ptr<void> object) {
  Run([&] { state_->kept.push_back(std::move(object)); });
}

absl::StatusOr<UcxEndpoint*> UcxWorker::Open(const std::string& remote_address) {
  return state_->Open(remote_address);
}
void UcxWorker::Retain(UcxEndpoint* endpoint) { ++endpoint->users; }
void UcxWorker::Release(UcxEndpoint* endpoint) { state_->Release(endpoint); }
void UcxWorker::Abort(UcxEndpoint* endpoint) { state_->Fail(endpoint); }
uint64_t UcxWorker::Connection(const UcxEndpoint* endpoint) { return endpoint->connection; }
bool UcxWorker::Failed(const UcxEndpoint* endpoint) { return endpoint->failed; }
void UcxWorker::Send(UcxEndpoint* endpoint, UcxSend& message, std::span<const uint8_t> payload) {
  state_->Send(endpoint, message, payload);
}

void UcxWorker::AcceptPeers(Allow allow) {
  Run([&] { state_->allow = std::move(allow); });
}

UcxEndpoint* UcxWorker::FindPeer(const SessionToken& session, uint16_t channel) const {
  const auto found = state_->peers.find({session, channel});
  if (found == state_->peers.end() || found->second.endpoint->failed) return nullptr;
  return found->second.endpoint;
}

}  // namespace kvd
