#include "client/staged_fetcher.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#include "client/device_buffer.h"
#include "client/fetch_list.h"
#include "kernels/checksum.h"
#include "kernels/gather.h"
#include "proto/status.h"
#if KVD_CUDA
#include "client/gpu_scope.h"
#include "client/gpu_status.h"
#include "client/record_loader.h"
#endif

namespace kvd {
namespace {

using Clock = std::chrono::steady_clock;

// Staging memory of one part: what the ucx path sends as one piece.
constexpr size_t kPartBytes = size_t{4} << 20;
// Staging memory of records.
[[maybe_unused]] constexpr size_t kRecordBytes = size_t{8} << 20;

absl::Duration Left(Clock::time_point deadline) {
  return absl::FromChrono(deadline - Clock::now());
}

// Consecutive entries of a list, on their way through one piece of staging memory.
struct Part {
  PlacedBytes staging;                 // pinned
  std::vector<uint8_t*> destinations;  // in staging
  PlacedArray<GatherUnit> uploads;     // pinned
  PlacedArray<uint8_t> uploaded;       // pinned; always 1: staging does not change
  FetchList list;
  size_t first = 0;
  size_t count = 0;  // 0: idle
};

struct ListSlot {
  Part parts[2];
  Clock::time_point deadline;
  size_t next = 0;  // first entry that no part has taken yet
#if KVD_CUDA
  cudaStream_t stream = nullptr;
#endif
};

}  // namespace

struct StagedFetcher::Impl {
  Impl(std::unique_ptr<Fetcher> inner_in, const ArenaShape& shape_in, const MemoryPlace& place_in)
      : inner(std::move(inner_in)), shape(shape_in), place(place_in) {}
  ~Impl();

  absl::Status MakeSlots();
  absl::Status MakePart(Part& part);
  void Begin(ListSlot& slot, FetchList& list, Clock::time_point deadline);
  void StartPart(ListSlot& slot, Part& part, FetchList& list);
  void Finish(ListSlot& slot, FetchList& list);
  bool Upload(ListSlot& slot, Part& part, const FetchList& list);
  void StoreBatch(RecordList& list, size_t first, size_t count, Clock::time_point deadline);
  // `inner` brings units where they go.
  bool units_pass() const { return place.on_gpu() && inner->destination_space() == place.space; }

  const std::unique_ptr<Fetcher> inner;
  const ArenaShape shape;
  const MemoryPlace place;
  size_t part_units = 0;
  std::atomic<bool> broken{false};
  ListSlot slots[kMaxLists];
  SlotPool<ListSlot> free_slots;

