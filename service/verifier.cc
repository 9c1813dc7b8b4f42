#include "service/verifier.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/checksum.h"
#include "kernels/gather.h"

namespace kvd {
namespace {

// Verifies one page after the other through copies of its own.
class PageVerifier {
 public:
  PageVerifier(const Arena& arena, VerifyOutcome* outcome)
      : arena_(arena),
        slot_(arena.memory().shape().slot),
        outcome_(*outcome),
        records_(slot_.summary_bytes()),
        unit_(slot_.unit_bytes) {}

  void Verify(const SlotView& view) {
    view_ = view;
    const ArenaMemory& memory = arena_.memory();
    uint8_t header[sizeof(PageHeader)];
    const auto* header_bytes = reinterpret_cast<const uint8_t*>(memory.header(view.slot));
    if (!Copy(header_bytes, sizeof(header), header) ||
        !Copy(memory.summary(view.slot), records_.size(), records_.data())) {
      return NotValid();
    }
    if (std::memcmp(header + offsetof(PageHeader, key), view.page.key.data(), 16) != 0) {
      return Fail("the key in its header");
    }
    uint64_t expected = 0;
    std::memcpy(&expected, header + offsetof(PageHeader, summary_checksum), sizeof(expected));
    // The checksums of the units stand in the records: without right records nothing can be said of
    // them.
    if (Checksum64(records_.data(), records_.size()) != expected) return Fail("its records");
    VerifyUnits();
  }

 private:
  void VerifyUnits() {
    const uint32_t field = MakeSummaryLayout(arena_.geometry()).coarse[kUnitChecksum];
    uint64_t wrong = 0;
    std::string first;
    for (int layer = 0; layer < slot_.num_layers; ++layer) {
      for (int head = 0; head < slot_.shard_heads; ++head) {
        const uint8_t* source = arena_.memory().unit(view_.slot, layer, head);
        if (!Copy(source, unit_.size(), unit_.data())) return NotValid();
        uint64_t expected = 0;
        std::memcpy(&expected, records_.data() + slot_.coarse_offset(layer, head) + field,
                    sizeof(expected));
        ++outcome_.units;
        if (Checksum64(unit_.data(), unit_.size()) == expected) continue;
        if (wrong++ == 0) first = absl::StrCat("layer ", layer, ", head ", head);
      }
    }
    if (wrong > 0) return Fail(absl::StrCat(wrong, " units, the first of ", first));
    ++outcome_.pages;
  }

  // False if the generation is not the page's any more after the copy.
  bool Copy(const uint8_t* source, size_t bytes, uint8_t* destination) const {
    const GatherUnit unit = {source, arena_.memory().header(view_.slot), view_.generation,
                             destination};
    uint8_t valid = 0;
    return ref::GatherUnits(&unit, 1, bytes, &valid) == 1;
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
  const SlotLayout slot_;
  VerifyOutcome& outcome_;
  SlotView view_;
  std::vector<uint8_t> records_;
  std::vector<uint8_t> unit_;
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
