// The memory of one tenant and model: pages, records, headers, and the private truth about them.
//
// The daemon's truth (page table, generations, leases) is in this process's private memory; headers
// are a copy that is published for readers and never read back. Who touches bytes, in host memory
// or on a GPU, is the PageStore. Thread safety: safe. Locks are held for table work and while
// evicted pages' headers turn odd, never while bytes are copied: a writer holds a ReservationPin
// instead, and a reader's copy is proved by the generation.

#ifndef LOCKS_KVD_SERVICE_ARENA_H_
#define LOCKS_KVD_SERVICE_ARENA_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/query_metric.h"
#include "kernels/summarize.h"
#include "proto/arena_memory.h"
#include "proto/clock.h"
#include "proto/page_key.h"
#include "proto/wire.h"
#include "service/evictor.h"
#include "service/lease_table.h"
#include "service/page_store.h"
#include "service/page_table.h"

namespace kvd {

// High half: a serial number of the arena's reservations; low half: the slot.
enum class Ticket : uint64_t {};

class Arena;

// Keeps a reservation's slot from being freed while units are written into it. REQUIRES: does not
// outlive its arena.
class ReservationPin {
 public:
  ReservationPin() = default;
  ReservationPin(ReservationPin&& other) noexcept;
  ReservationPin& operator=(ReservationPin&& other) noexcept;
  ~ReservationPin();

  // Whose units the holder may write.
  uint32_t slot() const { return slot_; }
  // Where a unit's bytes go; in an arena on a GPU a device address. REQUIRES: layer and head in
  // range (CheckUnit).
  uint8_t* unit(int layer, int head) const;
  // Marks a unit as complete; writing the same unit twice is allowed and the later bytes stand.
  void MarkReceived(int layer, int head);
  // Where a copy's records go; null unless a mover reserved the slot.
  uint8_t* records() const;
  void MarkRecordsReceived();

 private:
  friend class Arena;
  ReservationPin(Arena* arena, uint32_t slot) : arena_(arena), slot_(slot) {}
  void Reset();
  Arena* arena_ = nullptr;
  uint32_t slot_ = 0;
};

struct ArenaOptions {
  std::string tenant;
  std::string model;
  KvGeometry geometry;
  Fingerprint model_fingerprint = {};
  uint64_t bytes = 0;
  MemoryPlace place;  // of pages, records and headers
  Encoder encoder = Encoder::kE1;
  QueryMetric metric;  // empty unless encoder is kE1S
  uint32_t reservations_per_session = 65536;
  uint32_t leases_per_session = 1048576;
  absl::Duration quarantine = absl::Seconds(5);
  // A reservation that receives nothing for this long is given up.
  absl::Duration reservation_idle = absl::Seconds(60);
  Incarnation incarnation = {};
  const Clock* clock = nullptr;  // must outlive the arena
};

// Who a session is.
enum class SessionKind {
  kWorker,
  kMover,  // another daemon: brings copies of sealed pages with their records
};

// A sealed page with what a copy of it needs.
struct SealedCopy {
  PageLocation location{};
  PageId page;
  uint32_t page_idx = 0;
  uint64_t word = 0;  // placement word of its stripe
};

enum class SessionEnd {
  kDetached,  // in order: nothing of it is on its way any more
  kLost,      // its bytes and reads may still be on their way: quarantine
};

// Upper bounds in seconds of how long pages stay leased.
inline constexpr std::array<double, 10> kLeasedAgeBounds = {0.01, 0.1,  1,    10,    60,
                                                            300,  1800, 3600, 14400, 86400};

// Figures of one arena. Counters count since the start.
struct ArenaStats {
  uint32_t slots_free = 0;
  uint32_t slots_reserved = 0;
  uint32_t slots_sealed = 0;  // the canary's not counted
  uint32_t slots_quarantined = 0;
  uint32_t slots_leased = 0;
  uint64_t leases = 0;
  uint64_t matched_pages = 0;
  uint64_t unmatched_pages = 0;
  uint64_t reserved_new = 0;
  uint64_t reserved_hit = 0;
  uint64_t reserved_refused = 0;
  uint64_t reserved_expired = 0;
  uint64_t sealed_pages = 0;
  uint64_t seals_refused = 0;
  uint64_t sealed_never_matched = 0;  // evicted without having been found
  uint64_t evicted_pages = 0;
  uint64_t evictions_refused = 0;  // everything leased, reserved or in quarantine
  uint64_t leases_lost = 0;        // reclaimed from lost sessions
  uint64_t leases_released = 0;
  uint64_t quarantined_slots = 0;
  // Pages whose last lease ended, by the time since their first one began; then those above all
  // bounds, and the sum of all times.
  std::array<uint64_t, kLeasedAgeBounds.size() + 1> leased_age_counts = {};
  double leased_age_seconds = 0;
};

struct ReserveOutcome {
  enum class State { kNew, kHit, kPending, kFull };
  struct Page {
    State state = State::kFull;
    uint32_t slot = 0;        // new, hit
    Ticket ticket{};          // new
    uint64_t generation = 0;  // hit
  };
  std::vector<Page> pages;  // parallel to the request
  std::string full_reason;  // which limit, if a state is kFull; later pages were not tried
};

// Resident pages of a list.
struct MatchOutcome {
  std::vector<uint32_t> pages;          // positions in the list, ascending
  std::vector<PageLocation> locations;  // [pages][shards]
};

// Pages that a session had leased and released, and that are gone since it last asked.
struct Evictions {
  std::vector<PageLocation> pages;  // at most kMaxEvictionsKept, oldest first
  bool some_dropped = false;        // there were more
};

// One slot as an operator sees it.
struct SlotView {
  uint32_t slot = 0;
  SlotState state = SlotState::kFree;
  uint64_t generation = 0;
  PageId page;           // reserved, sealed
  bool matched = false;  // sealed: was found by a lookup
  uint32_t leases = 0;   // sessions that hold it
};

struct SealOutcome {
  PageLocation location{};
  absl::Duration since_last_unit{};  // from the last unit's arrival until the page was visible
  absl::Duration summarize{};        // time to build its records; zero for a repeated seal
};

// Memory, page table and leases of one (tenant, model). The data plane uses the part below; the
// control plane's calls follow it.
class Arena {
 public:
  // Carves the memory, fills the canary slot. kInvalidArgument if `bytes` holds fewer than two
  // slots or the options contradict each other; kResourceExhausted if the kernel or the GPU refuses
  // the memory; kFailedPrecondition if there is no such GPU.
  static absl::StatusOr<std::unique_ptr<Arena>> Make(ArenaOptions options);
  // REQUIRES: no pin and no call is under way.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const std::string& tenant() const { return options_.tenant; }
  const std::string& model() const { return options_.model; }
  const KvGeometry& geometry() const { return options_.geometry; }
  const ArenaOptions& options() const { return options_; }
  const ArenaMemory& memory() const { return *memory_; }
  PageStore& store() const { return *store_; }

