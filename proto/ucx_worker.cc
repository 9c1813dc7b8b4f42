#include "proto/ucx_worker.h"

#include <poll.h>
#include <sched.h>
#include <ucp/api/ucp.h>
#include <uct/api/uct.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <future>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/check.h"
#include "proto/gpu_memory.h"
#include "proto/status.h"
#include "proto/ucx_state.h"

namespace kvd {
namespace {

// How long shutting down waits for UCX to close its connections.
constexpr auto kCloseLimit = std::chrono::seconds(1);
// A turn of the thread longer than this is counted: peers wait meanwhile.
constexpr auto kStall = std::chrono::milliseconds(1);

absl::Status UcxError(absl::string_view what, ucs_status_t status) {
  return absl::FailedPreconditionError(
      absl::StrCat("UCX: ", what, ": ", ucs_status_string(status)));
}

// Only transports of the network: shared-memory ones would map or read another process's memory.
// "ib" is named only where there is a device, since UCX warns about names that it cannot use.
std::string NetworkTransports() {
  std::error_code error;
  const bool has_device = !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
  return has_device ? "tcp,ib" : "tcp";
}

// True if the library that runs can copy to and from a GPU, and between the GPU memories of two
// processes.
bool HasCuda() {
  uct_component_h* components = nullptr;
  unsigned count = 0;
  if (uct_query_components(&components, &count) != UCS_OK) return false;
  int found = 0;
  for (unsigned i = 0; i < count; ++i) {
    uct_component_attr_t attr = {};
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME;
    if (uct_component_query(components[i], &attr) != UCS_OK) continue;
    const absl::string_view name = attr.name;
    found += name == "cuda_cpy" || name == "cuda_ipc" ? 1 : 0;
  }
  uct_release_component_list(components);
  return found == 2;
}

std::string Transports(const UcxOptions& options) {
  if (!options.transports.empty()) return options.transports;
  return absl::StrCat(NetworkTransports(),
                      options.gpu >= 0 && HasCuda() ? ",cuda_copy,cuda_ipc" : "");
}

bool NamesCuda(absl::string_view transports) { return absl::StrContains(transports, "cuda"); }

// Settings of UCX's TCP carry its name from 1.17 on.
std::string TcpSetting(const char* name) {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  return absl::StrCat(major > 1 || minor >= 17 ? "TCP_" : "", name);
}

absl::Status Configure(const UcxOptions& options, ucp_config_t* config) {
  const std::string transports = Transports(options);
  std::vector<std::pair<std::string, std::string>> settings = {
      {"TLS", transports},
      {"NET_DEVICES", options.devices.empty() ? "all" : options.devices},
      {"RNDV_SCHEME", options.read_from_sender ? "get_zcopy" : "auto"},
      {TcpSetting("PORT_RANGE"), options.port_range.empty() ? "0" : options.port_range},
      // UCX's own defaults, and never what the environment says: a process whose TCP receive
      // segment is smaller than its peer's is ended by UCX with the first long message.
      {TcpSetting("RX_SEG_SIZE"), "64k"},
      {TcpSetting("TX_SEG_SIZE"), "8k"},
  };
  // UCX's cache of memory types misses what a CUDA runtime inside the program allocates, and takes
  // it for host memory: asking the driver costs a microsecond, for messages that name GPU memory
  // alone. For all of this process's UCX.
  if (NamesCuda(transports)) settings.emplace_back("MEMTYPE_CACHE", "n");
  for (const auto& [name, value] : settings) {
    if (const ucs_status_t status = ucp_config_modify(config, name.c_str(), value.c_str());
        status != UCS_OK) {
      return UcxError(absl::StrCat("cannot set ", name, "=", value), status);
    }
  }
  return absl::OkStatus();
}

// Allocates as pieces are allocated and asks UCX what that is. Up to 1.22 UCX passes over the
// memory type that a message names and looks for itself; what it takes for host memory it copies
// with the CPU, which ends the process.
bool KnowsGpuMemory(ucp_context_h context, int gpu) {
  uint8_t* const memory = AllocateExportable(gpu, kGpuGranule);
  if (memory == nullptr) return false;
  ucp_mem_map_params_t params = {};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = memory;
  params.length = kGpuGranule;
  ucp_mem_h mapped = nullptr;
  ucp_mem_attr_t attr = {};
  attr.field_mask = UCP_MEM_ATTR_FIELD_MEM_TYPE;
  bool knows = false;
  if (ucp_mem_map(context, &params, &mapped) == UCS_OK) {
    knows = ucp_mem_query(mapped, &attr) == UCS_OK && attr.mem_type == UCS_MEMORY_TYPE_CUDA;
    ucp_mem_unmap(context, mapped);
  }
  FreeExportable(gpu, memory);
  return knows;
}

// `transports` name what carries messages between GPU memories, and the context can handle such
// memory.
bool HasGpuMemory(const std::string& transports, ucp_context_h context, int gpu) {
  if (!NamesCuda(transports)) return false;
  ucp_context_attr_t attr = {};
  attr.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  return ucp_context_query(context, &attr) == UCS_OK &&
         (attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0 && KnowsGpuMemory(context, gpu);
}

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
    return UcxError(
        absl::StrCat("cannot start with devices '", options.devices, "', transports '",
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
  gpu_memory = options.gpu >= 0 && HasGpuMemory(Transports(options), context, options.gpu);
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
  worker->transports_ = absl::StrCat(Transports(options), " on ",
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
