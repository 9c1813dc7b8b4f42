#include "proto/ingest_channel.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/staging.h"
#include "proto/status.h"
#include "proto/ucx_link.h"

namespace kvd {
namespace {

// Messages in flight, and their size: enough to keep a link busy while the next one is filled.
constexpr int kWindow = 4;
constexpr size_t kMessageBytes = size_t{1} << 20;
constexpr absl::Duration kShutdownLimit = absl::Seconds(1);
using Steady = std::chrono::steady_clock;

absl::Status FromWire(WireStatus status) {
  switch (status) {
    case WireStatus::kOk:
      return absl::OkStatus();
    case WireStatus::kAborted:
      return absl::AbortedError("ingest: the daemon does not know the session: attach again");
    case WireStatus::kExhausted:
      return absl::ResourceExhaustedError("ingest: over a limit of the daemon: send less at once");
    case WireStatus::kUnavailable:
      return absl::UnavailableError("ingest: the daemon is draining: use another");
    case WireStatus::kLate:
      return absl::DeadlineExceededError("ingest: the daemon was too late");
    case WireStatus::kInvalid:
      break;
  }
  return absl::InvalidArgumentError(
      "ingest: the daemon refused a message as malformed: a bug of the client");
}

}  // namespace

class IngestChannel::Impl final : public UcxReceiver {
 public:
  explicit Impl(size_t unit_bytes) : unit_bytes_(unit_bytes) {
    for (Message& message : messages_) {
      message.impl = this;
      message.bytes.Reserve(kMessageBytes);
    }
  }

  size_t unit_bytes() const { return unit_bytes_; }
  // Items of `item_bytes` each.
  absl::Status Send(std::span<const IngestUnit> items, size_t item_bytes, uint8_t flags,
                    absl::Duration timeout);
  void Shutdown();
  void OnMessage(const MessageHeader& header, UcxPayload& payload) override;
  bool Idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::none_of(std::begin(messages_), std::end(messages_),
                        [](const Message& message) { return message.busy || message.receiving; });
  }

  std::unique_ptr<UcxLink> link_;

 private:
  struct Message final : UcxTask, UcxSend, UcxReceive {
    Impl* impl = nullptr;
    StagingBuffer bytes;
    size_t size = 0;
    size_t first_unit = 0;
    size_t num_units = 0;
    bool busy = false;       // queued or being sent: its bytes are in use
    bool waiting = false;    // for its acknowledgement
    bool receiving = false;  // the acknowledgement's bitmap is on its way
    WireStatus status = WireStatus::kOk;
    std::vector<uint8_t> stored;  // bitmap
    void RunOnProgressThread() override { impl->link_->Send(*this, {bytes.data(), size}); }
    void OnSent(bool ok) override { impl->OnSent(*this, ok); }
    void OnReceived(bool ok) override { impl->OnAcknowledged(*this, ok); }
  };

  // These need mutex_.
  bool CanSend() const { return lost_ || failed_ || FindFree() != nullptr; }
  bool AllAcknowledged() const;
  Message* FindFree() const;
  absl::Status Await(bool (Impl::*condition)() const, std::unique_lock<std::mutex>& lock,
                     Steady::time_point deadline);
  void Count(const Message& message);

  void Fill(Message& message, std::span<const IngestUnit> items, size_t item_bytes, size_t first);
  void OnSent(Message& message, bool ok);
  void OnAcknowledged(Message& message, bool ok);

  const size_t unit_bytes_;
  std::mutex turn_;   // one Send at a time; taken before mutex_
  std::mutex mutex_;  // guards what follows, except a message's bytes while it is busy
  std::condition_variable changed_;
  mutable Message messages_[kWindow];
  uint64_t number_ = 0;
  bool lost_ = false;
  bool failed_ = false;
  // Of the Send under way.
  absl::Status refusal_;
  size_t num_refused_ = 0;
  size_t first_refused_ = 0;
};

IngestChannel::Impl::Message* IngestChannel::Impl::FindFree() const {
  for (Message& message : messages_) {
    if (!message.busy && !message.waiting && !message.receiving) return &message;
  }
  return nullptr;
}

bool IngestChannel::Impl::AllAcknowledged() const {
  return lost_ || failed_ ||
         std::none_of(std::begin(messages_), std::end(messages_),
                      [](const Message& message) { return message.waiting; });
}

absl::Status IngestChannel::Impl::Await(bool (Impl::*condition)() const,
                                        std::unique_lock<std::mutex>& lock,
                                        Steady::time_point deadline) {
  const bool met = changed_.wait_until(lock, deadline, [&] { return (this->*condition)(); });
  if (lost_) return absl::AbortedError("ingest: the session is lost: attach again");
  if (failed_) return absl::UnavailableError("ingest: the connection to the daemon failed");
  if (!met) return absl::DeadlineExceededError("ingest: the daemon did not acknowledge in time");
  return absl::OkStatus();
}

void IngestChannel::Impl::Fill(Message& message, std::span<const IngestUnit> items,
                               size_t item_bytes, size_t first) {
  const size_t per_message =
      std::clamp<size_t>(kMessageBytes / (item_bytes + sizeof(IngestEntry)), 1, 65536);
  message.first_unit = first;
  message.num_units = std::min(per_message, items.size() - first);
  message.size = message.num_units * (sizeof(IngestEntry) + item_bytes);
  uint8_t* entry = message.bytes.Reserve(message.size);
  uint8_t* item = entry + message.num_units * sizeof(IngestEntry);
  for (size_t i = 0; i < message.num_units; ++i, entry += sizeof(IngestEntry), item += item_bytes) {
    const IngestUnit& source = items[first + i];
    const IngestEntry filled = {source.ticket, source.layer, source.head, 0};
    std::memcpy(entry, &filled, sizeof(filled));
    std::memcpy(item, source.bytes, item_bytes);
  }
}

