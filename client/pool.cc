#include "client/pool.h"

#include <algorithm>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr size_t kPagesPerMatch = 65536;
constexpr size_t kSlotsPerRelease = 131072;
// Former placements that are remembered.
constexpr size_t kMaxFormer = 8;

uint64_t RandomId() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

}  // namespace

void RunInParallel(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i + 1 < count; ++i) threads.emplace_back([&work, i] { work(i); });
  if (count > 0) work(count - 1);
  for (std::thread& thread : threads) thread.join();
}

bool IsDaemonLoss(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kCancelled:
      return true;
    default:
      return false;
  }
}

LeasedSlots& LeasedSlots::operator=(LeasedSlots&& other) noexcept {
  if (this != &other) {
    Release();
    channel_ = other.channel_;
    attachment_ = std::move(other.attachment_);
    slots_ = std::move(other.slots_);
  }
  return *this;
}

void LeasedSlots::Add(std::span<const SlotRef> slots) {
  attachment_->leases.Add(slots);
  slots_.insert(slots_.end(), slots.begin(), slots.end());
}

void LeasedSlots::Release() {
  if (attachment_ == nullptr || slots_.empty()) return;
  const std::vector<SlotRef> slots = std::exchange(slots_, {});
  const auto alone = attachment_->leases.Releasing();
  const std::vector<SlotRef> last = attachment_->leases.Drop(slots);
  for (size_t at = 0; at < last.size(); at += kSlotsPerRelease) {
    locks_kvd::v1::ReleaseRequest request;
    for (size_t i = at; i < std::min(last.size(), at + kSlotsPerRelease); ++i) {
      request.add_slots(last[i].slot);
      request.add_generations(last[i].generation);
    }
    if (!channel_->Release(*attachment_, std::move(request)).ok()) return;
  }
}

std::vector<PlacedPage> PoolView::Place(std::span<const PageKey> keys) const {
  std::vector<PlacedPage> pages;
  pages.reserve(keys.size());
  uint64_t word = 0;
  int owner = 0;
  for (size_t p = 0; p < keys.size(); ++p) {
    if (p % kStripePages == 0) {
      word = PlacementWord(keys[p]);
      owner = placed.owner(word);
    }
    pages.push_back({keys[p], static_cast<uint32_t>(p), owner, word});
  }
  return pages;
}

PlacedPage PoolView::PlaceOne(const PageKey& key, int page_idx, const PageKey& stripe_key) const {
  const uint64_t word = PlacementWord(stripe_key);
  return {key, static_cast<uint32_t>(page_idx), placed.owner(word), word};
}

std::vector<int> PoolView::Holders(uint64_t word, bool only_live) const {
  std::vector<int> ranks;
  placed.placement->Owners(word, replicas, &ranks);
  std::vector<int> holders;
  const auto add = [&](int daemon) {
    if (is_attached(daemon) && std::find(holders.begin(), holders.end(), daemon) == holders.end()) {
      holders.push_back(daemon);
    }
  };
  for (const int rank : ranks) add(placed.daemons[static_cast<size_t>(rank)]);
  if (only_live) return holders;
  for (const PlacedDaemons& earlier : former) add(earlier.owner(word));
  return holders;
}

