#include "client/sequence_pages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "proto/status.h"

namespace kvd {

absl::StatusOr<std::unique_ptr<SequencePages>> SequencePages::Make(const WorkerShape& shape,
                                                                   int page_capacity, int n_sink,
                                                                   int n_win, int max_daemons) {
  if (page_capacity < 1 || page_capacity > kMaxPages) {
    return absl::InvalidArgumentError(absl::StrCat("a sequence must have room for 1 to ", kMaxPages,
                                                   " pages, got ", page_capacity));
  }
  auto pages =
      std::unique_ptr<SequencePages>(new SequencePages(shape, page_capacity, n_sink, n_win));
  KVD_ASSIGN_OR_RETURN(pages->mirror_, Mirror::Make(shape, page_capacity));
  KVD_ASSIGN_OR_RETURN(pages->ring_, TailRing::Make(shape, n_win));
  const size_t sink_bytes = static_cast<size_t>(n_sink) * shape.page_bytes();
  KVD_ASSIGN_OR_RETURN(pages->sinks_, PlacedBytes::Make(shape.place, sink_bytes, "sink pages"));
  const auto capacity = static_cast<size_t>(page_capacity);
  pages->daemon_.resize(capacity);
  pages->version_.resize(capacity);
  pages->slots_.resize(capacity * static_cast<size_t>(shape.num_shards()));
  pages->selectable_.resize((capacity + 63) / 64);
  pages->missing_.resize((capacity + 63) / 64);
  if (shape.place.on_gpu()) pages->change_of_.assign(capacity, -1);
  pages->sources_.resize(static_cast<size_t>(max_daemons));
  pages->sealed_.resize(static_cast<size_t>(pages->ring_->num_pages()));
  for (SealedPage& entry : pages->sealed_) {
    entry.slots.resize(static_cast<size_t>(shape.num_shards()));
  }
  return pages;
}

SequencePages::~SequencePages() {
  delete moved_in_.load();
  delete moved_out_.load();
}

void SequencePages::SetSource(int daemon, std::shared_ptr<PageSource> source) {
  Source& entry = sources_[static_cast<size_t>(daemon)];
  num_daemons_ = std::max(num_daemons_, daemon + 1);
  if (entry.source == source) {
    if (entry.retry_at != absl::InfiniteDuration()) UnmaskDaemon(daemon);
    return;
  }
  MaskDaemon(daemon, /*missing=*/true);
  entry.source = std::move(source);
  entry.masked = false;
  entry.retry_at = absl::InfiniteDuration();
}

void SequencePages::SetPage(int page, int daemon, std::span<const SlotRef> slots) {
  KVD_CHECK(page >= 0 && page < page_capacity_);
  KVD_CHECK(static_cast<int>(slots.size()) == shape_.num_shards());
  const auto p = static_cast<size_t>(page);
  daemon_[p] = static_cast<uint16_t>(daemon);
  NoteChange(page, /*forget=*/version_[p] > 0);
  ++version_[p];
  std::copy(slots.begin(), slots.end(), slots_.begin() + static_cast<ptrdiff_t>(p * slots.size()));
  missing_[p / 64] &= ~(uint64_t{1} << (p % 64));
  SetSelectable(page, !sources_[static_cast<size_t>(daemon)].masked);
}

void SequencePages::SetAlternate(int page, int daemon, std::span<const SlotRef> slots) {
  KVD_CHECK(sources_[static_cast<size_t>(daemon)].source != nullptr);
  if (alt_daemon_.empty()) {
    alt_daemon_.resize(static_cast<size_t>(page_capacity_), kNoDaemon);
    alt_slots_.resize(slots_.size());
  }
  alt_daemon_[static_cast<size_t>(page)] = static_cast<uint16_t>(daemon);
  std::copy(slots.begin(), slots.end(),
            alt_slots_.begin() + page * static_cast<ptrdiff_t>(slots.size()));
}

// The bytes are the same, so what the page cache holds of the page stays good.
void SequencePages::MovePage(int page, int daemon, std::span<const SlotRef> slots) {
  const auto p = static_cast<size_t>(page);
  daemon_[p] = static_cast<uint16_t>(daemon);
  NoteChange(page, /*forget=*/false);
  std::copy(slots.begin(), slots.end(), slots_.begin() + static_cast<ptrdiff_t>(p * slots.size()));
  missing_[p / 64] &= ~(uint64_t{1} << (p % 64));
  SetSelectable(page, !sources_[static_cast<size_t>(daemon)].masked);
}

bool SequencePages::TakeAlternate(int page) {
  if (alt_daemon_.empty()) return false;
  const auto p = static_cast<size_t>(page);
  const uint16_t daemon = std::exchange(alt_daemon_[p], kNoDaemon);
  if (daemon == kNoDaemon) return false;
  const Source& source = sources_[daemon];
  if (source.masked || source.source->lost.load(std::memory_order_acquire)) return false;
  const auto shards = static_cast<size_t>(shape_.num_shards());
  MovePage(page, daemon, {alt_slots_.data() + p * shards, shards});
  return true;
}

void SequencePages::SetNumPages(int num_pages) {
  KVD_CHECK(num_pages >= num_pages_ && num_pages <= page_capacity_);
  for (int p = num_pages_; p < num_pages; ++p) num_missing_ += is_selectable(p) ? 0 : 1;
  num_pages_ = num_pages;
  num_tokens_ = std::max(num_tokens_, int64_t{num_pages} * shape_.geometry.page_tokens);
  complete_pages_.store(tail_page(), std::memory_order_release);
}

void SequencePages::AdvanceTail() {
  ++num_tokens_;
  complete_pages_.store(tail_page(), std::memory_order_release);
}

absl::Status SequencePages::AppendTail(std::span<const EngineKv> layers, int64_t first_token,
                                       int count) {
  if (static_cast<int>(layers.size()) != shape_.num_layers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("AppendTail needs one EngineKv a layer: expected ", shape_.num_layers(),
                     ", got ", layers.size()));
  }
  for (int done = 0; done < count;) {
    AdoptSealed();
    if (!HasRoom()) return NoRoom();
    const int n = std::min(count - done, shape_.geometry.page_tokens - tail_row());
    KVD_RETURN_IF_ERROR(ring_->AppendRows(layers, first_token + done, num_tokens_, n));
    num_tokens_ += n;
    complete_pages_.store(tail_page(), std::memory_order_release);
    done += n;
  }
  return absl::OkStatus();
}

