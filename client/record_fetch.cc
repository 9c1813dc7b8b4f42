#include "client/record_fetch.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "client/device_buffer.h"
#include "proto/geometry.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr size_t kListBytes = size_t{16} << 20;
constexpr size_t kListUnits = 2048;
// Slots of one list where nothing is staged.
constexpr size_t kMappedList = 65536;

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

// --- into a mirror in host memory ----------------------------------------------------------------

// Takes the records of one page and shard; false if they are not as they should be.
using RecordSink = std::function<bool(int page, int shard_pos, const uint8_t* records)>;

// Fetches one shard of one daemon's pages, list by list; clears good[] of those that did not come,
// or that the sink refused.
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
      if (valid[i] == 0 || !sink(requests[request].page, shard_pos, destinations[i]))
        good[request] = 0;
    }
  }
}

// --- into a mirror on a GPU ----------------------------------------------------------------------

// The same by the fetcher's own kernels, straight into the mirror.
void StoreShard(Fetcher& fetcher, std::span<const RecordRequest> requests,
                std::span<const size_t> mine, int shard_pos, absl::Duration timeout, Mirror& mirror,
                bool compare_only, const WorkerShape& shape, std::vector<uint8_t>& good) {
  const size_t per_list =
      fetcher.peer() != nullptr
          ? kMappedList
          : std::clamp<size_t>(kListBytes / shape.slot.summary_bytes(), 1, kListUnits);
  std::vector<RecordList::Entry> entries;
  std::vector<uint8_t> valid(std::min(per_list, mine.size()));
  for (size_t at = 0; at < mine.size(); at += per_list) {
    const size_t count = std::min(per_list, mine.size() - at);
    entries.clear();
    entries.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const RecordRequest& request = requests[mine[at + i]];
      const SlotRef& slot = request.slots[static_cast<size_t>(shard_pos)];
      entries.push_back(
          {slot.slot, slot.generation, request.page, shard_pos * shape.slot.shard_heads});
    }
    RecordList list;
    list.entries = entries;
    list.coarse = mirror.coarse_data();
    list.fine = mirror.fine_data();
    list.num_heads = shape.num_heads();
    list.page_capacity = mirror.page_capacity();
    list.compare_only = compare_only;
    list.valid = valid.data();
    list.deadline = timeout;
    fetcher.StoreRecords(list);
    for (size_t i = 0; i < count; ++i) good[mine[at + i]] &= valid[i];
  }
}

// --- either --------------------------------------------------------------------------------------

std::vector<uint8_t> FetchInto(const PoolView& view, std::span<const RecordRequest> requests,
                               absl::Duration timeout, Mirror& mirror, bool compare_only,
                               const WorkerShape& shape) {
  std::vector<uint8_t> good(requests.size(), 1);
  const RecordSink sink = [&](int page, int shard_pos, const uint8_t* records) {
    return compare_only ? mirror.Equals(page, shard_pos, records)
                        : mirror.Store(page, shard_pos, records).ok();
  };
  const auto lists = ByDaemon(requests, view.attachments.size());
  RunInParallel(static_cast<int>(lists.size()), [&](int n) {
    const std::vector<size_t>& mine = lists[static_cast<size_t>(n)];
    const auto daemon = static_cast<size_t>(requests[mine[0]].daemon);
    Fetcher& fetcher = *view.attachments[daemon]->fetcher;
    for (int s = 0; s < shape.num_shards(); ++s) {
      if (mirror.place().on_gpu()) {
        StoreShard(fetcher, requests, mine, s, timeout, mirror, compare_only, shape, good);
      } else {
        FetchShard(fetcher, requests, mine, s, timeout, sink, shape, good);
      }
    }
  });
  return good;
}

// --- units ---------------------------------------------------------------------------------------

