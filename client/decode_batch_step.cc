// DecodeBatch between two steps: what the host takes over and tells the GPU.

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/decode_batch_impl.h"
#include "client/peer_fetcher.h"
#include "client/sequence.h"
#include "proto/clock.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr char kWhat[] = "decode batch";

StepRow RowOf(SequencePages& pages) {
  return {.num_tokens = pages.num_tokens(),
          .num_pages = pages.num_pages(),
          .num_sinks = pages.num_sinks(),
          .first_ring_page = pages.first_ring_page(),
          .ring_pages = pages.ring().num_pages(),
          .ring = pages.ring().page(0),
          .sinks = pages.sink_page(0)};
}

}  // namespace

// The device's number of a session with a daemon. Where there are too many, the page's units fail
// and are reported missing.
uint32_t DecodeBatch::Impl::ArenaOf(const std::shared_ptr<PageSource>& source) {
  if (source == nullptr) return kMaxArenas;
  auto at = std::find(arenas.begin(), arenas.end(), source);
  if (at == arenas.end()) {
    at = std::find(arenas.begin(), arenas.end(), nullptr);
    if (at == arenas.end()) return kMaxArenas;
    *at = source;
    arenas_changed = true;
  }
  return static_cast<uint32_t>(at - arenas.begin());
}

PagePlace DecodeBatch::Impl::PlaceOf(SequencePages& pages, int page, int shard_pos) {
  if (pages.versions()[page] == 0) return {};  // no row yet; not selectable
  const SlotRef& slot = pages.slot_of(page, shard_pos);
  return {slot.generation, slot.slot, ArenaOf(pages.source(pages.daemon_of(page)))};
}

// A session that has ended is not read any more: its memory is given up once the table without it
// is on its way (its destructor waits for the GPU).
void DecodeBatch::Impl::DropLostArenas() {
  for (std::shared_ptr<PageSource>& source : arenas) {
    if (source == nullptr || !source->lost.load(std::memory_order_acquire)) continue;
    source.reset();
    arenas_changed = true;
  }
}

// The step's lists of changes, of all rows one after another, stay in pinned memory until the step
// is done: no wait, unless they are more than it holds (a whole daemon's pages).
absl::Status DecodeBatch::Impl::ApplyChanges(int n, Flight& flight, size_t* used,
                                             cudaStream_t stream) {
  Row& row = rows[static_cast<size_t>(n)];
  const std::span<const PageChange> changes = row.pages->TakeChanges();
  const auto shards = static_cast<size_t>(shape.num_shards());
  for (size_t first = 0; first < changes.size();) {
    if (*used == kMaxUpdates) {
      KVD_RETURN_IF_ERROR(GpuStatus(cudaStreamSynchronize(stream), kWhat));
      *used = 0;
    }
    const size_t count = std::min(changes.size() - first, kMaxUpdates - *used);
    PageUpdate* const updates = flight.updates.data() + *used;
    PagePlace* const places = flight.update_places.data() + *used * shards;
    for (size_t i = 0; i < count; ++i) {
      const PageChange& change = changes[first + i];
      updates[i] = {change.page,
                    (row.pages->is_selectable(change.page) ? PageUpdate::kSelectable : 0u) |
                        (change.forget ? PageUpdate::kForget : 0u)};
      for (size_t s = 0; s < shards; ++s) {
        places[i * shards + s] = PlaceOf(*row.pages, change.page, static_cast<int>(s));
      }
    }
    // The row's maps are one (layer, head) after the other: the first one's addresses and the
    // capacity give all.
    const PageUpdateArgs args = {.num_updates = static_cast<int>(count),
                                 .num_shards = shape.num_shards(),
                                 .updates = updates,
                                 .new_places = places,
                                 .places = row.places.data(),
                                 .selectable = row.selectable.data(),
                                 .num_cache_rows = static_cast<int>(shape.units_per_page()),
                                 .page_capacity = row.pages->page_capacity(),
                                 .cache_slots = step_shape.cache_slots,
                                 .page_slot = row.page_slot.data(),
                                 .slot_page = row.slot_page.data(),
                                 .slot_step = row.slot_step.data()};
    KVD_RETURN_IF_ERROR(GpuStatus(LaunchPageUpdates(args, stream), kWhat));
    *used += count;
    first += count;
  }
  return absl::OkStatus();
}