  // --- data plane ---

  // allowed[i] = 1 iff `session` leases entries[i].slot, or it is the canary's (the copy itself is
  // guarded by the generation). kInvalidArgument, naming the entry, if a slot, layer or head is out
  // of range. kAborted if the session has ended.
  absl::Status CheckFetch(SessionId session, std::span<const FetchEntry> entries,
                          std::span<uint8_t> allowed) const;

  // kNotFound for an unknown ticket or another session's; kFailedPrecondition once it is being
  // sealed.
  absl::StatusOr<ReservationPin> PinReservation(SessionId session, Ticket ticket);

  // kInvalidArgument if layer or head is out of range.
  absl::Status CheckUnit(int layer, int head) const;

  // --- control plane; lengths and ranges of what a client sent are checked by the caller
  // (PoolService) ---

  // A session holds leases and reservations only between these two.
  void BeginSession(SessionId session, SessionKind kind = SessionKind::kWorker);
  void EndSession(SessionId session, SessionEnd why);

  // Longest prefix of `keys` of which every one of `shards` is sealed, leased to the session.
  // Page-major. A repeated (request_id, list) answers from what is resident of the first answer and
  // leases nothing, so that a late duplicate cannot take back what was released meanwhile.
  // kResourceExhausted, leasing nothing, if the prefix would exceed the session's leases. kAborted
  // if the session has ended.
  absl::StatusOr<MatchOutcome> MatchPrefix(SessionId session, uint64_t request_id,
                                           std::span<const PageKey> keys,
                                           std::span<const uint32_t> shards);

  // The same for every resident page of the list, whatever is missing between.
  absl::StatusOr<MatchOutcome> MatchEach(SessionId session, uint64_t request_id,
                                         std::span<const PageKey> keys,
                                         std::span<const uint32_t> shards);

