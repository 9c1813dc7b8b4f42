#include "client/miss_fetch.h"

#include <algorithm>
#include <utility>

#include "client/device_buffer.h"
#include "kernels/check.h"
#include "kernels/checksum.h"
#include "proto/clock.h"
#include "proto/status.h"

namespace kvd {
namespace {

int64_t NowNs() { return absl::ToInt64Nanoseconds(SteadyClock().Now()); }

}  // namespace

absl::StatusOr<std::unique_ptr<MissFetch>> MissFetch::Make(const WorkerShape& shape,
                                                           size_t max_misses, int max_daemons,
                                                           const StepOptions& options,
                                                           size_t max_list_units) {
  auto fetch = std::unique_ptr<MissFetch>(new MissFetch(shape, options));
  fetch->max_wave_ =
      std::max<size_t>(1, std::min(max_list_units, kMaxListBytes / shape.unit_bytes()));
  constexpr char kWhat[] = "fetch lists";
  KVD_ASSIGN_OR_RETURN(fetch->added_, Buffer<Miss>::Make(max_misses, kWhat));
  KVD_ASSIGN_OR_RETURN(fetch->grouped_, Buffer<Miss>::Make(max_misses, kWhat));
  KVD_ASSIGN_OR_RETURN(fetch->entries_, Buffer<FetchEntry>::Make(max_misses, kWhat));
  KVD_ASSIGN_OR_RETURN(fetch->destinations_, Buffer<uint8_t*>::Make(max_misses, kWhat));
  KVD_ASSIGN_OR_RETURN(fetch->valid_, Buffer<uint8_t>::Make(max_misses, kWhat));
  KVD_ASSIGN_OR_RETURN(fetch->again_, Buffer<uint32_t>::Make(max_misses, kWhat));
  if (options.verify == VerifyPolicy::kChecksum && shape.place.on_gpu()) {
    KVD_ASSIGN_OR_RETURN(fetch->unit_, Buffer<uint8_t>::Make(shape.unit_bytes(), kWhat));
  }
  fetch->work_.resize(static_cast<size_t>(max_daemons));
  return fetch;
}

void MissFetch::Add(int32_t page, int32_t head, int32_t cache_slot, uint8_t* destination) {
  KVD_CHECK(num_misses_ < added_.size());
  added_[num_misses_++] = {page, head, cache_slot, destination, Miss::Outcome::kFailed};
}

void MissFetch::Start(SequencePages& pages, int layer) {
  num_again_ = 0;
  give_up_at_ = SteadyClock().Now() + options_.fetch_timeout;
  // Counting sort by daemon.
  const std::span<Work> in_use(work_.data(), static_cast<size_t>(pages.num_daemons()));
  for (Work& work : in_use) work.begin = work.end = work.sent = 0;
  for (size_t i = 0; i < num_misses_; ++i) {
    ++work_[static_cast<size_t>(pages.daemon_of(added_[i].page))].end;
  }
  size_t at = 0;
  for (Work& work : in_use) {
    const size_t count = work.end;
    work.begin = work.end = work.sent = at;
    at += count;
  }
  for (size_t i = 0; i < num_misses_; ++i) {
    const Miss& miss = added_[i];
    const size_t to = work_[static_cast<size_t>(pages.daemon_of(miss.page))].end++;
    const SlotRef& slot = pages.slot_of(miss.page, shape_.shard_pos(miss.head));
    grouped_[to] = miss;
    entries_[to] = {.slot = slot.slot,
                    .layer = static_cast<uint16_t>(layer),
                    .head = static_cast<uint16_t>(shape_.head_in_shard(miss.head)),
                    .generation = slot.generation};
    destinations_[to] = miss.destination;
    valid_[to] = 0;
  }
  for (int d = 0; d < pages.num_daemons(); ++d) StartWave(pages, d);
}

void MissFetch::StartWave(SequencePages& pages, int daemon) {
  Work& work = work_[static_cast<size_t>(daemon)];
  work.in_flight = work.sent < work.end;
  if (!work.in_flight) return;
  const size_t first = work.sent;
  const size_t count = std::min(max_wave_, work.end - first);
  work.sent = first + count;
  work.list = FetchList{};
  work.list.entries = {entries_.data() + first, count};
  work.list.destinations = destinations_.data() + first;
  work.list.valid = valid_.data() + first;
  work.list.deadline =
      pages.has_alternates() ? options_.failover_timeout() : options_.fetch_timeout;
  const int64_t start = NowNs();
  pages.fetcher(daemon)->Start(work.list);
  work.post_ns = NowNs() - start;
}

PathTotals& MissFetch::TotalsOf(const SequencePages& pages, int daemon) {
  return totals_[static_cast<size_t>(pages.fetcher(daemon)->path())];
}

void MissFetch::CountUnit(Miss::Outcome outcome, absl::StatusCode code, PathTotals& totals) {
  switch (outcome) {
    case Miss::Outcome::kVerified:
      return totals.verified.Add(1);
    case Miss::Outcome::kMissing:
      return totals.missing.Add(1);
    case Miss::Outcome::kLate:
      return totals.late.Add(1);
    case Miss::Outcome::kFailed:
      totals.aborted.Add(code == absl::StatusCode::kAborted ? 1 : 0);
      return totals.failed.Add(1);
    case Miss::Outcome::kCorrupt:
      return totals.corrupt.Add(1);
  }
}

int64_t MissFetch::Finish(SequencePages& pages, int layer, UnitCounts& counts) {
  int64_t bytes = 0;
  for (bool any = true; any;) {
    any = false;
    for (int d = 0; d < pages.num_daemons(); ++d) {
      Work& work = work_[static_cast<size_t>(d)];
      if (!work.in_flight) continue;
      const int64_t start = NowNs();
      pages.fetcher(d)->Wait(work.list);
      PathTotals& totals = TotalsOf(pages, d);
      totals.seconds.Observe(work.post_ns + NowNs() - start);
      totals.post_seconds.Observe(work.post_ns);
      totals.bytes.Add(static_cast<int64_t>(work.list.path_bytes));
      bytes += static_cast<int64_t>(work.list.path_bytes);
      FinishWave(pages, layer, d, counts);
      any = any || work.in_flight;
    }
  }
  if (num_again_ > 0) bytes += FetchAgain(pages, layer, counts);
  return bytes;
}

void MissFetch::FinishWave(SequencePages& pages, int layer, int daemon, UnitCounts& counts) {
  Work& work = work_[static_cast<size_t>(daemon)];
  const absl::StatusCode code = work.list.code;
  // After a failed list nothing more is sent: what was not asked for fails like the rest.
  const size_t first = work.sent - work.list.entries.size();
  const size_t last = code == absl::StatusCode::kOk ? work.sent : work.end;
  work.sent = last;
  // From now on, not from the start: the wait itself may have been as long as the suspension.
  if (code != absl::StatusCode::kOk) pages.Suspend(daemon, SteadyClock().Now());
  for (size_t i = first; i < last; ++i)
    Settle(pages, layer, daemon, i, valid_[i] != 0, code, counts);
  StartWave(pages, daemon);
}

void MissFetch::Settle(SequencePages& pages, int layer, int daemon, size_t place, bool valid,
                       absl::StatusCode code, UnitCounts& counts) {
  Miss& miss = grouped_[place];
  miss.outcome = Judge(pages, layer, miss, valid, code);
  CountUnit(miss.outcome, code, TotalsOf(pages, daemon));
  const bool gone =
      miss.outcome == Miss::Outcome::kMissing || miss.outcome == Miss::Outcome::kCorrupt;
  // Another unit of the page may have turned it to its second holder already.
  const bool moved = pages.daemon_of(miss.page) != daemon;
  if (gone && !moved) pages.MarkMissing(miss.page);
  if (miss.outcome == Miss::Outcome::kCorrupt) ++counts.checksum_failures;
  if (miss.outcome != Miss::Outcome::kVerified && pages.daemon_of(miss.page) != daemon &&
      pages.is_selectable(miss.page)) {
    again_[num_again_++] = static_cast<uint32_t>(place);
    return;
  }
  switch (miss.outcome) {
    case Miss::Outcome::kVerified:
      ++counts.verified;
      break;
    case Miss::Outcome::kMissing:
      ++counts.missing;
      break;
    case Miss::Outcome::kLate:
      ++counts.late;
      break;
    case Miss::Outcome::kFailed:
      ++counts.failed;
      break;
    case Miss::Outcome::kCorrupt:
      break;
  }
}

// One daemon and one list after the other: this is the exception. The first round's lists have all
// ended, so their arrays are free.
int64_t MissFetch::FetchAgain(SequencePages& pages, int layer, UnitCounts& counts) {
  const auto daemon_of = [&](uint32_t place) { return pages.daemon_of(grouped_[place].page); };
  std::sort(again_.data(), again_.data() + num_again_, [&](uint32_t a, uint32_t b) {
    return std::pair(daemon_of(a), a) < std::pair(daemon_of(b), b);
  });
  const size_t count = std::exchange(num_again_, 0);
  int64_t bytes = 0;
  for (size_t at = 0; at < count;) {
    const int daemon = daemon_of(again_[at]);
    size_t n = 0;
    for (; at + n < count && n < max_wave_ && daemon_of(again_[at + n]) == daemon; ++n) {
      const Miss& miss = grouped_[again_[at + n]];
      const SlotRef& slot = pages.slot_of(miss.page, shape_.shard_pos(miss.head));
      entries_[n] = {.slot = slot.slot,
                     .layer = static_cast<uint16_t>(layer),
                     .head = static_cast<uint16_t>(shape_.head_in_shard(miss.head)),
                     .generation = slot.generation};
      destinations_[n] = miss.destination;
      valid_[n] = 0;
    }
    FetchList list;
    list.entries = {entries_.data(), n};
    list.destinations = destinations_.data();
    list.valid = valid_.data();
    list.deadline = std::max(give_up_at_ - SteadyClock().Now(), absl::Milliseconds(1));
    const int64_t start = NowNs();
    pages.fetcher(daemon)->Start(list);
    const int64_t posted = NowNs();
    pages.fetcher(daemon)->Wait(list);
    PathTotals& totals = TotalsOf(pages, daemon);
    totals.seconds.Observe(NowNs() - start);
    totals.post_seconds.Observe(posted - start);
    totals.bytes.Add(static_cast<int64_t>(list.path_bytes));
    bytes += static_cast<int64_t>(list.path_bytes);
    if (list.code != absl::StatusCode::kOk) pages.Suspend(daemon, SteadyClock().Now());
    for (size_t i = 0; i < n; ++i) {
      Settle(pages, layer, daemon, again_[at + i], valid_[i] != 0, list.code, counts);
    }
    at += n;
  }
  return bytes;
}

Miss::Outcome MissFetch::Judge(SequencePages& pages, int layer, const Miss& miss, bool valid,
                               absl::StatusCode code) {
  if (!valid) {
    if (code == absl::StatusCode::kOk) return Miss::Outcome::kMissing;
    return code == absl::StatusCode::kDeadlineExceeded ? Miss::Outcome::kLate
                                                       : Miss::Outcome::kFailed;
  }
  if (options_.verify == VerifyPolicy::kChecksum &&
      !HasChecksum(miss, pages.mirror().unit_checksum(layer, miss.head, miss.page))) {
    return Miss::Outcome::kCorrupt;
  }
  return Miss::Outcome::kVerified;
}

bool MissFetch::HasChecksum(const Miss& miss, uint64_t checksum) {
  const uint8_t* unit = miss.destination;
  if (shape_.place.on_gpu()) {
    if (!CopyBytes(shape_.place, unit_.data(), unit, unit_.size()).ok()) return false;
    unit = unit_.data();
  }
  return Checksum64(unit, shape_.unit_bytes()) == checksum;
}

}  // namespace kvd