RowMass DecodeBatch::Impl::MassOfRow(const Flight& flight, size_t n) const {
  const auto heads = static_cast<size_t>(shape.num_q_heads());
  RowMass sum;
  for (size_t h = 0; h < heads; ++h) {
    sum.unread += flight.mass[n * heads + h].unread;
    sum.lost += flight.mass[n * heads + h].lost;
  }
  const auto parts = static_cast<float>(shape.num_q_heads() * shape.num_layers());
  return {sum.unread / parts, sum.lost / parts};
}

// Counts a finished step and masks the pages that failed in it. Nothing happens if it is not
// finished and `wait` is false.
absl::Status DecodeBatch::Impl::TakeFigures(Flight& flight, bool wait) {
  if (!flight.pending) return absl::OkStatus();
  const cudaError_t state = wait ? cudaEventSynchronize(flight.done) : cudaEventQuery(flight.done);
  if (state == cudaErrorNotReady) return absl::OkStatus();
  KVD_RETURN_IF_ERROR(GpuStatus(state, "decode step"));
  flight.pending = false;
  ++report.num_steps;
  report.hits = report.misses = 0;
  report.failed = flight.host_failed;
  for (size_t n = 0; n < rows.size(); ++n) {
    Row& row = rows[n];
    const StepFigures& of_row = flight.figures[n];
    if (row.pages == nullptr) continue;
    report.hits += of_row.hits;
    report.misses += of_row.misses;
    report.failed += of_row.failed;
    const auto named = std::min<uint32_t>(of_row.num_failures, StepFigures::kMaxFailures);
    for (uint32_t i = 0; i < named; ++i) {
      if (row.pages->is_selectable(of_row.failed_pages[i]))
        row.pages->MarkMissing(of_row.failed_pages[i]);
    }
    if (reports_mass()) report.mass[n] = MassOfRow(flight, n);
    if (row.totals == nullptr) continue;
    if (row.pages->num_missing() > 0) {
      row.totals->lossy_steps.Add(1);
      if (reports_mass()) row.totals->AddLostMass(report.mass[n].lost);
    }
    row.totals->hits.Add(of_row.hits);
    if (options.mode == BatchMode::kHostDriven) continue;  // counted where they were fetched
    row.totals->misses.Add(of_row.misses);
    row.totals->verified_units.Add(of_row.misses - of_row.failed);
    row.totals->missing_units.Add(of_row.failed - of_row.damaged);
    row.totals->checksum_failures.Add(of_row.damaged);
    row.totals->bytes_fetched.Add(static_cast<int64_t>(of_row.misses - of_row.failed) *
                                  static_cast<int64_t>(shape.unit_bytes()));
  }
  return absl::OkStatus();
}