  // One outcome a page, in order; evicts unleased pages where there is no free slot. `words`:
  // placement word of each page's stripe, or empty (each page is a stripe). kAborted if the session
  // has ended. REQUIRES: page_idx.size() == keys.size(), shard < num_shards.
  absl::StatusOr<ReserveOutcome> Reserve(SessionId session, std::span<const PageKey> keys,
                                         std::span<const uint32_t> page_idx, uint32_t shard,
                                         std::span<const uint64_t> words = {});

  // Summarises, publishes and leases the page of `ticket`; builds the records on the calling
  // thread. Repeating it gives the same answer for as long as the page stays. kFailedPrecondition:
  // units are missing, how many and which first; kInvalidArgument: NaN or Inf; after both the
  // reservation is given back. kNotFound: unknown ticket, or another session's. kAborted: the
  // session has ended.
  absl::StatusOr<SealOutcome> Seal(SessionId session, Ticket ticket);
  // The same for a copy: its records came with it and are proved, never built again. kDataLoss:
  // `summary_checksum` is not the records', or a unit's is not the one in its record; the
  // reservation is given back. kFailedPrecondition also if the records did not come.
  absl::StatusOr<SealOutcome> SealCopy(SessionId session, Ticket ticket, uint64_t summary_checksum);

  // True for each location that is still there and now leased. kResourceExhausted, leasing nothing,
  // if the session would exceed its leases. REQUIRES: slots in range.
  absl::StatusOr<std::vector<bool>> Lease(SessionId session,
                                          std::span<const PageLocation> locations);
  // Ends the session's leases of those locations that are still there.
  absl::Status Release(SessionId session, std::span<const PageLocation> locations);

  // What was evicted of pages that the session had released; each is told once. Empty if the
  // session has ended.
  static constexpr size_t kMaxEvictionsKept = 4096;
  Evictions TakeEvictions(SessionId session);

  // --- copies (arena_copies.cc): for the daemon's own migrator ---

  // Every sealed page but the canary.
  std::vector<SealedCopy> SealedPages() const;
  // Keeps those of the pages that are still there from being evicted until EndCopying, which leaves
  // their turn in the order of eviction as it was. True for each that is kept. One caller at a
  // time.
  std::vector<bool> BeginCopying(std::span<const SealedCopy> pages);
  void EndCopying();
  // Frees the slots of those pages that nobody leases and no quarantine holds; returns how many.
  size_t DropIdle(std::span<const PageLocation> locations);

  // Ends quarantines and gives up idle reservations whose time has come.
  void Tick();

  ArenaStats Stats() const;
  uint32_t num_leases(SessionId session) const;
  uint32_t num_reservations(SessionId session) const;

  // Slots [first, first + count), as far as there are such; the canary's is slot 0.
  std::vector<SlotView> ViewSlots(uint32_t first, uint32_t count) const;
  // The slot that holds or will hold a page.
  std::optional<SlotView> ViewPage(const PageId& page) const;

 private:
  friend class ReservationPin;

  // A slot that is being written.
  struct Reservation {
    SessionId session;
    bool sealing = false;     // a Seal works on it: no new pins
    bool over = false;        // ended unsealed; the slot waits for its last pin and its Seal to end
    bool quarantine = false;  // over: what becomes of the slot then
    uint32_t pins = 0;
    size_t num_received = 0;
    std::vector<uint64_t> received;  // a bit per unit
    bool is_copy = false;            // a mover's
    bool records_received = false;
    absl::Duration last_activity;
  };
  struct RecentMatch {
    uint64_t request_id;
    uint64_t list_hash;
    uint32_t num_pages;
  };
  struct Session {
    SessionKind kind = SessionKind::kWorker;
    absl::flat_hash_set<uint32_t> reserved;  // slots
    std::vector<RecentMatch> recent;         // ring of kRecentMatches
    size_t next_recent = 0;
    std::vector<uint64_t> released;  // a bit a slot: pages whose eviction the session is to be told
    Evictions evictions;             // not told yet
  };
  // What a slot remembers of its last reservation, so that a repeated seal finds its answer.
  struct SlotTicket {
    Ticket ticket{};
    SessionId session{};
  };

  Arena(ArenaOptions options, std::unique_ptr<ArenaMemory> memory);
  // What the constructor cannot do because it can fail.
  absl::Status Start();
  static uint32_t SlotOf(Ticket ticket) {
    return static_cast<uint32_t>(static_cast<uint64_t>(ticket));
  }
  static absl::Status UnknownTicket();