absl::Status SequencePages::BeginStep(absl::Duration now) {
  AdoptMoved();
  CheckSources(now);
  if (!HasRoom()) [[unlikely]]
    return NoRoom();
  return absl::OkStatus();
}

bool SequencePages::HasRoom() const {
  // The place of the tail page must not hold a page that is still attended from the ring.
  const bool ring_full = tail_page() - ring_->num_pages() >= first_ring_page();
  return !ring_full && tail_page() < page_capacity_;
}

absl::Status SequencePages::NoRoom() const {
  if (tail_page() >= page_capacity_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("sequence is full: ", num_tokens_, " tokens, room for ", page_capacity_,
                     " pages; open it again with a larger max_tokens"));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("tail ring is full: ", tail_page() - num_pages_,
                   " complete pages wait for their seal (last: ",
                   absl::StatusCodeToString(seal_problem_.load(std::memory_order_relaxed)),
                   "); retry the step, or give the pool more memory"));
}

void SequencePages::AdoptSealed() {
  const uint64_t pushed = num_pushed_.load(std::memory_order_acquire);
  for (; num_adopted_ < pushed; ++num_adopted_) {
    SealedPage& entry = sealed_[num_adopted_ % sealed_.size()];
    const bool gone = !UseSource(entry.daemon, &entry.source);
    const int page = num_pages_;
    if (page < n_sink_) {
      // On a GPU the copy can only fail if the context is broken, and then every step fails too.
      (void)CopyBytes(shape_.place, sink_page(page), ring_->page(page), shape_.page_bytes());
    }
    SetPage(page, entry.daemon, entry.slots);
    if (gone) MarkMissing(page);
    num_pages_ = page + 1;
    num_missing_ += is_selectable(page) ? 0 : 1;
  }
}

// False if the session has ended. Where the daemon has another session now (it is new, or came back
// as a stranger), the old one is left in `source`, so that it is freed by the sealer and not in a
// step.
bool SequencePages::UseSource(int daemon, std::shared_ptr<PageSource>* source) {
  if ((*source)->lost.load(std::memory_order_acquire)) return false;
  Source& entry = sources_[static_cast<size_t>(daemon)];
  if (entry.source == *source) return true;
  MaskDaemon(daemon, /*missing=*/true);
  entry.source.swap(*source);
  entry.masked = false;
  entry.retry_at = absl::InfiniteDuration();
  num_daemons_ = std::max(num_daemons_, daemon + 1);
  return true;
}

void SequencePages::AdoptMoved() {
  // Pages that were sealed before the batch was made are adopted before it is applied.
  MovedPages* batch = moved_in_.exchange(nullptr, std::memory_order_acquire);
  AdoptSealed();
  if (batch == nullptr) [[likely]]
    return;
  for (MovedPage& moved : *batch) {
    if (UseSource(moved.daemon, &moved.source)) MovePage(moved.page, moved.daemon, moved.slots);
  }
  moved_out_.store(batch, std::memory_order_release);
}

