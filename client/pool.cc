#include "client/pool.h"

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/address.h"
#include "proto/placement.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr size_t kPagesPerMatch = 65536;
constexpr size_t kSlotsPerRelease = 131072;

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
  const std::vector<int> owners = PlacePages(keys, live_names);
  std::vector<PlacedPage> pages;
  pages.reserve(keys.size());
  for (size_t p = 0; p < keys.size(); ++p) {
    pages.push_back({keys[p], static_cast<uint32_t>(p), live[static_cast<size_t>(owners[p])]});
  }
  return pages;
}

PlacedPage PoolView::PlaceOne(const PageKey& key, int page_idx, const PageKey& stripe_key) const {
  const auto owner = static_cast<size_t>(OwnerOf(stripe_key, live_names));
  return {key, static_cast<uint32_t>(page_idx), live[owner]};
}

absl::StatusOr<std::unique_ptr<Pool>> Pool::Make(const ClientOptions* options,
                                                 const WorkerShape* shape, UcxWorker* ucx) {
  if (options->daemons.empty()) return absl::InvalidArgumentError("daemons: give at least one");
  if (options->daemons.size() > 4096) {
    return absl::InvalidArgumentError("daemons: at most 4096 members");
  }
  auto pool = std::unique_ptr<Pool>(new Pool(options, shape));
  for (const std::string& address : options->daemons) {
    KVD_RETURN_IF_ERROR(Address::Parse(address).status());
    if (std::count(options->daemons.begin(), options->daemons.end(), address) != 1) {
      return absl::InvalidArgumentError(absl::StrCat("daemons: ", address, " is named twice"));
    }
    pool->channels_.push_back(
        std::make_unique<PoolChannel>(address, pool->num_daemons(), options, shape, ucx));
  }
  std::vector<absl::Status> started(pool->channels_.size());
  RunInParallel(pool->num_daemons(), [&](int d) {
    started[static_cast<size_t>(d)] = pool->channels_[static_cast<size_t>(d)]->Start();
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

PoolView Pool::View() const {
  PoolView view;
  for (const auto& channel : channels_) {
    std::shared_ptr<Attachment> attachment = channel->attachment();
    const bool usable =
        attachment != nullptr && !attachment->lost.load() && !attachment->draining.load();
    if (usable) {
      view.live.push_back(channel->daemon());
      view.live_names.push_back(channel->address());
    }
    view.attachments.push_back(usable ? std::move(attachment) : nullptr);
  }
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

// Asks for pages [at, end) of the daemon's list; returns how many of them, from `at` on, are
// resident.
absl::StatusOr<size_t> Pool::MatchRun(DaemonMatch& match, std::span<const PlacedPage> pages,
                                      size_t at, size_t end) {
  const auto shards = static_cast<size_t>(shape_.num_shards());
  locks_kvd::v1::MatchRequest request;
  request.set_request_id(RandomId());
  for (const uint32_t shard : shape_.shards) request.add_shards(shard);
  for (size_t i = at; i < end; ++i) {
    const PlacedPage& page = pages[match.pages[i]];
    request.mutable_pages()->mutable_keys()->append(page.key.begin(), page.key.end());
    request.mutable_pages()->add_page_idx(page.page_idx);
  }
  KVD_ASSIGN_OR_RETURN(
      const auto reply,
      channel(match.attachment->daemon).Match(*match.attachment, std::move(request)));
  const size_t found = reply.num_pages();
  if (found > end - at || static_cast<size_t>(reply.slots_size()) != found * shards ||
      static_cast<size_t>(reply.generations_size()) != found * shards) {
    return absl::InternalError(absl::StrCat("match at ", match.attachment->address,
                                            ": malformed reply of ", found, " pages"));
  }
  for (size_t i = 0; i < found * shards; ++i) {
    const int n = static_cast<int>(i);
    match.slots[at * shards + i] = {reply.slots(n), reply.generations(n)};
  }
  std::fill_n(match.found.begin() + static_cast<ptrdiff_t>(at), found, uint8_t{1});
  return found;
}

absl::Status Pool::MatchOne(DaemonMatch& match, std::span<const PlacedPage> pages, MatchMode mode) {
  match.found.resize(match.pages.size());
  match.slots.resize(match.pages.size() * static_cast<size_t>(shape_.num_shards()));
  int skips = 0;
  for (size_t at = 0; at < match.pages.size();) {
    const size_t end = std::min(match.pages.size(), at + kPagesPerMatch);
    KVD_ASSIGN_OR_RETURN(const size_t found, MatchRun(match, pages, at, end));
    at += found;
    if (at == end) continue;
    if (mode == MatchMode::kPrefix || ++skips > kMaxSkips) break;
    ++at;  // the page that is not there
  }
  return absl::OkStatus();
}

absl::StatusOr<MatchedPages> Pool::Match(const PoolView& view, std::span<const PlacedPage> pages,
                                         MatchMode mode) {
  if (view.live.empty()) return absl::UnavailableError("no daemon of the pool is attached");
  std::vector<DaemonMatch> matches(view.attachments.size());
  for (size_t p = 0; p < pages.size(); ++p) {
    matches[static_cast<size_t>(pages[p].daemon)].pages.push_back(p);
  }
  std::vector<std::shared_lock<std::shared_mutex>> leasing;
  for (const int d : view.live) {
    DaemonMatch& match = matches[static_cast<size_t>(d)];
    match.attachment = view.attachments[static_cast<size_t>(d)];
    leasing.push_back(match.attachment->leases.Leasing());
  }
  RunInParallel(static_cast<int>(view.live.size()), [&](int i) {
    DaemonMatch& match = matches[static_cast<size_t>(view.live[static_cast<size_t>(i)])];
    match.status = MatchOne(match, pages, mode);
  });
  MatchedPages result;
  size_t kept_end = pages.size();
  for (const int d : view.live) {
    const DaemonMatch& match = matches[static_cast<size_t>(d)];
    result.problem.Update(match.status);
    const auto gap = std::find(match.found.begin(), match.found.end(), uint8_t{0});
    if (mode == MatchMode::kEach || gap == match.found.end()) continue;
    kept_end = std::min(kept_end, match.pages[static_cast<size_t>(gap - match.found.begin())]);
  }
  // Everything that was leased is counted first, so that every way out of here releases it.
  const auto shards = static_cast<size_t>(shape_.num_shards());
  std::vector<LeasedSlots> surplus;
  result.num_pages = static_cast<int>(kept_end);
  result.found.resize(kept_end);
  result.slots.resize(kept_end * shards);
  for (const int d : view.live) {
    const DaemonMatch& match = matches[static_cast<size_t>(d)];
    LeasedSlots kept(&channel(d), match.attachment);
    LeasedSlots rest(&channel(d), match.attachment);
    for (size_t i = 0; i < match.pages.size(); ++i) {
      if (match.found[i] == 0) continue;
      const size_t page = match.pages[i];
      const std::span<const SlotRef> slots(match.slots.data() + i * shards, shards);
      (page < kept_end ? kept : rest).Add(slots);
      if (page >= kept_end) continue;
      result.found[page] = 1;
      std::copy(slots.begin(), slots.end(),
                result.slots.begin() + static_cast<ptrdiff_t>(page * shards));
    }
    result.leases.push_back(std::move(kept));
    surplus.push_back(std::move(rest));
  }
  leasing.clear();
  surplus.clear();
  if (!result.problem.ok() && !IsDaemonLoss(result.problem)) return result.problem;
  return result;
}

}  // namespace kvd
