// Active messages of a UcxWorker, both ways.

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/ucx_state.h"

namespace kvd {

absl::Status UcxState::RegisterHandlers() {
  for (int i = 0; i < kNumMessageTypes; ++i) {
    handlers[i] = {this, static_cast<MessageType>(i + 1)};
    ucp_am_handler_param_t params = {};
    params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                        UCP_AM_HANDLER_PARAM_FIELD_ARG;
    params.id = static_cast<unsigned>(i + 1);
    params.cb = OnActiveMessage;
    params.arg = &handlers[i];
    if (const ucs_status_t status = ucp_worker_set_am_recv_handler(worker, &params);
        status != UCS_OK) {
      return absl::FailedPreconditionError(
          absl::StrCat("UCX: cannot take active messages: ", ucs_status_string(status)));
    }
  }
  return absl::OkStatus();
}

ucs_status_t UcxState::OnActiveMessage(void* arg, const void* header_data, size_t header_bytes,
                                       void* data, size_t bytes, const ucp_am_recv_param_t* param) {
  const auto* handler = static_cast<const Handler*>(arg);
  UcxState* state = handler->state;
  const absl::StatusOr<MessageHeader> header =
      ParseHeader({static_cast<const uint8_t*>(header_data), header_bytes}, handler->type);
  if (!header.ok()) {
    state->num_malformed.fetch_add(1, std::memory_order_relaxed);
    return UCS_OK;
  }
  UcxPayload payload;
  payload.state_ = state;
  payload.bytes_ = bytes;
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (rendezvous) {
    payload.descriptor_ = data;
  } else {
    payload.data_ = static_cast<const uint8_t*>(data);
  }
  state->Deliver(*header, payload);
  // UCX drops a rendezvous that was not started when the callback returns OK: Drop() must not, too.
  // One that was held left `payload` empty and stays ours.
  const bool held = rendezvous && payload.descriptor_ == nullptr;
  payload.descriptor_ = nullptr;
  return held ? UCS_INPROGRESS : UCS_OK;
}

void UcxState::Deliver(const MessageHeader& header, UcxPayload& payload) {
  UcxReceiver* receiver = nullptr;
  switch (header.type) {
    case MessageType::kHello:
      return OnHello(header, payload);
    case MessageType::kFetch:
    case MessageType::kIngest:
      receiver = receivers[static_cast<int>(header.type) - 1];
      break;
    case MessageType::kFetchReply:
    case MessageType::kIngestAck:
    case MessageType::kHelloAck:
      if (const auto found = channels.find(ChannelOf(header.request)); found != channels.end()) {
        receiver = found->second;
      }
      break;
  }
  if (receiver != nullptr) receiver->OnMessage(header, payload);
}

void UcxState::Finish(UcxSend& message, bool ok) {
  --message.endpoint_->in_flight;
  message.OnSent(ok);
}

void UcxState::OnSendDone(void* request, ucs_status_t status, void* user) {
  ucp_request_free(request);
  Finish(*static_cast<UcxSend*>(user), status == UCS_OK);
}

void UcxState::OnReceiveDone(void* request, ucs_status_t status, size_t, void* user) {
  ucp_request_free(request);
  Finish(*static_cast<UcxReceive*>(user), status == UCS_OK);
}

void UcxState::Finish(UcxReceive& receive, bool ok) {
  if (UcxState* state = std::exchange(receive.into_gpu_, nullptr); state != nullptr)
    --state->num_gpu_receives;
  receive.OnReceived(ok);
}

void UcxState::Send(UcxEndpoint* endpoint, UcxSend& message, std::span<const uint8_t> payload,
                    MemorySpace space) {
  message.endpoint_ = endpoint;
  ++endpoint->in_flight;
  if (endpoint->failed) return Finish(message, false);
  ucp_request_param_t params = {};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.cb.send = OnSendDone;
  params.user_data = &message;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  if (space == MemorySpace::kGpu) {
    // Never through UCX's own host memory: the receiver reads it from where it is.
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_AM_SEND_FLAG_RNDV;
    params.memory_type = UCS_MEMORY_TYPE_CUDA;
  }
  void* request =
      ucp_am_send_nbx(endpoint->ep, static_cast<unsigned>(message.header.type), &message.header,
                      sizeof(message.header), payload.data(), payload.size(), &params);
  if (UCS_PTR_IS_PTR(request)) return;  // OnSendDone will come
  Finish(message, request == nullptr);
}

UcxPayload::UcxPayload(UcxPayload&& other) noexcept { *this = std::move(other); }

UcxPayload& UcxPayload::operator=(UcxPayload&& other) noexcept {
  if (this == &other) return *this;
  Drop();
  state_ = other.state_;
  data_ = std::exchange(other.data_, nullptr);
  descriptor_ = std::exchange(other.descriptor_, nullptr);
  copy_ = std::move(other.copy_);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

UcxPayload::~UcxPayload() { Drop(); }

void UcxPayload::Drop() {
  if (descriptor_ != nullptr)
    ucp_am_data_release(state_->worker, std::exchange(descriptor_, nullptr));
}

void UcxPayload::ReceiveInto(uint8_t* buffer, UcxReceive& receive, MemorySpace space) {
  const bool to_gpu = space == MemorySpace::kGpu;
  if (descriptor_ == nullptr) {
    if (to_gpu) return receive.OnReceived(false);
    if (bytes_ > 0) std::memcpy(buffer, data_ != nullptr ? data_ : copy_.data(), bytes_);
    return receive.OnReceived(true);
  }
  ucp_request_param_t params = {};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.cb.recv_am = UcxState::OnReceiveDone;
  params.user_data = &receive;
  params.memory_type = to_gpu ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
  if (to_gpu) {
    receive.into_gpu_ = state_;
    ++state_->num_gpu_receives;
  }
  void* descriptor = std::exchange(descriptor_, nullptr);
  void* request = ucp_am_recv_data_nbx(state_->worker, descriptor, buffer, bytes_, &params);
  if (!UCS_PTR_IS_PTR(request)) UcxState::Finish(receive, request == nullptr);
}

UcxPayload UcxPayload::Hold() {
  if (data_ != nullptr) {
    copy_.assign(data_, data_ + bytes_);
    data_ = nullptr;
  }
  return std::move(*this);
}

}  // namespace kvd
