#include "service/server.h"

#include <fcntl.h>
#include <google/protobuf/text_format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/layout.h"
#include "proto/address.h"
#include "proto/status.h"
#include "service/arena_factory.h"
#include "service/config.h"
#include "service/log_setup.h"
#include "service/nccl_communicator.h"
#include "service/server_parts.h"
#include "spdlog/spdlog.h"

namespace kvd {
namespace {

using locks_kvd::v1::DaemonConfig;
using locks_kvd::v1::ReadyFile;

constexpr int kMaxMessageBytes = 4 << 20;
constexpr size_t kGrpcMemoryBytes = size_t{512} << 20;
constexpr int kGrpcMaxThreads = 128;
constexpr int kMaxStreamsPerConnection = 256;
// Calls that are still answered when the daemon stops.
constexpr absl::Duration kStopGrace = absl::Seconds(2);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(5);
// Calls that were let in before leasing stopped end within this.
constexpr absl::Duration kLastCalls = absl::Milliseconds(50);

std::string HexOf(const Incarnation& incarnation) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(incarnation.data()), incarnation.size()));
}

std::string WithPort(const std::string& address, int port) {
  absl::StatusOr<Address> parsed = Address::Parse(address);
  if (!parsed.ok()) return address;
  parsed->port = static_cast<uint16_t>(port);
  return parsed->ToString();
}

// The library of bulk moves as the configuration has it, or why they go by UCX.
absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> NcclOf(const DaemonConfig& config) {
  if (!config.cluster().has_nccl()) return absl::FailedPreconditionError("cluster.nccl is not set");
  const auto with_gpu = std::find_if(config.arenas().begin(), config.arenas().end(),
                                     [](const auto& arena) { return arena.has_gpu(); });
  if (with_gpu == config.arenas().end()) return absl::FailedPreconditionError("no arena has a gpu");
  const auto& nccl = config.cluster().nccl();
  KVD_ASSIGN_OR_RETURN(auto library, LoadNccl(nccl.library()));
  KVD_RETURN_IF_ERROR(
      ProveAlone(library, OnGpu(with_gpu->gpu()), absl::Milliseconds(nccl.watchdog_ms())));
  return library;
}

