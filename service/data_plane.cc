#include "service/data_plane.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/address.h"
#include "proto/gpu_memory.h"
#include "proto/status.h"
#include "spdlog/spdlog.h"

namespace kvd {
namespace {

// The same for every process of a host, another one after a reboot; not namespaced by containers.
std::string ReadHostId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return std::string(absl::StripAsciiWhitespace(id));
}

absl::Status PrepareDirectory(const std::string& directory) {
  if (mkdir(directory.c_str(), 0750) != 0 && errno != EEXIST) {
    return absl::FailedPreconditionError(
        absl::StrFormat("data.socket_dir %s: cannot be made: %s: make it with mode 0750 or 0770 "
                        "and the workers' group",
                        directory, std::strerror(errno)));
  }
  struct stat info = {};
  if (stat(directory.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("data.socket_dir ", directory, ": expected a directory: choose another path"));
  }
  if ((info.st_mode & S_IRWXO) != 0) {
    spdlog::warn("socket_dir_open path={} mode={:o} do=\"set its mode to 0750 or 0770\"", directory,
                 info.st_mode & 07777u);
  }
  return absl::OkStatus();
}

}  // namespace

UcxOptions UcxOptionsOf(const locks_kvd::v1::DaemonConfig& config) {
  UcxOptions options;
  options.devices = config.data().ucx_devices();
  const absl::StatusOr<Address> control = Address::Parse(config.control().address());
  if (options.devices.empty() && control.ok() && control->IsLoopback()) options.devices = "lo";
  options.transports = config.data().ucx_transports();
  options.port_range = config.data().ucx_port_range();
  return options;
}

// Counts fetches: a few relaxed additions each. Slow and failed ones go to the slowlog.
class DataPlane::Observer final : public FetchObserver {
 public:
  Observer(Metrics* metrics, Slowlog* slowlog)
      : counters_(&metrics->fetch), stale_(&metrics->stale_rejects), slowlog_(slowlog) {}
  void OnFetch(const FetchEvent& event) override {
    counters_->requests[static_cast<size_t>(event.status)].Add();
    slowlog_->Note(event);
    if (event.status != WireStatus::kOk) return;
    (*stale_)[kStaleLease].Add(event.unleased_units);
    (*stale_)[kStaleGeneration].Add(event.missing_units - event.unleased_units);
    counters_->units_ok.Add(event.units - event.missing_units);
    counters_->units_missing.Add(event.missing_units);
    counters_->bytes.Add(event.bytes);
    const FetchSize size = FetchSizeOf(event.bytes);
    counters_->seconds[size].Observe(event.total);
    counters_->queue_seconds[size].Observe(event.queued);
  }

 private:
  FetchCounters* const counters_;
  std::array<Counter, kNumStaleReasons>* const stale_;
  Slowlog* const slowlog_;
};

absl::StatusOr<std::unique_ptr<DataPlane>> DataPlane::Make(
    const locks_kvd::v1::DaemonConfig& config, uint16_t control_port, SessionTable* sessions,
    Metrics* metrics, Slowlog* slowlog) {
  std::unique_ptr<DataPlane> plane(new DataPlane());
  plane->host_id_ = ReadHostId();
  int on_gpu = 0;
  for (const auto& arena : config.arenas()) {
    if (!arena.has_gpu()) continue;
    plane->gpu_ = arena.gpu();
    ++on_gpu;
  }
  plane->all_on_gpu_ = on_gpu > 0 && on_gpu == config.arenas_size();
  if (plane->gpu_ >= 0) {
    KVD_ASSIGN_OR_RETURN(plane->gpu_uuid_, GpuUuid(plane->gpu_));
  }
  if (config.data().ucx()) KVD_RETURN_IF_ERROR(plane->StartUcx(config, sessions, metrics, slowlog));
  if (!config.data().socket_dir().empty()) {
    KVD_RETURN_IF_ERROR(plane->StartSocket(config.data().socket_dir(), control_port, sessions));
  }
  return plane;
}

DataPlane::~DataPlane() = default;

