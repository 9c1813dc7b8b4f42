#include "client/peer_fetcher.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "client/fetch_list.h"
#include "client/gpu_scope.h"
#include "client/gpu_status.h"
#include "client/record_loader.h"
#include "kernels/checksum.h"
#include "kernels/gather.h"
#include "proto/status.h"

namespace kvd {
namespace {

using Clock = std::chrono::steady_clock;

// Units of one launch; a longer list goes in several. Also the size of a slot's lists.
constexpr size_t kLaunchUnits = 8192;
// A waiting thread looks this long before it sleeps between looks: most gathers take tens of
// microseconds.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(20);
// Slots whose summaries are copied to the host between two looks at the clock.
constexpr size_t kSummaryBatch = 64;

// One list at work.
struct ListSlot {
  PlacedArray<GatherUnit> units;  // pinned: the kernel reads them where they are
  PlacedArray<uint8_t> valid;     // pinned
  cudaStream_t stream = nullptr;
  Clock::time_point deadline;
  size_t first = 0;  // entries of the launch at work
  size_t count = 0;
};

}  // namespace

struct PeerFetcher::Impl {
  explicit Impl(std::unique_ptr<const ArenaMemory> memory_in)
      : memory(std::move(memory_in)), gpu(memory->place().gpu) {}

  bool Refuse(FetchList& list) const {
    BeginList(list);
    if (is_lost()) {
      list.code = absl::StatusCode::kAborted;
    } else if (!AllInRange(list, memory->shape())) {
      list.code = absl::StatusCode::kInvalidArgument;
    }
    return list.code != absl::StatusCode::kOk;
  }
  bool is_lost() const { return std::atomic_ref(*lost_word).load(std::memory_order_acquire) != 0; }
  void Begin(ListSlot& slot, FetchList& list, Clock::time_point deadline);
  void Enqueue(ListSlot& slot, FetchList& list, size_t first);
  void Finish(ListSlot& slot, FetchList& list);
  absl::StatusCode WaitFor(const ListSlot& slot);
  // True if the call succeeded; else the context is broken for good.
  bool Good(cudaError_t error) {
    if (error != cudaSuccess) broken.store(true, std::memory_order_relaxed);
    return error == cudaSuccess;
  }
  absl::Status MakeArena();
  absl::Status MakeSlots();

  const std::unique_ptr<const ArenaMemory> memory;
  const int gpu;
  PlacedArray<const uint8_t*> slabs;  // on the GPU
  PlacedArray<uint32_t> lost;         // pinned, one word
  uint32_t* lost_word = nullptr;
  PeerArena arena;
  std::atomic<bool> broken{false};

  ListSlot slots[kMaxLists];
  SlotPool<ListSlot> free_slots;
  std::unique_ptr<RecordLoader> loader;

  std::mutex summary_mutex;  // guards what follows
  cudaStream_t summary_stream = nullptr;
  PlacedArray<PageHeader> summary_headers;  // pinned, [kSummaryBatch]
};

absl::Status PeerFetcher::Impl::MakeArena() {
  const ArenaShape& shape = memory->shape();
  KVD_ASSIGN_OR_RETURN(lost, PlacedArray<uint32_t>::MakePinned(1, "word of a lost session"));
  lost_word = lost.data();
  *lost_word = 0;
  std::vector<const uint8_t*> bases;
  for (uint32_t slab = 0; slab < shape.num_slabs(); ++slab) {
    bases.push_back(memory->slot_base(slab * shape.slots_per_slab));
  }
  KVD_ASSIGN_OR_RETURN(
      slabs, PlacedArray<const uint8_t*>::Make(OnGpu(gpu), bases.size(), "table of slabs"));
  KVD_RETURN_IF_ERROR(CopyBytes(OnGpu(gpu), slabs.data(), bases.data(), slabs.num_bytes()));
  arena = {slabs.data(), memory->header(0), lost_word, shape.num_slots, shape.slots_per_slab};
  return absl::OkStatus();
}

absl::Status PeerFetcher::Impl::MakeSlots() {
  int least = 0;
  int greatest = 0;
  KVD_RETURN_IF_ERROR(
      GpuStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), "peer fetcher"));
  for (ListSlot& slot : slots) {
    KVD_ASSIGN_OR_RETURN(slot.units,
                         PlacedArray<GatherUnit>::MakePinned(kLaunchUnits, "lists of units"));
    KVD_ASSIGN_OR_RETURN(slot.valid,
                         PlacedArray<uint8_t>::MakePinned(kLaunchUnits, "lists of units"));
    // Ahead of what computes there: a step waits for it, and it is short.
    KVD_RETURN_IF_ERROR(
        GpuStatus(cudaStreamCreateWithPriority(&slot.stream, cudaStreamNonBlocking, greatest),
                  "peer fetcher"));
    free_slots.Give(&slot);
  }
  KVD_ASSIGN_OR_RETURN(summary_headers,
                       PlacedArray<PageHeader>::MakePinned(kSummaryBatch, "headers"));
  return GpuStatus(cudaStreamCreateWithFlags(&summary_stream, cudaStreamNonBlocking),
                   "peer fetcher");
}