absl::StatusOr<std::unique_ptr<Pool>> Pool::Make(const ClientOptions* options,
                                                 const WorkerShape* shape, UcxWorker* ucx) {
  auto pool = std::unique_ptr<Pool>(new Pool(options, shape, ucx));
  MembershipOptions members;
  for (const std::string& address : options->daemons)
    members.static_members.push_back({"", address, 1});
  members.file = options->members_file;
  members.dns_name = options->members_dns;
  members.poll = options->members_poll;
  members.initial_wait = options->control_timeout;
  MembershipCallbacks callbacks;
  callbacks.on_change = [p = pool.get()](const std::shared_ptr<const MembershipView>& view) {
    const std::vector<PoolChannel*> fresh = p->Follow(*view);
    // A member that is not there yet is tried again by its channel.
    RunInParallel(static_cast<int>(fresh.size()),
                  [&](int i) { (void)fresh[static_cast<size_t>(i)]->Start(); });
  };
  callbacks.on_problem = [options](const absl::Status& problem) {
    if (options->on_event) {
      options->on_event({ClientEvent::Kind::kMembersProblem, "", std::string(problem.message())});
    }
  };
  absl::StatusOr<std::unique_ptr<Membership>> membership =
      Membership::Make(std::move(members), std::move(callbacks));
  if (!membership.ok()) return Annotate(membership.status(), "daemons");
  pool->membership_ = *std::move(membership);
  const std::vector<PoolChannel*> channels = pool->Follow(*pool->membership_->View());
  std::vector<absl::Status> started(channels.size());
  RunInParallel(static_cast<int>(channels.size()), [&](int d) {
    started[static_cast<size_t>(d)] = channels[static_cast<size_t>(d)]->Start();
  });
  absl::Status first_problem;
  int num_started = 0;
  for (const absl::Status& status : started) {
    num_started += status.ok() ? 1 : 0;
    first_problem.Update(status);
  }
  const bool enough = first_problem.ok() || (options->allow_partial && num_started > 0);
  if (!enough) return first_problem;
  return pool;
}

Pool::~Pool() { membership_.reset(); }

std::vector<PoolChannel*> Pool::Follow(const MembershipView& view) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<PoolChannel*> fresh;
  std::vector<MemberState> next;
  for (const Member& member : view.members) {
    const auto known =
        std::find_if(members_.begin(), members_.end(), [&](const MemberState& state) {
          return state.member.name == member.name && state.member.address == member.address;
        });
    if (known != members_.end()) {
      next.push_back({known->daemon, member});
      continue;
    }
    const int daemon = num_daemons_.load(std::memory_order_relaxed);
    if (daemon == kMaxDaemons) {
      if (options_.on_event) {
        options_.on_event({ClientEvent::Kind::kMembersProblem, member.address,
                           absl::StrCat("not used: this client has seen ", kMaxDaemons,
                                        " daemons; give members stable names and start it anew")});
      }
      continue;
    }
    auto& channel = channels_[static_cast<size_t>(daemon)];
    channel = std::make_unique<PoolChannel>(member.address, daemon, &options_, &shape_, ucx_);
    fresh.push_back(channel.get());
    num_daemons_.store(daemon + 1, std::memory_order_release);
    next.push_back({daemon, member});
  }
  for (const MemberState& state : members_) {
    const bool stays = std::any_of(next.begin(), next.end(),
                                   [&](const MemberState& n) { return n.daemon == state.daemon; });
    if (!stays) departed_.push_back({state.daemon, absl::Now() + options_.placement_grace});
  }
  members_ = std::move(next);
  return fresh;
}

void Pool::Upkeep() {
  std::vector<int> gone;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const absl::Time now = absl::Now();
    for (const Departed& departed : departed_) {
      if (now >= departed.until) gone.push_back(departed.daemon);
    }
    std::erase_if(departed_, [now](const Departed& departed) { return now >= departed.until; });
  }
  for (const int daemon : gone) channel(daemon).Stop();
}

PoolView Pool::View() {
  PoolView view;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int d = 0; d < num_daemons(); ++d) {
    std::shared_ptr<Attachment> attachment = channel(d).attachment();
    if (attachment != nullptr && attachment->lost.load()) attachment = nullptr;
    if (attachment != nullptr) {
      view.replicas = std::max(view.replicas, static_cast<int>(attachment->reply.replicas()));
    }
    view.attachments.push_back(std::move(attachment));
  }
  std::vector<std::pair<int, double>> members;
  std::vector<PlacedMember> names;
  for (const MemberState& state : members_) {
    const auto& attachment = view.attachments[static_cast<size_t>(state.daemon)];
    if (attachment == nullptr || attachment->draining.load()) continue;
    members.emplace_back(state.daemon, state.member.weight);
    names.push_back({state.member.name, state.member.weight});
    view.live.push_back(state.daemon);
  }
  const absl::Time now = absl::Now();
  if (members != placed_members_) {
    if (!placed_members_.empty()) {
      former_.insert(former_.begin(), {placed_, now + options_.placement_grace});
      if (former_.size() > kMaxFormer) former_.pop_back();
    }
    placed_members_ = std::move(members);
    placed_ = {view.live, std::make_shared<const Placement>(names)};
  }
  std::erase_if(former_, [now](const Former& former) { return now >= former.until; });
  for (const Former& former : former_) view.former.push_back(former.placed);
  view.placed = placed_;
  return view;
}

