#include "service/migrator.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "kernels/checksum.h"
#include "proto/status.h"
#include "service/log_setup.h"
#include "service/mover.h"
#include "spdlog/spdlog.h"

namespace kvd {
namespace {

// Bytes of one batch: its units are acknowledged before it is sealed, so it bounds what a failure
// repeats. NCCL's is larger: it moves one in a millisecond, about as long as the calls around it
// take.
constexpr size_t kBatchBytes = size_t{16} << 20;
constexpr size_t kNcclBatchBytes = size_t{256} << 20;
// How long UCX is used for a destination after NCCL has failed or been refused there.
constexpr absl::Duration kNcclOffFor = absl::Minutes(5);
constexpr absl::Duration kKeepAliveEvery = absl::Milliseconds(20);
// A member that refused or failed is left alone for this long; a drain goes to the next owner at
// once.
constexpr absl::Duration kRefusedFor = absl::Seconds(10);

bool IsUnreachable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsAborted(status);
}

uint64_t NameHash(const std::string& name) { return Checksum64(name.data(), name.size()); }

}  // namespace

Migrator::Migrator(MigratorOptions options, std::vector<std::shared_ptr<Arena>> arenas,
                   const Membership* membership, MoveCounters* counters)
    : options_(std::move(options)),
      arenas_(std::move(arenas)),
      membership_(membership),
      counters_(counters) {
  for (const auto& arena : arenas_) marks_.emplace_back(arena->memory().shape().num_slots);
  thread_ = std::thread([this] { Loop(); });
}

Migrator::~Migrator() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

bool Migrator::Stopping() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stopping_;
}

void Migrator::Loop() {
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, absl::ToChronoNanoseconds(options_.interval),
                        [this] { return stopping_; });
      if (stopping_) return;
    }
    // Problems are logged where they are met; the next round tries again.
    (void)Round(draining_.load(), [this] { return !Stopping(); });
  }
}

Migrator::DrainResult Migrator::Drain(absl::Duration limit, const std::function<bool()>& go_on) {
  draining_.store(true);
  DrainResult result;
  const absl::Duration end = clock_.Now() + limit;
  const auto in_time = [&] { return go_on() && clock_.Now() < end; };
  uint64_t moved_before = 0;
  {
    const std::lock_guard<std::mutex> lock(round_mutex_);
    moved_before = moved_;
    refused_.clear();
    // Who was given a copy before may have died since: everybody is asked again.
    for (std::vector<Mark>& marks : marks_) marks.assign(marks.size(), Mark{});
  }
  while (true) {
    result.problem = Round(/*draining=*/true, in_time);
    const std::lock_guard<std::mutex> lock(round_mutex_);
    const Plan left = MakePlan(*membership_->View(), /*draining=*/true);
    result.left = 0;
    for (const auto& [unused, wanted] : left.copies) result.left += wanted.size();
    result.moved = moved_ - moved_before;
    if (left.copies.empty() || !in_time()) break;
    SleepBriefly();  // somebody else is writing what is left
  }
  if (result.left == 0) {
    // Nobody else is in the pool, or every page is placed: pages without a destination are counted.
    const std::lock_guard<std::mutex> lock(round_mutex_);
    for (size_t a = 0; a < arenas_.size(); ++a) {
      for (const SealedCopy& page : arenas_[a]->SealedPages()) {
        const Mark& mark = marks_[a][page.location.slot];
        const bool held = mark.generation == page.location.generation && mark.holders[0] != 0;
        result.left += held ? 0 : 1;
      }
    }
  }
  return result;
}

void Migrator::SleepBriefly() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::milliseconds(20), [this] { return stopping_; });
}

bool Migrator::IsKnown(const Mark& mark, const SealedCopy& page, uint64_t name,
                       bool draining) const {
  const bool believed = draining || clock_.Now() - mark.asked < Believed();
  return believed && mark.generation == page.location.generation &&
         (mark.holders[0] == name || mark.holders[1] == name);
}

void Migrator::Remember(const Wanted& wanted, uint64_t name) {
  Mark& mark = marks_[wanted.arena][wanted.page.location.slot];
  const absl::Duration now = clock_.Now();
  if (mark.generation != wanted.page.location.generation || now - mark.asked >= Believed()) {
    mark = {.generation = wanted.page.location.generation, .holders = {}, .asked = now};
  }
  if (mark.holders[0] == name || mark.holders[1] == name) return;
  mark.holders[mark.holders[0] == 0 ? 0 : 1] = name;
}

const Migrator::Refusal* Migrator::RefusalOf(const std::string& name) const {
  const auto found = refused_.find(name);
  return found != refused_.end() && clock_.Now() < found->second.until ? &found->second : nullptr;
}