bool SequencePages::PushMoved(std::unique_ptr<MovedPages>* batch) {
  if (moved_under_way_) return false;
  moved_under_way_ = true;
  moved_in_.store(batch->release(), std::memory_order_release);
  return true;
}

std::unique_ptr<MovedPages> SequencePages::TakeBackMoved() {
  std::unique_ptr<MovedPages> batch(moved_out_.exchange(nullptr, std::memory_order_acquire));
  if (batch != nullptr) moved_under_way_ = false;
  return batch;
}

void SequencePages::PushSealed(SealedPage page) {
  const uint64_t pushed = num_pushed_.load(std::memory_order_relaxed);
  SealedPage& entry = sealed_[pushed % sealed_.size()];
  entry.daemon = page.daemon;
  entry.source = std::move(page.source);
  std::copy(page.slots.begin(), page.slots.end(), entry.slots.begin());
  num_pushed_.store(pushed + 1, std::memory_order_release);
}

void SequencePages::CheckSources(absl::Duration now) {
  for (int d = 0; d < num_daemons(); ++d) {
    Source& entry = sources_[static_cast<size_t>(d)];
    if (entry.source == nullptr) continue;
    const bool suspended = entry.retry_at != absl::InfiniteDuration();
    if (entry.source->lost.load(std::memory_order_acquire)) {
      if (!entry.masked || suspended) MaskDaemon(d, /*missing=*/true);
      entry.retry_at = absl::InfiniteDuration();
    } else if (suspended && now >= entry.retry_at) {
      UnmaskDaemon(d);
    }
  }
}

void SequencePages::Suspend(int daemon, absl::Duration now) {
  MaskDaemon(daemon, /*missing=*/false);
  sources_[static_cast<size_t>(daemon)].retry_at = now + kSuspendTime;
}

void SequencePages::MaskDaemon(int daemon, bool missing) {
  sources_[static_cast<size_t>(daemon)].masked = true;
  for (int p = 0; p < num_pages_; ++p) {
    if (daemon_of(p) != daemon || version_[static_cast<size_t>(p)] == 0) continue;
    if (TakeAlternate(p)) continue;
    if (missing) missing_[static_cast<size_t>(p) / 64] |= uint64_t{1} << (p % 64);
    SetSelectable(p, false);
  }
}

void SequencePages::UnmaskDaemon(int daemon) {
  Source& entry = sources_[static_cast<size_t>(daemon)];
  entry.masked = false;
  entry.retry_at = absl::InfiniteDuration();
  for (int p = 0; p < num_pages_; ++p) {
    if (daemon_of(p) == daemon && !is_missing(p)) SetSelectable(p, true);
  }
}

void SequencePages::MarkMissing(int page) {
  if (TakeAlternate(page)) return;
  missing_[static_cast<size_t>(page) / 64] |= uint64_t{1} << (page % 64);
  SetSelectable(page, false);
}

void SequencePages::SetSelectable(int page, bool selectable) {
  if (is_selectable(page) == selectable) return;
  NoteChange(page, /*forget=*/false);
  selectable_[static_cast<size_t>(page) / 64] ^= uint64_t{1} << (page % 64);
  if (page < num_pages_) num_missing_ += selectable ? -1 : 1;
}

void SequencePages::NoteChange(int page, bool forget) {
  if (change_of_.empty()) return;
  int32_t& idx = change_of_[static_cast<size_t>(page)];
  if (idx < 0) {
    idx = static_cast<int32_t>(changes_.size());
    changes_.push_back({page, false});
  }
  PageChange& change = changes_[static_cast<size_t>(idx)];
  change.forget = change.forget || forget;
}

std::span<const PageChange> SequencePages::TakeChanges() {
  taken_.swap(changes_);
  changes_.clear();
  for (const PageChange& change : taken_) change_of_[static_cast<size_t>(change.page)] = -1;
  return taken_;
}

std::vector<int> SequencePages::MissingPages() const {
  std::vector<int> pages;
  for (int p = 0; p < num_pages_; ++p) {
    if (!is_selectable(p)) pages.push_back(p);
  }
  return pages;
}

int64_t SequencePages::tokens_in(int page) const {
  const int tokens = shape_.geometry.page_tokens;
  return std::clamp<int64_t>(num_tokens_ - int64_t{page} * tokens, 0, tokens);
}

int SequencePages::first_ring_page() const { return std::max(num_sinks(), num_pages_ - n_win_); }

Fetcher* SequencePages::fetcher(int daemon) const {
  return sources_[static_cast<size_t>(daemon)].source->fetcher.get();
}

}  // namespace kvd