absl::StatusOr<std::unique_ptr<PeerFetcher>> PeerFetcher::Make(
    std::unique_ptr<const ArenaMemory> memory) {
  auto fetcher =
      std::unique_ptr<PeerFetcher>(new PeerFetcher(std::make_unique<Impl>(std::move(memory))));
  Impl& impl = *fetcher->impl_;
  const GpuScope scope(impl.gpu);
  KVD_RETURN_IF_ERROR(GpuStatus(scope.error(), "peer fetcher"));
  KVD_RETURN_IF_ERROR(impl.MakeArena());
  KVD_RETURN_IF_ERROR(impl.MakeSlots());
  KVD_ASSIGN_OR_RETURN(impl.loader, RecordLoader::Make(impl.gpu, impl.memory->shape().slot));
  return fetcher;
}

PeerFetcher::PeerFetcher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

PeerFetcher::~PeerFetcher() {
  // A failure means that the context is gone, and all of this with it. The mapping waits for the
  // whole GPU.
  const GpuScope scope(impl_->gpu);
  for (ListSlot& slot : impl_->slots) {
    if (slot.stream == nullptr) continue;
    (void)cudaStreamSynchronize(slot.stream);
    (void)cudaStreamDestroy(slot.stream);
  }
  if (impl_->summary_stream != nullptr) (void)cudaStreamDestroy(impl_->summary_stream);
}

// --- units ---------------------------------------------------------------------------------------

void PeerFetcher::Impl::Enqueue(ListSlot& slot, FetchList& list, size_t first) {
  slot.first = first;
  slot.count = std::min(kLaunchUnits, list.entries.size() - first);
  for (size_t i = 0; i < slot.count; ++i) {
    const FetchEntry& entry = list.entries[first + i];
    slot.units[i] = {memory->unit(entry.slot, entry.layer, entry.head), memory->header(entry.slot),
                     entry.generation, list.destinations[first + i]};
  }
  const GpuScope scope(gpu);
  const size_t unit_bytes = memory->shape().slot.unit_bytes;
  if (!Good(scope.error()) ||
      !Good(LaunchGatherUnits(slot.units.data(), static_cast<int64_t>(slot.count), unit_bytes,
                              slot.valid.data(), slot.stream))) {
    list.code = absl::StatusCode::kUnavailable;
    return;
  }
  list.path_bytes += slot.count * unit_bytes;
}

// Waits for the launch at work; whatever it returns, nothing writes to the destinations any more.
absl::StatusCode PeerFetcher::Impl::WaitFor(const ListSlot& slot) {
  const Clock::time_point spin_until = Clock::now() + kSpin;
  for (;;) {
    const cudaError_t state = cudaStreamQuery(slot.stream);
    if (state != cudaErrorNotReady) {
      return Good(state) ? absl::StatusCode::kOk : absl::StatusCode::kUnavailable;
    }
    const Clock::time_point now = Clock::now();
    if (now >= slot.deadline) break;
    if (now >= spin_until) std::this_thread::sleep_for(kNap);
  }
  // A kernel that has begun cannot be taken back, but it is short.
  return Good(cudaStreamSynchronize(slot.stream)) ? absl::StatusCode::kDeadlineExceeded
                                                  : absl::StatusCode::kUnavailable;
}

void PeerFetcher::Impl::Finish(ListSlot& slot, FetchList& list) {
  for (;;) {
    if (list.code == absl::StatusCode::kOk) list.code = WaitFor(slot);
    if (list.code != absl::StatusCode::kOk) return;
    std::memcpy(list.valid + slot.first, slot.valid.data(), slot.count);
    list.num_valid += std::count(slot.valid.data(), slot.valid.data() + slot.count, uint8_t{1});
    const size_t next = slot.first + slot.count;
    if (next == list.entries.size()) return;
    Enqueue(slot, list, next);
  }
}

void PeerFetcher::Impl::Begin(ListSlot& slot, FetchList& list, Clock::time_point deadline) {
  slot.deadline = deadline;
  Enqueue(slot, list, 0);
}

