// A pool of one daemon inside the test, in GPU memory: an arena that is exported and mapped as
// between processes, and sequences over it that lie on the GPU.
//
// Built with KVD_CUDA only; needs a GPU. See fake_pool.h for the data.

#ifndef LOCKS_KVD_TESTS_CLIENT_GPU_POOL_H_
#define LOCKS_KVD_TESTS_CLIENT_GPU_POOL_H_

#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "client/device_buffer.h"
#include "client/peer_fetcher.h"
#include "client/sequence_pages.h"
#include "proto/arena_memory.h"
#include "tests/client/fake_pool.h"

namespace kvd::testing {

inline void CheckOk(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::abort();
}
template <typename T>
T OrDie(absl::StatusOr<T> value) {
  CheckOk(value.status());
  return *std::move(value);
}

// The daemon's side: slot = first_slot + page, generation = 2 + 2 * slot, as FakeSlot gives them.
class GpuArena {
 public:
  GpuArena(const KvGeometry& g, uint32_t num_slots, int gpu = 0) {
    ArenaShape shape = {MakeSlotLayout(g), num_slots, (num_slots + 2) / 3};  // several slabs
    shape.num_slots = shape.slots_per_slab * 3;
    memory_ = OrDie(ArenaMemory::MakeGpu(shape, gpu));
  }
  void Seal(const SequenceData& data, const WorkerShape& shape, int page, uint32_t slot) {
    for (int layer = 0; layer < shape.num_layers(); ++layer) {
      for (int h = 0; h < shape.num_heads(); ++h) {
        const std::vector<uint8_t> unit = data.Unit(layer, h, page);
        CheckOk(
            CopyBytes(memory_->place(), memory_->unit(slot, layer, h), unit.data(), unit.size()));
      }
    }
    const std::vector<uint8_t> records = PageRecords(data, shape, page);
    CheckOk(CopyBytes(memory_->place(), memory_->summary(slot), records.data(), records.size()));
    SetHeader(slot, 2 + 2 * uint64_t{slot}, Checksum64(records.data(), records.size()));
  }
  // Another generation: whatever is asked for by the old one is gone.
  void SetHeader(uint32_t slot, uint64_t generation, uint64_t checksum = 0) {
    PageHeader header = {};
    header.generation.store(generation);
    header.summary_checksum = checksum;
    CheckOk(CopyBytes(memory_->place(), memory_->header(slot), &header, sizeof(header)));
  }
  // A session with this daemon, as another process would have it.
  std::shared_ptr<PageSource> Attach(int gpu = 0) const {
    std::vector<UniqueFd> descriptors;
    for (const UniqueFd& fd : memory_->descriptors()) descriptors.emplace_back(dup(fd.get()));
    auto source = std::make_shared<PageSource>();
    source->fetcher = OrDie(PeerFetcher::Make(
        OrDie(ArenaMemory::MapGpu(memory_->shape(), std::move(descriptors), gpu))));
    return source;
  }
  const ArenaMemory& memory() const { return *memory_; }

 private:
  std::unique_ptr<ArenaMemory> memory_;
};

// An open sequence on the GPU whose page p is in slot first_slot + p.
struct GpuSequence {
  GpuSequence(const SequenceData& sequence_data, int num_pages, const StepOptions& options,
              GpuArena* arena, uint32_t first_slot, std::shared_ptr<PageSource> source)
      : data(sequence_data), shape(*WorkerShape::Make(data.geometry, {})) {
    shape.place = OnGpu(0);
    pages = OrDie(SequencePages::Make(shape, num_pages + FakeSequence::kSpareCapacity,
                                      options.n_sink, options.n_win, 1));
    pages->SetSource(0, std::move(source));
    for (int p = 0; p < num_pages; ++p) {
      const uint32_t slot = first_slot + static_cast<uint32_t>(p);
      arena->Seal(data, shape, p, slot);
      CheckOk(pages->mirror().Store(p, 0, PageRecords(data, shape, p).data()));
      pages->SetPage(p, 0, std::vector<SlotRef>{{slot, 2 + 2 * uint64_t{slot}}});
    }
    pages->SetNumPages(num_pages);
    for (int layer = 0; layer < shape.num_layers(); ++layer) {
      for (int h = 0; h < shape.num_heads(); ++h) {
        const auto copy = [&](int p, uint8_t* to) {
          const std::vector<uint8_t> unit = data.Unit(layer, h, p);
          CheckOk(CopyBytes(shape.place, to, unit.data(), unit.size()));
        };
        for (int p = 0; p < pages->num_sinks(); ++p) copy(p, pages->sink_unit(p, layer, h));
        for (int p = pages->first_ring_page(); p < pages->num_pages(); ++p)
          copy(p, pages->ring_unit(p, layer, h));
      }
    }
  }

  const SequenceData& data;
  WorkerShape shape;
  std::unique_ptr<SequencePages> pages;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_CLIENT_GPU_POOL_H_