absl::Status DataPlane::StartUcx(const locks_kvd::v1::DaemonConfig& config, SessionTable* sessions,
                                 Metrics* metrics, Slowlog* slowlog) {
  UcxOptions options = UcxOptionsOf(config);
  options.read_from_sender = true;
  options.gpu = gpu_;
  absl::StatusOr<std::unique_ptr<UcxWorker>> worker = UcxWorker::Make(options);
  if (!worker.ok())
    return Annotate(worker.status(), "data.ucx (set it to false to serve without UCX)");
  worker_ = *std::move(worker);
  observer_ = std::make_unique<Observer>(metrics, slowlog);
  fetch_ = std::make_unique<FetchServer>(
      worker_.get(), sessions,
      FetchLimits{config.limits().units_per_fetch(),
                  config.limits().fetch_bytes_in_flight_per_session()},
      observer_.get());
  ingest_ = std::make_unique<IngestServer>(worker_.get(), sessions);
  worker_->AcceptPeers([sessions](const MessageHeader& header) {
    return sessions->Find(header.session, header.incarnation).status();
  });
  return absl::OkStatus();
}

absl::Status DataPlane::StartSocket(const std::string& directory, uint16_t control_port,
                                    const SessionTable* sessions) {
  KVD_RETURN_IF_ERROR(PrepareDirectory(directory));
  socket_path_ = absl::StrFormat("%s/locks-kvd-%d.sock", directory, control_port);
  KVD_ASSIGN_OR_RETURN(descriptors_, DescriptorServer::Make(socket_path_, sessions));
  return absl::OkStatus();
}

PathOffers DataPlane::Offers() const {
  PathOffers offers;
  if (gpu_ < 0) {
    offers.report.push_back("peer: no: no arena has a gpu");
  } else if (descriptors_ == nullptr) {
    offers.report.push_back("peer: no: data.socket_dir is empty");
  } else {
    offers.peer.emplace();
    offers.peer->set_socket_path(socket_path_);
    offers.peer->set_host_id(host_id_);
    offers.peer->set_gpu_uuid(gpu_uuid_);
    offers.report.push_back(
        absl::StrCat("peer: yes: GPU ", gpu_, " ", gpu_uuid_, " by ", socket_path_));
  }
  if (all_on_gpu_) {
    offers.report.push_back("shared: no: every arena has a gpu");
  } else if (descriptors_ == nullptr) {
    offers.report.push_back("shared: no: data.socket_dir is empty");
  } else {
    offers.shared.emplace();
    offers.shared->set_socket_path(socket_path_);
    offers.shared->set_host_id(host_id_);
    offers.report.push_back(absl::StrCat("shared: yes: ", socket_path_));
  }
  if (worker_ == nullptr) {
    offers.report.push_back("ucx: no: data.ucx is false");
  } else {
    offers.ucx.emplace();
    offers.ucx->set_worker_address(worker_->address());
    offers.ucx->set_version(UcxWorker::Version());
    offers.ucx->set_transports(worker_->transports());
    if (worker_->has_gpu_memory()) offers.ucx->set_gpu_host_id(host_id_);
    offers.report.push_back(absl::StrCat("ucx: yes: ", UcxDescription()));
  }
  return offers;
}

std::string DataPlane::UcxDescription() const {
  if (worker_ == nullptr) return "none";
  return absl::StrCat(UcxWorker::Version(), " ", worker_->transports());
}

void DataPlane::Drain() {
  if (fetch_ != nullptr) fetch_->Drain();
}

void DataPlane::Fill(MetricsSnapshot* snapshot) const {
  if (worker_ != nullptr) {
    snapshot->ucx_stalls = &worker_->stalls();
    snapshot->fetch_inflight = fetch_->num_in_flight();
    snapshot->fetch_refused = fetch_->num_refused();
    snapshot->fetch_malformed = fetch_->num_malformed() + worker_->num_malformed();
    snapshot->ingest_bytes = ingest_->num_bytes();
    snapshot->ingest_refused_bytes = ingest_->num_refused_bytes();
    snapshot->ingest_malformed = ingest_->num_malformed();
  }
  if (descriptors_ != nullptr) snapshot->uds_malformed = descriptors_->num_malformed();
}

}  // namespace kvd
