#include "service/cluster.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/time/clock.h"
#include "proto/membership_source.h"
#include "proto/status.h"
#include "service/data_plane.h"
#include "service/log_setup.h"
#include "spdlog/spdlog.h"

namespace kvd {
namespace {

using locks_kvd::v1::DaemonConfig;

constexpr absl::Duration kLook = absl::Seconds(1);
// A drain that comes before the members are known waits for them so long.
constexpr absl::Duration kMembersKnownWithin = absl::Seconds(5);

MembershipOptions MembersOf(const locks_kvd::v1::ClusterConfig& cluster) {
  MembershipOptions options;
  for (const auto& entry : cluster.members()) options.static_members.push_back(MemberOf(entry));
  options.file = cluster.members_file();
  options.dns_name = cluster.members_dns();
  options.poll = absl::Milliseconds(cluster.poll_ms());
  options.initial_wait = absl::ZeroDuration();  // Join looks again
  return options;
}

bool IsNotThereYet(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsUnavailable(status);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Make(
    const DaemonConfig& config, const std::string& control_address,
    std::vector<std::shared_ptr<Arena>> arenas, std::shared_ptr<const CommunicatorLibrary> nccl,
    MoveCounters* counters) {
  std::unique_ptr<Cluster> cluster(new Cluster());
  cluster->arenas_ = std::move(arenas);
  cluster->counters_ = counters;
  cluster->membership_options_ = MembersOf(config.cluster());
  MigratorOptions& migrator = cluster->migrator_options_;
  migrator.self = config.cluster().name().empty() ? control_address : config.cluster().name();
  migrator.replicas = static_cast<int>(config.cluster().replicas());
  migrator.rebalance = !config.cluster().no_rebalance();
  migrator.grace = absl::Milliseconds(config.cluster().moved_grace_ms());
  migrator.bytes_per_second = config.cluster().move_bytes_per_second();
  const auto& tls = config.control().tls();
  migrator.tls = {tls.ca_file(), tls.certificate_file(), tls.key_file()};
  migrator.ucx = UcxOptionsOf(config);
  migrator.nccl = std::move(nccl);
  migrator.nccl_watchdog = absl::Milliseconds(config.cluster().nccl().watchdog_ms());
  migrator.nccl_min_bytes = config.cluster().nccl().min_bytes();
  const absl::Status joined = cluster->Join();
  if (joined.ok()) return cluster;
  if (!IsNotThereYet(joined)) return Annotate(joined, "cluster");
  spdlog::warn("members_unknown reason={} do=\"waiting for them\"", LogQuote(joined.message()));
  cluster->joining_ = std::thread([c = cluster.get()] { c->JoinLoop(); });
  return cluster;
}

absl::Status Cluster::Join() {
  MembershipCallbacks callbacks;
  callbacks.on_change = [](const std::shared_ptr<const MembershipView>& view) {
    spdlog::info("members_changed version={} members={}", view->version, view->members.size());
  };
  callbacks.on_problem = [](const absl::Status& problem) {
    spdlog::warn("members_problem reason={} do=\"the last view stays\"",
                 LogQuote(problem.message()));
  };
  KVD_ASSIGN_OR_RETURN(auto membership,
                       Membership::Make(membership_options_, std::move(callbacks)));
  const auto view = membership->View();
  bool is_member = false;
  for (const Member& member : view->members)
    is_member = is_member || member.name == migrator_options_.self;
  spdlog::info("members_known version={} members={} self={} member={}", view->version,
               view->members.size(), LogQuote(migrator_options_.self), is_member);
  if (!is_member) {
    spdlog::warn(
        "not_a_member self={} do=\"set cluster.name to this daemon's name in the list; pages are "
        "not "
        "rebalanced until it is there\"",
        LogQuote(migrator_options_.self));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return absl::OkStatus();
  membership_ = std::move(membership);
  migrator_ = std::make_unique<Migrator>(migrator_options_, arenas_, membership_.get(), counters_);
  changed_.notify_all();
  return absl::OkStatus();
}

void Cluster::JoinLoop() {
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const absl::Duration look = std::min(kLook, membership_options_.poll);
      changed_.wait_for(lock, absl::ToChronoNanoseconds(look), [this] { return stopping_; });
      if (stopping_) return;
    }
    if (Join().ok()) return;
  }
}

Cluster::~Cluster() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (joining_.joinable()) joining_.join();
}

Migrator::DrainResult Cluster::Drain(absl::Duration limit, const std::function<bool()>& go_on) {
  const absl::Time end = absl::Now() + limit;
  const absl::Time known_by = std::min(end, absl::Now() + kMembersKnownWithin);
  Migrator* migrator = nullptr;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (migrator_ == nullptr && go_on() && absl::Now() < known_by) {
      changed_.wait_for(lock, std::chrono::milliseconds(50));
    }
    migrator = migrator_.get();
  }
  if (migrator != nullptr) return migrator->Drain(end - absl::Now(), go_on);
  Migrator::DrainResult result;
  for (const auto& arena : arenas_) result.left += arena->Stats().slots_sealed;
  result.problem = absl::UnavailableError("the members of the pool are not known");
  return result;
}

std::shared_ptr<const MembershipView> Cluster::View() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return membership_ == nullptr ? nullptr : membership_->View();
}

MembershipFigures Cluster::Figures() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return membership_ == nullptr ? MembershipFigures() : membership_->Figures();
}

}  // namespace kvd
