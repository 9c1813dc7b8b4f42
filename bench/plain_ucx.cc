#include "bench/plain_ucx.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "absl/time/clock.h"
#include "kernels/check.h"
#include "proto/arena_memory.h"
#include "proto/fd_channel.h"
#include "proto/staging.h"
#include "tests/support/data_plane.h"

namespace kvd::bench {
namespace {

constexpr char kServeFlag[] = "--serve-plain-ucx";
constexpr size_t kBufferBytes = size_t{64} << 20;
constexpr size_t kMaxMessages = 64;

// Header of both messages.
struct PlainHeader {
  uint64_t message_bytes;  // request: what a reply may have
  uint64_t offset;         // reply: where its bytes belong
};

struct Ucx {
  Ucx() {
    ucp_config_t* config = nullptr;
    KVD_CHECK(ucp_config_read(nullptr, nullptr, &config) == UCS_OK);
    KVD_CHECK(ucp_config_modify(config, "TLS", "tcp") == UCS_OK);
    KVD_CHECK(ucp_config_modify(config, "NET_DEVICES", "lo") == UCS_OK);
    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM;
    KVD_CHECK(ucp_init(&params, config, &context) == UCS_OK);
    ucp_config_release(config);
    ucp_worker_params_t worker_params = {};
    worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
    KVD_CHECK(ucp_worker_create(context, &worker_params, &worker) == UCS_OK);
    buffer.Reserve(kBufferBytes);
    std::memset(buffer.data(), 1, kBufferBytes);
  }
  ~Ucx() {
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
  }
  void Handle(unsigned id, ucp_am_recv_callback_t callback, void* arg) const {
    ucp_am_handler_param_t params = {};
    params.field_mask =
        UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    params.id = id;
    params.cb = callback;
    params.arg = arg;
    KVD_CHECK(ucp_worker_set_am_recv_handler(worker, &params) == UCS_OK);
  }
  // Sends and forgets; header and bytes stay where they are.
  void Send(ucp_ep_h ep, unsigned id, const PlainHeader* header, const void* bytes, size_t size,
            uint32_t flags) const {
    ucp_request_param_t params = {};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = flags;
    params.cb.send = [](void* request, ucs_status_t status, void*) {
      KVD_CHECK(status == UCS_OK);
      ucp_request_free(request);
    };
    KVD_CHECK(!UCS_PTR_IS_ERR(ucp_am_send_nbx(ep, id, header, sizeof(*header), bytes, size, &params)));
  }

  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  StagingBuffer buffer;
};

struct Server : Ucx {
  std::unique_ptr<ArenaMemory> memory;
  PlainHeader headers[kMaxMessages];

