// The memory of one tenant and model: pages, records, headers, and the private truth about them.
//
// The daemon's truth (page table, generations, leases) is in this process's private memory; headers are a
// copy that is published for readers and never read back.
// Thread safety: safe. Locks are held for table work only, never while bytes are copied: a writer holds a
// ReservationPin instead, and a reader's copy is proved by the generation.

#ifndef LOCKS_KVD_SERVICE_ARENA_H_
#define LOCKS_KVD_SERVICE_ARENA_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/arena_memory.h"
#include "proto/clock.h"
#include "proto/page_key.h"
#include "proto/wire.h"

namespace kvd {

enum class SessionId : uint64_t {};
enum class Ticket : uint64_t {};

class Arena;

// Keeps a reservation's slot from being freed while units are written into it.
class ReservationPin {
 public:
  ReservationPin() = default;
  ReservationPin(ReservationPin&& other) noexcept;
  ReservationPin& operator=(ReservationPin&& other) noexcept;
  ~ReservationPin();

  // Where a unit's bytes go. REQUIRES: layer and head in range (IngestTarget checks).
  uint8_t* unit(int layer, int head) const;
  // Marks a unit as complete; writing the same unit twice is allowed and the later bytes stand.
  void MarkReceived(int layer, int head);

 private:
  friend class Arena;
  ReservationPin(Arena* arena, Ticket ticket, uint32_t slot) : arena_(arena), ticket_(ticket), slot_(slot) {}
  Arena* arena_ = nullptr;
  Ticket ticket_{};
  uint32_t slot_ = 0;
};

// Memory, page table and leases of one (tenant, model). The data plane uses the part below; the control
// plane's calls follow it.
class Arena {
 public:
  const KvGeometry& geometry() const { return geometry_; }
  const ArenaMemory& memory() const { return *memory_; }

  // --- data plane ---

  // allowed[i] = 1 iff `session` leases entries[i].slot, or it is the canary's (the copy itself is guarded
  // by the generation). kInvalidArgument, naming the entry, if a slot, layer or head is out of range.
  absl::Status CheckFetch(SessionId session, std::span<const FetchEntry> entries,
                          std::span<uint8_t> allowed) const;

  // kNotFound for an unknown ticket or another session's; kFailedPrecondition once it is being sealed.
  absl::StatusOr<ReservationPin> PinReservation(SessionId session, Ticket ticket);

  // kInvalidArgument if layer or head is out of range.
  absl::Status CheckUnit(int layer, int head) const;

 private:
  KvGeometry geometry_;
  std::unique_ptr<ArenaMemory> memory_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_ARENA_H_
