// The arena's part in moving and copying pages between daemons.

#include <algorithm>

#include "kernels/check.h"
#include "proto/status.h"
#include "service/arena.h"

namespace kvd {
namespace {

constexpr uint32_t kSlotsPerHold = 4096;
// Holds what is being copied. Ids of real sessions count up from 1.
constexpr SessionId kCopySession{UINT64_MAX};

}  // namespace

uint8_t* ReservationPin::records() const {
  return arena_->IsCopy(slot_) ? arena_->memory_->summary(slot_) : nullptr;
}

void ReservationPin::MarkRecordsReceived() { arena_->MarkRecordsReceived(slot_); }

bool Arena::IsCopy(uint32_t slot) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reservations_[slot]->is_copy;
}

void Arena::MarkRecordsReceived(uint32_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reservations_[slot]->records_received = true;
  reservations_[slot]->last_activity = options_.clock->Now();
}

absl::StatusOr<SealOutcome> Arena::SealCopy(SessionId session, Ticket ticket,
                                            uint64_t summary_checksum) {
  return SealWith(session, ticket,
                  [&](uint32_t slot, const SealStart& start) -> absl::StatusOr<uint64_t> {
                    if (!start.records_received) {
                      return absl::FailedPreconditionError(
                          "the page's records did not come: the reservation is given back; send "
                          "units and records, then seal");
                    }
                    KVD_RETURN_IF_ERROR(store_->ProveCopy(slot, summary_checksum));
                    return summary_checksum;
                  });
}

std::vector<SealedCopy> Arena::SealedPages() const {
  std::vector<SealedCopy> sealed;
  for (uint32_t slot = kCanarySlot + 1; slot < pages_.num_slots();) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const uint32_t end = std::min(pages_.num_slots(), slot + kSlotsPerHold); slot < end;
         ++slot) {
      const PageTable::Slot& s = pages_.slot(slot);
      if (s.state != SlotState::kSealed) continue;
      sealed.push_back({{slot, s.generation}, s.page, s.page_idx, s.word});
    }
  }
  return sealed;
}

std::vector<bool> Arena::BeginCopying(std::span<const SealedCopy> pages) {
  const std::lock_guard<std::mutex> lock(mutex_);
  KVD_CHECK(copying_.empty());
  leases_.Begin(kCopySession);
  std::vector<bool> kept(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    const uint32_t slot = pages[i].location.slot;
    kept[i] = IsSealedLocked(pages[i].location);
    if (!kept[i]) continue;
    copying_.emplace_back(slot, evictor_.lease_end(slot));
    if (leases_.Lease(kCopySession, slot)) evictor_.Remove(slot);
  }
  return kept;
}

void Arena::EndCopying() {
  const std::lock_guard<std::mutex> lock(mutex_);
  leases_.End(kCopySession);
  const absl::Duration now = options_.clock->Now();
  for (const auto& [slot, lease_end] : copying_) {
    if (leases_.holders(slot) > 0) continue;
    evictor_.Add(slot, pages_.slot(slot).page_idx, lease_end.value_or(now));
  }
  copying_.clear();
}

size_t Arena::DropIdle(std::span<const PageLocation> locations) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const absl::Duration now = options_.clock->Now();
  size_t dropped = 0;
  for (const PageLocation& location : locations) {
    if (!IsSealedLocked(location) || !evictor_.IsVictim(location.slot, now)) continue;
    evictor_.Remove(location.slot);
    EvictLocked(location.slot);
    ++dropped;
  }
  PublishEvictedLocked();
  return dropped;
}

}  // namespace kvd
