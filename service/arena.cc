#include "service/arena.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/built_geometries.h"
#include "kernels/check.h"
#include "kernels/checksum.h"
#include "proto/status.h"

namespace kvd {
namespace {

std::string ArenaName(const ArenaOptions& options) {
  return absl::StrCat("arena ", options.tenant, "/", options.model);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Arena>> Arena::Make(ArenaOptions options) {
  KVD_CHECK(options.clock != nullptr);
  if (const char* problem = Problem(options.geometry); problem != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(ArenaName(options), ": geometry: ", problem));
  }
  if (const char* problem = options.place.on_gpu() ? GpuProblem(options.geometry) : nullptr;
      problem != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(ArenaName(options), ": geometry: ", problem));
  }
  if ((options.encoder == Encoder::kE1S) == options.metric.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(ArenaName(options),
                     ": encoder E1S and a query metric file go together: give both or neither"));
  }
  const ArenaShape shape = CarveArena(options.geometry, options.bytes);
  if (shape.num_slots < 2) {
    const SlotLayout slot = MakeSlotLayout(options.geometry);
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: bytes: expected room for at least two slots of %u bytes with their records, got %u: "
        "raise it",
        ArenaName(options), slot.slot_bytes() + slot.summary_bytes(), options.bytes));
  }
  absl::StatusOr<std::unique_ptr<ArenaMemory>> memory =
      options.place.on_gpu() ? ArenaMemory::MakeGpu(shape, options.place.gpu)
                             : ArenaMemory::MakeShared(shape);
  if (!memory.ok()) return Annotate(memory.status(), ArenaName(options));
  std::unique_ptr<Arena> arena(new Arena(std::move(options), *std::move(memory)));
  if (const absl::Status started = arena->Start(); !started.ok()) {
    return Annotate(started, ArenaName(arena->options()));
  }
  return arena;
}

Arena::Arena(ArenaOptions options, std::unique_ptr<ArenaMemory> memory)
    : options_(std::move(options)),
      slot_layout_(memory->shape().slot),
      memory_(std::move(memory)),
      pages_(memory_->shape().num_slots),
      leases_(memory_->shape().num_slots),
      evictor_(memory_->shape().num_slots),
      reservations_(memory_->shape().num_slots),
      tickets_(memory_->shape().num_slots),
      leased_since_(memory_->shape().num_slots) {}

absl::Status Arena::Start() {
  KVD_ASSIGN_OR_RETURN(store_, PageStore::Make(*memory_, {.geometry = options_.geometry,
                                                          .encoder = options_.encoder,
                                                          .metric = &options_.metric}));
  const size_t page_bytes = slot_layout_.slot_bytes(), record_bytes = slot_layout_.summary_bytes();
  StagingBuffer staging;
  uint8_t* const canary = staging.Reserve(page_bytes + record_bytes, store_->place());
  for (uint64_t i = 0; i < page_bytes / sizeof(uint64_t); ++i) {
    const uint64_t word = CanaryWord(options_.incarnation, i);
    std::memcpy(canary + i * sizeof(word), &word, sizeof(word));
  }
  uint8_t* const records = canary + page_bytes;
  std::memset(records, 0, record_bytes);
  std::vector<PageStore::UnitWrite> units;
  for (int layer = 0; layer < slot_layout_.num_layers; ++layer) {
    for (int head = 0; head < slot_layout_.shard_heads; ++head) {
      units.push_back({kCanarySlot, layer, head, canary + slot_layout_.unit_offset(layer, head)});
    }
  }
  store_->WriteUnits(units);
  const PageStore::RecordsWrite of_canary = {kCanarySlot, records};
  store_->WriteRecords({&of_canary, 1});
  std::vector<PageStore::Gone> empty;
  for (uint32_t slot = kCanarySlot + 1; slot < memory_->shape().num_slots; ++slot)
    empty.push_back({slot, 1});
  store_->PublishGone(empty);
  store_->PublishSealed(kCanarySlot, kCanaryGeneration, PageKey{},
                        Checksum64(records, record_bytes));
  return absl::OkStatus();
}

Arena::~Arena() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& reservation : reservations_) {
    KVD_CHECK(reservation == nullptr || reservation->pins == 0);
  }
}

// --- data plane ---

absl::Status Arena::CheckFetch(SessionId session, std::span<const FetchEntry> entries,
                               std::span<uint8_t> allowed) const {
  KVD_CHECK(allowed.size() == entries.size());
  const uint32_t num_slots = memory_->shape().num_slots;
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<uint64_t>* leased = leases_.Bits(session);
  if (leased == nullptr) return CheckLiveLocked(session);
  for (size_t i = 0; i < entries.size(); ++i) {
    const FetchEntry& entry = entries[i];
    if (entry.slot >= num_slots || entry.layer >= slot_layout_.num_layers ||
        entry.head >= slot_layout_.shard_heads) [[unlikely]] {
      return absl::InvalidArgumentError(
          absl::StrFormat("fetch entry %d: slot %u, layer %u, head %u: expected below %u, %d, %d: "
                          "the client uses another "
                          "geometry than it attached with",
                          i, entry.slot, entry.layer, entry.head, num_slots,
                          slot_layout_.num_layers, slot_layout_.shard_heads));
    }
    const bool held =
        !leased->empty() && ((*leased)[entry.slot / 64] >> (entry.slot % 64) & 1) != 0;
    allowed[i] = held || entry.slot == kCanarySlot ? 1 : 0;
  }
  return absl::OkStatus();
}