Migrator::Plan Migrator::MakePlan(const MembershipView& view, bool draining) {
  // Clients place over the members that they reach: who is unreachable from here has no share for
  // now. One that is full keeps its share, since clients look for it there, but a drain goes on to
  // the next owner.
  std::vector<Member> members;
  for (const Member& member : view.members) {
    if (draining && member.name == options_.self) continue;
    const Refusal* refusal = RefusalOf(member.name);
    if (refusal != nullptr && (draining || refusal->unreachable)) continue;
    members.push_back(member);
  }
  std::vector<PlacedMember> placed;
  placed.reserve(members.size());
  for (const Member& member : members) placed.push_back({member.name, member.weight});
  Plan plan;
  plan.drops.resize(arenas_.size());
  const bool is_member =
      std::any_of(view.members.begin(), view.members.end(),
                  [&](const Member& member) { return member.name == options_.self; });
  // Who is not (yet) in the view keeps what it has: a wrong name must not empty a daemon.
  if (members.empty() || (!is_member && !draining)) return plan;
  const Placement placement(placed);
  for (size_t a = 0; a < arenas_.size(); ++a) {
    for (const SealedCopy& page : arenas_[a]->SealedPages()) {
      PlanPage(a, page, placement, members, draining, &plan);
    }
  }
  std::erase_if(plan.copies, [&](const auto& entry) { return RefusalOf(entry.first) != nullptr; });
  return plan;
}

void Migrator::PlanPage(size_t arena, const SealedCopy& page, const Placement& placement,
                        const std::vector<Member>& members, bool draining, Plan* plan) {
  std::vector<int> owners;
  placement.Owners(page.word, options_.replicas, &owners);
  const bool mine = std::any_of(owners.begin(), owners.end(), [&](int owner) {
    return members[static_cast<size_t>(owner)].name == options_.self;
  });
  if (!mine && !draining && !options_.rebalance) return;
  const MoveReason reason =
      draining ? MoveReason::kDrain : (mine ? MoveReason::kReplica : MoveReason::kRebalance);
  const Mark& mark = marks_[arena][page.location.slot];
  bool settled = true;
  for (const int owner : owners) {
    const std::string& name = members[static_cast<size_t>(owner)].name;
    if (name == options_.self || IsKnown(mark, page, NameHash(name), draining)) continue;
    plan->copies[name].push_back({arena, page, reason});
    settled = false;
  }
  // In a drain the pages stay to be served until the process ends.
  const bool drop = settled && !mine && !draining && clock_.Now() - mark.asked >= options_.grace;
  if (drop) plan->drops[arena].push_back(page.location);
}

absl::Status Migrator::Round(bool draining, const std::function<bool()>& go_on) {
  const std::lock_guard<std::mutex> lock(round_mutex_);
  const auto view = membership_->View();
  absl::Status status;
  const Plan plan = MakePlan(*view, draining);
  for (size_t a = 0; a < arenas_.size(); ++a) arenas_[a]->DropIdle(plan.drops[a]);
  for (const auto& [name, wanted] : plan.copies) {
    if (!go_on()) break;
    const auto to =
        std::find_if(view->members.begin(), view->members.end(),
                     [&name = name](const Member& member) { return member.name == name; });
    const absl::Status done = Execute(*to, wanted, draining, go_on);
    if (done.ok()) {
      complained_.erase(name);
      continue;
    }
    refused_[name] = {clock_.Now() + kRefusedFor, IsUnreachable(done)};
    counters_->aborted[static_cast<size_t>(Carrier::kUcx)][static_cast<size_t>(wanted[0].reason)]
        .Add();
    Complain(name, done);
    status.Update(done);
  }
  return status;
}

