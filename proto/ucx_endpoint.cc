// Connections of a UcxWorker: opening, failure, closing, and peers that connect to a daemon.

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/checksum.h"
#include "proto/ucx_state.h"

namespace kvd {
namespace {

// UCX addresses are a few hundred bytes; more network devices make them longer.
constexpr size_t kMaxAddressBytes = 16384;

// Stands before an address wherever it travels. UCX ends the process on an address that it cannot
// parse, so damaged or foreign bytes must not reach it. This is no defence against forgery: who can
// send to the UCX port is trusted not to attack UCX itself (SECURITY.md).
struct AddressSeal {
  uint32_t magic = 0x414B564Cu;  // "LVKA"
  uint32_t bytes = 0;            // of the address that follows
  uint64_t checksum = 0;         // Checksum64 of it
};
static_assert(sizeof(AddressSeal) == 16);

bool IsSealed(const std::string& address) {
  AddressSeal seal;
  if (address.size() <= sizeof(seal)) return false;
  std::memcpy(&seal, address.data(), sizeof(seal));
  const size_t bytes = address.size() - sizeof(seal);
  return seal.magic == AddressSeal{}.magic && seal.bytes == bytes &&
         seal.checksum == Checksum64(address.data() + sizeof(seal), bytes);
}

uint64_t RandomConnection() {
  std::random_device random;
  return std::max<uint64_t>(1, ConnectionOf(uint64_t{random()} << 32 | random()));
}

// A peer's address on its way in, then the answer on its way back. Owns itself.
class Greeting final : public UcxReceive, public UcxSend {
 public:
  Greeting(UcxState* state, const MessageHeader& hello, size_t bytes)
      : state_(state), hello_(hello), address_(bytes, '\0') {}
  uint8_t* buffer() { return reinterpret_cast<uint8_t*>(address_.data()); }

  void OnReceived(bool ok) override {
    if (!ok || !state_->allow) return Finish();
    absl::StatusOr<UcxEndpoint*> endpoint = state_->Open(address_, ConnectionOf(hello_.request));
    if (!endpoint.ok()) {
      state_->num_malformed.fetch_add(1, std::memory_order_relaxed);
      return Finish();
    }
    header = hello_;
    header.type = MessageType::kHelloAck;
    header.status = WireStatus::kOk;
    if (absl::Status allowed = state_->allow(hello_); allowed.ok()) {
      ++(*endpoint)->users;
      Replace({hello_, *endpoint});
    } else {
      header.status = allowed.code() == absl::StatusCode::kUnavailable ? WireStatus::kUnavailable
                                                                       : WireStatus::kAborted;
    }
    endpoint_opened_ = *endpoint;
    state_->Send(*endpoint, *this, {});
  }
  void OnSent(bool) override { Finish(); }

 private:
  // Also forgets peers whose session has ended: nothing else tells this worker.
  void Replace(UcxState::Peer peer) {
    auto& peers = state_->peers;
    for (auto it = peers.begin(); it != peers.end();) {
      const bool same = it->first == std::make_pair(hello_.session, ChannelOf(hello_.request));
      if (!same && !it->second.endpoint->failed && state_->allow(it->second.hello).ok()) {
        ++it;
        continue;
      }
      state_->Release(it->second.endpoint);
      peers.erase(it++);
    }
    peers[{hello_.session, ChannelOf(hello_.request)}] = peer;
  }
  void Finish() {
    if (endpoint_opened_ != nullptr) state_->Release(endpoint_opened_);
    delete this;
  }

