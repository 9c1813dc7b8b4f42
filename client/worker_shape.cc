#include "client/worker_shape.h"

#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvd {

absl::StatusOr<WorkerShape> WorkerShape::Make(const KvGeometry& geometry,
                                              std::vector<uint32_t> shards) {
  if (const char* problem = Problem(geometry)) {
    return absl::InvalidArgumentError(absl::StrCat("geometry: ", problem));
  }
  if (shards.empty()) {
    shards.resize(static_cast<size_t>(geometry.num_shards));
    std::iota(shards.begin(), shards.end(), 0u);
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    const bool ascends = i == 0 || shards[i] > shards[i - 1];
    if (!ascends || shards[i] >= static_cast<uint32_t>(geometry.num_shards)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shards must be ascending and below num_shards (", geometry.num_shards,
                       "), got ", shards[i], " at place ", i));
    }
  }
  return WorkerShape{geometry, std::move(shards), MakeSlotLayout(geometry),
                     MakeSummaryLayout(geometry)};
}

}  // namespace kvd