// One daemon's part of a match.
struct Pool::DaemonMatch {
  std::shared_ptr<Attachment> attachment;
  std::vector<size_t> pages;   // positions in the whole list, ascending
  std::vector<uint8_t> found;  // parallel to pages
  std::vector<SlotRef> slots;  // [pages][shards]
  absl::Status status;
};

// Asks for pages [at, end) of the daemon's list; `found`: how many of them are resident.
absl::Status Pool::MatchRun(DaemonMatch& match, std::span<const PlacedPage> pages, size_t at,
                            size_t end, bool each, size_t* found) {
  const auto shards = static_cast<size_t>(shape_.num_shards());
  locks_kvd::v1::MatchRequest request;
  request.set_request_id(RandomId());
  request.set_each(each);
  for (const uint32_t shard : shape_.shards) request.add_shards(shard);
  for (size_t i = at; i < end; ++i) {
    const PlacedPage& page = pages[match.pages[i]];
    request.mutable_pages()->mutable_keys()->append(page.key.begin(), page.key.end());
    request.mutable_pages()->add_page_idx(page.page_idx);
  }
  KVD_ASSIGN_OR_RETURN(
      const auto reply,
      channel(match.attachment->daemon).Match(*match.attachment, std::move(request)));
  *found = reply.num_pages();
  const bool fits = *found <= end - at &&
                    static_cast<size_t>(reply.slots_size()) == *found * shards &&
                    static_cast<size_t>(reply.generations_size()) == *found * shards &&
                    static_cast<size_t>(reply.pages_size()) == (each ? *found : 0);
  for (size_t n = 0; fits && n < *found; ++n) {
    const size_t page = each ? reply.pages(static_cast<int>(n)) : n;
    if (page >= end - at || match.found[at + page] != 0) break;
    match.found[at + page] = 1;
    for (size_t s = 0; s < shards; ++s) {
      const int from = static_cast<int>(n * shards + s);
      match.slots[(at + page) * shards + s] = {reply.slots(from), reply.generations(from)};
    }
  }
  const auto first = match.found.begin() + static_cast<ptrdiff_t>(at);
  const auto num_taken = std::count(first, first + static_cast<ptrdiff_t>(end - at), uint8_t{1});
  if (fits && static_cast<size_t>(num_taken) == *found) return absl::OkStatus();
  std::fill(first, first + static_cast<ptrdiff_t>(end - at), uint8_t{0});
  return absl::InternalError(absl::StrCat("match at ", match.attachment->address,
                                          ": malformed reply of ", *found, " pages"));
}

absl::Status Pool::MatchAt(DaemonMatch& match, std::span<const PlacedPage> pages, bool each) {
  match.found.resize(match.pages.size());
  match.slots.resize(match.pages.size() * static_cast<size_t>(shape_.num_shards()));
  for (size_t at = 0; at < match.pages.size(); at += kPagesPerMatch) {
    const size_t end = std::min(match.pages.size(), at + kPagesPerMatch);
    size_t found = 0;
    KVD_RETURN_IF_ERROR(MatchRun(match, pages, at, end, each, &found));
    if (!each && found < end - at) break;
  }
  return absl::OkStatus();
}

// What a match has found so far.
struct Pool::MatchState {
  MatchedPages result;
  // From before the first lease until all are counted.
  std::map<int, std::shared_lock<std::shared_mutex>> leasing;
};