absl::Status IngestChannel::Impl::Send(std::span<const IngestUnit> units, size_t item_bytes,
                                       uint8_t flags, absl::Duration timeout) {
  const auto deadline = Steady::now() + absl::ToChronoNanoseconds(timeout);
  const std::lock_guard<std::mutex> turn(turn_);
  std::unique_lock<std::mutex> lock(mutex_);
  refusal_ = absl::OkStatus();
  num_refused_ = 0;
  absl::Status status;
  for (size_t first = 0; status.ok() && refusal_.ok() && first < units.size();) {
    status = Await(&Impl::CanSend, lock, deadline);
    if (!status.ok()) break;
    Message& message = *FindFree();
    message.busy = true;
    message.waiting = true;
    message.header = link_->Header(MessageType::kIngest, ++number_);
    lock.unlock();  // the message is this thread's until it is posted
    Fill(message, units, item_bytes, first);
    message.header.flags = flags;
    message.header.count = static_cast<uint32_t>(message.num_units);
    first += message.num_units;
    link_->worker()->Post(message);
    lock.lock();
  }
  if (status.ok()) status = Await(&Impl::AllAcknowledged, lock, deadline);
  // What is still under way belongs to nobody: its acknowledgement is ignored when it comes.
  for (Message& message : messages_) message.waiting = false;
  KVD_RETURN_IF_ERROR(status);
  KVD_RETURN_IF_ERROR(refusal_);
  if (num_refused_ == 0) return absl::OkStatus();
  const IngestUnit& unit = units[first_refused_];
  return absl::FailedPreconditionError(
      absl::StrCat("ingest: ", num_refused_, " of ", units.size(),
                   " units have no open reservation, first ticket ", unit.ticket, " layer ",
                   unit.layer, " head ", unit.head, ": reserve the pages again"));
}

void IngestChannel::Impl::OnSent(Message& message, bool ok) {
  const std::lock_guard<std::mutex> lock(mutex_);
  message.busy = false;
  if (!ok) failed_ = true;
  changed_.notify_all();
}

void IngestChannel::Impl::OnMessage(const MessageHeader& header, UcxPayload& payload) {
  if (header.type != MessageType::kIngestAck) return;
  Message* found = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Message& message : messages_) {
      if (message.waiting && !message.receiving && message.header.request == header.request)
        found = &message;
    }
    if (found == nullptr) return;
    found->status = header.status;
    if (header.status != WireStatus::kOk) {
      found->waiting = false;
      if (refusal_.ok()) refusal_ = FromWire(header.status);
      changed_.notify_all();
      return;
    }
    if (header.count != found->num_units || payload.bytes() != BitmapBytes(found->num_units)) {
      found->waiting = false;
      refusal_ =
          absl::InternalError("ingest: the daemon's acknowledgement does not fit its message");
      changed_.notify_all();
      return;
    }
    found->receiving = true;
    found->stored.resize(payload.bytes());
  }
  payload.ReceiveInto(found->stored.data(), *found);
}

void IngestChannel::Impl::OnAcknowledged(Message& message, bool ok) {
  const std::lock_guard<std::mutex> lock(mutex_);
  message.receiving = false;
  changed_.notify_all();
  if (!ok) failed_ = true;
  if (!message.waiting) return;
  message.waiting = false;
  if (ok) Count(message);
}

void IngestChannel::Impl::Count(const Message& message) {
  for (size_t i = 0; i < message.num_units; ++i) {
    if ((message.stored[i / 8] >> (i % 8) & 1) != 0) continue;
    const size_t unit = message.first_unit + i;
    first_refused_ = num_refused_ == 0 ? unit : std::min(first_refused_, unit);
    ++num_refused_;
  }
}

void IngestChannel::Impl::Shutdown() {
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_ = true;
  changed_.notify_all();
}

absl::StatusOr<std::unique_ptr<IngestChannel>> IngestChannel::Connect(
    UcxWorker* worker, const std::string& remote_address, const Incarnation& incarnation,
    const SessionToken& session, size_t unit_bytes, absl::Duration timeout) {
  auto impl = std::make_shared<Impl>(unit_bytes);
  KVD_ASSIGN_OR_RETURN(impl->link_, UcxLink::Connect(worker, remote_address, incarnation, session,
                                                     impl.get(), timeout));
  return std::unique_ptr<IngestChannel>(new IngestChannel(std::move(impl)));
}

IngestChannel::IngestChannel(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

IngestChannel::~IngestChannel() {
  UcxWorker* worker = impl_->link_->worker();
  const absl::Time limit = absl::Now() + kShutdownLimit;
  bool idle = impl_->Idle();
  while (!idle && absl::Now() < limit) {
    worker->Run([&] { impl_->link_->Abort(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    idle = impl_->Idle();
  }
  impl_->link_.reset();
  if (!idle) worker->KeepUntilEnd(impl_);
}

absl::Status IngestChannel::Send(std::span<const IngestUnit> units, absl::Duration timeout) {
  return impl_->Send(units, impl_->unit_bytes(), 0, timeout);
}

absl::Status IngestChannel::SendRecords(std::span<const IngestUnit> records, size_t record_bytes,
                                        absl::Duration timeout) {
  return impl_->Send(records, record_bytes, kFlagSummaries, timeout);
}
bool IngestChannel::failed() const { return impl_->link_->failed(); }
void IngestChannel::Shutdown() { impl_->Shutdown(); }

}  // namespace kvd
