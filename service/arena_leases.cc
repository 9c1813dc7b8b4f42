// Arena: leases, and the matching of keys, which leases what it finds.

#include <algorithm>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "proto/status.h"
#include "service/arena.h"

namespace kvd {
namespace {

// Pages handled under one hold of the mutex, so that a call with 131,072 keys does not stall
// fetches.
constexpr size_t kPagesPerHold = 512;
// Answers of Match that a session can repeat.
constexpr size_t kRecentMatches = 64;

}  // namespace

void Arena::LeaseLocked(SessionId session, uint32_t slot) {
  if (!leases_.Lease(session, slot)) return;
  evictor_.Remove(slot);
  if (leases_.holders(slot) == 1) leased_since_[slot] = options_.clock->Now();
}

void Arena::LastLeaseEndedLocked(uint32_t slot, absl::Duration now) {
  evictor_.Add(slot, pages_.slot(slot).page_idx, now);
  const double age = absl::ToDoubleSeconds(now - leased_since_[slot]);
  const auto bound = std::lower_bound(kLeasedAgeBounds.begin(), kLeasedAgeBounds.end(), age);
  ++counters_.leased_age_counts[static_cast<size_t>(bound - kLeasedAgeBounds.begin())];
  counters_.leased_age_seconds += age;
}

void Arena::ReleaseLocked(SessionId session, uint32_t slot, absl::Duration now) {
  const LeaseTable::Released released = leases_.Release(session, slot);
  if (released == LeaseTable::Released::kLast) LastLeaseEndedLocked(slot, now);
  if (released == LeaseTable::Released::kNothing) return;
  ++counters_.leases_released;
  std::vector<uint64_t>& bits = sessions_.find(session)->second.released;
  bits.resize((memory_->shape().num_slots + 63) / 64);
  bits[slot / 64] |= uint64_t{1} << (slot % 64);
}

bool Arena::IsSealedLocked(const PageLocation& location) const {
  const PageTable::Slot& slot = pages_.slot(location.slot);
  return location.slot != kCanarySlot && slot.state == SlotState::kSealed &&
         slot.generation == location.generation;
}

absl::StatusOr<std::vector<bool>> Arena::Lease(SessionId session,
                                               std::span<const PageLocation> locations) {
  const std::lock_guard<std::mutex> lock(mutex_);
  KVD_RETURN_IF_ERROR(CheckLiveLocked(session));
  std::vector<bool> leased(locations.size());
  absl::flat_hash_set<uint32_t> fresh;
  for (size_t i = 0; i < locations.size(); ++i) {
    leased[i] = IsSealedLocked(locations[i]);
    if (leased[i] && !leases_.Holds(session, locations[i].slot)) fresh.insert(locations[i].slot);
  }
  KVD_RETURN_IF_ERROR(CheckRoomLocked(session, fresh.size()));
  for (const uint32_t slot : fresh) LeaseLocked(session, slot);
  return leased;
}

absl::Status Arena::Release(SessionId session, std::span<const PageLocation> locations) {
  const std::lock_guard<std::mutex> lock(mutex_);
  KVD_RETURN_IF_ERROR(CheckLiveLocked(session));
  const absl::Duration now = options_.clock->Now();  // one for all: ties go deepest page first
  for (const PageLocation& location : locations) {
    if (IsSealedLocked(location)) ReleaseLocked(session, location.slot, now);
  }
  return absl::OkStatus();
}

bool Arena::LocateLocked(const PageKey& key, std::span<const uint32_t> shards,
                         std::vector<PageLocation>* out) const {
  const size_t before = out->size();
  for (const uint32_t shard : shards) {
    const std::optional<uint32_t> slot = pages_.Find({key, shard});
    if (!slot.has_value() || pages_.slot(*slot).state != SlotState::kSealed) {
      out->resize(before);
      return false;
    }
    out->push_back({*slot, pages_.slot(*slot).generation});
  }
  return true;
}

std::optional<uint32_t> Arena::FindRecent(SessionId session, uint64_t request_id,
                                          uint64_t list_hash) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return std::nullopt;
  for (const RecentMatch& recent : it->second.recent) {
    if (recent.request_id == request_id && recent.list_hash == list_hash) return recent.num_pages;
  }
  return std::nullopt;
}

