#include "client/mirror.h"

#include <cstring>
#include <vector>

#include "kernels/check.h"
#include "proto/status.h"

namespace kvd {

absl::StatusOr<std::unique_ptr<Mirror>> Mirror::Make(const WorkerShape& shape, int page_capacity) {
  KVD_CHECK(page_capacity > 0 && page_capacity <= kMaxPages);
  auto mirror = std::unique_ptr<Mirror>(new Mirror(shape, page_capacity));
  const size_t records = shape.units_per_page() * static_cast<size_t>(page_capacity);
  KVD_ASSIGN_OR_RETURN(
      mirror->coarse_,
      PlacedBytes::Make(shape.place, records * shape.summary.coarse_bytes, "mirror, coarse parts"));
  KVD_ASSIGN_OR_RETURN(
      mirror->fine_,
      PlacedBytes::Make(shape.place, records * shape.summary.fine_bytes, "mirror, fine parts"));
  return mirror;
}

// A slot's heads of one layer are neighbours in the mirror and among the records: one run a layer
// and part.
template <typename Copy>
void Mirror::ForEachRun(int page, int shard_pos, const Copy& copy) const {
  KVD_CHECK(page >= 0 && page < page_capacity_);
  KVD_CHECK(shard_pos >= 0 && shard_pos < shape_.num_shards());
  const SlotLayout& slot = shape_.slot;
  const auto heads = static_cast<size_t>(slot.shard_heads);
  for (int layer = 0; layer < shape_.num_layers(); ++layer) {
    const size_t first = record_idx(layer, shard_pos * slot.shard_heads, page);
    copy(coarse_, first * slot.coarse_bytes, slot.coarse_offset(layer, 0), heads,
         size_t{slot.coarse_bytes});
    copy(fine_, first * slot.fine_bytes, slot.fine_offset(layer, 0), heads,
         size_t{slot.fine_bytes});
  }
}

absl::Status Mirror::Store(int page, int shard_pos, const uint8_t* records) {
  absl::Status status;
  const auto capacity = static_cast<size_t>(page_capacity_);
  ForEachRun(page, shard_pos,
             [&](const PlacedBytes& part, size_t at, size_t from, size_t rows, size_t bytes) {
               uint8_t* to = (&part == &coarse_ ? coarse_ : fine_).data() + at;
               status.Update(CopyRows(shape_.place, to, capacity * bytes, records + from, bytes,
                                      bytes, rows));
             });
  return status;
}

bool Mirror::Equals(int page, int shard_pos, const uint8_t* records) const {
  bool equal = true;
  const auto capacity = static_cast<size_t>(page_capacity_);
  std::vector<uint8_t> copy;
  ForEachRun(page, shard_pos,
             [&](const PlacedBytes& part, size_t at, size_t from, size_t rows, size_t bytes) {
               if (!equal) return;
               copy.resize(rows * bytes);
               equal = CopyRows(shape_.place, copy.data(), bytes, part.data() + at,
                                capacity * bytes, bytes, rows)
                           .ok() &&
                       std::memcmp(copy.data(), records + from, copy.size()) == 0;
             });
  return equal;
}

const uint8_t* Mirror::coarse(int layer) const {
  return coarse_.data() + record_idx(layer, 0, 0) * shape_.summary.coarse_bytes;
}

const uint8_t* Mirror::fine(int layer) const {
  return fine_.data() + record_idx(layer, 0, 0) * shape_.summary.fine_bytes;
}

uint64_t Mirror::unit_checksum(int layer, int head, int page) const {
  const uint8_t* record =
      coarse_.data() + record_idx(layer, head, page) * shape_.summary.coarse_bytes;
  if (!shape_.place.on_gpu()) return UnitChecksumOf(record, shape_.summary);
  uint64_t checksum = 0;
  const uint8_t* at = record + shape_.summary.coarse[kUnitChecksum];
  return CopyBytes(shape_.place, &checksum, at, sizeof(checksum)).ok() ? checksum : 0;
}

}  // namespace kvd
