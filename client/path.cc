#include "client/path.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/canary.h"
#include "client/device_buffer.h"
#include "client/shared_fetcher.h"
#include "client/staged_fetcher.h"
#include "client/ucx_fetcher.h"
#include "kernels/check.h"
#include "proto/fd_channel.h"
#include "proto/status.h"
#include "proto/ucx_worker.h"
#if KVD_CUDA
#include "client/peer_fetcher.h"
#endif

namespace kvd {
namespace {

// How long the ucx path between GPU memories may take to prove itself: there is another way.
constexpr absl::Duration kBetweenGpusLimit = absl::Seconds(2);
// By so much its canary may be slower: of small pages both take what a message and its answer take.
constexpr double kClearlySlower = 2;

// Where a status carries its PathRefusal; without it, the reason is kFailed.
constexpr char kReasonKey[] = "locks-kvd/path-refusal";

absl::Status Refused(PathRefusal reason, absl::string_view message) {
  absl::Status status = absl::FailedPreconditionError(message);
  status.SetPayload(kReasonKey, absl::Cord(absl::StrCat(static_cast<int>(reason))));
  return status;
}

PathRefusal ReasonOf(const absl::Status& status) {
  int reason = static_cast<int>(PathRefusal::kFailed);
  const auto payload = status.GetPayload(kReasonKey);
  if (payload.has_value()) KVD_CHECK(absl::SimpleAtoi(std::string(*payload), &reason));
  return static_cast<PathRefusal>(reason);
}

struct SessionIds {
  Incarnation incarnation = {};
  SessionToken token = {};
};

absl::StatusOr<SessionIds> IdsOf(const locks_kvd::v1::SessionRef& session) {
  SessionIds ids;
  if (session.incarnation().size() != ids.incarnation.size() ||
      session.token().size() != ids.token.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach reply: expected an incarnation and a token of 16 bytes, got ",
                     session.incarnation().size(), " and ", session.token().size()));
  }
  std::memcpy(ids.incarnation.data(), session.incarnation().data(), ids.incarnation.size());
  std::memcpy(ids.token.data(), session.token().data(), ids.token.size());
  return ids;
}

std::string HostId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

// What every way of opening a path needs.
struct Opening {
  const locks_kvd::v1::AttachReply& offer;
  const SessionIds& ids;
  const ArenaShape& shape;
  const MemoryPlace place;  // where the worker's units go
  UcxWorker* const ucx;
};

// The arena's descriptors, for a session of the daemon at `socket_path` on the host `host_id`.
absl::StatusOr<std::vector<UniqueFd>> Descriptors(const Opening& opening,
                                                  const std::string& socket_path,
                                                  const std::string& host_id,
                                                  absl::Duration timeout) {
  if (host_id != HostId()) return Refused(PathRefusal::kOtherHost, "the daemon is on another host");
  DescriptorRequest request;
  request.incarnation = opening.ids.incarnation;
  request.session = opening.ids.token;
  return ReceiveDescriptors(socket_path, request, timeout);
}

absl::StatusOr<std::unique_ptr<Fetcher>> OpenPeer(const Opening& opening, absl::Duration timeout) {
  const locks_kvd::v1::AttachReply& offer = opening.offer;
  if (!offer.has_peer()) {
    if (offer.has_shared()) return Refused(PathRefusal::kHostMemory, "the arena is in host memory");
    return Refused(PathRefusal::kNotOffered, "the daemon does not offer it");
  }
  if (!opening.place.on_gpu()) {
    return Refused(PathRefusal::kNoGpu,
                   absl::StrCat("this worker has no GPU, and the arena is on GPU ",
                                offer.peer().gpu_uuid(), ": set ClientOptions::gpu"));
  }
#if KVD_CUDA
  KVD_ASSIGN_OR_RETURN(
      std::vector<UniqueFd> descriptors,
      Descriptors(opening, offer.peer().socket_path(), offer.peer().host_id(), timeout));
  KVD_ASSIGN_OR_RETURN(
      std::unique_ptr<ArenaMemory> memory,
      ArenaMemory::MapGpu(opening.shape, std::move(descriptors), opening.place.gpu));
  return PeerFetcher::Make(std::move(memory));
#else
  (void)timeout;
  return Refused(PathRefusal::kNoGpu, "this library was built without CUDA");
#endif
}

