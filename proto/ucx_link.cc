#include "proto/ucx_link.h"

#include <semaphore>

#include "proto/status.h"

namespace kvd {

// Kept alive by the link, the waiting thread and, while it is on its way, by itself.
class UcxLink::Greeting final : public UcxSend {
 public:
  void OnSent(bool ok) override {
    if (!ok) Done(absl::UnavailableError("UCX: the daemon's endpoint failed while connecting"));
    keep_.reset();
  }
  // Progress thread. The first answer counts.
  void Done(absl::Status status) {
    if (told_) return;
    told_ = true;
    status_ = std::move(status);
    done_.release();
  }
  void Keep(std::shared_ptr<Greeting> self) { keep_ = std::move(self); }
  absl::Status Wait(absl::Duration timeout) {
    if (done_.try_acquire_for(absl::ToChronoNanoseconds(timeout))) return status_;
    return absl::DeadlineExceededError(
        "UCX: no greeting from the daemon in time: is its data port open, and the session still "
        "alive?");
  }
  std::string own_address;

 private:
  std::shared_ptr<Greeting> keep_;
  bool told_ = false;  // progress thread
  absl::Status status_;
  std::binary_semaphore done_{0};
};

absl::StatusOr<std::unique_ptr<UcxLink>> UcxLink::Connect(
    UcxWorker* worker, const std::string& remote_address, const Incarnation& incarnation,
    const SessionToken& session, UcxReceiver* answers, absl::Duration timeout) {
  if (remote_address.empty()) return absl::UnavailableError("UCX: the daemon offers no address");
  std::unique_ptr<UcxLink> link(new UcxLink(worker, incarnation, session, answers));
  KVD_ASSIGN_OR_RETURN(link->channel_, worker->OpenChannel(link.get()));
  auto greeting = std::make_shared<Greeting>();
  greeting->own_address = worker->address();
  link->greeting_ = greeting;
  absl::Status opened;
  worker->Run([&] {
    absl::StatusOr<UcxEndpoint*> endpoint = worker->Open(remote_address);
    if (!endpoint.ok()) {
      opened = endpoint.status();
      return;
    }
    link->endpoint_ = *endpoint;
    greeting->header = link->Header(MessageType::kHello, UcxWorker::Connection(*endpoint));
    greeting->Keep(greeting);
    const std::string& address = greeting->own_address;
    worker->Send(*endpoint, *greeting,
                 {reinterpret_cast<const uint8_t*>(address.data()), address.size()});
  });
  KVD_RETURN_IF_ERROR(opened);
  if (absl::Status greeted = greeting->Wait(timeout); !greeted.ok()) {
    worker->Run([&] { link->Abort(); });
    return greeted;
  }
  return link;
}

UcxLink::~UcxLink() {
  if (channel_ != 0) worker_->CloseChannel(channel_);
  if (endpoint_ != nullptr) worker_->Run([this] { worker_->Release(endpoint_); });
}

MessageHeader UcxLink::Header(MessageType type, uint64_t number) const {
  MessageHeader header;
  header.type = type;
  header.incarnation = incarnation_;
  header.session = session_;
  header.request = static_cast<uint64_t>(channel_) << 48 | number;
  return header;
}

void UcxLink::OnMessage(const MessageHeader& header, UcxPayload& payload) {
  // An answer of another process that once had this address is nobody's here (guarantee G3).
  if (header.incarnation != incarnation_) return;
  if (header.type != MessageType::kHelloAck) return answers_->OnMessage(header, payload);
  switch (header.status) {
    case WireStatus::kOk:
      return greeting_->Done(absl::OkStatus());
    case WireStatus::kUnavailable:
      return greeting_->Done(absl::UnavailableError("UCX: the daemon is draining: use another"));
    default:
      return greeting_->Done(
          absl::AbortedError("UCX: the daemon does not know the session: attach again"));
  }
}

}  // namespace kvd
