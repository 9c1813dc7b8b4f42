#include "service/peer_session.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/layout.h"
#include "proto/status.h"
#include "proto/wire.h"
#include "service/nccl_mover.h"
#include "service/ucx_mover.h"

namespace kvd {
namespace {

namespace v1 = locks_kvd::v1;

template <typename Bytes>
absl::StatusOr<Bytes> BytesOf(const std::string& text) {
  Bytes bytes;
  if (text.size() != bytes.size()) {
    return absl::InternalError(
        absl::StrCat("expected ", bytes.size(), " bytes, got ", text.size()));
  }
  std::memcpy(bytes.data(), text.data(), bytes.size());
  return bytes;
}

}  // namespace

// Pages that the other daemon wants, with their tickets.
struct PeerSession::Batch {
  std::vector<SealedCopy> pages;
  std::vector<size_t> places;  // in the caller's list
  std::vector<uint64_t> tickets;
  std::vector<uint64_t> summary_checksums;  // of the pages that were sent
};

absl::StatusOr<std::unique_ptr<PeerSession>> PeerSession::Open(const std::string& address,
                                                               const TlsFiles& tls,
                                                               std::shared_ptr<Arena> arena,
                                                               UcxWorker* worker,
                                                               absl::Duration timeout) {
  std::unique_ptr<PeerSession> session(new PeerSession(std::move(arena), timeout));
  if (absl::Status attached = session->Attach(address, tls, worker); !attached.ok()) {
    return Annotate(attached, absl::StrCat("daemon ", address));
  }
  return session;
}

absl::Status PeerSession::Attach(const std::string& address, const TlsFiles& tls,
                                 UcxWorker* worker) {
  address_ = address;
  KVD_ASSIGN_OR_RETURN(const auto channel, OpenGrpcChannel(address, tls));
  stub_ = v1::Pool::NewStub(channel);
  v1::AttachRequest request;
  request.set_protocol_min(kProtocolVersion);
  request.set_protocol_max(kProtocolVersion);
  request.set_tenant(arena_.tenant());
  request.set_model(arena_.model());
  request.set_layout_fingerprint(LayoutFingerprint(arena_.geometry()));
  const Fingerprint& model = arena_.options().model_fingerprint;
  request.set_model_fingerprint(model.data(), model.size());
  request.set_client_name("locks-kvd mover");
  request.set_ucx_version(UcxWorker::Version());
  request.set_mover(true);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout_));
  v1::AttachReply reply;
  KVD_RETURN_IF_ERROR(FromGrpc(stub_->Attach(&context, request, &reply)));
  session_ = reply.session();
  KVD_ASSIGN_OR_RETURN(const auto incarnation, BytesOf<Incarnation>(session_.incarnation()));
  KVD_ASSIGN_OR_RETURN(const auto token, BytesOf<SessionToken>(session_.token()));
  heartbeat_ =
      std::make_unique<HeartbeatStream>(stub_.get(), session_, [](const v1::SessionEvent&) {});
  heartbeat_interval_ = absl::Milliseconds(reply.heartbeat_ms());
  last_ping_ = clock_.Now();
  heartbeat_->Ping();
  KVD_ASSIGN_OR_RETURN(mover_, UcxMover::Make(&arena_, worker, reply.ucx().worker_address(),
                                              incarnation, token, timeout_));
  return absl::OkStatus();
}

absl::Status PeerSession::UseNccl(std::shared_ptr<const CommunicatorLibrary> library,
                                  absl::Duration watchdog, std::function<bool()> go_on) {
  const auto keep_on = [this, go_on = std::move(go_on)] {
    KeepAlive();
    return go_on();
  };
  KVD_ASSIGN_OR_RETURN(mover_, NcclMover::Make({.stub = stub_.get(),
                                                .session = session_,
                                                .arena = shared_arena_,
                                                .library = std::move(library),
                                                .watchdog = watchdog,
                                                .go_on = keep_on}));
  return absl::OkStatus();
}

void PeerSession::KeepAlive() {
  if (clock_.Now() - last_ping_ < heartbeat_interval_) return;
  last_ping_ = clock_.Now();
  heartbeat_->Ping();
}

PeerSession::~PeerSession() {
  mover_.reset();
  if (heartbeat_ != nullptr) heartbeat_->End();
  if (!session_.token().empty()) {
    v1::DetachRequest request;
    v1::DetachReply reply;
    (void)Call(request, &reply, &v1::Pool::Stub::Detach,
               "detach");  // else the session's TTL ends it
  }
}

template <typename Request, typename Reply, typename Method>
absl::Status PeerSession::Call(Request& request, Reply* reply, Method method, const char* name) {
  *request.mutable_session() = session_;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout_));
  return Annotate(FromGrpc((stub_.get()->*method)(&context, request, reply)),
                  absl::StrCat(name, " at ", address_));
}