  UcxState* state_;
  MessageHeader hello_;
  std::string address_;
  UcxEndpoint* endpoint_opened_ = nullptr;
};

}  // namespace

std::string UcxState::SealAddress(const void* address, size_t bytes) {
  AddressSeal seal;
  seal.bytes = static_cast<uint32_t>(bytes);
  seal.checksum = Checksum64(address, bytes);
  std::string sealed(reinterpret_cast<const char*>(&seal), sizeof(seal));
  return sealed.append(static_cast<const char*>(address), bytes);
}

absl::StatusOr<UcxEndpoint*> UcxState::Open(const std::string& remote_address,
                                            uint64_t connection) {
  if (!IsSealed(remote_address)) {
    return absl::InvalidArgumentError(
        absl::StrCat("UCX: ", remote_address.size(),
                     " bytes are not an address that a locks-kvd process gave out"));
  }
  const std::vector<UcxEndpoint*> open = endpoints;  // Fail takes them out
  for (UcxEndpoint* endpoint : open) {
    if (endpoint->remote_address != remote_address) continue;
    if (connection == 0 || endpoint->connection == connection) {
      ++endpoint->users;
      return endpoint;
    }
    // Its other end is gone: small messages would still arrive on it, but a long one would never be
    // fetched.
    Fail(endpoint);
  }
  auto endpoint = std::make_unique<UcxEndpoint>();
  endpoint->state = this;
  endpoint->remote_address = remote_address;
  endpoint->connection = connection == 0 ? RandomConnection() : connection;
  endpoint->users = 1;
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address =
      reinterpret_cast<const ucp_address_t*>(endpoint->remote_address.data() + sizeof(AddressSeal));
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = OnEndpointError;
  params.err_handler.arg = endpoint.get();
  if (const ucs_status_t status = ucp_ep_create(worker, &params, &endpoint->ep); status != UCS_OK) {
    return absl::UnavailableError(
        absl::StrCat("UCX: cannot connect: ", ucs_status_string(status),
                     ": check that both ends share a network device and the same UCX version"));
  }
  endpoints.push_back(endpoint.get());
  return endpoint.release();
}

void UcxState::Release(UcxEndpoint* endpoint) {
  KVD_CHECK(endpoint->users > 0);
  if (--endpoint->users == 0) Fail(endpoint);  // nobody will use it again: close it
}

// Never inside UCX's own error callback: closing is left to the loop.
void UcxState::Fail(UcxEndpoint* endpoint) {
  if (endpoint->failed) return;
  endpoint->failed = true;
  std::erase(endpoints, endpoint);
  failed.push_back(endpoint);
}

void UcxState::OnEndpointError(void* arg, ucp_ep_h, ucs_status_t) {
  auto* endpoint = static_cast<UcxEndpoint*>(arg);
  endpoint->state->Fail(endpoint);
}

void UcxState::CloseFailed() {
  for (size_t i = failed.size(); i-- > 0;) {
    UcxEndpoint* endpoint = failed[i];
    if (endpoint->ep != nullptr) {
      ucp_request_param_t params = {};
      params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
      params.flags = UCP_EP_CLOSE_FLAG_FORCE;
      void* request = ucp_ep_close_nbx(std::exchange(endpoint->ep, nullptr), &params);
      if (UCS_PTR_IS_PTR(request)) endpoint->close_request = request;
    }
    if (endpoint->close_request != nullptr &&
        ucp_request_check_status(endpoint->close_request) != UCS_INPROGRESS) {
      ucp_request_free(std::exchange(endpoint->close_request, nullptr));
    }
    if (endpoint->close_request == nullptr && endpoint->users == 0 && endpoint->in_flight == 0) {
      std::erase(failed, endpoint);
      delete endpoint;
    }
  }
  absl::erase_if(peers, [](const auto& entry) {
    if (!entry.second.endpoint->failed) return false;
    --entry.second.endpoint->users;
    return true;
  });
}

void UcxState::OnHello(const MessageHeader& header, UcxPayload& payload) {
  if (payload.bytes() == 0 || payload.bytes() > kMaxAddressBytes || !allow || !allow(header).ok()) {
    // Without a valid session there is nobody to answer: its address is not even parsed.
    num_malformed.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  auto* greeting = new Greeting(this, header, payload.bytes());
  payload.ReceiveInto(greeting->buffer(), *greeting);
}

}  // namespace kvd