  static ucs_status_t OnRequest(void* arg, const void* header_data, size_t, void* data, size_t bytes,
                                const ucp_am_recv_param_t* param) {
    auto* server = static_cast<Server*>(arg);
    PlainHeader header;
    std::memcpy(&header, header_data, sizeof(header));
    const size_t count = bytes / sizeof(FetchEntry);
    const size_t unit_bytes = server->memory->shape().slot.unit_bytes;
    uint8_t* const staged = server->buffer.data();
    for (size_t i = 0; i < count; ++i) {
      FetchEntry entry;
      std::memcpy(&entry, static_cast<const uint8_t*>(data) + i * sizeof(entry), sizeof(entry));
      std::memcpy(staged + i * unit_bytes, server->memory->unit(entry.slot, entry.layer, entry.head), unit_bytes);
    }
    size_t message = 0;
    for (size_t at = 0; at < count * unit_bytes; at += header.message_bytes, ++message) {
      KVD_CHECK(message < kMaxMessages);
      server->headers[message] = {0, at};
      server->Send(param->reply_ep, 2, &server->headers[message], staged + at,
                   std::min<size_t>(header.message_bytes, count * unit_bytes - at), 0);
    }
    return UCS_OK;
  }
};

std::unique_ptr<ArenaMemory> MapArena(const locks_kvd::v1::AttachReply& offer) {
  DescriptorRequest request;
  request.incarnation = IncarnationOf(offer);
  request.session = TokenOf(offer);
  auto descriptors = ReceiveDescriptors(offer.shared().socket_path(), request, absl::Seconds(10));
  KVD_CHECK(descriptors.ok());
  auto memory = ArenaMemory::MapShared(ShapeOf(offer), *std::move(descriptors));
  KVD_CHECK(memory.ok());
  return *std::move(memory);
}

std::string Receive(int socket) {
  std::string bytes(65536, '\0');
  const ssize_t got = recv(socket, bytes.data(), bytes.size(), 0);
  KVD_CHECK(got > 0);
  bytes.resize(static_cast<size_t>(got));
  return bytes;
}

void Transmit(int socket, const std::string& bytes) {
  KVD_CHECK(send(socket, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
}

}  // namespace

struct PlainUcx::State : Ucx {
  pid_t pid = -1;
  int control = -1;
  ucp_ep_h ep = nullptr;
  PlainHeader request = {};
  size_t received = 0;

  static void OnReceived(void* request, ucs_status_t status, size_t bytes, void* user) {
    KVD_CHECK(status == UCS_OK);
    static_cast<State*>(user)->received += bytes;
    ucp_request_free(request);
  }
  static ucs_status_t OnReply(void* arg, const void* header_data, size_t, void* data, size_t bytes,
                              const ucp_am_recv_param_t* param) {
    auto* state = static_cast<State*>(arg);
    PlainHeader header;
    std::memcpy(&header, header_data, sizeof(header));
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
      std::memcpy(state->buffer.data() + header.offset, data, bytes);
      state->received += bytes;
      return UCS_OK;
    }
    ucp_request_param_t params = {};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.cb.recv_am = OnReceived;
    params.user_data = state;
    KVD_CHECK(UCS_PTR_IS_PTR(
        ucp_am_recv_data_nbx(state->worker, data, state->buffer.data() + header.offset, bytes, &params)));
    return UCS_INPROGRESS;
  }
};

PlainUcx::PlainUcx(const locks_kvd::v1::AttachReply& offer) : state_(std::make_unique<State>()) {
  int sockets[2];
  KVD_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) == 0);
  const std::string fd = std::to_string(sockets[1]);
  state_->pid = fork();
  KVD_CHECK(state_->pid >= 0);
  if (state_->pid == 0) {
    close(sockets[0]);
    execl("/proc/self/exe", "plain-ucx", kServeFlag, fd.c_str(), nullptr);
    _exit(127);
  }
  close(sockets[1]);
  state_->control = sockets[0];
  Transmit(state_->control, offer.SerializeAsString());
  const std::string address = Receive(state_->control);
  state_->Handle(2, State::OnReply, state_.get());
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  KVD_CHECK(ucp_ep_create(state_->worker, &params, &state_->ep) == UCS_OK);
}

PlainUcx::~PlainUcx() {
  kill(state_->pid, SIGKILL);
  waitpid(state_->pid, nullptr, 0);
  close(state_->control);
}

void PlainUcx::Fetch(std::span<const FetchEntry> entries, size_t unit_bytes, size_t message_bytes) {
  state_->request = {message_bytes, 0};
  state_->received = 0;
  state_->Send(state_->ep, 1, &state_->request, entries.data(), entries.size_bytes(),
               UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER);
  while (state_->received < entries.size() * unit_bytes) ucp_worker_progress(state_->worker);
}

const uint8_t* PlainUcx::buffer() const { return state_->buffer.data(); }

void PlainUcx::Pause() { KVD_CHECK(kill(state_->pid, SIGSTOP) == 0); }

void PlainUcx::Resume() {
  KVD_CHECK(kill(state_->pid, SIGCONT) == 0);
  absl::SleepFor(absl::Milliseconds(1));
}

void ServePlainUcxIfAsked(int argc, char** argv) {
  if (argc != 3 || std::strcmp(argv[1], kServeFlag) != 0) return;
  const int control = std::atoi(argv[2]);
  locks_kvd::v1::AttachReply offer;
  KVD_CHECK(offer.ParseFromString(Receive(control)));
  Server server;
  server.memory = MapArena(offer);
  server.Handle(1, Server::OnRequest, &server);
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  KVD_CHECK(ucp_worker_get_address(server.worker, &address, &bytes) == UCS_OK);
  Transmit(control, std::string(reinterpret_cast<const char*>(address), bytes));
  while (getppid() != 1) {
    for (int i = 0; i < 10000; ++i) ucp_worker_progress(server.worker);
  }
  _exit(0);
}

}  // namespace kvd::bench
