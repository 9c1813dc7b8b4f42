#include "client/record_loader.h"

#include <algorithm>

#include "client/gpu_scope.h"
#include "client/gpu_status.h"
#include "proto/status.h"

namespace kvd {
namespace {

// Slots of one launch: a GiB of records, beside which the latency of a launch is nothing.
constexpr size_t kBatchSlots = 8192;

}  // namespace

absl::StatusOr<std::unique_ptr<RecordLoader>> RecordLoader::Make(int gpu, const SlotLayout& slot) {
  const GpuScope scope(gpu);
  KVD_RETURN_IF_ERROR(GpuStatus(scope.error(), "record loader"));
  auto loader = std::unique_ptr<RecordLoader>(new RecordLoader(gpu, slot));
  KVD_RETURN_IF_ERROR(GpuStatus(cudaStreamCreateWithFlags(&loader->stream_, cudaStreamNonBlocking),
                                "record loader"));
  for (Batch& batch : loader->batches_) {
    constexpr char kWhat[] = "lists of records";
    KVD_ASSIGN_OR_RETURN(batch.host, PlacedArray<SlotRecords>::MakePinned(kBatchSlots, kWhat));
    KVD_ASSIGN_OR_RETURN(batch.device,
                         PlacedArray<SlotRecords>::Make(OnGpu(gpu), kBatchSlots, kWhat));
    KVD_ASSIGN_OR_RETURN(batch.sums, PlacedArray<uint64_t>::Make(OnGpu(gpu), kBatchSlots, kWhat));
    KVD_ASSIGN_OR_RETURN(batch.valid, PlacedArray<uint8_t>::MakePinned(kBatchSlots, kWhat));
    KVD_RETURN_IF_ERROR(
        GpuStatus(cudaEventCreateWithFlags(&batch.done, cudaEventDisableTiming), "record loader"));
  }
  return loader;
}

RecordLoader::~RecordLoader() {
  // Failures mean that the context is gone, and all of this with it.
  const GpuScope scope(gpu_);
  if (stream_ != nullptr) (void)cudaStreamSynchronize(stream_);
  for (Batch& batch : batches_) {
    if (batch.done != nullptr) (void)cudaEventDestroy(batch.done);
  }
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

absl::Status RecordLoader::Enqueue(Batch& batch, RecordList& list,
                                   absl::FunctionRef<SlotRecords(size_t)> source) {
  for (size_t i = 0; i < batch.count; ++i) {
    SlotRecords& slot = batch.host[i];
    slot = source(batch.first + i);
    slot.page = list.entries[batch.first + i].page;
    slot.first_head = list.entries[batch.first + i].first_head;
  }
  KVD_RETURN_IF_ERROR(
      GpuStatus(cudaMemcpyAsync(batch.device.data(), batch.host.data(),
                                batch.count * sizeof(SlotRecords), cudaMemcpyHostToDevice, stream_),
                "list of records"));
  StoreRecordsArgs args = {};
  args.slot = slot_;
  args.num_heads = list.num_heads;
  args.page_capacity = list.page_capacity;
  args.num_slots = static_cast<int64_t>(batch.count);
  args.slots = batch.device.data();
  args.coarse = list.coarse;
  args.fine = list.fine;
  args.sums = batch.sums.data();
  args.valid = batch.valid.data();
  args.compare_only = list.compare_only;
  KVD_RETURN_IF_ERROR(GpuStatus(LaunchStoreRecords(args, stream_), "storing records"));
  return GpuStatus(cudaEventRecord(batch.done, stream_), "storing records");
}

absl::Status RecordLoader::Collect(Batch& batch, RecordList& list) {
  KVD_RETURN_IF_ERROR(GpuStatus(cudaEventSynchronize(batch.done), "storing records"));
  std::copy(batch.valid.data(), batch.valid.data() + batch.count, list.valid + batch.first);
  list.num_valid += std::count(batch.valid.data(), batch.valid.data() + batch.count, uint8_t{1});
  batch.count = 0;
  return absl::OkStatus();
}

absl::Status RecordLoader::Run(RecordList& list, size_t first, size_t count,
                               absl::FunctionRef<SlotRecords(size_t)> source,
                               std::chrono::steady_clock::time_point deadline) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const GpuScope scope(gpu_);
  absl::Status status = GpuStatus(scope.error(), "storing records");
  size_t turn = 0;
  for (size_t at = first; at < first + count && status.ok(); at += kBatchSlots, turn ^= 1) {
    Batch& batch = batches_[turn];
    if (batch.count > 0) status = Collect(batch, list);
    if (status.ok() && std::chrono::steady_clock::now() > deadline) {
      status = absl::DeadlineExceededError("storing records");
    }
    if (!status.ok()) break;
    batch.first = at;
    batch.count = std::min(kBatchSlots, first + count - at);
    status = Enqueue(batch, list, source);
    if (!status.ok()) batch.count = 0;  // its event may be an earlier batch's: nothing of it counts
  }
  for (int i = 0; i < 2; ++i, turn ^= 1) {
    if (batches_[turn].count > 0) status.Update(Collect(batches_[turn], list));
  }
  if (!status.ok()) {
    // Whatever was enqueued without its event must have ended too.
    status.Update(GpuStatus(cudaStreamSynchronize(stream_), "storing records"));
    for (Batch& batch : batches_) batch.count = 0;
  }
  return status;
}

}  // namespace kvd
