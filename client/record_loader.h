// Feeds LaunchStoreRecords: lists of slots in device memory, many slots a launch, the next list
// written while the last is at work.
//
// Why a class: the lists and the scratch are allocated once for a fetcher, since allocating on a
// GPU holds up whoever computes there. Needs KVD_CUDA. Thread safety: safe; one call at a time,
// others wait. Blocking.

#ifndef LOCKS_KVD_CLIENT_RECORD_LOADER_H_
#define LOCKS_KVD_CLIENT_RECORD_LOADER_H_

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <mutex>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/device_buffer.h"
#include "client/fetcher.h"
#include "kernels/store_records.h"

namespace kvd {

class RecordLoader {
 public:
  // Errors: kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<RecordLoader>> Make(int gpu, const SlotLayout& slot);
  ~RecordLoader();
  RecordLoader(const RecordLoader&) = delete;
  RecordLoader& operator=(const RecordLoader&) = delete;

  // Stores (or compares) the entries [first, first + count) of `list`; `source(i)` is what
  // LaunchStoreRecords reads for entry i, its page and head filled in here. Sets valid[i] and adds
  // to num_valid. Nothing reads the sources nor writes to the mirror any more once it returned.
  // kDeadlineExceeded, kInternal: a CUDA error.
  absl::Status Run(RecordList& list, size_t first, size_t count,
                   absl::FunctionRef<SlotRecords(size_t)> source,
                   std::chrono::steady_clock::time_point deadline);

 private:
  struct Batch {
    PlacedArray<SlotRecords> host;  // pinned
    PlacedArray<SlotRecords> device;
    PlacedArray<uint64_t> sums;  // device
    PlacedArray<uint8_t> valid;  // pinned
    cudaEvent_t done = nullptr;
    size_t first = 0;
    size_t count = 0;  // 0: not at work
  };
  RecordLoader(int gpu, const SlotLayout& slot) : gpu_(gpu), slot_(slot) {}
  absl::Status Enqueue(Batch& batch, RecordList& list,
                       absl::FunctionRef<SlotRecords(size_t)> source);
  absl::Status Collect(Batch& batch, RecordList& list);

  const int gpu_;
  const SlotLayout slot_;
  std::mutex mutex_;  // guards what follows
  cudaStream_t stream_ = nullptr;
  Batch batches_[2];
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_RECORD_LOADER_H_
