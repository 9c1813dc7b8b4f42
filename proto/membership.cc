#include "proto/membership.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/address.h"
#include "proto/clock.h"
#include "proto/membership_filter.h"
#include "proto/membership_source.h"
#include "proto/placement.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr absl::Duration kInitialRetry = absl::Seconds(1);
constexpr absl::Duration kShortestPoll = absl::Milliseconds(10);
constexpr double kJitter = 0.2;
constexpr size_t kMaxNameBytes = 255;

// Names go into logs, labels and protobuf text.
bool IsName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 127; });
}

absl::Status CheckMember(const Member& member) {
  KVD_ASSIGN_OR_RETURN(const Address address, Address::Parse(member.address));
  if (address.port == 0) {
    return absl::InvalidArgumentError(absl::StrCat("member ", member.address, ": port 0"));
  }
  if (!IsName(member.name)) {
    return absl::InvalidArgumentError(absl::StrCat("member at ", member.address,
                                                   ": its name is not 1 to ", kMaxNameBytes,
                                                   " printable characters without spaces"));
  }
  if (!(member.weight > 0 && member.weight <= kMaxMemberWeight)) {
    return absl::InvalidArgumentError(absl::StrCat("member ", member.name, ": weight ",
                                                   member.weight, ", expected above 0 and at most ",
                                                   kMaxMemberWeight));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const MembershipOptions& options) {
  const int sources = (options.static_members.empty() ? 0 : 1) + (options.file.empty() ? 0 : 1) +
                      (options.dns_name.empty() ? 0 : 1);
  if (sources != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "members: ", sources, " sources, expected one of static members, file and DNS name"));
  }
  if (options.poll < kShortestPoll || options.min_interval < absl::ZeroDuration()) {
    return absl::InvalidArgumentError("members: poll below 10 ms, or min_interval below 0");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Member>> CheckMembers(std::vector<Member> members) {
  if (members.empty()) return absl::InvalidArgumentError("members: none, expected at least one");
  if (members.size() > static_cast<size_t>(kMaxMembers)) {
    return absl::InvalidArgumentError(
        absl::StrCat("members: ", members.size(), ", expected at most ", kMaxMembers));
  }
  std::unordered_set<std::string> addresses;
  for (Member& member : members) {
    if (member.name.empty()) member.name = member.address;
    KVD_RETURN_IF_ERROR(CheckMember(member));
    if (!addresses.insert(member.address).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("members: the address ", member.address, " stands there twice"));
    }
  }
  std::sort(members.begin(), members.end(),
            [](const Member& a, const Member& b) { return a.name < b.name; });
  const auto twice =
      std::adjacent_find(members.begin(), members.end(),
                         [](const Member& a, const Member& b) { return a.name == b.name; });
  if (twice != members.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("members: the name ", twice->name, " stands there twice"));
  }
  return members;
}

struct Membership::State {
  explicit State(MembershipOptions from, MembershipCallbacks to)
      : options(std::move(from)), callbacks(std::move(to)), filter(options.min_interval) {}

  // What the provider says now goes through the filter. On the thread that looks.
  MembershipFilter::Outcome LookOnce();
  void Watch();
  // False once the Membership ends.
  bool Sleep(absl::Duration duration);

  const MembershipOptions options;
  const MembershipCallbacks callbacks;
  const SteadyClock clock;
  std::unique_ptr<MemberSource> source;  // null: static
  std::minstd_rand random{std::random_device()()};

  mutable std::mutex mutex;  // of what follows
  std::condition_variable changed;
  bool stopping = false;
  MembershipFilter filter;
  std::thread watcher;  // last: nothing above goes before it ended
};

MembershipFilter::Outcome Membership::State::LookOnce() {
  absl::StatusOr<std::vector<Member>> answer = source->Look();
  const std::lock_guard<std::mutex> lock(mutex);
  // A look that the end cut short says nothing about the provider.
  if (stopping) return {};
  return filter.Offer(std::move(answer), clock.Now());
}

bool Membership::State::Sleep(absl::Duration duration) {
  std::unique_lock<std::mutex> lock(mutex);
  return !changed.wait_for(lock, absl::ToChronoNanoseconds(duration), [this] { return stopping; });
}

void Membership::State::Watch() {
  std::uniform_real_distribution<double> jitter(1 - kJitter, 1 + kJitter);
  while (Sleep(options.poll * jitter(random))) {
    const MembershipFilter::Outcome outcome = LookOnce();
    // Only this thread changes the filter.
    if (outcome.changed && callbacks.on_change) callbacks.on_change(filter.view());
    if (outcome.is_new && callbacks.on_problem) callbacks.on_problem(outcome.problem);
  }
}

Membership::Membership(std::unique_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<Membership>> Membership::Make(MembershipOptions options,
                                                             MembershipCallbacks callbacks) {
  KVD_RETURN_IF_ERROR(CheckOptions(options));
  auto state = std::make_unique<State>(std::move(options), std::move(callbacks));
  const MembershipOptions& checked = state->options;
  if (!checked.static_members.empty()) {
    KVD_RETURN_IF_ERROR(state->filter.Offer(checked.static_members, state->clock.Now()).problem);
    return std::unique_ptr<Membership>(new Membership(std::move(state)));
  }
  KVD_ASSIGN_OR_RETURN(state->source, checked.dns_name.empty()
                                          ? MakeFileSource(checked.file)
                                          : MakeDnsSource(checked.dns_name, checked.dns_servers));
  const absl::Duration give_up = state->clock.Now() + checked.initial_wait;
  while (true) {
    const absl::Status problem = state->LookOnce().problem;
    if (problem.ok()) break;
    const bool waits = absl::IsNotFound(problem) || absl::IsUnavailable(problem);
    if (!waits || state->clock.Now() + kInitialRetry > give_up) return problem;
    state->Sleep(kInitialRetry);
  }
  auto membership = std::unique_ptr<Membership>(new Membership(std::move(state)));
  State* running = membership->state_.get();
  running->watcher = std::thread([running] { running->Watch(); });
  return membership;
}

Membership::~Membership() {
  if (!state_->watcher.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  state_->source->Cancel();
  state_->watcher.join();
}

std::shared_ptr<const MembershipView> Membership::View() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->filter.view();
}

MembershipFigures Membership::Figures() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const MembershipFilter& filter = state_->filter;
  const bool is_static = state_->source == nullptr;
  return {filter.num_accepted(), filter.num_refused(),
          is_static ? absl::ZeroDuration() : state_->clock.Now() - filter.last_good()};
}

}  // namespace kvd
