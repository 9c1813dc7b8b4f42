#include "client/mirror.h"

#include <cstring>

#include "kernels/check.h"
#include "proto/status.h"

namespace kvd {

absl::StatusOr<std::unique_ptr<Mirror>> Mirror::Make(const WorkerShape& shape, int page_capacity) {
  KVD_CHECK(page_capacity > 0 && page_capacity <= kMaxPages);
  auto mirror = std::unique_ptr<Mirror>(new Mirror(shape, page_capacity));
  const size_t records = shape.units_per_page() * static_cast<size_t>(page_capacity);
  KVD_ASSIGN_OR_RETURN(mirror->coarse_, Buffer<uint8_t>::Make(records * shape.summary.coarse_bytes,
                                                              "mirror, coarse parts"));
  KVD_ASSIGN_OR_RETURN(mirror->fine_, Buffer<uint8_t>::Make(records * shape.summary.fine_bytes,
                                                            "mirror, fine parts"));
  return mirror;
}

void Mirror::Store(int page, int shard_pos, const uint8_t* records) {
  KVD_CHECK(page >= 0 && page < page_capacity_);
  KVD_CHECK(shard_pos >= 0 && shard_pos < shape_.num_shards());
  const SlotLayout& slot = shape_.slot;
  for (int layer = 0; layer < shape_.num_layers(); ++layer) {
    for (int h = 0; h < slot.shard_heads; ++h) {
      const size_t idx = record_idx(layer, shard_pos * slot.shard_heads + h, page);
      std::memcpy(coarse_.data() + idx * slot.coarse_bytes, records + slot.coarse_offset(layer, h),
                  slot.coarse_bytes);
      std::memcpy(fine_.data() + idx * slot.fine_bytes, records + slot.fine_offset(layer, h),
                  slot.fine_bytes);
    }
  }
}

bool Mirror::Equals(int page, int shard_pos, const uint8_t* records) const {
  KVD_CHECK(page >= 0 && page < page_capacity_);
  const SlotLayout& slot = shape_.slot;
  for (int layer = 0; layer < shape_.num_layers(); ++layer) {
    for (int h = 0; h < slot.shard_heads; ++h) {
      const size_t idx = record_idx(layer, shard_pos * slot.shard_heads + h, page);
      if (std::memcmp(coarse_.data() + idx * slot.coarse_bytes, records + slot.coarse_offset(layer, h),
                      slot.coarse_bytes) != 0 ||
          std::memcmp(fine_.data() + idx * slot.fine_bytes, records + slot.fine_offset(layer, h),
                      slot.fine_bytes) != 0) {
        return false;
      }
    }
  }
  return true;
}

const uint8_t* Mirror::coarse(int layer) const {
  return coarse_.data() + record_idx(layer, 0, 0) * shape_.summary.coarse_bytes;
}

const uint8_t* Mirror::fine(int layer) const {
  return fine_.data() + record_idx(layer, 0, 0) * shape_.summary.fine_bytes;
}

uint64_t Mirror::unit_checksum(int layer, int head, int page) const {
  return UnitChecksumOf(
      coarse_.data() + record_idx(layer, head, page) * shape_.summary.coarse_bytes, shape_.summary);
}

}  // namespace kvd
