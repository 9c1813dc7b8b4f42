// What a decode step knows of one open sequence: where its pages are, which may be chosen, their
// records, and the local pages (sinks, window, tail).
//
// Invariants: num_pages() pages are sealed and mirrored, and only they are scanned. A page is
// selectable iff it is not known to be missing and its daemon is neither lost nor suspended. A
// page's version grows whenever its row changes, so cached units of an older row are never taken
// for the new one's. Thread safety: one owner thread (the step's) for everything but the two ends
// of the seal queue: the sealer reads complete_pages() and complete pages of the ring, stores
// records of pages that are not yet counted, and calls PushSealed. No locks: adopting a sealed page
// is one acquire load.

#ifndef LOCKS_KVD_CLIENT_SEQUENCE_PAGES_H_
#define LOCKS_KVD_CLIENT_SEQUENCE_PAGES_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/buffer.h"
#include "client/leases.h"
#include "client/mirror.h"
#include "client/page_source.h"
#include "client/tail_ring.h"
#include "client/worker_shape.h"
#include "kernels/gather.h"

namespace kvd {

// A page that the sealer has sealed and whose records are in the mirror.
struct SealedPage {
  int daemon = 0;
  std::shared_ptr<PageSource> source;
  std::vector<SlotRef> slots;  // one a shard held
};

// A page whose bytes another daemon holds too, proved by its records: the step reads it there from
// now on.
struct MovedPage {
  int page = 0;
  int daemon = 0;
  std::shared_ptr<PageSource> source;
  std::vector<SlotRef> slots;  // one a shard held
};
using MovedPages = std::vector<MovedPage>;

// A page whose row changed since the copy of the page table on a GPU was brought up to date.
struct PageChange {
  int page = 0;
  bool forget = false;  // it may have other bytes now than what a page cache holds of it
};

class SequencePages {
 public:
  // `max_daemons`: a page's daemon is below it.
  static absl::StatusOr<std::unique_ptr<SequencePages>> Make(const WorkerShape& shape,
                                                             int page_capacity, int n_sink,
                                                             int n_win, int max_daemons);
  ~SequencePages();

  // --- owner thread, between steps ---

  // A daemon's session from now on. What the previous one held becomes missing; the same one again
  // ends a suspension.
  void SetSource(int daemon, std::shared_ptr<PageSource> source);
  // Where a page is (opened or repaired): selectable again. Its records must be in the mirror.
  void SetPage(int page, int daemon, std::span<const SlotRef> slots);
  // A second holder of a page, to which the step turns when the first one fails: the same bytes.
  // Its daemon has a source. Allocates with the first one.
  void SetAlternate(int page, int daemon, std::span<const SlotRef> slots);
  bool has_alternates() const { return !alt_daemon_.empty(); }
  // Raises the count of sealed pages when a sequence is opened; the tail starts after them.
  void SetNumPages(int num_pages);
  // Counts the token whose rows stand at (tail_page(), tail_row()) of every layer.
  void AdvanceTail();

  // Copies tokens [first_token, first_token + count) of an engine's cache, one EngineKv a layer, to
  // the end of the sequence; adopts sealed pages. kResourceExhausted, after the tokens that had
  // room, as BeginStep.
  absl::Status AppendTail(std::span<const EngineKv> layers, int64_t first_token, int count);

  // --- owner thread, in a step ---

  // `now`: SteadyClock's. Adopts sealed pages, masks pages of lost daemons, retries suspended ones.
  // kResourceExhausted if the next token has no room (ring full: seals lag; capacity: open again).
  // Allocates only on error.
  absl::Status BeginStep(absl::Duration now);
  // The page is not where it should be: its second holder is taken, or it is not selectable until
  // SetPage.
  void MarkMissing(int page);
  // A fetch list of this daemon failed as a whole: its pages turn to their second holders; those
  // without are not selectable for kSuspendTime.
  void Suspend(int daemon, absl::Duration now);
  static constexpr absl::Duration kSuspendTime = absl::Seconds(1);

  int num_pages() const { return num_pages_; }        // sealed and mirrored
  int64_t num_tokens() const { return num_tokens_; }  // of the sequence, without the step's own
  int64_t tokens_in(int page) const;                  // rows of a ring page that are written
  int tail_page() const { return static_cast<int>(num_tokens_ / shape_.geometry.page_tokens); }
  int tail_row() const { return static_cast<int>(num_tokens_ % shape_.geometry.page_tokens); }

  // Always-kept pages: the sinks [0, num_sinks()) and the ring pages [first_ring_page(), ...).
  int num_sinks() const { return num_pages_ < n_sink_ ? num_pages_ : n_sink_; }
  int first_ring_page() const;
  uint8_t* sink_unit(int page, int layer, int head) {
    return sink_page(page) + shape_.unit_idx(layer, head) * shape_.unit_bytes();
  }
  uint8_t* sink_page(int page) {
    return sinks_.data() + static_cast<size_t>(page) * shape_.page_bytes();
  }
  uint8_t* ring_unit(int page, int layer, int head) { return ring_->unit(page, layer, head); }
  TailRing& ring() { return *ring_; }

