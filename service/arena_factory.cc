#include "service/arena_factory.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/geometry.h"
#include "proto/gpu_memory.h"
#include "proto/page_key.h"
#include "proto/status.h"
#include "service/config.h"

namespace kvd {

absl::StatusOr<std::vector<std::shared_ptr<Arena>>> MakeArenas(
    const locks_kvd::v1::DaemonConfig& config, const Incarnation& incarnation, const Clock* clock) {
  std::vector<std::shared_ptr<Arena>> arenas;
  for (int i = 0; i < config.arenas_size(); ++i) {
    const auto& proto = config.arenas(i);
    const std::string at = absl::StrFormat("arenas[%d]", i);
    ArenaOptions options;
    options.tenant = proto.tenant();
    options.model = proto.model();
    KVD_ASSIGN_OR_RETURN(options.geometry, FromProto(proto.geometry()));
    options.model_fingerprint =
        ModelFingerprint(options.geometry, proto.identity().weights_id(), proto.identity().rope());
    options.bytes = proto.bytes();
    if (proto.has_gpu()) {
      if (const absl::Status gpu = CheckGpu(proto.gpu()); !gpu.ok()) {
        return Annotate(gpu, absl::StrCat(at, ".gpu"));
      }
      options.place = OnGpu(proto.gpu());
    }
    options.encoder = ArenaEncoder(proto);
    if (options.encoder == Encoder::kE1S) {
      const std::string problem =
          QueryMetric::Load(proto.query_metric_file(), options.geometry, &options.metric);
      if (!problem.empty()) {
        return absl::FailedPreconditionError(
            absl::StrCat(at, ".query_metric_file: ", problem,
                         ": measure the metric for this model, or leave the field empty"));
      }
    }
    options.reservations_per_session = config.limits().reservations_per_session();
    options.leases_per_session = config.limits().leases_per_session();
    options.quarantine = absl::Milliseconds(config.times().quarantine_ms());
    options.incarnation = incarnation;
    options.clock = clock;
    absl::StatusOr<std::unique_ptr<Arena>> arena = Arena::Make(std::move(options));
    if (!arena.ok()) return Annotate(arena.status(), at);
    arenas.push_back(*std::move(arena));
  }
  return arenas;
}

}  // namespace kvd