absl::Status DecodeBatch::Impl::BeginStep(cudaStream_t stream) {
  if (next_layer != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("BeginStep between steps only: layer ", next_layer, " is next"));
  }
  Flight& flight = flights[num_steps % kTableCopies];
  KVD_RETURN_IF_ERROR(TakeFigures(flight, /*wait=*/true));
  for (Flight& other : flights) KVD_RETURN_IF_ERROR(TakeFigures(other, /*wait=*/false));
  const absl::Duration now = SteadyClock().Now();
  for (size_t n = 0; n < rows.size(); ++n) {
    if (rows[n].pages == nullptr) continue;
    if (absl::Status begun = rows[n].pages->BeginStep(now); !begun.ok())
      return Annotate(begun, absl::StrCat("row ", n));
  }
  size_t used = 0;  // of the flight's lists of changes
  for (size_t n = 0; n < rows.size(); ++n) {
    const Row& row = rows[n];
    if (row.pages != nullptr)
      KVD_RETURN_IF_ERROR(ApplyChanges(static_cast<int>(n), flight, &used, stream));
    StepRow& entry = flight.tables.rows[n];
    entry = row.pages != nullptr ? RowOf(*row.pages) : StepRow();
    entry.places = row.places.data();
    entry.selectable = const_cast<uint64_t*>(row.selectable.data());
    entry.cache = const_cast<uint8_t*>(row.cache.data());
    flight.tables.num_pages[n] = entry.num_pages;
  }
  const auto upload = [&](void* to, const void* from, size_t size) {
    return GpuStatus(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, stream), kWhat);
  };
  KVD_RETURN_IF_ERROR(upload(tables.bytes.data(), flight.tables.bytes.data(), tables.bytes.size()));
  std::vector<std::shared_ptr<PageSource>> dropped;
  if (std::any_of(arenas.begin(), arenas.end(), [](const auto& source) {
        return source != nullptr && source->lost.load(std::memory_order_acquire);
      })) {
    dropped = arenas;  // kept until the table without them is on its way
    DropLostArenas();
  }
  if (std::exchange(arenas_changed, false)) {
    for (size_t a = 0; a < arenas.size(); ++a) {
      const PeerFetcher* peer = arenas[a] == nullptr ? nullptr : arenas[a]->fetcher->peer();
      flight.arenas[a] = peer == nullptr ? PeerArena() : peer->arena();
    }
    KVD_RETURN_IF_ERROR(upload(arena_table.data(), flight.arenas.data(), arena_table.num_bytes()));
  }
  ++num_steps;
  return absl::OkStatus();
}

absl::Status DecodeBatch::Impl::EndStep(cudaStream_t stream) {
  if (num_steps == 0 || next_layer != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("EndStep after BeginStep and all layers: layer ", next_layer, " is next"));
  }
  Flight& flight = flights[(num_steps - 1) % kTableCopies];
  KVD_RETURN_IF_ERROR(
      GpuStatus(cudaMemcpyAsync(flight.figures.data(), figures.data(), figures.num_bytes(),
                                cudaMemcpyDeviceToHost, stream),
                kWhat));
  if (reports_mass()) {
    KVD_RETURN_IF_ERROR(GpuStatus(cudaMemcpyAsync(flight.mass.data(), mass.data(), mass.num_bytes(),
                                                  cudaMemcpyDeviceToHost, stream),
                                  kWhat));
  }
  KVD_RETURN_IF_ERROR(GpuStatus(cudaEventRecord(flight.done, stream), kWhat));
  events->latest.store(flight.done, std::memory_order_release);
  flight.pending = true;
  flight.host_failed = std::exchange(host_failed, 0);
  for (Row& row : rows) {
    if (row.pages == nullptr) continue;
    row.pages->AdvanceTail();
    if (row.sequence != nullptr) row.sequence->WakeSealer();
    if (row.totals == nullptr) continue;
    row.totals->steps.Add(1);
    row.totals->layers.Add(shape.num_layers());
    if (scan == ScanMode::kProgressive) row.totals->progressive_layers.Add(shape.num_layers());
    row.totals->unsealed_pages.Set(row.pages->complete_pages() - row.pages->num_pages());
  }
  return Outcome();
}

absl::Status DecodeBatch::Impl::Outcome() const {
  if (options.step.loss == LossPolicy::kGoOn) return absl::OkStatus();
  for (size_t n = 0; n < rows.size(); ++n) {
    if (rows[n].pages == nullptr || rows[n].pages->num_missing() == 0) continue;
    const std::string what =
        absl::StrCat("row ", n, ": ", rows[n].pages->num_missing(), " pages are missing");
    if (options.step.loss == LossPolicy::kFail) {
      return absl::AbortedError(absl::StrCat(what, ": o and lse of this step are not to be used"));
    }
    return absl::UnavailableError(absl::StrCat(
        what,
        ": o and lse are valid over the rest; put them again and Repair, or let the row leave"));
  }
  return absl::OkStatus();
}

}  // namespace kvd