absl::Status PeerSession::Copy(std::span<const SealedCopy> pages, std::span<CopyOutcome> outcomes,
                               uint64_t* bytes) {
  KeepAlive();
  std::fill(outcomes.begin(), outcomes.end(), CopyOutcome::kFailed);
  Batch batch;
  const absl::Status reserved = Reserve(batch, pages, outcomes);
  if (batch.pages.empty()) return reserved;
  const std::vector<bool> kept = arena_.BeginCopying(batch.pages);
  Batch here;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (!kept[i]) {
      outcomes[batch.places[i]] = CopyOutcome::kGone;  // its reservation there ends unsealed
      continue;
    }
    here.pages.push_back(batch.pages[i]);
    here.places.push_back(batch.places[i]);
    here.tickets.push_back(batch.tickets[i]);
  }
  absl::Status done = here.pages.empty() ? absl::OkStatus() : Send(here, bytes);
  if (done.ok()) done = Seal(here, outcomes);
  if (absl::IsDataLoss(done)) carrier_problem_ = done;
  arena_.EndCopying();
  done.Update(reserved);
  return done;
}

absl::Status PeerSession::Reserve(Batch& batch, std::span<const SealedCopy> pages,
                                  std::span<CopyOutcome> outcomes) {
  v1::ReserveRequest request;
  request.set_shard(pages[0].page.shard);
  for (const SealedCopy& page : pages) {
    request.mutable_pages()->mutable_keys()->append(page.page.key.begin(), page.page.key.end());
    request.mutable_pages()->add_page_idx(page.page_idx);
    request.mutable_pages()->add_placement_words(page.word);
  }
  v1::ReserveReply reply;
  KVD_RETURN_IF_ERROR(Call(request, &reply, &v1::Pool::Stub::Reserve, "reserve"));
  if (static_cast<size_t>(reply.results_size()) != pages.size()) {
    return absl::InternalError(absl::StrCat("reserve at ", address_, ": ", pages.size(),
                                            " results expected, got ", reply.results_size()));
  }
  absl::Status status;
  for (size_t i = 0; i < pages.size(); ++i) {
    const auto& result = reply.results(static_cast<int>(i));
    switch (result.state()) {
      case v1::ReserveReply::STATE_NEW:
        batch.pages.push_back(pages[i]);
        batch.places.push_back(i);
        batch.tickets.push_back(result.ticket());
        break;
      case v1::ReserveReply::STATE_HIT:
        outcomes[i] = CopyOutcome::kHadIt;
        break;
      case v1::ReserveReply::STATE_PENDING:
        outcomes[i] = CopyOutcome::kPending;
        break;
      default:
        status = absl::ResourceExhaustedError(absl::StrCat(address_, ": ", reply.full_reason()));
    }
  }
  return status;
}

// The slots cannot change meanwhile: they are being copied (Arena::BeginCopying).
absl::Status PeerSession::Send(Batch& batch, uint64_t* bytes) {
  const SlotLayout& slot = arena_.memory().shape().slot;
  std::vector<MovedPage> pages;
  for (size_t i = 0; i < batch.pages.size(); ++i)
    pages.push_back({batch.pages[i].location.slot, batch.tickets[i]});
  absl::StatusOr<std::vector<uint64_t>> moved = mover_->Move(pages);
  if (!moved.ok()) return carrier_problem_ = moved.status();
  batch.summary_checksums = *std::move(moved);
  *bytes += batch.pages.size() * (slot.slot_bytes() + slot.summary_bytes());
  return absl::OkStatus();
}

absl::Status PeerSession::Seal(const Batch& batch, std::span<CopyOutcome> outcomes) {
  if (batch.tickets.empty()) return absl::OkStatus();
  v1::SealRequest request;
  for (size_t i = 0; i < batch.tickets.size(); ++i) {
    request.add_tickets(batch.tickets[i]);
    request.add_summary_checksums(batch.summary_checksums[i]);
  }
  v1::SealReply reply;
  KVD_RETURN_IF_ERROR(Call(request, &reply, &v1::Pool::Stub::Seal, "seal"));
  if (static_cast<size_t>(reply.results_size()) != batch.tickets.size()) {
    return absl::InternalError(absl::StrCat("seal at ", address_, ": ", batch.tickets.size(),
                                            " results expected, got ", reply.results_size()));
  }
  absl::Status status;
  v1::ReleaseRequest release;
  for (size_t i = 0; i < batch.tickets.size(); ++i) {
    const auto& result = reply.results(static_cast<int>(i));
    if (result.code() != 0) {
      status.Update(absl::Status(static_cast<absl::StatusCode>(result.code()),
                                 absl::StrCat("seal at ", address_, ": ", result.message())));
      continue;
    }
    outcomes[batch.places[i]] = CopyOutcome::kCopied;
    release.add_slots(result.slot());
    release.add_generations(result.generation());
  }
  v1::ReleaseReply released;
  status.Update(Call(release, &released, &v1::Pool::Stub::Release, "release"));
  return status;
}

}  // namespace kvd