// Asks the daemon of rank `rank` among each missing page's holders. False if nobody is left to be
// asked.
bool Pool::AskHolders(const PoolView& view, std::span<const PlacedPage> pages, size_t rank,
                      bool each, MatchMode mode, MatchState* state) {
  MatchedPages& result = state->result;
  std::map<int, DaemonMatch> matches;
  std::vector<int> holders;  // of the stripe of `word`
  uint64_t word = 0;
  for (size_t p = 0; p < pages.size(); ++p) {
    if (result.found[p] != 0) continue;
    if (!each || mode == MatchMode::kAtDaemon) {
      holders = {pages[p].daemon};
    } else if (holders.empty() || pages[p].word != word) {
      word = pages[p].word;
      holders = view.Holders(word, mode == MatchMode::kEachLive);
    }
    if (rank < holders.size()) matches[holders[rank]].pages.push_back(p);
  }
  std::vector<DaemonMatch*> asked;
  for (auto& [daemon, match] : matches) {
    match.attachment = view.attachments[static_cast<size_t>(daemon)];
    if (!state->leasing.contains(daemon))
      state->leasing.emplace(daemon, match.attachment->leases.Leasing());
    asked.push_back(&match);
  }
  RunInParallel(static_cast<int>(asked.size()), [&](int i) {
    DaemonMatch& match = *asked[static_cast<size_t>(i)];
    match.status = MatchAt(match, pages, each);
  });
  const auto shards = static_cast<ptrdiff_t>(shape_.num_shards());
  for (const auto& [daemon, match] : matches) {
    result.problem.Update(match.status);
    for (size_t i = 0; i < match.pages.size(); ++i) {
      if (match.found[i] == 0) continue;
      const size_t page = match.pages[i];
      result.found[page] = 1;
      result.daemons[page] = daemon;
      std::copy_n(match.slots.begin() + static_cast<ptrdiff_t>(i) * shards, shards,
                  result.slots.begin() + static_cast<ptrdiff_t>(page) * shards);
    }
  }
  return !matches.empty();
}

absl::StatusOr<MatchedPages> Pool::Match(const PoolView& view, std::span<const PlacedPage> pages,
                                         MatchMode mode) {
  if (view.live.empty()) return absl::UnavailableError("no daemon of the pool is attached");
  // Where a page has one possible holder, the shorter question will do.
  const bool each = mode != MatchMode::kPrefix || view.replicas > 1 || !view.former.empty();
  const auto shards = static_cast<size_t>(shape_.num_shards());
  MatchState state;
  MatchedPages& result = state.result;
  result.found.resize(pages.size());
  result.daemons.resize(pages.size());
  result.slots.resize(pages.size() * shards);
  for (size_t rank = 0; AskHolders(view, pages, rank, each, mode, &state); ++rank) {
    if (!each) break;
  }
  if (each && IsDaemonLoss(result.problem)) {
    // A former owner may have ended between the questions, after its pages had moved to owners
    // asked before it.
    for (size_t rank = 0; AskHolders(view, pages, rank, each, mode, &state); ++rank) {
    }
  }
  size_t kept_end = pages.size();
  if (mode == MatchMode::kPrefix) {
    const auto gap = std::find(result.found.begin(), result.found.end(), uint8_t{0});
    kept_end = static_cast<size_t>(gap - result.found.begin());
  }
  // Everything that was leased is counted; what lies behind the prefix is given back.
  std::vector<LeasedSlots> surplus;
  for (const auto& [daemon, unused] : state.leasing) {
    LeasedSlots kept(&channel(daemon), view.attachments[static_cast<size_t>(daemon)]);
    LeasedSlots rest(&channel(daemon), view.attachments[static_cast<size_t>(daemon)]);
    for (size_t p = 0; p < pages.size(); ++p) {
      if (result.found[p] == 0 || result.daemons[p] != daemon) continue;
      (p < kept_end ? kept : rest).Add({result.slots.data() + p * shards, shards});
    }
    result.leases.push_back(std::move(kept));
    surplus.push_back(std::move(rest));
  }
  result.num_pages = static_cast<int>(kept_end);
  result.found.resize(kept_end);
  result.daemons.resize(kept_end);
  result.slots.resize(kept_end * shards);
  state.leasing.clear();
  surplus.clear();
  if (!result.problem.ok() && !IsDaemonLoss(result.problem)) return result.problem;
  return std::move(result);
}

}  // namespace kvd