void Arena::Remember(SessionId session, const RecentMatch& match) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  Session& s = it->second;
  if (s.recent.size() < kRecentMatches) {
    s.recent.push_back(match);
  } else {
    s.recent[s.next_recent] = match;
    s.next_recent = (s.next_recent + 1) % kRecentMatches;
  }
}

absl::Status Arena::LeaseMatchedLocked(SessionId session, std::span<const PageLocation> locations,
                                       std::vector<uint32_t>* fresh) {
  for (const PageLocation& location : locations) {
    pages_.MarkMatched(location.slot);
    if (leases_.Holds(session, location.slot)) continue;
    KVD_RETURN_IF_ERROR(CheckRoomLocked(session, 1));
    LeaseLocked(session, location.slot);
    fresh->push_back(location.slot);
  }
  return absl::OkStatus();
}

absl::StatusOr<MatchOutcome> Arena::MatchPages(SessionId session, uint64_t request_id,
                                               std::span<const PageKey> keys,
                                               std::span<const uint32_t> shards, bool each) {
  const auto* bytes = reinterpret_cast<const char*>(keys.data());
  const uint64_t list_hash =
      absl::HashOf(absl::string_view(bytes, keys.size() * sizeof(PageKey)),
                   std::vector<uint32_t>(shards.begin(), shards.end()), each);
  const std::optional<uint32_t> earlier = FindRecent(session, request_id, list_hash);
  const size_t limit = earlier.has_value() && !each ? *earlier : keys.size();
  MatchOutcome outcome;
  std::vector<uint32_t> fresh;  // leased by this call
  bool go_on = true;
  for (size_t page = 0; go_on && page < limit;) {
    const std::lock_guard<std::mutex> lock(mutex_);
    KVD_RETURN_IF_ERROR(CheckLiveLocked(session));
    for (const size_t end = std::min(limit, page + kPagesPerHold); page < end && go_on; ++page) {
      const size_t before = outcome.locations.size();
      bool resident = LocateLocked(keys[page], shards, &outcome.locations);
      const auto found = std::span(outcome.locations).subspan(before);
      if (earlier.has_value() && each) {  // what became resident since is not part of the answer
        resident = resident && std::all_of(found.begin(), found.end(), [&](const PageLocation& l) {
                     return leases_.Holds(session, l.slot);
                   });
      }
      if (!resident) {
        outcome.locations.resize(before);
        go_on = each;
        continue;
      }
      outcome.pages.push_back(static_cast<uint32_t>(page));
      if (earlier.has_value()) continue;
      if (absl::Status room = LeaseMatchedLocked(session, found, &fresh); !room.ok()) {
        const absl::Duration now = options_.clock->Now();
        for (const uint32_t slot : fresh) ReleaseLocked(session, slot, now);
        return room;
      }
    }
  }
  if (earlier.has_value()) return outcome;
  const auto num_pages = static_cast<uint32_t>(outcome.pages.size());
  Remember(session, {request_id, list_hash, num_pages});
  const std::lock_guard<std::mutex> lock(mutex_);
  counters_.matched_pages += num_pages;
  counters_.unmatched_pages += keys.size() - num_pages;
  return outcome;
}

absl::StatusOr<MatchOutcome> Arena::MatchPrefix(SessionId session, uint64_t request_id,
                                                std::span<const PageKey> keys,
                                                std::span<const uint32_t> shards) {
  return MatchPages(session, request_id, keys, shards, /*each=*/false);
}

absl::StatusOr<MatchOutcome> Arena::MatchEach(SessionId session, uint64_t request_id,
                                              std::span<const PageKey> keys,
                                              std::span<const uint32_t> shards) {
  return MatchPages(session, request_id, keys, shards, /*each=*/true);
}

}  // namespace kvd