// Writes a file whole and at once: a reader sees all of it or none.
absl::Status WriteWhole(const std::string& path, const std::string& text) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  const bool written =
      fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int error = errno;
  if (fd >= 0) close(fd);
  if (written && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const int shown = written ? errno : error;
  unlink(temporary.c_str());
  return absl::FailedPreconditionError(absl::StrCat(
      "ready_file ", path, ": cannot be written: ", std::strerror(shown), ": check its directory"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const DaemonConfig& config) {
  return Start(config, NcclOf(config));
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(
    const DaemonConfig& config, absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> nccl) {
  auto parts = std::make_unique<Parts>(config, std::move(nccl));
  std::unique_ptr<Server> server(new Server(std::move(parts)));
  Parts& p = *server->parts_;
  AdminOptions admin;
  admin.tls = !IsInsecure(config);
  admin.metrics = &p.metrics;
  admin.slowlog = &p.slowlog;
  admin.arenas = &p.arenas;
  admin.config = [&p] { return PrintConfig(p.ConfigInForce()); };
  admin.drain = [s = server.get()](absl::Duration limit,
                                   bool exit) -> absl::StatusOr<DrainOutcome> {
    if (!s->parts_->serving.load(std::memory_order_acquire)) {
      return absl::UnavailableError("the daemon is starting: try again in a moment");
    }
    const DrainResult result = s->Drain(limit, "asked for by an operator");
    if (exit) s->RequestExit();
    return DrainOutcome{result.clean, result.leases_left};
  };
  p.admin = std::make_unique<AdminService>(std::move(admin));
  KVD_RETURN_IF_ERROR(p.Start());
  return server;
}

Server::Server(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Server::~Server() = default;

const ReadyFile& Server::ready() const { return parts_->ready; }

absl::Status Server::Parts::Start() {
  const auto& times = config.times();
  KVD_ASSIGN_OR_RETURN(arenas, MakeArenas(config, incarnation, &clock));
  sessions = std::make_unique<SessionTable>(
      SessionTable::Options{.incarnation = incarnation,
                            .ttl = absl::Milliseconds(times.session_ttl_ms()),
                            .sessions_per_tenant = config.limits().sessions_per_tenant(),
                            .clock = &clock});
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  sealer = std::make_unique<Sealer>(static_cast<int>(std::min(4u, cores)));
  MoveReceiver::Options receiver = {.sessions = sessions.get(), .clock = &clock, .library = nccl};
  if (config.cluster().has_nccl())
    receiver.watchdog = absl::Milliseconds(config.cluster().nccl().watchdog_ms());
  moves = std::make_unique<MoveReceiver>(std::move(receiver));
  PoolOptions options;
  options.moves = moves.get();
  options.sessions = sessions.get();
  options.sealer = sealer.get();
  options.metrics = &metrics;
  options.clock = &clock;
  options.arenas = arenas;
  options.tls = !IsInsecure(config);
  options.heartbeat = absl::Milliseconds(times.heartbeat_ms());
  options.version = kVersion;
  options.replicas = std::max(1u, config.cluster().replicas());
  pool = std::make_unique<PoolService>(std::move(options));
  KVD_RETURN_IF_ERROR(StartControl());
  const absl::StatusOr<Address> address = Address::Parse(ready.control_address());
  KVD_ASSIGN_OR_RETURN(data_plane,
                       DataPlane::Make(config, address.ok() ? address->port : uint16_t{0},
                                       sessions.get(), &metrics, &slowlog));
  if (config.has_cluster()) {
    KVD_ASSIGN_OR_RETURN(cluster, Cluster::Make(config, ready.control_address(), arenas,
                                                nccl.ok() ? *nccl : nullptr, &metrics.moves));
  }
  KVD_RETURN_IF_ERROR(StartOutside());
  last_tick_ns = absl::ToInt64Nanoseconds(clock.Now());
  upkeep = std::thread([this] { UpkeepLoop(); });
  watch = std::thread([this] { WatchLoop(); });
  pool->Open(Offers());
  serving.store(true, std::memory_order_release);
  if (health != nullptr) {
    health->SetStarted(true);
    health->SetLive(true);
    health->SetReady(true);
  }
  LogStart();
  if (config.ready_file().empty()) return absl::OkStatus();
  std::string text;
  google::protobuf::TextFormat::PrintToString(ready, &text);
  KVD_RETURN_IF_ERROR(WriteWhole(config.ready_file(), text));
  ready_file_written = true;
  return absl::OkStatus();
}

absl::Status Server::Parts::StartControl() {
  std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials();
  if (!IsInsecure(config)) {
    KVD_ASSIGN_OR_RETURN(auto expiries, CheckTlsFiles(config.control().tls(), absl::Now()));
    const std::lock_guard<std::mutex> lock(mutex);
    certificates = std::move(expiries);
    credentials = MakeTlsCredentials(config.control().tls());
  }
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(config.control().address(), credentials, &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT,
                             0);  // two daemons on one port would mix their clients
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetResourceQuota(
      grpc::ResourceQuota("control").SetMaxThreads(kGrpcMaxThreads).Resize(kGrpcMemoryBytes));
  builder.RegisterService(pool.get());
  builder.RegisterService(admin.get());
  control = builder.BuildAndStart();
  if (control == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("control.address ", config.control().address(),
                     ": cannot listen: is the port taken, or the address another host's?"));
  }
  ready.set_control_address(WithPort(config.control().address(), port));
  ready.set_incarnation(HexOf(incarnation));
  ready.set_pid(static_cast<uint64_t>(getpid()));
  return absl::OkStatus();
}

absl::Status Server::Parts::StartOutside() {
  ready.set_socket_path(data_plane->socket_path());
  if (!config.health_address().empty()) {
    KVD_ASSIGN_OR_RETURN(health, HealthServer::Make(config.health_address()));
    ready.set_health_address(WithPort(config.health_address(), health->port()));
  }
  if (config.metrics_address().empty()) return absl::OkStatus();
  MetricsIdentity identity;
  identity.version = kVersion;
  identity.commit = KVD_COMMIT;
  identity.ucx = data_plane->UcxDescription();
  identity.layout_version = kLayoutVersion;
  identity.incarnation = incarnation;
  identity.start_time_seconds = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  KVD_ASSIGN_OR_RETURN(metrics_server,
                       MetricsServer::Make(config.metrics_address(), &metrics, std::move(identity),
                                           [this] { return Snapshot(); }));
  ready.set_metrics_address(WithPort(config.metrics_address(), metrics_server->port()));
  return absl::OkStatus();
}

PathOffers Server::Parts::Offers() const {
  PathOffers offers = data_plane->Offers();
  if (cluster == nullptr) return offers;
  offers.report.push_back(
      nccl.ok() ? absl::StrCat("nccl: yes: ", (*nccl)->version(), " for moves of ",
                               config.cluster().nccl().min_bytes(), " bytes and more")
                : absl::StrCat("nccl: no: ", nccl.status().message(), ": pages move by ucx"));
  return offers;
}

// With the addresses that were really listened on.
DaemonConfig Server::Parts::ConfigInForce() const {
  DaemonConfig in_force = config;
  if (!serving.load(std::memory_order_acquire)) return in_force;
  in_force.mutable_control()->set_address(ready.control_address());
  in_force.set_health_address(ready.health_address());
  in_force.set_metrics_address(ready.metrics_address());
  return in_force;
}

DrainResult Server::Drain(absl::Duration limit, const std::string& reason) {
  Parts& p = *parts_;
  const absl::Duration wait =
      limit > absl::ZeroDuration() ? limit : absl::Milliseconds(p.config.times().drain_ms());
  spdlog::info("drain_begin reason={} limit_ms={} sessions={} leases={}", LogQuote(reason),
               absl::ToInt64Milliseconds(wait), p.sessions->size(), p.CountLeases());
  if (p.health != nullptr) p.health->SetReady(false);
  p.pool->StartDraining(reason);
  const absl::Duration end = p.clock.Now() + wait;
  if (p.cluster != nullptr) {
    const auto moved =
        p.cluster->Drain(wait, [&p] { return p.SleepUnlessStopping(absl::ZeroDuration()); });
    spdlog::info("drain_moved pages={} left={} problem={}", moved.moved, moved.left,
                 LogQuote(moved.problem.message()));
  }
  const auto wait_for_quiet = [&p, end] {
    while (p.IsBusy() && p.clock.Now() < end && p.SleepUnlessStopping(kDrainPoll)) {
    }
  };
  wait_for_quiet();
  // Who matched a page just now still gets it.
  p.pool->StopLeasing();
  p.SleepUnlessStopping(kLastCalls);
  wait_for_quiet();
  const DrainResult result = {!p.IsBusy(), p.CountLeases()};
  p.data_plane->Drain();
  spdlog::info("drain_end clean={} leases_left={}", result.clean, result.leases_left);
  return result;
}

void Server::RequestExit() {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  parts_->exit_requested = true;
  parts_->changed.notify_all();
}

void Server::WaitForExit() {
  std::unique_lock<std::mutex> lock(parts_->mutex);
  parts_->changed.wait(lock, [this] { return parts_->exit_requested; });
}

Server::Parts::~Parts() {
  if (ready_file_written) unlink(config.ready_file().c_str());
  {
    const std::lock_guard<std::mutex> lock(mutex);
    stopping = true;
    changed.notify_all();
  }
  if (health != nullptr) health->SetReady(false);
  if (upkeep.joinable()) upkeep.join();
  if (watch.joinable()) watch.join();
  metrics_server.reset();
  health.reset();
  if (control != nullptr) {
    pool->EndStreams();
    control->Shutdown(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(kStopGrace));
    control->Wait();
  }
  cluster.reset();
  data_plane.reset();
  control.reset();
  admin.reset();
  pool.reset();
  moves.reset();
  sealer.reset();
  sessions.reset();
  if (ready.pid() != 0) spdlog::info("stopped incarnation={}", ready.incarnation());
}

}  // namespace kvd