  int daemon_of(int page) const { return daemon_[static_cast<size_t>(page)]; }
  const SlotRef& slot_of(int page, int shard_pos) const {
    return slots_[static_cast<size_t>(page) * static_cast<size_t>(shape_.num_shards()) +
                  static_cast<size_t>(shard_pos)];
  }
  const uint32_t* versions() const { return version_.data(); }
  const uint64_t* selectable() const { return selectable_.data(); }
  bool is_selectable(int page) const {
    return (selectable_[static_cast<size_t>(page) / 64] >> (page % 64) & 1) != 0;
  }
  // Sealed pages that are not selectable, ascending. Allocates.
  std::vector<int> MissingPages() const;
  int num_missing() const { return num_missing_; }
  // Where the pages are on a GPU: what changed since the last call, each page once. The list is
  // valid until the next change.
  std::span<const PageChange> TakeChanges();
  const std::shared_ptr<PageSource>& source(int daemon) const {
    return sources_[static_cast<size_t>(daemon)].source;
  }
  Fetcher* fetcher(int daemon) const;
  // Above every daemon that has a source.
  int num_daemons() const { return num_daemons_; }
  int max_daemons() const { return static_cast<int>(sources_.size()); }

  const WorkerShape& shape() const { return shape_; }
  Mirror& mirror() { return *mirror_; }
  int page_capacity() const { return page_capacity_; }
  int n_sink() const { return n_sink_; }
  int n_win() const { return n_win_; }

  // --- sealer thread ---

  // Pages whose tokens are all written; those from the sealer's own count on are its work.
  int complete_pages() const { return complete_pages_.load(std::memory_order_acquire); }
  // Hands over the next page, in order of pages.
  void PushSealed(SealedPage page);
  // Hands over pages that have moved, for the next step; false while the last batch was not taken
  // back.
  bool PushMoved(std::unique_ptr<MovedPages>* batch);
  // The batch that the step has taken over, else null. Its entries hold the sources that it
  // replaced.
  std::unique_ptr<MovedPages> TakeBackMoved();
  // Why the last seal failed, for the message of a full ring; kOk once one succeeds.
  void SetSealProblem(absl::StatusCode code) {
    seal_problem_.store(code, std::memory_order_relaxed);
  }

 private:
  struct Source {
    std::shared_ptr<PageSource> source;
    bool masked = true;  // none of its pages is selectable
    absl::Duration retry_at = absl::InfiniteDuration();
  };

  SequencePages(const WorkerShape& shape, int page_capacity, int n_sink, int n_win)
      : shape_(shape), page_capacity_(page_capacity), n_sink_(n_sink), n_win_(n_win) {}
  void AdoptSealed();
  void AdoptMoved();
  bool UseSource(int daemon, std::shared_ptr<PageSource>* source);
  void MovePage(int page, int daemon, std::span<const SlotRef> slots);
  bool TakeAlternate(int page);
  void CheckSources(absl::Duration now);
  void MaskDaemon(int daemon, bool missing);
  void UnmaskDaemon(int daemon);
  void SetSelectable(int page, bool selectable);
  void NoteChange(int page, bool forget);
  bool is_missing(int page) const {
    return (missing_[static_cast<size_t>(page) / 64] >> (page % 64) & 1) != 0;
  }
  bool HasRoom() const;
  absl::Status NoRoom() const;

  const WorkerShape shape_;
  const int page_capacity_;
  const int n_sink_;
  const int n_win_;
  std::unique_ptr<Mirror> mirror_;
  std::unique_ptr<TailRing> ring_;
  PlacedBytes sinks_;  // [n_sink][L][heads] units

  int num_pages_ = 0;
  int64_t num_tokens_ = 0;
  int num_missing_ = 0;            // clear bits of selectable_ below num_pages_
  std::vector<uint16_t> daemon_;   // [P_cap]
  std::vector<uint32_t> version_;  // [P_cap]; 0 is no row
  std::vector<SlotRef> slots_;     // [P_cap][shards held]
  std::vector<uint64_t> selectable_;
  std::vector<uint64_t> missing_;  // proven gone; the rest of the unselectable are suspended
  std::vector<Source> sources_;    // [max_daemons]
  int num_daemons_ = 0;
  static constexpr uint16_t kNoDaemon = 0xFFFF;
  std::vector<uint16_t> alt_daemon_;  // [P_cap] or empty
  std::vector<SlotRef> alt_slots_;    // [P_cap][shards held] or empty

  std::vector<PageChange> changes_;  // on a GPU only
  std::vector<PageChange> taken_;
  std::vector<int32_t> change_of_;  // [P_cap] index into changes_, or -1

  // One batch of moved pages at a time: the sealer puts it here, the step takes it and puts it
  // there.
  std::atomic<MovedPages*> moved_in_{nullptr};
  std::atomic<MovedPages*> moved_out_{nullptr};
  bool moved_under_way_ = false;  // sealer's

  // Seal queue: the sealer writes entry num_pushed % size, the owner reads entry num_adopted_ %
  // size.
  std::vector<SealedPage> sealed_;
  std::atomic<uint64_t> num_pushed_{0};
  uint64_t num_adopted_ = 0;
  std::atomic<int> complete_pages_{0};
  std::atomic<absl::StatusCode> seal_problem_{absl::StatusCode::kOk};
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_SEQUENCE_PAGES_H_
