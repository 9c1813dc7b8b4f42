#include "service/page_store.h"

#include <array>
#include <atomic>
#include <bit>
#include <cstring>

#include "absl/strings/str_format.h"
#include "kernels/checksum.h"
#include "kernels/gather.h"
#include "service/sealer.h"
#if KVD_CUDA
#include "service/gpu_page_store.h"
#endif

namespace kvd {

absl::StatusOr<std::unique_ptr<PageStore>> PageStore::Make(const ArenaMemory& memory,
                                                           const RecordRecipe& recipe) {
#if KVD_CUDA
  if (memory.place().on_gpu()) return GpuPageStore::Make(memory, recipe);
#endif
  return std::make_unique<HostPageStore>(memory, recipe);
}

void PageStore::GiveExportable(uint8_t*, std::chrono::steady_clock::time_point) const {}

// The records are the sealing daemon's own (their checksum is in its page header), and they hold
// the checksum of every unit.
absl::Status PageStore::ProveCopy(uint32_t slot, uint64_t summary_checksum) const {
  const SlotSums sums = SumsOf(slot);
  if (sums.records != summary_checksum) {
    return absl::DataLossError(absl::StrFormat(
        "the records' checksum is %016x, expected %016x: the copy is refused; send it again",
        sums.records, summary_checksum));
  }
  for (size_t unit = 0; unit < sums.units.size(); ++unit) {
    if (sums.units[unit] == sums.expected[unit]) continue;
    const auto heads = static_cast<size_t>(slot_layout_.shard_heads);
    return absl::DataLossError(
        absl::StrFormat("layer %d, head %d: the unit's checksum is not the one in its record: the "
                        "copy is refused; send it again",
                        unit / heads, unit % heads));
  }
  return absl::OkStatus();
}

// Whoever writes a slot next takes the arena's mutex after these stores, and that hand-over orders
// them before those writes for readers without a lock. (A fence would say the same; ThreadSanitizer
// does not know fences.)
void HostPageStore::PublishGone(std::span<const Gone> gone) {
  for (const Gone& each : gone) {
    memory_.header(each.slot)->generation.store(each.generation, std::memory_order_seq_cst);
  }
}

// Key and checksum first, then the even generation: a reader that sees it sees them, and the units
// and records, which were written before.
void HostPageStore::PublishSealed(uint32_t slot, uint64_t generation, const PageKey& key,
                                  uint64_t summary_checksum) {
  PageHeader* header = memory_.header(slot);
  const auto words = std::bit_cast<std::array<uint64_t, 2>>(key);
  // Readers may look at any time; whole-word stores keep what they see defined (the generation
  // judges it).
  auto* key_words = reinterpret_cast<uint64_t*>(header->key);
  std::atomic_ref<uint64_t>(key_words[0]).store(words[0], std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(key_words[1]).store(words[1], std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(header->summary_checksum)
      .store(summary_checksum, std::memory_order_relaxed);
  header->generation.store(generation, std::memory_order_release);
}

void HostPageStore::WriteUnits(std::span<const UnitWrite> writes) {
  for (const UnitWrite& write : writes) {
    std::memcpy(memory_.unit(write.slot, write.layer, write.head), write.from,
                slot_layout_.unit_bytes);
  }
}

void HostPageStore::WriteRecords(std::span<const RecordsWrite> writes) {
  for (const RecordsWrite& write : writes) {
    std::memcpy(memory_.summary(write.slot), write.from, slot_layout_.summary_bytes());
  }
}

absl::StatusOr<uint64_t> HostPageStore::BuildRecords(uint32_t slot, uint32_t shard,
                                                     uint32_t page_idx) {
  return SummarizePage({.geometry = &recipe_.geometry,
                        .encoder = recipe_.encoder,
                        .metric = recipe_.metric,
                        .units = memory_.slot_base(slot),
                        .records = memory_.summary(slot),
                        .shard = shard,
                        .page_idx = page_idx});
}

PageStore::SlotSums HostPageStore::SumsOf(uint32_t slot) const {
  const SummaryLayout summary = MakeSummaryLayout(recipe_.geometry);
  const uint8_t* records = memory_.summary(slot);
  SlotSums sums;
  sums.records = Checksum64(records, slot_layout_.summary_bytes());
  for (int layer = 0; layer < slot_layout_.num_layers; ++layer) {
    for (int head = 0; head < slot_layout_.shard_heads; ++head) {
      sums.units.push_back(Checksum64(memory_.unit(slot, layer, head), slot_layout_.unit_bytes));
      sums.expected.push_back(
          UnitChecksumOf(records + slot_layout_.coarse_offset(layer, head), summary));
    }
  }
  return sums;
}

void HostPageStore::ReadUnits(std::span<const Read> reads, std::span<uint8_t> valid) const {
  std::vector<GatherUnit> units;
  units.reserve(reads.size());
  for (const Read& read : reads) {
    const FetchEntry& entry = read.entry;
    units.push_back({memory_.unit(entry.slot, entry.layer, entry.head), memory_.header(entry.slot),
                     entry.generation, read.to});
  }
  ref::GatherUnits(units.data(), static_cast<int64_t>(units.size()), slot_layout_.unit_bytes,
                   valid.data());
}

void HostPageStore::ReadSummaries(std::span<const Read> reads, std::span<uint8_t> valid) const {
  for (size_t i = 0; i < reads.size(); ++i) {
    const FetchEntry& entry = reads[i].entry;
    const PageHeader* header = memory_.header(entry.slot);
    const auto* header_bytes = reinterpret_cast<const uint8_t*>(header);
    uint8_t* const records = reads[i].to + sizeof(PageHeader);
    // The header travels as an item too, under the same guard.
    const GatherUnit of_records = {memory_.summary(entry.slot), header, entry.generation, records};
    const GatherUnit of_header = {header_bytes, header, entry.generation, reads[i].to};
    uint8_t header_valid = 0;
    ref::GatherUnits(&of_records, 1, slot_layout_.summary_bytes(), &valid[i]);
    ref::GatherUnits(&of_header, 1, sizeof(PageHeader), &header_valid);
    valid[i] = valid[i] & header_valid;
    if (valid[i] == 0)
      std::memset(reads[i].to, 0, sizeof(PageHeader) + slot_layout_.summary_bytes());
  }
}

PageStore::PageBytes HostPageStore::ReadPage(uint32_t slot, StagingBuffer*) const {
  return {memory_.slot_base(slot), memory_.summary(slot), memory_.header(slot)->summary_checksum};
}

std::vector<uint64_t> HostPageStore::SummaryChecksums(std::span<const uint32_t> slots) const {
  std::vector<uint64_t> sums;
  for (const uint32_t slot : slots) sums.push_back(memory_.header(slot)->summary_checksum);
  return sums;
}

}  // namespace kvd
