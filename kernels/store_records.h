// Copies the records of whole slots into a sequence's mirror on the GPU, and proves them.
//
// Why: opening a sequence moves 10% of its KV bytes; it must run at the memory's rate, and a record
// that is not its page's would mislead every later step. GPU only. Thread safety: compatible.
// Ownership: views only.
//
// A slot's summary is [L][shard heads] coarse parts, then fine parts; the mirror is two streams
// [L][heads][P_cap]. The summary's Checksum64 is computed on the way and compared; the generation
// is checked after the copy, as in gather. It is looked at before as well: records of a slot that
// has other content already do not touch the mirror.

#ifndef LOCKS_KVD_KERNELS_STORE_RECORDS_H_
#define LOCKS_KVD_KERNELS_STORE_RECORDS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/layout.h"

namespace kvd {

struct SlotRecords {
  // SlotLayout::summary_bytes(), 16-byte aligned; null: nothing to store, not valid
  const uint8_t* summary;
  // null: the source is this process's own and was proved by its generation already
  const PageHeader* header;
  uint64_t generation;  // expected; even
  uint64_t checksum;    // of the summary; used where header is null, else the header's counts
  int32_t page;         // place in the mirror
  // head of this worker that the slot's head 0 is: shard position * shard heads
  int32_t first_head;
};

struct StoreRecordsArgs {
  SlotLayout slot;
  int num_heads;          // heads of the mirror
  int64_t page_capacity;  // P_cap
  int64_t num_slots;
  const SlotRecords* slots;  // [num_slots] device
  uint8_t* coarse;           // [L][heads][P_cap] coarse parts
  uint8_t* fine;
  uint64_t* sums;     // [num_slots] device: scratch
  uint8_t* valid;     // [num_slots] out, device or pinned: 1 if the records are there and proved
  bool compare_only;  // true: writes nothing to the mirror; valid also needs equal bytes there
};

// Stream:   enqueues on `stream` only (a few launches); allocates nothing; no host sync;
//           capturable.
// Errors:   cudaErrorInvalidValue for counts below 0 or from 2^31 up (slots; heads times P_cap;
//           16-byte words of a summary); else the launch's.
[[nodiscard]] cudaError_t LaunchStoreRecords(const StoreRecordsArgs& args, cudaStream_t stream);

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_STORE_RECORDS_H_
