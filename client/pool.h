// The daemons of a pool together: placement over those that live, and calls to all at once.
//
// Placement is over the members that are attached and not draining: a dead daemon's share moves to
// the others at once (rendezvous hashing moves nothing else), so that its pages can be put again;
// when it comes back its stripes are looked for there again. Thread safety: safe.

#ifndef LOCKS_KVD_CLIENT_POOL_H_
#define LOCKS_KVD_CLIENT_POOL_H_

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client_options.h"
#include "client/pool_channel.h"
#include "client/worker_shape.h"
#include "proto/page_key.h"

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

// A page and the daemon that is asked for it, or given it.
struct PlacedPage {
  PageKey key;
  uint32_t page_idx;  // in its sequence
  int daemon;         // member; attached in the view that placed it
};

// The daemons that pages are placed on at one moment.
struct PoolView {
  std::vector<std::shared_ptr<Attachment>>
      attachments;        // [members]; null: not attached or draining
  std::vector<int> live;  // members with an attachment
  std::vector<std::string> live_names;

  // The pages of a sequence with their owners. REQUIRES: a live member; `keys` starts at page 0.
  std::vector<PlacedPage> Place(std::span<const PageKey> keys) const;
  // One page with its owner, given the key of the first page of its stripe.
  PlacedPage PlaceOne(const PageKey& key, int page_idx, const PageKey& stripe_key) const;
};

enum class MatchMode {
  kPrefix,  // the pages before the first one that is not resident
  kEach,    // every resident page of the list, whatever is missing between
};

// Resident pages, leased.
struct MatchedPages {
  int num_pages = 0;                // kPrefix: length of the prefix; kEach: of the list
  std::vector<uint8_t> found;       // [num_pages]
  std::vector<SlotRef> slots;       // [num_pages][shards held]
  std::vector<LeasedSlots> leases;  // one a daemon; exactly the pages that were found
  absl::Status problem;  // first daemon that could not be asked: its pages count as not resident
};

class Pool {
 public:
  // Starts every channel, in parallel. Errors as PoolChannel::Start; with allow_partial only if no
  // daemon could be attached.
  static absl::StatusOr<std::unique_ptr<Pool>> Make(const ClientOptions* options,
                                                    const WorkerShape* shape, UcxWorker* ucx);

  PoolView View() const;
  PoolChannel& channel(int daemon) { return *channels_[static_cast<size_t>(daemon)]; }
  int num_daemons() const { return static_cast<int>(channels_.size()); }

  // Leases the pages that are resident. Daemons that cannot be reached count as having nothing.
  // kEach gives up on a daemon after kMaxSkips pages that are not there: what is left counts as not
  // found. Errors: kUnavailable if there is no live daemon; what is not a daemon's loss. Blocking:
  // up to control_timeout for 65,536 pages, or a skipped page, of one daemon.
  absl::StatusOr<MatchedPages> Match(const PoolView& view, std::span<const PlacedPage> pages,
                                     MatchMode mode);
  static constexpr int kMaxSkips = 64;

 private:
  Pool(const ClientOptions* options, const WorkerShape* shape)
      : options_(*options), shape_(*shape) {}
  struct DaemonMatch;
  absl::Status MatchOne(DaemonMatch& match, std::span<const PlacedPage> pages, MatchMode mode);
  absl::StatusOr<size_t> MatchRun(DaemonMatch& match, std::span<const PlacedPage> pages, size_t at,
                                  size_t end);

  const ClientOptions& options_;
  const WorkerShape& shape_;
  std::vector<std::unique_ptr<PoolChannel>> channels_;
};

// Runs work(0) .. work(count - 1), each on a thread of its own but the last, and waits for all.
void RunInParallel(int count, const std::function<void(int)>& work);

// True for what a lost, late or draining daemon answers.
bool IsDaemonLoss(const absl::Status& status);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_POOL_H_
