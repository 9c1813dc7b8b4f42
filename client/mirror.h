// A sequence's copy of its pages' records, in the order in which they are scanned.
//
// Why: selection reads every record of a layer and KV head at each step; in the mirror they are
// contiguous, coarse and fine parts apart, as [L][heads][P_cap] each. It is where the shape's place
// says: on a GPU, only kernels and copies touch it, and Store, Equals and unit_checksum are
// blocking copies for single pages; whole sequences are filled by client/record_fetch.h. Thread
// safety: compatible; Store of a page that no reader scans yet may run beside readers. Ownership:
// owns its memory. Records are copies of what the daemon built, never rebuilt.

#ifndef LOCKS_KVD_CLIENT_MIRROR_H_
#define LOCKS_KVD_CLIENT_MIRROR_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/device_buffer.h"
#include "client/worker_shape.h"

namespace kvd {

class Mirror {
 public:
  // kResourceExhausted if the memory cannot be had.
  static absl::StatusOr<std::unique_ptr<Mirror>> Make(const WorkerShape& shape, int page_capacity);

  // Copies the records of one slot (`shard_pos` of the page) into their places. `records` is what
  // Fetcher::FetchSummaries delivered: SlotLayout::summary_bytes() long. REQUIRES: page < capacity.
  // kInternal: a CUDA error, on a GPU only.
  absl::Status Store(int page, int shard_pos, const uint8_t* records);

  // True if `records` is what Store put there. May run beside readers. False also after a CUDA
  // error.
  bool Equals(int page, int shard_pos, const uint8_t* records) const;

  // First record of (layer, head 0, page 0); a head's records are page_capacity() records long.
  const uint8_t* coarse(int layer) const;
  const uint8_t* fine(int layer) const;
  // The same, of the whole mirror, for who fills it.
  uint8_t* coarse_data() { return coarse_.data(); }
  uint8_t* fine_data() { return fine_.data(); }
  const MemoryPlace& place() const { return shape_.place; }

  // Checksum of a unit's bytes as its daemon sealed them. 0 after a CUDA error.
  uint64_t unit_checksum(int layer, int head, int page) const;

  int page_capacity() const { return page_capacity_; }
  size_t bytes() const { return coarse_.size() + fine_.size(); }

 private:
  Mirror(const WorkerShape& shape, int page_capacity)
      : shape_(shape), page_capacity_(page_capacity) {}
  size_t record_idx(int layer, int head, int page) const {
    return shape_.unit_idx(layer, head) * static_cast<size_t>(page_capacity_) +
           static_cast<size_t>(page);
  }

  // Calls copy(part, offset in the part, offset in the slot's records, rows, bytes of a row) for
  // each run: `rows` records that are page_capacity() records apart in the part and one behind the
  // other in the slot's.
  template <typename Copy>
  void ForEachRun(int page, int shard_pos, const Copy& copy) const;

  const WorkerShape shape_;
  const int page_capacity_;
  PlacedBytes coarse_;
  PlacedBytes fine_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_MIRROR_H_
