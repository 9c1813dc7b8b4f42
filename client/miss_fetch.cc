#include "client/miss_fetch.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/checksum.h"
#include "proto/clock.h"
#include "proto/status.h"

namespace kvd {
absl::StatusOr<std::unique_ptr<MissFetch>> MissFetch::Make(const WorkerShape& shape,
                                                           size_t max_misses, int num_daemons,
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
  fetch->work_.resize(static_cast<size_t>(num_daemons));
  return fetch;
}

void MissFetch::Add(int32_t page, int32_t head, int32_t cache_slot, uint8_t* destination) {
  KVD_CHECK(num_misses_ < added_.size());
  added_[num_misses_++] = {page, head, cache_slot, destination, Miss::Outcome::kFailed};
}

void MissFetch::Start(SequencePages& pages, int layer) {
  // Counting sort by daemon.
  for (Work& work : work_) work.begin = work.end = work.sent = 0;
  for (size_t i = 0; i < num_misses_; ++i) {
    ++work_[static_cast<size_t>(pages.daemon_of(added_[i].page))].end;
  }
  size_t at = 0;
  for (Work& work : work_) {
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
  work.list.deadline = options_.fetch_timeout;
  pages.fetcher(daemon)->Start(work.list);
}

int64_t MissFetch::Finish(SequencePages& pages, int layer, UnitCounts& counts) {
  int64_t bytes = 0;
  for (bool any = true; any;) {
    any = false;
    for (int d = 0; d < pages.num_daemons(); ++d) {
      Work& work = work_[static_cast<size_t>(d)];
      if (!work.in_flight) continue;
      pages.fetcher(d)->Wait(work.list);
      bytes += static_cast<int64_t>(work.list.path_bytes);
      FinishWave(pages, layer, d, counts);
      any = any || work.in_flight;
    }
  }
  return bytes;
}

void MissFetch::FinishWave(SequencePages& pages, int layer, int daemon, UnitCounts& counts) {
  Work& work = work_[static_cast<size_t>(daemon)];
  const absl::StatusCode code = work.list.code;
  // After a failed list nothing more is sent: what was not asked for fails like the rest.
  const size_t first = work.sent - work.list.entries.size();
  const size_t last = code == absl::StatusCode::kOk ? work.sent : work.end;
  work.sent = last;
  for (size_t i = first; i < last; ++i) {
    Miss& miss = grouped_[i];
    miss.outcome = Judge(pages, layer, miss, valid_[i] != 0, code);
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
        ++counts.checksum_failures;
        break;
    }
    const bool gone =
        miss.outcome == Miss::Outcome::kMissing || miss.outcome == Miss::Outcome::kCorrupt;
    if (gone) pages.MarkMissing(miss.page);
  }
  // From now on, not from the start: the wait itself may have been as long as the suspension.
  if (code != absl::StatusCode::kOk) pages.Suspend(daemon, SteadyClock().Now());
  StartWave(pages, daemon);
}

Miss::Outcome MissFetch::Judge(SequencePages& pages, int layer, const Miss& miss, bool valid,
                               absl::StatusCode code) const {
  if (!valid) {
    if (code == absl::StatusCode::kOk) return Miss::Outcome::kMissing;
    return code == absl::StatusCode::kDeadlineExceeded ? Miss::Outcome::kLate
                                                       : Miss::Outcome::kFailed;
  }
  if (options_.verify == VerifyPolicy::kChecksum &&
      Checksum64(miss.destination, shape_.unit_bytes()) !=
          pages.mirror().unit_checksum(layer, miss.head, miss.page)) {
    return Miss::Outcome::kCorrupt;
  }
  return Miss::Outcome::kVerified;
}

}  // namespace kvd