absl::Status Arena::CheckUnit(int layer, int head) const {
  if (layer >= 0 && layer < slot_layout_.num_layers && head >= 0 &&
      head < slot_layout_.shard_heads) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("unit of layer %d, head %d: expected below %d and %d: the client uses "
                      "another geometry than it "
                      "attached with",
                      layer, head, slot_layout_.num_layers, slot_layout_.shard_heads));
}

absl::StatusOr<ReservationPin> Arena::PinReservation(SessionId session, Ticket ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // whoever evicted a slot told its readers before it could be written
  KVD_CHECK(unpublished_.empty());
  Reservation* reservation = FindReservationLocked(session, ticket);
  const bool sealed = reservation == nullptr && IsSealedTicketLocked(session, ticket);
  if (sealed || (reservation != nullptr && reservation->sealing)) {
    return absl::FailedPreconditionError(
        "the page of this ticket is sealed or being sealed: a sealed page never changes");
  }
  if (reservation == nullptr) return UnknownTicket();
  ++reservation->pins;
  return ReservationPin(this, SlotOf(ticket));
}

ReservationPin::ReservationPin(ReservationPin&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)), slot_(other.slot_) {}

ReservationPin& ReservationPin::operator=(ReservationPin&& other) noexcept {
  if (this != &other) {
    Reset();
    arena_ = std::exchange(other.arena_, nullptr);
    slot_ = other.slot_;
  }
  return *this;
}

ReservationPin::~ReservationPin() { Reset(); }

void ReservationPin::Reset() {
  if (arena_ != nullptr) std::exchange(arena_, nullptr)->Unpin(slot_);
}

uint8_t* ReservationPin::unit(int layer, int head) const {
  return arena_->memory_->unit(slot_, layer, head);
}

void ReservationPin::MarkReceived(int layer, int head) { arena_->MarkReceived(slot_, layer, head); }

void Arena::MarkReceived(uint32_t slot, int layer, int head) {
  const size_t unit = slot_layout_.unit_idx(layer, head);
  const std::lock_guard<std::mutex> lock(mutex_);
  Reservation& reservation = *reservations_[slot];
  uint64_t& word = reservation.received[unit / 64];
  const uint64_t bit = uint64_t{1} << (unit % 64);
  if ((word & bit) == 0) ++reservation.num_received;
  word |= bit;
  reservation.last_activity = options_.clock->Now();
}

void Arena::Unpin(uint32_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  KVD_CHECK(reservations_[slot] != nullptr && reservations_[slot]->pins > 0);
  --reservations_[slot]->pins;
  FreeIfIdleLocked(slot);
  reservation_changed_.notify_all();
}

// --- sessions ---

void Arena::BeginSession(SessionId session, SessionKind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  leases_.Begin(session);
  sessions_.try_emplace(session).first->second.kind = kind;
}

void Arena::EndSession(SessionId session, SessionEnd why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  const bool lost = why == SessionEnd::kLost;
  const absl::Duration now = options_.clock->Now();
  const std::vector<uint32_t> reserved(it->second.reserved.begin(), it->second.reserved.end());
  for (const uint32_t slot : reserved) EndReservationLocked(slot, lost);
  sessions_.erase(it);
  const std::vector<uint32_t> held = leases_.End(session);
  for (const uint32_t slot : held) {
    const bool last = leases_.holders(slot) == 0;
    if (lost) evictor_.HoldUntil(slot, now + options_.quarantine);
    if (last) LastLeaseEndedLocked(slot, now);
  }
  (lost ? counters_.leases_lost : counters_.leases_released) += held.size();
}

absl::Status Arena::CheckLiveLocked(SessionId session) const {
  if (leases_.IsLive(session)) return absl::OkStatus();
  return absl::AbortedError(
      "the session has ended: attach again; what it leased is no longer leased");
}

absl::Status Arena::CheckRoomLocked(SessionId session, size_t more) const {
  const size_t used =
      size_t{leases_.num_leases(session)} + sessions_.find(session)->second.reserved.size();
  if (used + more <= options_.leases_per_session) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrFormat("limits.leases_per_session: %d leased and reserved pages and %d more exceed "
                      "%u: release pages, open "
                      "another session or raise the limit",
                      used, more, options_.leases_per_session));
}

// --- upkeep ---

void Arena::Tick() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const absl::Duration now = options_.clock->Now();
  pages_.FreeExpired(now);
  std::vector<uint32_t> idle;
  for (const auto& [id, session] : sessions_) {
    for (const uint32_t slot : session.reserved) {
      const Reservation& reservation = *reservations_[slot];
      const bool busy = reservation.sealing || reservation.pins > 0;
      if (!busy && now - reservation.last_activity >= options_.reservation_idle)
        idle.push_back(slot);
    }
  }
  for (const uint32_t slot : idle) EndReservationLocked(slot, /*quarantine=*/true);
  counters_.reserved_expired += idle.size();
}

ArenaStats Arena::Stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  ArenaStats stats = counters_;
  stats.slots_free = pages_.count(SlotState::kFree);
  stats.slots_reserved = pages_.count(SlotState::kReserved);
  stats.slots_sealed = pages_.count(SlotState::kSealed);
  stats.slots_quarantined = pages_.count(SlotState::kQuarantined);
  stats.slots_leased = leases_.num_leased_slots();
  stats.leases = leases_.num_leases();
  return stats;
}

uint32_t Arena::num_leases(SessionId session) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return leases_.num_leases(session);
}

uint32_t Arena::num_reservations(SessionId session) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = sessions_.find(session);
  return it == sessions_.end() ? 0 : static_cast<uint32_t>(it->second.reserved.size());
}

}  // namespace kvd