  absl::Status CheckLiveLocked(SessionId session) const;
  absl::Status CheckRoomLocked(SessionId session, size_t more) const;
  void LeaseLocked(SessionId session, uint32_t slot);
  // The last lease of a slot has ended: it may be evicted.
  void LastLeaseEndedLocked(uint32_t slot, absl::Duration now);
  void ReleaseLocked(SessionId session, uint32_t slot, absl::Duration now);
  bool IsSealedLocked(const PageLocation& location) const;
  bool EvictOneLocked();
  void EvictLocked(uint32_t slot);
  // REQUIRES: called before the mutex is let go after EvictLocked: until then nobody can write to
  // those slots.
  void PublishEvictedLocked();
  void NoteEvictionLocked(const PageLocation& page);
  // Appends the page's location in each shard; false, leaving `out` alone, unless all are sealed.
  bool LocateLocked(const PageKey& key, std::span<const uint32_t> shards,
                    std::vector<PageLocation>* out) const;
  // An earlier Match of the same id and list: pages of its answer.
  std::optional<uint32_t> FindRecent(SessionId session, uint64_t request_id,
                                     uint64_t list_hash) const;
  void Remember(SessionId session, const RecentMatch& match);
  ReserveOutcome::Page ReserveOneLocked(SessionId session, const PageId& page, uint32_t page_idx,
                                        uint64_t word, std::string* full_reason);
  absl::StatusOr<MatchOutcome> MatchPages(SessionId session, uint64_t request_id,
                                          std::span<const PageKey> keys,
                                          std::span<const uint32_t> shards, bool each);
  // Leases the locations that the session does not lease yet, appending their slots to `fresh`.
  absl::Status LeaseMatchedLocked(SessionId session, std::span<const PageLocation> locations,
                                  std::vector<uint32_t>* fresh);
  std::string FullReasonLocked() const;
  SlotView ViewLocked(uint32_t slot) const;

  // The reservation that `ticket` names if it is `session`'s and not over, else null.
  Reservation* FindReservationLocked(SessionId session, Ticket ticket);
  // True while the page that `ticket` was sealed into stays.
  bool IsSealedTicketLocked(SessionId session, Ticket ticket) const;
  // Ends a reservation without sealing it: at once, or when its last pin drops or its seal ends.
  void EndReservationLocked(uint32_t slot, bool quarantine);
  void FreeIfIdleLocked(uint32_t slot);
  void Unpin(uint32_t slot);
  void MarkReceived(uint32_t slot, int layer, int head);
  bool IsCopy(uint32_t slot) const;
  void MarkRecordsReceived(uint32_t slot);

  // The parts of Seal: claim the reservation, or find the answer of an earlier seal; then publish.
  struct SealStart {
    bool already_sealed = false;
    PageLocation location{};  // if already sealed
    uint32_t shard = 0;       // otherwise
    uint32_t page_idx = 0;
    bool records_received = false;
  };
  absl::StatusOr<SealOutcome> SealWith(
      SessionId session, Ticket ticket,
      const std::function<absl::StatusOr<uint64_t>(uint32_t slot, const SealStart&)>& make_records);
  absl::StatusOr<SealStart> BeginSeal(SessionId session, Ticket ticket);
  absl::Status CheckCompleteLocked(const Reservation& reservation) const;
  absl::StatusOr<SealOutcome> FinishSeal(SessionId session, uint32_t slot,
                                         const absl::StatusOr<uint64_t>& summary_checksum);

  const ArenaOptions options_;
  const SlotLayout slot_layout_;
  const std::unique_ptr<ArenaMemory> memory_;
  std::unique_ptr<PageStore> store_;

  mutable std::mutex mutex_;  // guards what follows; functions named ...Locked need it
  std::condition_variable reservation_changed_;  // a pin dropped, or a Seal ended
  PageTable pages_;
  LeaseTable leases_;
  Evictor evictor_;
  absl::flat_hash_map<SessionId, Session> sessions_;
  std::vector<std::unique_ptr<Reservation>> reservations_;  // [num_slots]
  std::vector<SlotTicket> tickets_;                         // [num_slots]
  std::vector<PageStore::Gone> unpublished_;                // evicted under this hold of the mutex
  // Slots that are being copied, with the end of their last lease if nobody held them.
  std::vector<std::pair<uint32_t, std::optional<absl::Duration>>> copying_;
  std::vector<absl::Duration> leased_since_;  // [num_slots] of leased slots
  uint32_t next_serial_ = 1;
  ArenaStats counters_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_ARENA_H_
