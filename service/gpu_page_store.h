// A PageStore in a GPU's memory: every operation is a few launches on a stream of its own and a
// wait for them.
//
// Why it waits: the caller's next step (a reply, a seal, letting somebody write the slot) depends
// on it, and the wait is what orders it for readers on any GPU (kernels/arena_io.h). Operations of
// several threads run beside each other, each on a lane of its own.
// Built with KVD_CUDA only. See page_store.h for contract, thread safety and errors.

#ifndef LOCKS_KVD_SERVICE_GPU_PAGE_STORE_H_
#define LOCKS_KVD_SERVICE_GPU_PAGE_STORE_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "service/page_store.h"

namespace kvd {

class GpuPageStore final : public PageStore {
 public:
  // Packs the metric, if there is one, and takes the memory that every operation needs.
  // kResourceExhausted, kFailedPrecondition: the GPU or the host has no room for it.
  static absl::StatusOr<std::unique_ptr<PageStore>> Make(const ArenaMemory& memory,
                                                         const RecordRecipe& recipe);
  ~GpuPageStore() override;

  void PublishGone(std::span<const Gone> gone) override;
  void PublishSealed(uint32_t slot, uint64_t generation, const PageKey& key,
                     uint64_t summary_checksum) override;
  void WriteUnits(std::span<const UnitWrite> writes) override;
  void WriteRecords(std::span<const RecordsWrite> writes) override;
  absl::StatusOr<uint64_t> BuildRecords(uint32_t slot, uint32_t shard, uint32_t page_idx) override;
  void ReadUnits(std::span<const Read> reads, std::span<uint8_t> valid) const override;
  void ReadSummaries(std::span<const Read> reads, std::span<uint8_t> valid) const override;
  PageBytes ReadPage(uint32_t slot, StagingBuffer* staging) const override;
  std::vector<uint64_t> SummaryChecksums(std::span<const uint32_t> slots) const override;
  uint8_t* TakeExportable() const override;
  void GiveExportable(uint8_t* piece,
                      std::chrono::steady_clock::time_point usable_from) const override;

 private:
  struct Tables;
  struct Lane;
  class LaneUse;

  GpuPageStore(const ArenaMemory& memory, const RecordRecipe& recipe);
  SlotSums SumsOf(uint32_t slot) const override;
  absl::Status PackMetric();
  absl::StatusOr<std::unique_ptr<Lane>> MakeLane(int priority) const;
  // Makes the store's GPU the calling thread's.
  void UseGpu() const;
  void SummarizeUnits(const Lane& lane, size_t first, size_t count, uint32_t slot,
                      uint32_t shard) const;

  const RecordRecipe recipe_;
  const int gpu_;
  uint8_t* packed_metric_ = nullptr;  // device; [L][Hk] packed matrices

  std::mutex publish_mutex_;  // one launch of headers at a time
  std::unique_ptr<Lane> publish_lane_;
  mutable std::mutex lanes_mutex_;  // guards what follows
  mutable std::vector<std::unique_ptr<Lane>> free_lanes_;

  // Made when the first piece is asked for: an arena whose workers all map it needs none.
  struct Exportable {
    uint8_t* piece;
    std::chrono::steady_clock::time_point usable_from;
  };
  mutable std::mutex exportable_mutex_;  // guards what follows
  mutable bool exportable_asked_for_ = false;
  mutable uint8_t* exportable_memory_ = nullptr;
  mutable std::vector<Exportable> exportables_;  // that are not taken
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_GPU_PAGE_STORE_H_