// For a worker with a GPU: what delivers to the host goes on from there.
absl::StatusOr<std::unique_ptr<Fetcher>> ToPlace(const Opening& opening,
                                                 std::unique_ptr<Fetcher> fetcher) {
  if (!opening.place.on_gpu()) return fetcher;
  return StagedFetcher::Make(std::move(fetcher), opening.shape, opening.place);
}

absl::StatusOr<std::unique_ptr<Fetcher>> OpenShared(const Opening& opening,
                                                    absl::Duration timeout) {
  const locks_kvd::v1::AttachReply& offer = opening.offer;
  if (!offer.has_shared()) {
    return Refused(PathRefusal::kNotOffered,
                   offer.has_peer() ? "the arena is on a GPU" : "the daemon does not offer it");
  }
  KVD_ASSIGN_OR_RETURN(
      std::vector<UniqueFd> descriptors,
      Descriptors(opening, offer.shared().socket_path(), offer.shared().host_id(), timeout));
  KVD_ASSIGN_OR_RETURN(std::unique_ptr<ArenaMemory> memory,
                       ArenaMemory::MapShared(opening.shape, std::move(descriptors)));
  return ToPlace(opening, std::make_unique<SharedFetcher>(std::move(memory)));
}

absl::Status CheckUcx(const Opening& opening) {
  const locks_kvd::v1::AttachReply& offer = opening.offer;
  if (!offer.has_ucx()) return Refused(PathRefusal::kNotOffered, "the daemon does not offer it");
  if (opening.ucx == nullptr) return Refused(PathRefusal::kNoUcx, "this process runs without UCX");
  if (offer.ucx().version() != UcxWorker::Version()) {
    return Refused(PathRefusal::kOtherVersion,
                   absl::StrCat("the daemon runs UCX ", offer.ucx().version(), ", this process ",
                                UcxWorker::Version(), ": run the same version"));
  }
  return absl::OkStatus();
}

// Units go to `place`: the host, or the worker's own.
absl::StatusOr<std::unique_ptr<UcxFetcher>> ConnectUcx(const Opening& opening,
                                                       const MemoryPlace& place,
                                                       absl::Duration timeout) {
  return UcxFetcher::Connect(opening.ucx, opening.offer.ucx().worker_address(),
                             opening.ids.incarnation, opening.ids.token, opening.shape.slot,
                             timeout, place);
}

