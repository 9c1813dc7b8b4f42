// The writing side of Arena: reserve, seal, evict.

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "proto/placement.h"
#include "proto/status.h"
#include "service/arena.h"

namespace kvd {
namespace {

constexpr size_t kPagesPerHold = 256;
// A unit that is being copied when its page is sealed takes microseconds; a longer wait is a stuck
// writer.
constexpr std::chrono::seconds kPinWait(5);

Ticket MakeTicket(uint32_t serial, uint32_t slot) {
  return static_cast<Ticket>(uint64_t{serial} << 32 | slot);
}

}  // namespace

absl::Status Arena::UnknownTicket() {
  return absl::NotFoundError(
      "unknown ticket: it is another session's, was given up, or its page was evicted: reserve "
      "again");
}

bool Arena::EvictOneLocked() {
  const std::optional<uint32_t> victim = evictor_.PopVictim(options_.clock->Now());
  if (!victim.has_value()) {
    ++counters_.evictions_refused;
    return false;
  }
  if (!pages_.slot(*victim).matched) ++counters_.sealed_never_matched;
  ++counters_.evicted_pages;
  EvictLocked(*victim);
  return true;
}

void Arena::EvictLocked(uint32_t slot) {
  KVD_CHECK(leases_.holders(slot) == 0);
  NoteEvictionLocked({slot, pages_.slot(slot).generation});
  unpublished_.push_back({slot, pages_.Evict(slot)});
}

// The headers turn odd before any byte of the slots can change: whoever writes one takes the mutex
// after this.
void Arena::PublishEvictedLocked() {
  if (unpublished_.empty()) return;
  store_->PublishGone(unpublished_);
  unpublished_.clear();
}

void Arena::NoteEvictionLocked(const PageLocation& page) {
  const uint64_t bit = uint64_t{1} << (page.slot % 64);
  for (auto& [unused, session] : sessions_) {
    if (session.released.empty() || (session.released[page.slot / 64] & bit) == 0) continue;
    session.released[page.slot / 64] &= ~bit;
    Evictions& untold = session.evictions;
    if (untold.pages.size() < kMaxEvictionsKept) {
      untold.pages.push_back(page);
    } else {
      untold.some_dropped = true;
    }
  }
}

Evictions Arena::TakeEvictions(SessionId session) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = sessions_.find(session);
  return it == sessions_.end() ? Evictions() : std::exchange(it->second.evictions, Evictions());
}

std::string Arena::FullReasonLocked() const {
  return absl::StrFormat(
      "arena %s/%s is full: of %u slots %u are leased, %u are being written, %u wait in quarantine "
      "and no "
      "page can be evicted yet: release pages, give the arena more bytes or use another daemon",
      options_.tenant, options_.model, pages_.num_slots() - 1, leases_.num_leased_slots(),
      pages_.count(SlotState::kReserved), pages_.count(SlotState::kQuarantined));
}

ReserveOutcome::Page Arena::ReserveOneLocked(SessionId session, const PageId& page,
                                             uint32_t page_idx, uint64_t word,
                                             std::string* full_reason) {
  using State = ReserveOutcome::State;
  const std::optional<uint32_t> present = pages_.Find(page);
  if (present.has_value() && pages_.slot(*present).state == SlotState::kReserved) {
    return {.state = State::kPending};
  }
  const bool is_new = !present.has_value();
  Session& s = sessions_.find(session)->second;
  if (is_new && s.reserved.size() >= options_.reservations_per_session) {
    *full_reason = absl::StrFormat(
        "limits.reservations_per_session: %u pages are reserved and not sealed: seal them first or "
        "raise "
        "the limit",
        options_.reservations_per_session);
    return {};
  }
  if (!is_new && s.kind == SessionKind::kMover) {
    // Only asked whether the copy is there: neither leased nor used.
    return {.state = State::kHit, .slot = *present, .generation = pages_.slot(*present).generation};
  }
  if (is_new || !leases_.Holds(session, *present)) {
    if (const absl::Status room = CheckRoomLocked(session, 1); !room.ok()) {
      *full_reason = std::string(room.message());
      return {};
    }
  }
  if (!is_new) {
    LeaseLocked(session, *present);
    return {.state = State::kHit, .slot = *present, .generation = pages_.slot(*present).generation};
  }
  if (pages_.count(SlotState::kFree) == 0 && !EvictOneLocked()) {
    *full_reason = FullReasonLocked();
    return {};
  }
  const uint32_t slot = *pages_.Reserve(page, page_idx, word);
  const Ticket ticket = MakeTicket(next_serial_++, slot);
  tickets_[slot] = {ticket, session};
  reservations_[slot] = std::make_unique<Reservation>();
  reservations_[slot]->session = session;
  reservations_[slot]->is_copy = s.kind == SessionKind::kMover;
  reservations_[slot]->received.resize((slot_layout_.num_units() + 63) / 64);
  reservations_[slot]->last_activity = options_.clock->Now();
  s.reserved.insert(slot);
  return {.state = State::kNew, .slot = slot, .ticket = ticket};
}