absl::Status Migrator::Execute(const Member& to, std::span<const Wanted> wanted, bool draining,
                               const std::function<bool()>& go_on) {
  // By arena and shard: a call names one shard of one arena.
  std::vector<Wanted> sorted(wanted.begin(), wanted.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const Wanted& a, const Wanted& b) {
    return std::pair(a.arena, a.page.page.shard) < std::pair(b.arena, b.page.page.shard);
  });
  std::unique_ptr<PeerSession> session;
  size_t session_arena = 0;
  for (size_t at = 0; at < sorted.size();) {
    if (!go_on()) return absl::OkStatus();
    const Wanted& first = sorted[at];
    if (session == nullptr || session_arena != first.arena) {
      session.reset();
      const auto is_others = [&](const Wanted& page) { return page.arena != first.arena; };
      const auto rest = sorted.begin() + static_cast<std::ptrdiff_t>(at);
      const auto run_end = std::find_if(rest, sorted.end(), is_others);
      KVD_ASSIGN_OR_RETURN(session, OpenSession(to, {rest, run_end}, go_on));
      session_arena = first.arena;
    }
    const size_t most = BatchPages(*session, arenas_[first.arena]->memory().shape().slot, draining);
    size_t end = at;
    while (end < sorted.size() && end - at < most && sorted[end].arena == first.arena &&
           sorted[end].page.page.shard == first.page.page.shard) {
      ++end;
    }
    const absl::Status copied =
        CopyRun(*session, to.name, std::span(sorted).subspan(at, end - at), draining);
    if (session->carrier() == Carrier::kNccl && !session->carrier_problem().ok()) {
      // The pages are still here. Their reservations there end with the session, each once NCCL
      // cannot write to it any more; the next session goes on by UCX.
      LeaveNccl(to.name, first.reason, session->carrier_problem());
      session.reset();
      continue;
    }
    KVD_RETURN_IF_ERROR(copied);
    at = end;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PeerSession>> Migrator::OpenSession(
    const Member& to, std::span<const Wanted> wanted, const std::function<bool()>& go_on) {
  KVD_ASSIGN_OR_RETURN(UcxWorker* const worker, Worker());
  const std::shared_ptr<Arena>& arena = arenas_[wanted[0].arena];
  KVD_ASSIGN_OR_RETURN(
      auto session, PeerSession::Open(to.address, options_.tls, arena, worker, options_.timeout));
  const SlotLayout& slot = arena->memory().shape().slot;
  const auto off = nccl_off_.find(to.name);
  const bool is_off = off != nccl_off_.end() && clock_.Now() < off->second.until;
  const bool is_small =
      wanted.size() * (slot.slot_bytes() + slot.summary_bytes()) < options_.nccl_min_bytes;
  if (options_.nccl == nullptr || is_off || is_small) return session;
  const absl::Status used = session->UseNccl(options_.nccl, options_.nccl_watchdog, go_on);
  if (used.ok()) {
    nccl_off_.erase(to.name);
  } else {
    LeaveNccl(to.name, wanted[0].reason, used);
  }
  return session;
}

size_t Migrator::BatchPages(const PeerSession& session, const SlotLayout& slot,
                            bool draining) const {
  const size_t page_bytes = slot.slot_bytes() + slot.summary_bytes();
  if (session.carrier() != Carrier::kNccl) return std::max<size_t>(1, kBatchBytes / page_bytes);
  // A limited rate is kept over seconds.
  const bool limited = !draining && options_.bytes_per_second > 0;
  const size_t bytes =
      limited ? std::clamp<size_t>(options_.bytes_per_second, kBatchBytes, kNcclBatchBytes)
              : kNcclBatchBytes;
  return std::clamp<size_t>(bytes / page_bytes, 1, kMaxMovedPages);
}

void Migrator::LeaveNccl(const std::string& to, MoveReason reason, const absl::Status& why) {
  if (absl::IsCancelled(why)) return;  // the round is over
  const bool refused = absl::IsFailedPrecondition(why) || absl::IsUnimplemented(why) ||
                       absl::IsResourceExhausted(why);
  if (!refused)
    counters_->aborted[static_cast<size_t>(Carrier::kNccl)][static_cast<size_t>(reason)].Add();
  NcclOff& off = nccl_off_[to];
  off.until = clock_.Now() + kNcclOffFor;
  if (off.reason == why.message()) return;
  off.reason = std::string(why.message());
  spdlog::warn("carrier to={} use=ucx not=nccl code={} reason={}", LogQuote(to),
               absl::StatusCodeToString(why.code()), LogQuote(why.message()));
}

absl::Status Migrator::CopyRun(PeerSession& session, const std::string& to,
                               std::span<const Wanted> run, bool draining) {
  std::vector<SealedCopy> pages;
  for (const Wanted& wanted : run) pages.push_back(wanted.page);
  std::vector<CopyOutcome> outcomes(run.size());
  uint64_t bytes = 0;
  const absl::Duration start = clock_.Now();
  const absl::Status status = session.Copy(pages, outcomes, &bytes);
  const auto reason = static_cast<size_t>(run[0].reason);
  const auto carrier = static_cast<size_t>(session.carrier());
  const uint64_t name = NameHash(to);
  for (size_t i = 0; i < run.size(); ++i) {
    if (outcomes[i] != CopyOutcome::kCopied && outcomes[i] != CopyOutcome::kHadIt) continue;
    Remember(run[i], name);
    if (outcomes[i] == CopyOutcome::kCopied) {
      counters_->pages[carrier][reason].Add();
      ++moved_;
    }
  }
  counters_->bytes[carrier][reason].Add(bytes);
  if (!draining && options_.bytes_per_second > 0 && bytes > 0) {
    const absl::Duration least =
        absl::Seconds(static_cast<double>(bytes) / static_cast<double>(options_.bytes_per_second));
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_ && !draining_.load() && clock_.Now() - start < least) {
      const absl::Duration pause = std::min(least - (clock_.Now() - start), kKeepAliveEvery);
      changed_.wait_for(lock, absl::ToChronoNanoseconds(pause),
                        [this] { return stopping_ || draining_.load(); });
      session.KeepAlive();
    }
  }
  return status;
}

absl::StatusOr<UcxWorker*> Migrator::Worker() {
  if (worker_ == nullptr) {
    KVD_ASSIGN_OR_RETURN(worker_, UcxWorker::Make(options_.ucx));
  }
  return worker_.get();
}

// Once, until the member's state changes.
void Migrator::Complain(const std::string& to, const absl::Status& status) {
  const auto [entry, is_new] = complained_.try_emplace(to, status.code());
  if (!is_new && entry->second == status.code()) return;
  entry->second = status.code();
  spdlog::warn("move_failed to={} reason={}", LogQuote(to), LogQuote(status.message()));
}

}  // namespace kvd
