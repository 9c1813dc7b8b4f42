// Arenas as the configuration describes them.

#ifndef LOCKS_KVD_SERVICE_ARENA_FACTORY_H_
#define LOCKS_KVD_SERVICE_ARENA_FACTORY_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/config.pb.h"
#include "service/arena.h"

namespace kvd {

// One arena for each of config.arenas, its query metric loaded. REQUIRES: `config` was checked.
// Errors name the arena and, where there is one, the field.
absl::StatusOr<std::vector<std::shared_ptr<Arena>>> MakeArenas(
    const locks_kvd::v1::DaemonConfig& config, const Incarnation& incarnation, const Clock* clock);

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_ARENA_FACTORY_H_
