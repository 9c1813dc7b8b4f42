#include "client/shared_fetcher.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "client/fetch_list.h"
#include "kernels/checksum.h"
#include "kernels/gather.h"

namespace kvd {
namespace {

// Units that are copied between two looks at the clock, and the size of the array on the stack.
constexpr size_t kBatch = 128;

}  // namespace

// True if nothing may be read for `list`; its code says why.
bool SharedFetcher::Refuse(FetchList& list) const {
  BeginList(list);
  if (lost_.load(std::memory_order_acquire)) {
    list.code = absl::StatusCode::kAborted;
  } else if (!AllInRange(list, memory_->shape())) {
    list.code = absl::StatusCode::kInvalidArgument;
  }
  return list.code != absl::StatusCode::kOk;
}

void SharedFetcher::Start(FetchList& list) {
  if (Refuse(list)) return;
  const size_t unit_bytes = memory_->shape().slot.unit_bytes;
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(list.deadline);
  GatherUnit units[kBatch];
  for (size_t first = 0; first < list.entries.size(); first += kBatch) {
    if (first > 0 && std::chrono::steady_clock::now() > deadline) {
      list.code = absl::StatusCode::kDeadlineExceeded;
      return;
    }
    const size_t count = std::min(kBatch, list.entries.size() - first);
    for (size_t i = 0; i < count; ++i) {
      const FetchEntry& entry = list.entries[first + i];
      units[i] = {memory_->unit(entry.slot, entry.layer, entry.head), memory_->header(entry.slot),
                  entry.generation, list.destinations[first + i]};
    }
    list.num_valid +=
        ref::GatherUnits(units, static_cast<int64_t>(count), unit_bytes, list.valid + first);
  }
  list.path_bytes = list.entries.size() * unit_bytes;
  if (lost_.load(std::memory_order_acquire)) AbortList(list);
}

void SharedFetcher::FetchSummaries(FetchList& list) {
  if (Refuse(list)) return;
  const size_t bytes = memory_->shape().slot.summary_bytes();
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(list.deadline);
  for (size_t i = 0; i < list.entries.size(); ++i) {
    if (std::chrono::steady_clock::now() > deadline) {
      list.code = absl::StatusCode::kDeadlineExceeded;
      return;
    }
    const FetchEntry& entry = list.entries[i];
    const PageHeader* header = memory_->header(entry.slot);
    alignas(64) uint8_t copy[sizeof(PageHeader)];
    const GatherUnit records = {memory_->summary(entry.slot), header, entry.generation,
                                list.destinations[i]};
    const GatherUnit its_header = {reinterpret_cast<const uint8_t*>(header), header,
                                   entry.generation, copy};
    uint8_t valid[2] = {};
    ref::GatherUnits(&records, 1, bytes, &valid[0]);
    ref::GatherUnits(&its_header, 1, sizeof(copy), &valid[1]);
    uint64_t checksum = 0;
    std::memcpy(&checksum, copy + offsetof(PageHeader, summary_checksum), sizeof(checksum));
    if (valid[0] == 1 && valid[1] == 1 && Checksum64(list.destinations[i], bytes) == checksum) {
      list.valid[i] = 1;
      ++list.num_valid;
    } else {
      std::memset(list.destinations[i], 0, bytes);
    }
  }
  list.path_bytes = list.entries.size() * bytes;
  if (lost_.load(std::memory_order_acquire)) AbortList(list);
}

}  // namespace kvd
