#include "client/record_fetch.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"

namespace kvd {
namespace {

constexpr size_t kListBytes = size_t{16} << 20;
constexpr size_t kListUnits = 2048;

// Positions of `requests` by daemon, and the daemons that have any.
template <typename Request>
std::vector<std::vector<size_t>> ByDaemon(std::span<const Request> requests, size_t num_daemons) {
  std::vector<std::vector<size_t>> lists(num_daemons);
  for (size_t i = 0; i < requests.size(); ++i) {
    lists[static_cast<size_t>(requests[i].daemon)].push_back(i);
  }
  std::erase_if(lists, [](const std::vector<size_t>& list) { return list.empty(); });
  return lists;
}

// Takes the records of one page and shard; false if they are not as they should be.
using RecordSink = std::function<bool(int page, int shard_pos, const uint8_t* records)>;

// Fetches one shard of one daemon's pages, list by list; clears good[] of those that did not come, or that
// the sink refused.
void FetchShard(Fetcher& fetcher, std::span<const RecordRequest> requests,
                std::span<const size_t> mine, int shard_pos, absl::Duration timeout,
                const RecordSink& sink, const WorkerShape& shape, std::vector<uint8_t>& good) {
  const size_t record_bytes = shape.slot.summary_bytes();
  const size_t per_list = std::clamp<size_t>(kListBytes / record_bytes, 1, kListUnits);
  std::vector<uint8_t> staging(std::min(per_list, mine.size()) * record_bytes);
  for (size_t at = 0; at < mine.size(); at += per_list) {
    const size_t count = std::min(per_list, mine.size() - at);
    std::vector<FetchEntry> entries;
    std::vector<uint8_t*> destinations;
    std::vector<uint8_t> valid(count);
    for (size_t i = 0; i < count; ++i) {
      const SlotRef& slot = requests[mine[at + i]].slots[static_cast<size_t>(shard_pos)];
      entries.push_back({slot.slot, 0, 0, slot.generation});
      destinations.push_back(staging.data() + i * record_bytes);
    }
    FetchList list;
    list.entries = entries;
    list.destinations = destinations.data();
    list.valid = valid.data();
    list.deadline = timeout;
    fetcher.FetchSummaries(list);
    for (size_t i = 0; i < count; ++i) {
      const size_t request = mine[at + i];
      if (valid[i] == 0 || !sink(requests[request].page, shard_pos, destinations[i])) good[request] = 0;
    }
  }
}

std::vector<uint8_t> FetchInto(const PoolView& view, std::span<const RecordRequest> requests,
                               absl::Duration timeout, const WorkerShape& shape, const RecordSink& sink) {
  std::vector<uint8_t> good(requests.size(), 1);
  const auto lists = ByDaemon(requests, view.attachments.size());
  RunInParallel(static_cast<int>(lists.size()), [&](int n) {
    const std::vector<size_t>& mine = lists[static_cast<size_t>(n)];
    const auto daemon = static_cast<size_t>(requests[mine[0]].daemon);
    Fetcher& fetcher = *view.attachments[daemon]->fetcher;
    for (int s = 0; s < shape.num_shards(); ++s) {
      FetchShard(fetcher, requests, mine, s, timeout, sink, shape, good);
    }
  });
  return good;
}

}  // namespace

std::vector<uint8_t> FetchRecords(const PoolView& view, std::span<const RecordRequest> requests,
                                  absl::Duration timeout, Mirror& mirror,
                                  const WorkerShape& shape) {
  return FetchInto(view, requests, timeout, shape, [&](int page, int shard_pos, const uint8_t* records) {
    mirror.Store(page, shard_pos, records);
    return true;
  });
}

std::vector<uint8_t> CompareRecords(const PoolView& view, std::span<const RecordRequest> requests,
                                    absl::Duration timeout, const Mirror& mirror,
                                    const WorkerShape& shape) {
  return FetchInto(view, requests, timeout, shape, [&](int page, int shard_pos, const uint8_t* records) {
    return mirror.Equals(page, shard_pos, records);
  });
}

absl::Status FetchUnits(const PoolView& view, std::span<const UnitRequest> requests,
                        absl::Duration timeout) {
  const auto lists = ByDaemon(requests, view.attachments.size());
  std::vector<absl::Status> outcomes(lists.size());
  RunInParallel(static_cast<int>(lists.size()), [&](int n) {
    const std::vector<size_t>& mine = lists[static_cast<size_t>(n)];
    const Attachment& attachment = *view.attachments[static_cast<size_t>(requests[mine[0]].daemon)];
    for (size_t at = 0; at < mine.size(); at += kListUnits) {
      const size_t count = std::min(kListUnits, mine.size() - at);
      std::vector<FetchEntry> entries;
      std::vector<uint8_t*> destinations;
      std::vector<uint8_t> valid(count);
      for (size_t i = 0; i < count; ++i) {
        entries.push_back(requests[mine[at + i]].entry);
        destinations.push_back(requests[mine[at + i]].destination);
      }
      FetchList list;
      list.entries = entries;
      list.destinations = destinations.data();
      list.valid = valid.data();
      list.deadline = timeout;
      attachment.fetcher->Start(list);
      attachment.fetcher->Wait(list);
      attachment.figures->CountFetch(list, attachment.fetcher->path());
      const auto num_valid = std::count(valid.begin(), valid.end(), uint8_t{1});
      if (num_valid == static_cast<ptrdiff_t>(count)) continue;
      outcomes[static_cast<size_t>(n)] = absl::UnavailableError(absl::StrCat(
          "fetch from ", attachment.address, ": ", num_valid, " of ", count, " units came (",
          absl::StatusCodeToString(list.code), "); open the sequence again"));
      return;
    }
  });
  absl::Status status;
  for (const absl::Status& outcome : outcomes) status.Update(outcome);
  return status;
}

}  // namespace kvd