void PeerFetcher::Start(FetchList& list) {
  if (impl_->Refuse(list) || list.entries.empty()) return;
  impl_->free_slots.StartIn(list, [&](ListSlot& slot, Clock::time_point deadline) {
    impl_->Begin(slot, list, deadline);
  });
}

void PeerFetcher::Wait(FetchList& list) {
  ListSlot* slot = impl_->free_slots.TakeBack(
      list,
      [&](ListSlot& free, Clock::time_point deadline) { impl_->Begin(free, list, deadline); });
  if (slot == nullptr) return;
  impl_->Finish(*slot, list);
  impl_->free_slots.Give(slot);
  if (impl_->is_lost()) AbortList(list);
}

// --- records -------------------------------------------------------------------------------------

// Each slot's records and then, behind them in stream order, its header: what the header says held
// after the copy.
void PeerFetcher::FetchSummaries(FetchList& list) {
  if (impl_->Refuse(list)) return;
  const ArenaMemory& memory = *impl_->memory;
  const size_t bytes = memory.shape().slot.summary_bytes();
  const Clock::time_point deadline = DeadlineOf(list.deadline);
  const std::lock_guard<std::mutex> lock(impl_->summary_mutex);
  const GpuScope scope(impl_->gpu);
  bool good = impl_->Good(scope.error());
  for (size_t first = 0; first < list.entries.size() && good; first += kSummaryBatch) {
    if (Clock::now() > deadline) {
      list.code = absl::StatusCode::kDeadlineExceeded;
      return;
    }
    const size_t count = std::min(kSummaryBatch, list.entries.size() - first);
    for (size_t i = 0; i < count && good; ++i) {
      const uint32_t slot = list.entries[first + i].slot;
      good = impl_->Good(cudaMemcpyAsync(list.destinations[first + i], memory.summary(slot), bytes,
                                         cudaMemcpyDeviceToHost, impl_->summary_stream)) &&
             impl_->Good(cudaMemcpyAsync(&impl_->summary_headers[i], memory.header(slot),
                                         sizeof(PageHeader), cudaMemcpyDeviceToHost,
                                         impl_->summary_stream));
    }
    good = impl_->Good(cudaStreamSynchronize(impl_->summary_stream)) && good;
    for (size_t i = 0; i < count && good; ++i) {
      const PageHeader& header = impl_->summary_headers[i];
      const uint64_t generation = list.entries[first + i].generation;
      uint8_t* records = list.destinations[first + i];
      const bool valid = generation % 2 == 0 &&
                         header.generation.load(std::memory_order_relaxed) == generation &&
                         Checksum64(records, bytes) == header.summary_checksum;
      if (!valid) std::memset(records, 0, bytes);
      list.valid[first + i] = valid ? 1 : 0;
      list.num_valid += valid ? 1 : 0;
    }
    list.path_bytes += count * bytes;
  }
  if (!good) list.code = absl::StatusCode::kUnavailable;
  if (impl_->is_lost()) AbortList(list);
}

void PeerFetcher::StoreRecords(RecordList& list) {
  const ArenaMemory& memory = *impl_->memory;
  const auto clear = [&list](absl::StatusCode code) {
    list.code = code;
    list.num_valid = 0;
    std::fill_n(list.valid, list.entries.size(), uint8_t{0});
  };
  clear(impl_->is_lost() ? absl::StatusCode::kAborted : absl::StatusCode::kOk);
  for (const RecordList::Entry& entry : list.entries) {
    if (entry.slot >= memory.shape().num_slots) list.code = absl::StatusCode::kInvalidArgument;
  }
  if (list.code != absl::StatusCode::kOk) return;
  const absl::Status status = impl_->loader->Run(
      list, 0, list.entries.size(),
      [&](size_t i) {
        const RecordList::Entry& entry = list.entries[i];
        return SlotRecords{
            memory.summary(entry.slot), memory.header(entry.slot), entry.generation, 0, 0, 0};
      },
      DeadlineOf(list.deadline));
  list.code = status.code();
  if (absl::IsInternal(status)) {
    impl_->broken.store(true, std::memory_order_relaxed);
    list.code = absl::StatusCode::kUnavailable;
  }
  if (impl_->is_lost()) clear(absl::StatusCode::kAborted);
}

// --- the rest ------------------------------------------------------------------------------------

bool PeerFetcher::failed() const { return impl_->broken.load(std::memory_order_relaxed); }

void PeerFetcher::Shutdown() {
  std::atomic_ref(*impl_->lost_word).store(1, std::memory_order_release);
}

const PeerArena& PeerFetcher::arena() const { return impl_->arena; }
const ArenaMemory& PeerFetcher::memory() const { return *impl_->memory; }

}  // namespace kvd
