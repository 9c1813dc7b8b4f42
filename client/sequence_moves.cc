// Sequence's background part: when a daemon drains or is lost, its pages are looked for where the
// pool places them now, proved to be the same by their records, and handed to the step. The
// sealer's thread; a step takes a batch over with one exchange of a pointer.

#include <algorithm>
#include <set>
#include <utility>

#include "absl/time/clock.h"
#include "client/record_fetch.h"
#include "client/sequence.h"
#include "proto/placement.h"

namespace kvd {
namespace {

// Between two looks for pages that were not found: their move may be under way.
constexpr absl::Duration kLookAgain = absl::Milliseconds(500);

bool IsLeaving(const Attachment& attachment) {
  return attachment.lost.load(std::memory_order_acquire) || attachment.draining.load();
}

}  // namespace

void Sequence::SetHome(int page, std::shared_ptr<Attachment> attachment) {
  const std::lock_guard<std::mutex> lock(homes_mutex_);
  const auto p = static_cast<size_t>(page);
  if (homes_.size() <= p) homes_.resize(p + 1);
  homes_[p] = std::move(attachment);
}

std::vector<int> Sequence::PagesToFollow() {
  const std::lock_guard<std::mutex> lock(homes_mutex_);
  std::vector<int> pages;
  for (size_t p = 0; p < homes_.size(); ++p) {
    if (homes_[p] != nullptr && IsLeaving(*homes_[p])) pages.push_back(static_cast<int>(p));
  }
  return pages;
}

void Sequence::FollowMoves() {
  SettleMoves();
  const absl::Time now = absl::Now();
  if (now < follow_at_ || !moved_homes_.empty()) return;
  const std::vector<int> pages = PagesToFollow();
  if (pages.empty()) return;
  follow_at_ = now + kLookAgain;
  const PoolView view = context_.pool->View();
  if (view.live.empty()) return;
  std::vector<PlacedPage> placed;
  for (const int p : pages) {
    placed.push_back(view.PlaceOne(key(p), p, key(p / kStripePages * kStripePages)));
  }
  absl::StatusOr<MatchedPages> matched = context_.pool->Match(view, placed, MatchMode::kEachLive);
  if (!matched.ok()) return;
  const auto shards = static_cast<size_t>(context_.shape->num_shards());
  std::vector<RecordRequest> requests;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (matched->found[i] == 0) continue;
    requests.push_back(
        {pages[i], matched->daemons[i], {matched->slots.data() + i * shards, shards}});
  }
  const std::vector<uint8_t> same =
      CompareRecords(view, requests, fetch_timeout_, pages_->mirror(), *context_.shape);
  auto batch = std::make_unique<MovedPages>();
  for (size_t i = 0; i < requests.size(); ++i) {
    if (same[i] == 0) continue;  // other bytes under the same key: the engine decides (Repair)
    const RecordRequest& request = requests[i];
    const auto& attachment = view.attachments[static_cast<size_t>(request.daemon)];
    batch->push_back(
        {request.page, request.daemon, attachment, {request.slots.begin(), request.slots.end()}});
    moved_homes_.emplace_back(request.page, attachment);
  }
  if (batch->empty()) return;
  moved_leases_ = std::move(matched->leases);
  pages_->PushMoved(&batch);
}

// Once the step has taken the batch over, what it read before is given back.
void Sequence::SettleMoves() {
  const std::unique_ptr<MovedPages> batch = pages_->TakeBackMoved();
  if (batch == nullptr) return;
  for (auto& [page, attachment] : moved_homes_) SetHome(page, std::move(attachment));
  moved_homes_.clear();
  std::vector<LeasedSlots> done;  // released without the lock
  const std::lock_guard<std::mutex> lock(homes_mutex_);
  std::set<const Attachment*> in_use;
  for (const auto& home : homes_) in_use.insert(home.get());
  const auto is_done = [&](const LeasedSlots& leases) {
    return IsLeaving(*leases.attachment()) && !in_use.contains(leases.attachment().get());
  };
  for (LeasedSlots& leases : leases_) {
    if (is_done(leases)) done.push_back(std::move(leases));
  }
  std::erase_if(leases_, [](const LeasedSlots& leases) { return leases.attachment() == nullptr; });
  for (LeasedSlots& leases : moved_leases_) leases_.push_back(std::move(leases));
  moved_leases_.clear();
}

}  // namespace kvd
