// The one place that touches the bytes of an arena's slots, in host memory or in a GPU's: what
// readers see of a slot, how units come in, how records are built, how bytes go out. Tables,
// leases, ingest, fetch, moves and verification are the same for both and know no difference.
//
// Right because (guarantee G1): PublishGone returns only when no reader can load a byte that is
// written afterwards without also loading the odd generation; writes are complete when they return;
// and what was written before PublishSealed is there for everyone who is told of the generation
// after it returned.
// Thread safety: safe. The caller sees to it that a slot is written by one thread at a time, and
// only while its generation is odd (Arena: reserved, pinned).
// Errors: a GPU that fails takes the pages with it, so the process ends (with a line in the log):
// workers see a lost daemon, and the one that is started in its place is a stranger (G3).

#ifndef LOCKS_KVD_SERVICE_PAGE_STORE_H_
#define LOCKS_KVD_SERVICE_PAGE_STORE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/query_metric.h"
#include "kernels/summarize.h"
#include "proto/arena_memory.h"
#include "proto/page_key.h"
#include "proto/staging.h"
#include "proto/wire.h"

namespace kvd {

// How the records of a model's pages are built.
struct RecordRecipe {
  KvGeometry geometry;
  Encoder encoder = Encoder::kE1;
  const QueryMetric* metric = nullptr;  // empty unless encoder is kE1S; must outlive the store
};

class PageStore {
 public:
  // For arenas of either kind; `memory` must outlive it. Errors: kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<PageStore>> Make(const ArenaMemory& memory,
                                                         const RecordRecipe& recipe);
  virtual ~PageStore() = default;

  // Where the arena is: bytes are written from, and read into, staging buffers that are reserved
  // for this place.
  const MemoryPlace& place() const { return memory_.place(); }

  // --- what readers see ---

  struct Gone {
    uint32_t slot;
    uint64_t generation;  // odd
  };
  // In one go for all. Call it before anybody can write to the slots. The arena's mutex is held: on
  // a GPU for as long as a launch takes, 15 us, or 2 ms where another process keeps the GPU busy.
  virtual void PublishGone(std::span<const Gone> gone) = 0;
  virtual void PublishSealed(uint32_t slot, uint64_t generation, const PageKey& key,
                             uint64_t summary_checksum) = 0;

  // --- writing ---

  struct UnitWrite {
    uint32_t slot;
    int layer;
    int head;
    const uint8_t* from;  // SlotLayout::unit_bytes, 16-byte aligned, in a buffer for place()
  };
  virtual void WriteUnits(std::span<const UnitWrite> writes) = 0;
  struct RecordsWrite {
    uint32_t slot;
    const uint8_t* from;  // SlotLayout::summary_bytes()
  };
  virtual void WriteRecords(std::span<const RecordsWrite> writes) = 0;

  // --- sealing ---

  // Builds every record of the page in `slot` from its units; the checksum of all of them.
  // kInvalidArgument if a key or value is NaN or Inf, naming page, layer, head, token and K or V;
  // the records are then undefined.
  virtual absl::StatusOr<uint64_t> BuildRecords(uint32_t slot, uint32_t shard,
                                                uint32_t page_idx) = 0;
  // Proves a copy: its records' checksum is `summary_checksum`, and every unit's is the one in its
  // record. kDataLoss says which is not.
  absl::Status ProveCopy(uint32_t slot, uint64_t summary_checksum) const;

  // --- reading, proved by the generation like any reader's copy ---

  struct Read {
    FetchEntry entry;  // in range; layer and head are 0 for a summary
    uint8_t* to;       // in a buffer for place(), 16-byte aligned
  };
  // valid[i] = 1 and the unit's bytes if it is that of the sealed page, else 0 and zeros.
  virtual void ReadUnits(std::span<const Read> reads, std::span<uint8_t> valid) const = 0;
  // The same for a slot's header, then all its records.
  virtual void ReadSummaries(std::span<const Read> reads, std::span<uint8_t> valid) const = 0;

  // --- pieces that another process of this host reads from the GPU while they travel ---

  // kMaxPieceBytes of the arena's GPU, for ReadUnits to read into and UCX to show to a peer; null:
  // none is free, or the arena is in host memory. A process that was shown it once can read and
  // write it from then on: it is this arena's for ever, so that no other tenant's bytes are ever in
  // it.
  virtual uint8_t* TakeExportable() const { return nullptr; }
  // It is not taken again before `usable_from`: until then a peer may still read what is in it.
  virtual void GiveExportable(uint8_t* piece,
                              std::chrono::steady_clock::time_point usable_from) const;

  // --- reading a page that cannot change meanwhile (Arena::BeginCopying) ---

  struct PageBytes {
    const uint8_t* units;  // [L][shard heads], in host memory
    const uint8_t* records;
    uint64_t summary_checksum;
  };
  // Views of the arena itself or of `staging`; valid for as long as both stay as they are.
  virtual PageBytes ReadPage(uint32_t slot, StagingBuffer* staging) const = 0;
  // Checksum of each slot's records as its header has it.
  virtual std::vector<uint64_t> SummaryChecksums(std::span<const uint32_t> slots) const = 0;

 protected:
  explicit PageStore(const ArenaMemory& memory)
      : memory_(memory), slot_layout_(memory.shape().slot) {}

  // Checksums of what is in a slot.
  struct SlotSums {
    uint64_t records;
    std::vector<uint64_t> units;     // [L][shard heads]
    std::vector<uint64_t> expected;  // of each unit, as its record has it
  };
  virtual SlotSums SumsOf(uint32_t slot) const = 0;

  const ArenaMemory& memory_;
  const SlotLayout slot_layout_;
};

// In the memory of this process.
class HostPageStore final : public PageStore {
 public:
  HostPageStore(const ArenaMemory& memory, const RecordRecipe& recipe)
      : PageStore(memory), recipe_(recipe) {}

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

 private:
  SlotSums SumsOf(uint32_t slot) const override;
  const RecordRecipe recipe_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_PAGE_STORE_H_
