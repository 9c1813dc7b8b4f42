// The daemons of a pool together: placement over those that live, and calls to all at once.
//
// Placement is over the members of the pool that are attached and not draining: a dead daemon's
// share moves to the others at once (rendezvous hashing moves nothing else), so that its pages can
// be put again. Pages that a member joining or leaving has moved to another owner are looked for
// there, and for placement_grace also at their former owner, which serves them until the new one
// has published them (guarantee G8). A member that leaves the view gets no new pages at once.
// Daemons are numbered as they are first seen; a number is never used again.
// Thread safety: safe.

#ifndef LOCKS_KVD_CLIENT_POOL_H_
#define LOCKS_KVD_CLIENT_POOL_H_

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/client_options.h"
#include "client/pool_channel.h"
#include "client/worker_shape.h"
#include "proto/membership.h"
#include "proto/page_key.h"
#include "proto/placement.h"

namespace kvd {

// Leased pages of one session, released with this object.
class LeasedSlots {
 public:
  LeasedSlots() = default;
  LeasedSlots(PoolChannel* channel, std::shared_ptr<Attachment> attachment)
      : channel_(channel), attachment_(std::move(attachment)) {}
  LeasedSlots(LeasedSlots&& other) noexcept = default;
  LeasedSlots& operator=(LeasedSlots&& other) noexcept;
  ~LeasedSlots() { Release(); }

  // Counts slots that a call has just leased. REQUIRES: called under attachment->leases.Leasing().
  void Add(std::span<const SlotRef> slots);
  // Blocking: up to control_timeout. Best effort: what fails ends with the session.
  void Release();
  const std::shared_ptr<Attachment>& attachment() const { return attachment_; }
  size_t size() const { return slots_.size(); }

 private:
  PoolChannel* channel_ = nullptr;
  std::shared_ptr<Attachment> attachment_;
  std::vector<SlotRef> slots_;
};

// A page with its place in the pool.
struct PlacedPage {
  PageKey key;
  uint32_t page_idx;  // in its sequence
  int daemon;         // its owner in the view that placed it
  uint64_t word;      // placement word of its stripe
};

// Members that pages are, or were, placed on.
struct PlacedDaemons {
  std::vector<int> daemons;  // what the placement's indices stand for
  std::shared_ptr<const Placement> placement;
  int owner(uint64_t word) const { return daemons[static_cast<size_t>(placement->Owner(word))]; }
};

// The pool at one moment.
struct PoolView {
  // [daemons] null: not attached. Those that drain, or have left the view, are here to be read
  // from.
  std::vector<std::shared_ptr<Attachment>> attachments;
  std::vector<int> live;              // daemons that pages are placed on
  PlacedDaemons placed;               // over `live`
  std::vector<PlacedDaemons> former;  // within placement_grace, newest first
  int replicas = 1;                   // daemons that hold each page

  bool is_attached(int daemon) const { return attachments[static_cast<size_t>(daemon)] != nullptr; }
  // The pages of a sequence with their owners. REQUIRES: a live member; `keys` starts at page 0.
  std::vector<PlacedPage> Place(std::span<const PageKey> keys) const;
  // One page with its owner, given the key of the first page of its stripe.
  PlacedPage PlaceOne(const PageKey& key, int page_idx, const PageKey& stripe_key) const;
  // Attached daemons that may hold a page, likeliest first; with `only_live` no draining or former
  // ones.
  std::vector<int> Holders(uint64_t word, bool only_live) const;
};

enum class MatchMode {
  kPrefix,    // the pages before the first one that is not resident
  kEach,      // every resident page of the list, whatever is missing between
  kEachLive,  // the same, at live members only: where pages have moved to
  kAtDaemon,  // the same, at the daemon that each page names and nowhere else
};

// Resident pages, leased.
struct MatchedPages {
  int num_pages = 0;                // kPrefix: length of the prefix; kEach: of the list
  std::vector<uint8_t> found;       // [num_pages]
  std::vector<int> daemons;         // [num_pages] who has it, where found
  std::vector<SlotRef> slots;       // [num_pages][shards held]
  std::vector<LeasedSlots> leases;  // one a daemon; exactly the pages that were found
  absl::Status problem;  // first daemon that could not be asked: its pages count as not resident
};

class Pool {
 public:
  static constexpr int kMaxDaemons = 1024;

  // Starts the channel of every member, in parallel, and follows the membership from then on.
  // Errors as Membership::Make and PoolChannel::Start; with allow_partial only if no daemon could
  // be attached.
  static absl::StatusOr<std::unique_ptr<Pool>> Make(const ClientOptions* options,
                                                    const WorkerShape* shape, UcxWorker* ucx);
  ~Pool();

  PoolView View();
  PoolChannel& channel(int daemon) { return *channels_[static_cast<size_t>(daemon)]; }
  // Daemons seen so far.
  int num_daemons() const { return num_daemons_.load(std::memory_order_acquire); }
  MembershipFigures membership() const { return membership_->Figures(); }

  // Leases the pages that are resident. Daemons that cannot be reached count as having nothing.
  // Errors: kUnavailable if there is no live daemon; what is not a daemon's loss. Blocking: up to
  // control_timeout for 65,536 pages of one daemon, a few times where holders differ.
  absl::StatusOr<MatchedPages> Match(const PoolView& view, std::span<const PlacedPage> pages,
                                     MatchMode mode);

  // Detaches from members that left the pool placement_grace ago. To be called now and then.
  // Blocking: up to a second.
  void Upkeep();

 private:
  struct MemberState {
    int daemon;
    Member member;
  };
  struct Former {
    PlacedDaemons placed;
    absl::Time until;
  };
  struct Departed {
    int daemon;
    absl::Time until;
  };
  struct DaemonMatch;
  struct MatchState;

  Pool(const ClientOptions* options, const WorkerShape* shape, UcxWorker* ucx)
      : options_(*options), shape_(*shape), ucx_(ucx) {}
  // Makes channels for members that are new or have another address. Returns them, not started.
  std::vector<PoolChannel*> Follow(const MembershipView& view);
  bool AskHolders(const PoolView& view, std::span<const PlacedPage> pages, size_t rank, bool each,
                  MatchMode mode, MatchState* state);
  absl::Status MatchAt(DaemonMatch& match, std::span<const PlacedPage> pages, bool each);
  absl::Status MatchRun(DaemonMatch& match, std::span<const PlacedPage> pages, size_t at,
                        size_t end, bool each, size_t* found);

  const ClientOptions& options_;
  const WorkerShape& shape_;
  UcxWorker* const ucx_;
  std::array<std::unique_ptr<PoolChannel>, kMaxDaemons> channels_;
  std::atomic<int> num_daemons_{0};

  std::mutex mutex_;  // guards what follows
  std::vector<MemberState> members_;
  std::vector<Departed> departed_;
  std::vector<std::pair<int, double>> placed_members_;  // what placed_ is over
  PlacedDaemons placed_;
  std::vector<Former> former_;  // newest first

  std::unique_ptr<Membership> membership_;  // ends first: its thread calls Follow
};

// Runs work(0) .. work(count - 1), each on a thread of its own but the last, and waits for all.
void RunInParallel(int count, const std::function<void(int)>& work);

// True for what a lost, late or draining daemon answers.
bool IsDaemonLoss(const absl::Status& status);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_POOL_H_