absl::StatusOr<ReserveOutcome> Arena::Reserve(SessionId session, std::span<const PageKey> keys,
                                              std::span<const uint32_t> page_idx, uint32_t shard,
                                              std::span<const uint64_t> words) {
  KVD_CHECK(page_idx.size() == keys.size() && shard < static_cast<uint32_t>(geometry().num_shards));
  KVD_CHECK(words.empty() || words.size() == keys.size());
  ReserveOutcome outcome;
  outcome.pages.resize(keys.size());
  bool full = false;
  for (size_t page = 0; page < keys.size() && !full;) {
    const std::lock_guard<std::mutex> lock(mutex_);
    KVD_RETURN_IF_ERROR(CheckLiveLocked(session));
    for (const size_t end = std::min(keys.size(), page + kPagesPerHold); page < end && !full;
         ++page) {
      ReserveOutcome::Page& result = outcome.pages[page];
      const uint64_t word = words.empty() ? PlacementWord(keys[page]) : words[page];
      result = ReserveOneLocked(session, {keys[page], shard}, page_idx[page], word,
                                &outcome.full_reason);
      full = result.state == ReserveOutcome::State::kFull;
      counters_.reserved_new += result.state == ReserveOutcome::State::kNew ? 1 : 0;
      counters_.reserved_hit += result.state == ReserveOutcome::State::kHit ? 1 : 0;
      counters_.reserved_refused += full ? 1 : 0;
    }
    PublishEvictedLocked();
  }
  return outcome;
}

Arena::Reservation* Arena::FindReservationLocked(SessionId session, Ticket ticket) {
  const uint32_t slot = SlotOf(ticket);
  if (slot >= reservations_.size() || tickets_[slot].ticket != ticket) return nullptr;
  Reservation* reservation = reservations_[slot].get();
  if (reservation == nullptr || reservation->over || reservation->session != session)
    return nullptr;
  return reservation;
}

bool Arena::IsSealedTicketLocked(SessionId session, Ticket ticket) const {
  const uint32_t slot = SlotOf(ticket);
  return slot < tickets_.size() && tickets_[slot].ticket == ticket &&
         tickets_[slot].session == session && pages_.slot(slot).state == SlotState::kSealed;
}

void Arena::EndReservationLocked(uint32_t slot, bool quarantine) {
  Reservation& reservation = *reservations_[slot];
  reservation.over = true;
  reservation.quarantine = quarantine;
  const auto session = sessions_.find(reservation.session);
  if (session != sessions_.end()) session->second.reserved.erase(slot);
  FreeIfIdleLocked(slot);
}

void Arena::FreeIfIdleLocked(uint32_t slot) {
  const Reservation& reservation = *reservations_[slot];
  if (!reservation.over || reservation.sealing || reservation.pins > 0) return;
  if (reservation.quarantine) {
    pages_.Quarantine(slot, options_.clock->Now() + options_.quarantine);
    ++counters_.quarantined_slots;
  } else {
    pages_.Free(slot);
  }
  reservations_[slot].reset();
}

absl::Status Arena::CheckCompleteLocked(const Reservation& reservation) const {
  const size_t num_units = slot_layout_.num_units();
  if (reservation.num_received == num_units) return absl::OkStatus();
  size_t first = 0;
  while ((reservation.received[first / 64] >> (first % 64) & 1) != 0) ++first;
  const auto heads = static_cast<size_t>(slot_layout_.shard_heads);
  return absl::FailedPreconditionError(absl::StrFormat(
      "%d of %d units are missing, the first is layer %d, head %d: the reservation is given back; "
      "reserve "
      "again, send every unit, wait for its acknowledgement, then seal",
      num_units - reservation.num_received, num_units, first / heads, first % heads));
}

