// What one worker holds of a model: the geometry, and the KV heads of its shards.
//
// Why: under tensor parallelism a worker attends with some of the KV heads, and each page has one
// slot per shard. Everything in client/ counts heads from 0 to num_heads(); this is the only place
// that maps them to (shard, head of the shard). Thread safety: immutable plain values.

#ifndef LOCKS_KVD_CLIENT_WORKER_SHAPE_H_
#define LOCKS_KVD_CLIENT_WORKER_SHAPE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/layout.h"
#include "kernels/memory_space.h"

namespace kvd {

struct WorkerShape {
  KvGeometry geometry;
  std::vector<uint32_t> shards;  // ascending, distinct
  SlotLayout slot;
  SummaryLayout summary;
  MemoryPlace place = {};  // of mirrors, page caches and local pages

  // kInvalidArgument if the geometry is unsupported or `shards` is not ascending or out of range.
  // Empty `shards` means all.
  static absl::StatusOr<WorkerShape> Make(const KvGeometry& geometry, std::vector<uint32_t> shards);

  int num_layers() const { return geometry.num_layers; }
  int num_shards() const { return static_cast<int>(shards.size()); }
  int num_heads() const { return num_shards() * geometry.shard_heads(); }  // KV heads held
  int num_q_heads() const { return num_heads() * geometry.group(); }
  int shard_pos(int head) const { return head / geometry.shard_heads(); }  // index into shards
  int head_in_shard(int head) const { return head % geometry.shard_heads(); }
  size_t unit_bytes() const { return slot.unit_bytes; }
  // Units of one page that this worker holds, as [L][heads].
  size_t units_per_page() const {
    return static_cast<size_t>(num_layers()) * static_cast<size_t>(num_heads());
  }
  size_t page_bytes() const { return units_per_page() * unit_bytes(); }
  size_t unit_idx(int layer, int head) const {
    return static_cast<size_t>(layer) * static_cast<size_t>(num_heads()) +
           static_cast<size_t>(head);
  }
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_WORKER_SHAPE_H_
