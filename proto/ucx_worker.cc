#include "proto/ucx_worker.h"

#include <poll.h>
#include <sched.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/check.h"
#include "proto/gpu_memory.h"
#include "proto/status.h"
#include "proto/ucx_context.h"
#include "proto/ucx_state.h"

namespace kvd {
namespace {

// How long shutting down waits for UCX to close its connections.
constexpr auto kCloseLimit = std::chrono::seconds(1);
// A turn of the thread longer than this is counted: peers wait meanwhile.
constexpr auto kStall = std::chrono::milliseconds(1);

// Runs `work` with `gpu` current, without changing what is current for the caller; -1: as it is.
void OnThreadFor(int gpu, const std::function<void()>& work) {
  if (gpu < 0) return work();
  std::thread([&] {
    // Without the GPU, UCX says itself that it finds none.
    (void)MakeGpuCurrent(gpu);
    work();
  }).join();
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
  absl::Status started;
  // UCX's CUDA transports look at the GPU that is current. It is made so on threads of ours alone.
  OnThreadFor(options.gpu, [&] { started = StartUcx(); });
  KVD_RETURN_IF_ERROR(started);
  thread = std::thread([this] {
    if (gpu_memory) KVD_CHECK(MakeGpuCurrent(options.gpu).ok());
    Loop();
  });
  return absl::OkStatus();
}

absl::Status UcxState::StartUcx() {
  KVD_ASSIGN_OR_RETURN(context, MakeUcxContext(options));
  ucs_status_t status = UCS_OK;
  ucp_worker_params_t params = {};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  if (status = ucp_worker_create(context, &params, &worker); status != UCS_OK) {
    return UcxError("cannot make a worker", status);
  }
  if (status = ucp_worker_get_efd(worker, &event_fd); status != UCS_OK) {
    return UcxError("a transport has no events to wait for", status);
  }
  gpu_memory = HasGpuMemory(options, context);
  return RegisterHandlers();
}

absl::StatusOr<std::string> UcxState::PackedAddress() const {
  ucp_address_t* packed = nullptr;
  size_t bytes = 0;
  if (const ucs_status_t status = ucp_worker_get_address(worker, &packed, &bytes);
      status != UCS_OK) {
    return UcxError("cannot get the worker's address", status);
  }
  std::string address = SealAddress(packed, bytes);
  ucp_worker_release_address(worker, packed);
  return address;
}

UcxState::~UcxState() {
  OnThreadFor(options.gpu, [this] {
    if (worker != nullptr) ucp_worker_destroy(worker);
    if (context != nullptr) ucp_cleanup(context);
  });
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
    } else if (now - last_work < spin || num_gpu_receives > 0) {
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
  // Either Post sees `sleeping`, or this thread sees its task: both orders are sequentially
  // consistent.
  sleeping.store(true);
  if (tasks.load() == nullptr && ucp_worker_arm(worker) == UCS_OK) {
    pollfd event = {event_fd, POLLIN, 0};
    // UCX closes failed endpoints by its own progress, which may need no event; and pollers look at
    // the clock, to cut off peers that went silent.
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
  worker->transports_ = absl::StrCat(UcxTransports(options), " on ",
                                     options.devices.empty() ? "all devices" : options.devices);
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
      closed =
          std::none_of(state->failed.begin(), state->failed.end(), [](const UcxEndpoint* endpoint) {
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
bool UcxWorker::has_gpu_memory() const {
  return state_->gpu_memory.load(std::memory_order_relaxed);
}
void UcxWorker::LeaveGpuMemory() { state_->gpu_memory.store(false, std::memory_order_relaxed); }
void UcxWorker::Send(UcxEndpoint* endpoint, UcxSend& message, std::span<const uint8_t> payload,
                     MemorySpace space) {
  state_->Send(endpoint, message, payload, space);
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