absl::StatusOr<Arena::SealStart> Arena::BeginSeal(SessionId session, Ticket ticket) {
  const uint32_t slot = SlotOf(ticket);
  std::unique_lock<std::mutex> lock(mutex_);
  KVD_RETURN_IF_ERROR(CheckLiveLocked(session));
  const auto not_sealing = [&] {
    const Reservation* r = FindReservationLocked(session, ticket);
    return r == nullptr || !r->sealing;
  };
  reservation_changed_.wait(lock, not_sealing);  // a repeated call waits for the first one's answer
  Reservation* reservation = FindReservationLocked(session, ticket);
  if (reservation == nullptr) {
    if (!IsSealedTicketLocked(session, ticket)) return UnknownTicket();
    return SealStart{.already_sealed = true, .location = {slot, pages_.slot(slot).generation}};
  }
  if (absl::Status complete = CheckCompleteLocked(*reservation); !complete.ok()) {
    EndReservationLocked(slot, /*quarantine=*/false);
    ++counters_.seals_refused;
    return complete;
  }
  reservation->sealing = true;
  const auto unpinned = [reservation] { return reservation->pins == 0; };
  const bool quiet = reservation_changed_.wait_for(lock, kPinWait, unpinned);
  if (quiet && !reservation->over) {
    const PageTable::Slot& s = pages_.slot(slot);
    return SealStart{.shard = s.page.shard,
                     .page_idx = s.page_idx,
                     .records_received = reservation->records_received};
  }
  reservation->sealing = false;
  reservation_changed_.notify_all();
  const bool ended = reservation->over;
  if (ended) {
    FreeIfIdleLocked(slot);
  } else {
    EndReservationLocked(slot, /*quarantine=*/false);
  }
  ++counters_.seals_refused;
  if (ended)
    return absl::AbortedError("the session ended while its page was being sealed: attach again");
  return absl::FailedPreconditionError(
      "a unit of the page was still being written after 5 s: the reservation is given back; "
      "reserve again");
}

absl::StatusOr<SealOutcome> Arena::FinishSeal(SessionId session, uint32_t slot,
                                              const absl::StatusOr<uint64_t>& summary_checksum) {
  std::unique_lock<std::mutex> lock(mutex_);
  Reservation& reservation = *reservations_[slot];
  uint64_t generation = 0;
  if (!reservation.over && summary_checksum.ok()) {
    // Without the lock: on a GPU that another process keeps busy this takes milliseconds. While the
    // reservation is being sealed nobody writes or frees the slot; and nobody is told the
    // generation before the table has it.
    generation = pages_.slot(slot).generation + 1;
    const PageKey key = pages_.slot(slot).page.key;
    lock.unlock();
    store_->PublishSealed(slot, generation, key, *summary_checksum);
    lock.lock();
  }
  reservation.sealing = false;
  reservation_changed_.notify_all();
  if (reservation.over) {
    if (generation != 0) {
      unpublished_.push_back({slot, pages_.SkipSeal(slot)});
      PublishEvictedLocked();
    }
    FreeIfIdleLocked(slot);
    ++counters_.seals_refused;
    return absl::AbortedError("the session ended while its page was being sealed: attach again");
  }
  if (!summary_checksum.ok()) {
    EndReservationLocked(slot, /*quarantine=*/false);
    ++counters_.seals_refused;
    return summary_checksum.status();
  }
  SealOutcome outcome;
  outcome.since_last_unit = options_.clock->Now() - reservation.last_activity;
  sessions_.find(session)->second.reserved.erase(slot);
  reservations_[slot].reset();
  outcome.location = {slot, pages_.Seal(slot)};
  KVD_CHECK(outcome.location.generation == generation);
  LeaseLocked(session, slot);
  ++counters_.sealed_pages;
  return outcome;
}

absl::StatusOr<SealOutcome> Arena::SealWith(
    SessionId session, Ticket ticket,
    const std::function<absl::StatusOr<uint64_t>(uint32_t slot, const SealStart&)>& make_records) {
  KVD_ASSIGN_OR_RETURN(const SealStart start, BeginSeal(session, ticket));
  if (start.already_sealed) return SealOutcome{.location = start.location};
  const uint32_t slot = SlotOf(ticket);
  const absl::Duration begin = options_.clock->Now();
  const absl::StatusOr<uint64_t> checksum = make_records(slot, start);
  const absl::Duration took = options_.clock->Now() - begin;
  KVD_ASSIGN_OR_RETURN(SealOutcome outcome, FinishSeal(session, slot, checksum));
  outcome.summarize = took;
  return outcome;
}

absl::StatusOr<SealOutcome> Arena::Seal(SessionId session, Ticket ticket) {
  return SealWith(session, ticket, [this](uint32_t slot, const SealStart& start) {
    return store_->BuildRecords(slot, start.shard, start.page_idx);
  });
}

}  // namespace kvd