// Where a fetcher that delivers to a GPU puts units that are wanted in host memory: pinned memory,
// which kernels can write; then they are copied. Unused where destinations are what the fetcher
// wants.
class Landing {
 public:
  static absl::StatusOr<Landing> Make(const Attachment& attachment, const uint8_t* destination,
                                      size_t count) {
    Landing landing;
    if (attachment.fetcher->destination_space() == MemorySpace::kHost || !IsHostMemory(destination))
      return landing;
    KVD_ASSIGN_OR_RETURN(const KvGeometry geometry, FromProto(attachment.reply.arena().geometry()));
    landing.unit_bytes_ = MakeSlotLayout(geometry).unit_bytes;
    KVD_ASSIGN_OR_RETURN(landing.bytes_,
                         PlacedBytes::MakePinned(count * landing.unit_bytes_, "fetched units"));
    return landing;
  }
  uint8_t* place(size_t i, uint8_t* destination) {
    return unit_bytes_ == 0 ? destination : bytes_.data() + i * unit_bytes_;
  }
  void Deliver(size_t i, uint8_t* destination) const {
    if (unit_bytes_ != 0) std::memcpy(destination, bytes_.data() + i * unit_bytes_, unit_bytes_);
  }

 private:
  size_t unit_bytes_ = 0;  // 0: unused
  PlacedBytes bytes_;
};

// Fetches the units of one daemon, list by list, up to the first that is missing.
absl::Status FetchUnitsOf(const Attachment& attachment, std::span<const UnitRequest> requests,
                          std::span<const size_t> mine, absl::Duration timeout) {
  KVD_ASSIGN_OR_RETURN(Landing landing, Landing::Make(attachment, requests[mine[0]].destination,
                                                      std::min(kListUnits, mine.size())));
  for (size_t at = 0; at < mine.size(); at += kListUnits) {
    const size_t count = std::min(kListUnits, mine.size() - at);
    std::vector<FetchEntry> entries;
    std::vector<uint8_t*> destinations;
    std::vector<uint8_t> valid(count);
    for (size_t i = 0; i < count; ++i) {
      entries.push_back(requests[mine[at + i]].entry);
      destinations.push_back(landing.place(i, requests[mine[at + i]].destination));
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
    if (num_valid != static_cast<ptrdiff_t>(count)) {
      return absl::UnavailableError(absl::StrCat(
          "fetch from ", attachment.address, ": ", num_valid, " of ", count, " units came (",
          absl::StatusCodeToString(list.code), "); open the sequence again"));
    }
    for (size_t i = 0; i < count; ++i) landing.Deliver(i, requests[mine[at + i]].destination);
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<uint8_t> FetchRecords(const PoolView& view, std::span<const RecordRequest> requests,
                                  absl::Duration timeout, Mirror& mirror,
                                  const WorkerShape& shape) {
  return FetchInto(view, requests, timeout, mirror, /*compare_only=*/false, shape);
}

std::vector<uint8_t> CompareRecords(const PoolView& view, std::span<const RecordRequest> requests,
                                    absl::Duration timeout, Mirror& mirror,
                                    const WorkerShape& shape) {
  return FetchInto(view, requests, timeout, mirror, /*compare_only=*/true, shape);
}

absl::Status FetchUnits(const PoolView& view, std::span<const UnitRequest> requests,
                        absl::Duration timeout) {
  const auto lists = ByDaemon(requests, view.attachments.size());
  std::vector<absl::Status> outcomes(lists.size());
  RunInParallel(static_cast<int>(lists.size()), [&](int n) {
    const std::vector<size_t>& mine = lists[static_cast<size_t>(n)];
    const auto daemon = static_cast<size_t>(requests[mine[0]].daemon);
    outcomes[static_cast<size_t>(n)] =
        FetchUnitsOf(*view.attachments[daemon], requests, mine, timeout);
  });
  absl::Status status;
  for (const absl::Status& outcome : outcomes) status.Update(outcome);
  return status;
}

}  // namespace kvd
