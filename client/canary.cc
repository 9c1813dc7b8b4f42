#include "client/canary.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/status.h"

namespace kvd {
namespace {

// Units of the canary page that are fetched: enough for a rate, little enough for a slow network.
constexpr size_t kCanaryUnits = 256;
constexpr uint64_t kCanaryGeneration = 2;

}  // namespace

absl::StatusOr<Canary> Canary::Make(const SlotLayout& slot, uint32_t canary_slot,
                                    const Incarnation& incarnation, const MemoryPlace& place) {
  Canary canary;
  canary.incarnation_ = incarnation;
  const size_t count = std::min(slot.num_units(), kCanaryUnits);
  canary.bytes_.resize(count * slot.unit_bytes);
  KVD_ASSIGN_OR_RETURN(canary.landing_, PlacedBytes::Make(place, canary.bytes_.size(), "canary"));
  canary.valid_.resize(count);
  const auto heads = static_cast<size_t>(slot.shard_heads);
  for (size_t i = 0; i < count; ++i) {
    canary.entries_.push_back({canary_slot, static_cast<uint16_t>(i / heads),
                               static_cast<uint16_t>(i % heads), kCanaryGeneration});
    canary.destinations_.push_back(canary.landing_.data() + i * slot.unit_bytes);
  }
  return canary;
}

bool Canary::IsRight() const {
  for (size_t i = 0; i < bytes_.size() / sizeof(uint64_t); ++i) {
    uint64_t word = 0;
    std::memcpy(&word, bytes_.data() + i * sizeof(word), sizeof(word));
    if (word != CanaryWord(incarnation_, i)) return false;
  }
  return true;
}

absl::StatusOr<double> Canary::Fetch(Fetcher& fetcher, absl::Duration timeout) {
  std::fill(bytes_.begin(), bytes_.end(), uint8_t{0});
  KVD_RETURN_IF_ERROR(CopyBytes(landing_.place(), landing_.data(), bytes_.data(), bytes_.size()));
  FetchList list;
  list.entries = entries_;
  list.destinations = destinations_.data();
  list.valid = valid_.data();
  list.deadline = timeout;
  const absl::Time start = absl::Now();
  fetcher.Start(list);
  fetcher.Wait(list);
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  if (list.code != absl::StatusCode::kOk) return absl::Status(list.code, "the canary fetch failed");
  if (list.num_valid != static_cast<int64_t>(entries_.size())) {
    return absl::DataLossError(absl::StrCat("the canary fetch delivered ", list.num_valid, " of ",
                                            entries_.size(), " units"));
  }
  KVD_RETURN_IF_ERROR(CopyBytes(landing_.place(), bytes_.data(), landing_.data(), bytes_.size()));
  if (!IsRight()) {
    return absl::DataLossError("the canary fetch delivered wrong bytes: do not use this daemon");
  }
  return seconds;
}

}  // namespace kvd