absl::Status ProveByCanary(Fetcher& fetcher, const Opening& opening, absl::Duration timeout,
                           PathReport& report) {
  KVD_ASSIGN_OR_RETURN(Canary canary,
                       Canary::Make(opening.shape.slot, opening.offer.arena().canary_slot(),
                                    opening.ids.incarnation, opening.place));
  // The first fetch also pays for connections and page faults; the second is the measured one. A
  // mapped path gets a third, since a moment's delay would cost it its place.
  const bool has_floor = fetcher.path() == PathKind::kPeer;
  report.canary_seconds = std::numeric_limits<double>::infinity();
  for (int round = 0; round < (has_floor ? 3 : 2); ++round) {
    KVD_ASSIGN_OR_RETURN(const double seconds, canary.Fetch(fetcher, timeout));
    if (round > 0) report.canary_seconds = std::min(report.canary_seconds, seconds);
  }
  report.canary_bytes_per_second = canary.num_bytes() / std::max(report.canary_seconds, 1e-9);
  if (has_floor && report.canary_seconds > canary.num_bytes() / kPeerFloor + 1e-3) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the canary came at ", report.canary_bytes_per_second / 1e9, " GB/s, expected at least ",
        kPeerFloor / 1e9, ": look at the link between the GPUs (nvidia-smi topo -m)"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ChosenPath> Prove(PathKind path, const Opening& opening,
                                 std::unique_ptr<Fetcher> fetcher, absl::Duration timeout) {
  ChosenPath chosen;
  chosen.report.path = path;
  KVD_RETURN_IF_ERROR(ProveByCanary(*fetcher, opening, timeout, chosen.report));
  chosen.fetcher = std::move(fetcher);
  return chosen;
}

// Why UCX cannot bring units from the daemon's GPU memory straight into this worker's; empty: it
// may.
std::string WhyNotBetweenGpus(const Opening& opening) {
  const std::string& host = opening.offer.ucx().gpu_host_id();
  if (host.empty()) return "the daemon's UCX does not send from GPU memory";
  if (host != HostId()) return "the daemon is on another host";
  if (!opening.ucx->has_gpu_memory())
    return absl::StrCat("UCX ", UcxWorker::Version(), " has no CUDA in this process");
  return "";
}

// The ucx path between the GPU memories.
absl::StatusOr<ChosenPath> OpenBetweenGpus(const Opening& opening, absl::Duration timeout) {
  KVD_ASSIGN_OR_RETURN(std::unique_ptr<UcxFetcher> fetcher,
                       ConnectUcx(opening, opening.place, timeout));
  const UcxFetcher& ucx = *fetcher;
  KVD_ASSIGN_OR_RETURN(std::unique_ptr<Fetcher> staged, ToPlace(opening, std::move(fetcher)));
  KVD_ASSIGN_OR_RETURN(ChosenPath chosen,
                       Prove(PathKind::kUcx, opening, std::move(staged), timeout));
  if (ucx.num_gpu_pieces() == 0)
    return absl::ResourceExhaustedError("the daemon had no GPU memory free to send from");
  return chosen;
}

// To a GPU, what is better depends on what UCX finds between the two processes (cuda_ipc, or TCP
// with copies of its own, which collapses with large pieces), and it does not say which: the canary
// tells.
absl::StatusOr<ChosenPath> OpenUcx(const Opening& opening, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  KVD_RETURN_IF_ERROR(CheckUcx(opening));
  KVD_ASSIGN_OR_RETURN(std::unique_ptr<Fetcher> fetcher, ConnectUcx(opening, {}, timeout));
  KVD_ASSIGN_OR_RETURN(fetcher, ToPlace(opening, std::move(fetcher)));
  KVD_ASSIGN_OR_RETURN(ChosenPath staged,
                       Prove(PathKind::kUcx, opening, std::move(fetcher), deadline - absl::Now()));
  if (!opening.place.on_gpu()) return staged;
  const auto rate = [](const ChosenPath& path) {
    return absl::StrFormat("%.2f GB/s", path.report.canary_bytes_per_second / 1e9);
  };
  const std::string why_not = WhyNotBetweenGpus(opening);
  if (!why_not.empty()) {
    staged.report.memory = absl::StrCat("through pinned memory: ", why_not);
    return staged;
  }
  auto straight = OpenBetweenGpus(opening, std::min(deadline - absl::Now(), kBetweenGpusLimit));
  if (absl::IsDataLoss(straight.status())) return straight;
  if (!straight.ok()) {
    // It may have cost the connection: the next session of this process does not try it again.
    if (!absl::IsResourceExhausted(straight.status())) opening.ucx->LeaveGpuMemory();
    staged.report.memory = absl::StrCat("through pinned memory: between GPU memories: ",
                                        absl::string_view(straight.status().message()));
    return staged;
  }
  const std::string rates =
      absl::StrCat("the canary came at ", rate(staged), " through pinned memory, ", rate(*straight),
                   " between GPU memories");
  const bool slower =
      straight->report.canary_seconds > kClearlySlower * staged.report.canary_seconds;
  ChosenPath& better = slower ? staged : *straight;
  better.report.memory =
      absl::StrCat(slower ? "through pinned memory: " : "between GPU memories: ", rates);
  return std::move(better);
}

// A path that works, and its proof.
absl::StatusOr<ChosenPath> Open(PathKind path, const Opening& opening, absl::Duration timeout) {
  if (path == PathKind::kUcx) return OpenUcx(opening, timeout);
  const absl::Time deadline = absl::Now() + timeout;
  KVD_ASSIGN_OR_RETURN(std::unique_ptr<Fetcher> fetcher, path == PathKind::kPeer
                                                             ? OpenPeer(opening, timeout)
                                                             : OpenShared(opening, timeout));
  return Prove(path, opening, std::move(fetcher), deadline - absl::Now());
}

// Why the options leave a path out; ok if they do not. Paths go from the best to the slowest.
absl::Status Allowed(PathKind path, const PathOptions& options) {
  if (options.required.has_value() && static_cast<int>(path) > static_cast<int>(*options.required))
    return Refused(PathRefusal::kByOptions, "slower than what is required");
  if (options.best.has_value() && static_cast<int>(path) < static_cast<int>(*options.best))
    return Refused(PathRefusal::kByOptions, "left out by the caller");
  return absl::OkStatus();
}

}  // namespace

