#include "service/verifier.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/checksum.h"

namespace kvd {
namespace {

// Units that are read at once.
constexpr size_t kReadBytes = size_t{1} << 20;

// Verifies one page after the other through copies of its own.
class PageVerifier {
 public:
  PageVerifier(const Arena& arena, VerifyOutcome* outcome)
      : arena_(arena),
        store_(arena.store()),
        slot_(arena.memory().shape().slot),
        outcome_(*outcome),
        summary_(
            summary_buffer_.Reserve(sizeof(PageHeader) + slot_.summary_bytes(), store_.place())),
        most_units_(
            std::min(slot_.num_units(), std::max<size_t>(kReadBytes / slot_.unit_bytes, 1))),
        units_(units_buffer_.Reserve(most_units_ * slot_.unit_bytes, store_.place())) {}

  void Verify(const SlotView& view) {
    view_ = view;
    uint8_t valid = 0;
    const PageStore::Read read = {{view.slot, 0, 0, view.generation}, summary_};
    store_.ReadSummaries({&read, 1}, {&valid, 1});
    if (valid == 0) return NotValid();
    if (std::memcmp(summary_ + offsetof(PageHeader, key), view.page.key.data(), 16) != 0) {
      return Fail("the key in its header");
    }
    uint64_t expected = 0;
    std::memcpy(&expected, summary_ + offsetof(PageHeader, summary_checksum), sizeof(expected));
    // The checksums of the units stand in the records: without right records nothing can be said of
    // them.
    if (Checksum64(records(), slot_.summary_bytes()) != expected) return Fail("its records");
    VerifyUnits();
  }

 private:
  const uint8_t* records() const { return summary_ + sizeof(PageHeader); }

  void VerifyUnits() {
    const SummaryLayout summary = MakeSummaryLayout(arena_.geometry());
    const auto heads = static_cast<size_t>(slot_.shard_heads);
    uint64_t wrong = 0;
    std::string first_wrong;
    for (size_t first = 0; first < slot_.num_units(); first += most_units_) {
      const size_t count = std::min(most_units_, slot_.num_units() - first);
      if (!ReadUnits(first, count)) return NotValid();
      for (size_t i = 0; i < count; ++i) {
        const size_t unit = first + i;
        ++outcome_.units;
        // Coarse parts stand in the units' order.
        const uint64_t expected = UnitChecksumOf(records() + unit * slot_.coarse_bytes, summary);
        if (Checksum64(units_ + i * slot_.unit_bytes, slot_.unit_bytes) == expected) continue;
        if (wrong++ == 0)
          first_wrong = absl::StrCat("layer ", unit / heads, ", head ", unit % heads);
      }
    }
    if (wrong > 0) return Fail(absl::StrCat(wrong, " units, the first of ", first_wrong));
    ++outcome_.pages;
  }

  // False if the generation is not the page's any more after the copy.
  bool ReadUnits(size_t first, size_t count) {
    const auto heads = static_cast<size_t>(slot_.shard_heads);
    std::vector<PageStore::Read> reads;
    for (size_t i = 0; i < count; ++i) {
      const FetchEntry entry = {view_.slot, static_cast<uint16_t>((first + i) / heads),
                                static_cast<uint16_t>((first + i) % heads), view_.generation};
      reads.push_back({entry, units_ + i * slot_.unit_bytes});
    }
    std::vector<uint8_t> valid(count);
    store_.ReadUnits(reads, valid);
    return std::find(valid.begin(), valid.end(), 0) == valid.end();
  }

  // Evicted, unless the private page table still has the page: then its header is damaged.
  void NotValid() {
    const std::vector<SlotView> now = arena_.ViewSlots(view_.slot, 1);
    if (now[0].state == SlotState::kSealed && now[0].generation == view_.generation) {
      return Fail("the generation in its header");
    }
    ++outcome_.evicted;
  }

  void Fail(std::string what) {
    outcome_.failures.push_back({{view_.slot, view_.generation}, std::move(what)});
  }

  const Arena& arena_;
  const PageStore& store_;
  const SlotLayout slot_;
  VerifyOutcome& outcome_;
  StagingBuffer summary_buffer_;
  uint8_t* const summary_;  // a header, then records
  const size_t most_units_;
  StagingBuffer units_buffer_;
  uint8_t* const units_;
  SlotView view_;
};

}  // namespace

VerifyOutcome VerifySlots(const Arena& arena, uint32_t first_slot, uint32_t max_slots) {
  const ArenaShape& shape = arena.memory().shape();
  const uint64_t page_bytes = shape.slot.slot_bytes() + shape.slot.summary_bytes();
  const uint64_t by_bytes = std::max<uint64_t>(1, kVerifyBytes / page_bytes);
  const uint64_t count = max_slots == 0 ? by_bytes : std::min<uint64_t>(by_bytes, max_slots);
  VerifyOutcome outcome;
  PageVerifier verifier(arena, &outcome);
  for (const SlotView& view : arena.ViewSlots(first_slot, static_cast<uint32_t>(count))) {
    if (view.state == SlotState::kSealed && view.slot != kCanarySlot) verifier.Verify(view);
  }
  const uint64_t next = uint64_t{first_slot} + count;
  outcome.next_slot = static_cast<uint32_t>(std::min<uint64_t>(next, shape.num_slots));
  outcome.done = next >= shape.num_slots;
  return outcome;
}

}  // namespace kvd