  std::mutex record_mutex;  // guards what follows
  PlacedBytes record_staging;
#if KVD_CUDA
  std::unique_ptr<RecordLoader> loader;
#endif
};

absl::Status StagedFetcher::Impl::MakePart(Part& part) {
  constexpr char kWhat[] = "staging memory";
  KVD_ASSIGN_OR_RETURN(part.staging,
                       PlacedBytes::MakePinned(part_units * shape.slot.unit_bytes, kWhat));
  KVD_ASSIGN_OR_RETURN(part.uploads, PlacedArray<GatherUnit>::MakePinned(part_units, kWhat));
  KVD_ASSIGN_OR_RETURN(part.uploaded, PlacedArray<uint8_t>::MakePinned(part_units, kWhat));
  for (size_t i = 0; i < part_units; ++i) {
    part.destinations.push_back(part.staging.data() + i * shape.slot.unit_bytes);
  }
  return absl::OkStatus();
}

absl::Status StagedFetcher::Impl::MakeSlots() {
  part_units = std::max<size_t>(kPartBytes / shape.slot.unit_bytes, 1);
  for (ListSlot& slot : slots) {
    for (Part& part : slot.parts) KVD_RETURN_IF_ERROR(MakePart(part));
#if KVD_CUDA
    if (place.on_gpu()) {
      KVD_RETURN_IF_ERROR(GpuStatus(cudaStreamCreateWithFlags(&slot.stream, cudaStreamNonBlocking),
                                    "staged fetcher"));
    }
#endif
    free_slots.Give(&slot);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StagedFetcher>> StagedFetcher::Make(std::unique_ptr<Fetcher> inner,
                                                                   const ArenaShape& shape,
                                                                   const MemoryPlace& place) {
  auto fetcher = std::unique_ptr<StagedFetcher>(
      new StagedFetcher(std::make_unique<Impl>(std::move(inner), shape, place)));
  Impl& impl = *fetcher->impl_;
  if (!place.on_gpu()) {
    KVD_RETURN_IF_ERROR(impl.MakeSlots());
    return fetcher;
  }
#if KVD_CUDA
  const GpuScope scope(place.gpu);
  KVD_RETURN_IF_ERROR(GpuStatus(scope.error(), "staged fetcher"));
  if (!impl.units_pass()) KVD_RETURN_IF_ERROR(impl.MakeSlots());
  const size_t record_bytes = shape.slot.summary_bytes();
  KVD_ASSIGN_OR_RETURN(impl.record_staging,
                       PlacedBytes::MakePinned(std::max(kRecordBytes, record_bytes), "records"));
  KVD_ASSIGN_OR_RETURN(impl.loader, RecordLoader::Make(place.gpu, shape.slot));
  return fetcher;
#else
  return absl::FailedPreconditionError(
      "a worker with a GPU is wanted, and this library was built without CUDA");
#endif
}

StagedFetcher::Impl::~Impl() {
#if KVD_CUDA
  // No list is in flight, so the streams are idle.
  for (ListSlot& slot : slots) {
    if (slot.stream != nullptr) (void)cudaStreamDestroy(slot.stream);
  }
#endif
}

StagedFetcher::StagedFetcher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StagedFetcher::~StagedFetcher() = default;

// --- units ---------------------------------------------------------------------------------------

void StagedFetcher::Impl::Begin(ListSlot& slot, FetchList& list, Clock::time_point deadline) {
  slot.deadline = deadline;
  slot.next = 0;
  for (Part& part : slot.parts) StartPart(slot, part, list);
}

void StagedFetcher::Impl::StartPart(ListSlot& slot, Part& part, FetchList& list) {
  part.first = slot.next;
  part.count = std::min(part_units, list.entries.size() - slot.next);
  if (part.count == 0) return;
  slot.next += part.count;
  part.list = {};
  part.list.entries = list.entries.subspan(part.first, part.count);
  part.list.destinations = part.destinations.data();
  part.list.valid = list.valid + part.first;
  part.list.deadline = Left(slot.deadline);
  inner->Start(part.list);
}

// Sends what has come from staging memory to where it belongs, missing units as zeros. False: a
// CUDA error.
bool StagedFetcher::Impl::Upload(ListSlot& slot, Part& part, const FetchList& list) {
  int64_t count = 0;
  for (size_t i = 0; i < part.count; ++i) {
    // After an error, what did not come has undefined staging memory, and its destination stays as
    // it is.
    if (part.list.code != absl::StatusCode::kOk && part.list.valid[i] == 0) continue;
    part.uploads[static_cast<size_t>(count++)] = {part.destinations[i], nullptr, 0,
                                                  list.destinations[part.first + i]};
  }
  const size_t unit_bytes = shape.slot.unit_bytes;
  if (!place.on_gpu()) {
    ref::GatherUnits(part.uploads.data(), count, unit_bytes, part.uploaded.data());
    return true;
  }
#if KVD_CUDA
  const GpuScope scope(place.gpu);
  const bool started = scope.error() == cudaSuccess &&
                       LaunchGatherUnits(part.uploads.data(), count, unit_bytes,
                                         part.uploaded.data(), slot.stream) == cudaSuccess;
  return cudaStreamSynchronize(slot.stream) == cudaSuccess && started;
#else
  (void)slot;
  return false;
#endif
}

void StagedFetcher::Impl::Finish(ListSlot& slot, FetchList& list) {
  for (size_t turn = 0; slot.parts[turn].count > 0; turn ^= 1) {
    Part& part = slot.parts[turn];
    inner->Wait(part.list);
    if (list.code == absl::StatusCode::kOk) list.code = part.list.code;
    if (Upload(slot, part, list)) {
      list.num_valid += part.list.num_valid;
    } else {
      broken.store(true, std::memory_order_relaxed);
      std::fill_n(part.list.valid, part.count, uint8_t{0});
      list.code = absl::StatusCode::kUnavailable;
    }
    list.path_bytes += part.list.path_bytes;
    part.count = 0;
    if (list.code == absl::StatusCode::kOk) StartPart(slot, part, list);
  }
}

void StagedFetcher::Start(FetchList& list) {
  if (impl_->units_pass()) return impl_->inner->Start(list);
  BeginList(list);
  if (list.entries.empty()) return;
  if (!AllInRange(list, impl_->shape)) {
    list.code = absl::StatusCode::kInvalidArgument;
    return;
  }
  impl_->free_slots.StartIn(list, [&](ListSlot& slot, Clock::time_point deadline) {
    impl_->Begin(slot, list, deadline);
  });
}

void StagedFetcher::Wait(FetchList& list) {
  if (impl_->units_pass()) return impl_->inner->Wait(list);
  ListSlot* slot = impl_->free_slots.TakeBack(
      list,
      [&](ListSlot& free, Clock::time_point deadline) { impl_->Begin(free, list, deadline); });
  if (slot == nullptr) return;
  impl_->Finish(*slot, list);
  impl_->free_slots.Give(slot);
  if (list.code == absl::StatusCode::kAborted) AbortList(list);
}

// --- records -------------------------------------------------------------------------------------

void StagedFetcher::FetchSummaries(FetchList& list) { impl_->inner->FetchSummaries(list); }

#if KVD_CUDA
void StagedFetcher::Impl::StoreBatch(RecordList& list, size_t first, size_t count,
                                     Clock::time_point deadline) {
  const size_t bytes = shape.slot.summary_bytes();
  std::vector<FetchEntry> entries;
  std::vector<uint8_t*> destinations;
  std::vector<uint8_t> valid(count);
  for (size_t i = 0; i < count; ++i) {
    entries.push_back({list.entries[first + i].slot, 0, 0, list.entries[first + i].generation});
    destinations.push_back(record_staging.data() + i * bytes);
  }
  FetchList fetch;
  fetch.entries = entries;
  fetch.destinations = destinations.data();
  fetch.valid = valid.data();
  fetch.deadline = Left(deadline);
  inner->FetchSummaries(fetch);
  if (fetch.code != absl::StatusCode::kOk) {
    list.code = fetch.code;
    return;
  }
  const absl::Status status = loader->Run(
      list, first, count,
      [&](size_t i) {
        if (valid[i - first] == 0) return SlotRecords{};
        const uint8_t* records = destinations[i - first];
        return SlotRecords{records, nullptr, 0, Checksum64(records, bytes), 0, 0};
      },
      deadline);
  list.code = status.code();
  if (absl::IsInternal(status)) {
    broken.store(true, std::memory_order_relaxed);
    list.code = absl::StatusCode::kUnavailable;
  }
}
#endif

void StagedFetcher::StoreRecords(RecordList& list) {
#if KVD_CUDA
  if (impl_->place.on_gpu()) {
    list.code = absl::StatusCode::kOk;
    list.num_valid = 0;
    std::fill_n(list.valid, list.entries.size(), uint8_t{0});
    const Clock::time_point deadline = DeadlineOf(list.deadline);
    const size_t per_batch = impl_->record_staging.size() / impl_->shape.slot.summary_bytes();
    const std::lock_guard<std::mutex> lock(impl_->record_mutex);
    for (size_t first = 0; first < list.entries.size() && list.code == absl::StatusCode::kOk;
         first += per_batch) {
      impl_->StoreBatch(list, first, std::min(per_batch, list.entries.size() - first), deadline);
    }
    return;
  }
#endif
  Fetcher::StoreRecords(list);
}

// --- the rest ------------------------------------------------------------------------------------

PathKind StagedFetcher::path() const { return impl_->inner->path(); }
MemorySpace StagedFetcher::destination_space() const { return impl_->place.space; }
bool StagedFetcher::failed() const {
  return impl_->broken.load(std::memory_order_relaxed) || impl_->inner->failed();
}
void StagedFetcher::Shutdown() { impl_->inner->Shutdown(); }

}  // namespace kvd