absl::string_view PathName(PathKind path) {
  switch (path) {
    case PathKind::kPeer:
      return "peer";
    case PathKind::kShared:
      return "shared";
    case PathKind::kUcx:
      break;
  }
  return "ucx";
}

absl::string_view PathRefusalName(PathRefusal reason) {
  switch (reason) {
    case PathRefusal::kHostMemory:
      return "host_memory";
    case PathRefusal::kNoGpu:
      return "no_gpu";
    case PathRefusal::kNotOffered:
      return "not_offered";
    case PathRefusal::kOtherHost:
      return "other_host";
    case PathRefusal::kNoUcx:
      return "no_ucx";
    case PathRefusal::kOtherVersion:
      return "other_version";
    case PathRefusal::kByOptions:
      return "by_options";
    case PathRefusal::kFailed:
      break;
  }
  return "failed";
}

absl::StatusOr<ChosenPath> ChoosePath(const locks_kvd::v1::AttachReply& offer,
                                      const ArenaShape& shape, UcxWorker* ucx,
                                      const PathOptions& options) {
  KVD_ASSIGN_OR_RETURN(const SessionIds ids, IdsOf(offer.session()));
  if (offer.arena().canary_slot() >= shape.num_slots) {
    return absl::InvalidArgumentError("attach reply: the canary slot is outside the arena");
  }
  const absl::Time deadline = absl::Now() + options.timeout;
  const Opening opening = {offer, ids, shape, options.gpu >= 0 ? OnGpu(options.gpu) : MemoryPlace{},
                           ucx};
  std::vector<std::string> rejected;
  std::vector<std::pair<PathKind, PathRefusal>> refusals;
  for (const PathKind path : {PathKind::kPeer, PathKind::kShared, PathKind::kUcx}) {
    absl::Status status = Allowed(path, options);
    if (status.ok()) {
      auto opened = Open(path, opening, deadline - absl::Now());
      status = opened.status();
      if (absl::IsDataLoss(status)) return Annotate(status, PathName(path));
      if (status.ok()) {
        opened->report.rejected = std::move(rejected);
        opened->report.refusals = std::move(refusals);
        return opened;
      }
    }
    rejected.push_back(absl::StrCat(PathName(path), ": ", absl::string_view(status.message())));
    refusals.emplace_back(path, ReasonOf(status));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("no path to the daemon works",
                   options.required.has_value()
                       ? absl::StrCat(" that is at least '", PathName(*options.required), "'")
                       : "",
                   ": ", absl::StrJoin(rejected, "; ")));
}

}  // namespace kvd
