#include "client/path.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/shared_fetcher.h"
#include "client/ucx_fetcher.h"
#include "kernels/check.h"
#include "proto/fd_channel.h"
#include "proto/status.h"
#include "proto/ucx_worker.h"

namespace kvd {
namespace {

// Units of the canary page that are fetched: enough for a rate, little enough for a slow network.
constexpr size_t kCanaryUnits = 256;
constexpr uint64_t kCanaryGeneration = 2;

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
  if (session.incarnation().size() != ids.incarnation.size() || session.token().size() != ids.token.size()) {
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

absl::StatusOr<std::unique_ptr<Fetcher>> OpenShared(const locks_kvd::v1::AttachReply& offer,
                                                    const SessionIds& ids, const ArenaShape& shape,
                                                    absl::Duration timeout) {
  if (!offer.has_shared()) return Refused(PathRefusal::kNotOffered, "the daemon does not offer it");
  if (offer.shared().host_id() != HostId()) {
    return Refused(PathRefusal::kOtherHost, "the daemon is on another host");
  }
  DescriptorRequest request;
  request.incarnation = ids.incarnation;
  request.session = ids.token;
  KVD_ASSIGN_OR_RETURN(std::vector<UniqueFd> descriptors,
                       ReceiveDescriptors(offer.shared().socket_path(), request, timeout));
  KVD_ASSIGN_OR_RETURN(std::unique_ptr<ArenaMemory> memory,
                       ArenaMemory::MapShared(shape, std::move(descriptors)));
  return std::make_unique<SharedFetcher>(std::move(memory));
}

absl::StatusOr<std::unique_ptr<Fetcher>> OpenUcx(const locks_kvd::v1::AttachReply& offer,
                                                 const SessionIds& ids, const ArenaShape& shape,
                                                 UcxWorker* worker, absl::Duration timeout) {
  if (!offer.has_ucx()) return Refused(PathRefusal::kNotOffered, "the daemon does not offer it");
  if (worker == nullptr) return Refused(PathRefusal::kNoUcx, "this process runs without UCX");
  if (offer.ucx().version() != UcxWorker::Version()) {
    return Refused(PathRefusal::kOtherVersion,
                   absl::StrCat("the daemon runs UCX ", offer.ucx().version(), ", this process ",
                                UcxWorker::Version(), ": run the same version"));
  }
  return UcxFetcher::Connect(worker, offer.ucx().worker_address(), ids.incarnation, ids.token, shape.slot,
                             timeout);
}

// The canary's units in `buffer`, in order, are those that `incarnation` determines.
bool CanaryIsRight(const std::vector<uint8_t>& buffer, const Incarnation& incarnation) {
  for (size_t i = 0; i < buffer.size() / sizeof(uint64_t); ++i) {
    uint64_t word = 0;
    std::memcpy(&word, buffer.data() + i * sizeof(word), sizeof(word));
    if (word != CanaryWord(incarnation, i)) return false;
  }
  return true;
}

absl::Status ProveByCanary(Fetcher& fetcher, const locks_kvd::v1::AttachReply& offer, const SessionIds& ids,
                           const ArenaShape& shape, absl::Duration timeout, PathReport& report) {
  const SlotLayout& slot = shape.slot;
  const size_t count = std::min(slot.num_units(), kCanaryUnits);
  std::vector<FetchEntry> entries(count);
  std::vector<uint8_t> buffer(count * slot.unit_bytes);
  std::vector<uint8_t*> destinations(count);
  std::vector<uint8_t> valid(count);
  for (size_t i = 0; i < count; ++i) {
    const auto heads = static_cast<size_t>(slot.shard_heads);
    entries[i] = {offer.arena().canary_slot(), static_cast<uint16_t>(i / heads),
                  static_cast<uint16_t>(i % heads), kCanaryGeneration};
    destinations[i] = buffer.data() + i * slot.unit_bytes;
  }
  // The first fetch also pays for connections and page faults; the second is the measured one.
  for (int round = 0; round < 2; ++round) {
    std::fill(buffer.begin(), buffer.end(), uint8_t{0});
    FetchList list;
    list.entries = entries;
    list.destinations = destinations.data();
    list.valid = valid.data();
    list.deadline = timeout;
    const absl::Time start = absl::Now();
    fetcher.Start(list);
    fetcher.Wait(list);
    report.canary_seconds = absl::ToDoubleSeconds(absl::Now() - start);
    if (list.code != absl::StatusCode::kOk) {
      return absl::Status(list.code, "the canary fetch failed");
    }
    if (list.num_valid != static_cast<int64_t>(count)) {
      return absl::DataLossError(
          absl::StrCat("the canary fetch delivered ", list.num_valid, " of ", count, " units"));
    }
    if (!CanaryIsRight(buffer, ids.incarnation)) {
      return absl::DataLossError("the canary fetch delivered wrong bytes: do not use this daemon");
    }
  }
  report.canary_bytes_per_second =
      static_cast<double>(buffer.size()) / std::max(report.canary_seconds, 1e-9);
  return absl::OkStatus();
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

absl::StatusOr<ChosenPath> ChoosePath(const locks_kvd::v1::AttachReply& offer, const ArenaShape& shape,
                                      UcxWorker* ucx, const PathOptions& options) {
  KVD_ASSIGN_OR_RETURN(const SessionIds ids, IdsOf(offer.session()));
  if (offer.arena().canary_slot() >= shape.num_slots) {
    return absl::InvalidArgumentError("attach reply: the canary slot is outside the arena");
  }
  const absl::Time deadline = absl::Now() + options.timeout;
  ChosenPath chosen;
  chosen.report.rejected.push_back("peer: the arena is in host memory");
  chosen.report.refusals.emplace_back(PathKind::kPeer, PathRefusal::kHostMemory);
  for (const PathKind path : {PathKind::kShared, PathKind::kUcx}) {
    const absl::Duration left = deadline - absl::Now();
    absl::Status status = Allowed(path, options);
    if (status.ok()) {
      auto opened = path == PathKind::kShared ? OpenShared(offer, ids, shape, left)
                                              : OpenUcx(offer, ids, shape, ucx, left);
      status = opened.status();
      if (opened.ok()) {
        status = ProveByCanary(**opened, offer, ids, shape, deadline - absl::Now(), chosen.report);
        if (absl::IsDataLoss(status)) return Annotate(status, PathName(path));
      }
      if (status.ok()) {
        chosen.fetcher = *std::move(opened);
        chosen.report.path = path;
        return chosen;
      }
    }
    chosen.report.rejected.push_back(absl::StrCat(PathName(path), ": ", absl::string_view(status.message())));
    chosen.report.refusals.emplace_back(path, ReasonOf(status));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("no path to the daemon works",
                   options.required.has_value()
                       ? absl::StrCat(" that is at least '", PathName(*options.required), "'")
                       : "",
                   ": ", absl::StrJoin(chosen.report.rejected, "; ")));
}

}  // namespace kvd
