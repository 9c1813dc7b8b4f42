#include "client/decode_batch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/batch_scan.h"
#include "client/decode_batch_impl.h"
#include "client/gpu_scope.h"
#include "client/peer_fetcher.h"
#include "kernels/built_geometries.h"
#include "proto/clock.h"
#include "proto/status.h"

namespace kvd {
namespace {

// Pages that one row may choose, and so slots of its page cache.
constexpr int kMaxBudget = kMaxCacheSlots;

absl::Status CheckOptions(const WorkerShape& shape, const BatchOptions& options) {
  const auto refuse = [](absl::string_view field, auto... why) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", why...));
  };
  if (!shape.place.on_gpu()) {
    return absl::FailedPreconditionError(
        "DecodeBatch runs on a GPU and the worker's memory is on the host: set ClientOptions::gpu, "
        "or use Sequence::Run");
  }
  if (const char* problem = GpuProblem(shape.geometry)) return refuse("geometry", problem);
  KVD_RETURN_IF_ERROR(Validate(options.step, shape.num_layers()));
  if (options.max_sequences < 1 || options.max_sequences * shape.num_heads() > 2048) {
    return refuse("max_sequences", "must be from 1 to ", 2048 / shape.num_heads(), " with ",
                  shape.num_heads(), " KV heads, got ", options.max_sequences);
  }
  const int64_t most = int64_t{kMaxPages} * shape.geometry.page_tokens;
  if (options.max_tokens < 1 || options.max_tokens > most) {
    return refuse("max_tokens", "must be from 1 to ", most, ", got ", options.max_tokens);
  }
  if (options.step.budget > kMaxBudget) {
    return refuse("budget", "must be at most ", kMaxBudget, " on a GPU, got ", options.step.budget);
  }
  if (!options.step.dense_layers.empty()) {
    return refuse("dense_layers",
                  "not on a GPU: keep the KV of layers that attend everything in the engine");
  }
  return absl::OkStatus();
}

// Adds an array to the batch and its bytes to the count.
template <typename T>
absl::Status Add(const MemoryPlace& place, size_t size, PlacedArray<T>& array, size_t& num_bytes) {
  KVD_ASSIGN_OR_RETURN(array, PlacedArray<T>::Make(place, size, "decode batch"));
  num_bytes += array.num_bytes();
  return absl::OkStatus();
}

template <typename T>
absl::Status AddPinned(size_t size, PlacedArray<T>& array) {
  KVD_ASSIGN_OR_RETURN(array, PlacedArray<T>::MakePinned(size, "decode batch"));
  return absl::OkStatus();
}

template <typename T>
absl::Status Fill(const PlacedArray<T>& array, int byte, absl::string_view what) {
  return GpuStatus(
      cudaMemsetAsync(const_cast<T*>(array.data()), byte, array.num_bytes(), cudaStreamPerThread),
      what);
}

template <typename T>
absl::Status Upload(T* to, const T* from, size_t size, cudaStream_t stream) {
  return GpuStatus(cudaMemcpyAsync(to, from, size * sizeof(T), cudaMemcpyHostToDevice, stream),
                   "decode batch");
}

}  // namespace

DecodeBatch::DecodeBatch(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DecodeBatch::~DecodeBatch() = default;

absl::StatusOr<std::unique_ptr<DecodeBatch>> DecodeBatch::Plan(const WorkerShape& shape,
                                                               const BatchOptions& options) {
  KVD_RETURN_IF_ERROR(CheckOptions(shape, options));
  auto impl = std::make_unique<Impl>(shape, options);
  KVD_RETURN_IF_ERROR(impl->Allocate());
  return std::unique_ptr<DecodeBatch>(new DecodeBatch(std::move(impl)));
}

DecodeBatch::Impl::~Impl() {
  const GpuScope scope(shape.place.gpu);
  cudaDeviceSynchronize();
  for (int n = 0; n < static_cast<int>(rows.size()); ++n) {
    if (rows[static_cast<size_t>(n)].pages != nullptr)
      rows[static_cast<size_t>(n)].pages->ring().SetStepEvents(nullptr);
  }
}

absl::Status DecodeBatch::Impl::Allocate() {
  const KvGeometry& g = shape.geometry;
  const MemoryPlace& place = shape.place;
  const GpuScope scope(place.gpu);
  KVD_RETURN_IF_ERROR(GpuStatus(scope.error(), absl::StrCat("GPU ", place.gpu)));
  const auto n = static_cast<size_t>(options.max_sequences);
  const auto layers = static_cast<size_t>(g.num_layers);
  page_capacity = static_cast<int>((options.max_tokens + g.page_tokens - 1) / g.page_tokens);
  lse_stride = (int64_t{page_capacity} + 3) / 4 * 4;
  budget = std::min(options.step.budget, page_capacity);
  const double wanted = std::ceil(options.step.cache_ratio * budget);
  const int cache_slots =
      static_cast<int>(std::clamp<double>(wanted, 1, std::min(page_capacity, kMaxCacheSlots)));
  max_chosen = std::min(options.step.candidates(), page_capacity);
  max_candidates = max_chosen + options.step.n_sink + options.step.n_win;
  max_units = budget + options.step.n_sink + options.step.n_win + TailRing::kSlackPages;
  scan =
      ChooseBatchScan(shape, options.max_sequences, page_capacity, max_chosen, options.step.scan);
  step_shape = {.num_rows = options.max_sequences,
                .num_layers = g.num_layers,
                .num_kv_heads = num_heads(),
                .shard_heads = g.shard_heads(),
                .group = g.group(),
                .head_dim = g.head_dim,
                .page_tokens = g.page_tokens,
                .cache_slots = cache_slots,
                .num_arenas = kMaxArenas};
  rows.resize(n);
  arenas.resize(kMaxArenas);
  const size_t lists = list_rows(), q_rows = n * static_cast<size_t>(shape.num_q_heads());
  const auto k = static_cast<size_t>(std::max(budget, 1));
  size_t& bytes = num_workspace_bytes;
  KVD_ASSIGN_OR_RETURN(PlacedBytes on_device,
                       PlacedBytes::Make(place, Tables::Size(n), "decode batch"));
  bytes += on_device.size();
  tables.Set(std::move(on_device), n);
  KVD_RETURN_IF_ERROR(Add(place, kMaxArenas, arena_table, bytes));
  KVD_RETURN_IF_ERROR(Add(place, layers * n, coarse, bytes));
  KVD_RETURN_IF_ERROR(Add(place, layers * n, fine, bytes));
  KVD_RETURN_IF_ERROR(Add(place, n, capacities, bytes));
  KVD_RETURN_IF_ERROR(Add(place, n, selectable, bytes));
  KVD_RETURN_IF_ERROR(Add(place, layers * lists, resolve_rows, bytes));
  KVD_RETURN_IF_ERROR(Add(place, q_rows * static_cast<size_t>(lse_stride), lse, bytes));
  KVD_RETURN_IF_ERROR(Add(place,
                          SelectGpuScratchBytes(static_cast<int64_t>(lists), g.group(), lse_stride),
                          select_scratch, bytes));
  KVD_RETURN_IF_ERROR(Add(place, lists * k, selected, bytes));
  KVD_RETURN_IF_ERROR(Add(place, lists, num_selected, bytes));
  KVD_RETURN_IF_ERROR(Add(place, lists, threshold, bytes));
  KVD_RETURN_IF_ERROR(Add(place, q_rows, log_norm, bytes));
  if (scan == ScanMode::kProgressive) {
    KVD_RETURN_IF_ERROR(Add(place, lists * static_cast<size_t>(max_candidates), candidates, bytes));
    KVD_RETURN_IF_ERROR(Add(place, lists, num_candidates, bytes));
  }
  KVD_RETURN_IF_ERROR(Add(place, lists * k, slots, bytes));
  KVD_RETURN_IF_ERROR(Add(place, lists * k, miss_idx, bytes));
  KVD_RETURN_IF_ERROR(Add(place, lists, num_misses, bytes));
  KVD_RETURN_IF_ERROR(Add(place, lists * static_cast<size_t>(max_units), units, bytes));
  KVD_RETURN_IF_ERROR(Add(place, lists, num_units, bytes));
  KVD_RETURN_IF_ERROR(Add(place, 1, step, bytes));
  KVD_RETURN_IF_ERROR(Add(place, kMaxArenas, arena_lost, bytes));
  KVD_RETURN_IF_ERROR(Add(place, n, figures, bytes));
  if (reports_mass()) {
    KVD_RETURN_IF_ERROR(Add(place, q_rows, mass, bytes));
    report.mass.resize(n);
  }
  if (options.mode == BatchMode::kHostDriven) {
    KVD_RETURN_IF_ERROR(AddPinned(lists * k, host.selected));
    KVD_RETURN_IF_ERROR(AddPinned(lists * k, host.slots));
    KVD_RETURN_IF_ERROR(AddPinned(lists * k, host.miss_idx));
    KVD_RETURN_IF_ERROR(AddPinned(lists, host.num_misses));
    KVD_RETURN_IF_ERROR(AddPinned(lists * k, host.units));
    KVD_RETURN_IF_ERROR(AddPinned(lists, host.num_units));
    KVD_RETURN_IF_ERROR(AddPinned(lists * k, host.valid));
    KVD_RETURN_IF_ERROR(Add(place, q_rows * static_cast<size_t>(g.head_dim), fetched_o, bytes));
    KVD_RETURN_IF_ERROR(Add(place, q_rows, fetched_lse, bytes));
  }
  for (Flight& flight : flights) {
    KVD_ASSIGN_OR_RETURN(PlacedBytes pinned,
                         PlacedBytes::MakePinned(Tables::Size(n), "decode batch"));
    flight.tables.Set(std::move(pinned), n);
    KVD_RETURN_IF_ERROR(AddPinned(kMaxArenas, flight.arenas));
    KVD_RETURN_IF_ERROR(AddPinned(n, flight.figures));
    if (reports_mass()) KVD_RETURN_IF_ERROR(AddPinned(q_rows, flight.mass));
    KVD_RETURN_IF_ERROR(AddPinned(kMaxUpdates, flight.updates));
    KVD_RETURN_IF_ERROR(
        AddPinned(kMaxUpdates * static_cast<size_t>(shape.num_shards()), flight.update_places));
    KVD_RETURN_IF_ERROR(
        GpuStatus(cudaEventCreateWithFlags(&flight.done, cudaEventDisableTiming), "decode batch"));
    events->all.push_back(flight.done);
  }
  // Padding until somebody joins: rows of zeros are read by no kernel but for their num_tokens.
  const std::vector<StepRow> padding(n);
  const std::vector<int32_t> no_pages(n);
  KVD_RETURN_IF_ERROR(CopyBytes(place, tables.rows, padding.data(), n * sizeof(StepRow)));
  KVD_RETURN_IF_ERROR(CopyBytes(place, tables.num_pages, no_pages.data(), n * sizeof(int32_t)));
  KVD_RETURN_IF_ERROR(Fill(arena_table, 0, "decode batch"));
  KVD_RETURN_IF_ERROR(Fill(coarse, 0, "decode batch"));
  KVD_RETURN_IF_ERROR(Fill(fine, 0, "decode batch"));
  KVD_RETURN_IF_ERROR(Fill(capacities, 0, "decode batch"));
  KVD_RETURN_IF_ERROR(Fill(selectable, 0, "decode batch"));
  KVD_RETURN_IF_ERROR(Fill(resolve_rows, 0, "decode batch"));
  KVD_RETURN_IF_ERROR(Fill(select_scratch, 0, "decode batch"));  // as select.h asks
  KVD_RETURN_IF_ERROR(Fill(step, 0, "decode batch"));
  KVD_RETURN_IF_ERROR(Fill(figures, 0, "decode batch"));
  return GpuStatus(cudaStreamSynchronize(cudaStreamPerThread), "decode batch");
}

absl::StatusOr<int> DecodeBatch::Join(Sequence* sequence) {
  return impl_->Join(sequence->pages_.get(), sequence, sequence->batch_totals_.get());
}

absl::StatusOr<int> DecodeBatch::Join(SequencePages* pages, StepTotals* totals) {
  return impl_->Join(pages, nullptr, totals);
}

absl::StatusOr<int> DecodeBatch::Impl::Join(SequencePages* pages, Sequence* sequence,
                                            StepTotals* totals) {
  const auto free =
      std::find_if(rows.begin(), rows.end(), [](const Row& row) { return row.pages == nullptr; });
  if (free == rows.end()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", rows.size(),
                     " rows of the batch are taken: let a sequence leave, or raise max_sequences"));
  }
  if (pages->page_capacity() > page_capacity || pages->n_sink() != options.step.n_sink ||
      pages->n_win() != options.step.n_win || !(pages->shape().place == shape.place)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a sequence that joins has room for at most ", page_capacity,
        " pages (max_tokens), n_sink ", options.step.n_sink, ", n_win ", options.step.n_win,
        " and lies on GPU ", shape.place.gpu, ": got ", pages->page_capacity(), ", ",
        pages->n_sink(), ", ", pages->n_win(), ", GPU ", pages->shape().place.gpu));
  }
  for (int d = 0; d < pages->num_daemons(); ++d) {
    const auto& source = pages->source(d);
    if (options.mode != BatchMode::kCaptured || source == nullptr ||
        source->fetcher->peer() != nullptr)
      continue;
    return absl::FailedPreconditionError(
        absl::StrCat("a captured step reads every daemon by the peer path; daemon ", d,
                     " is reached by '", PathName(source->fetcher->path()),
                     "': use BatchMode::kHostDriven, or require the peer path"));
  }
  const int n = static_cast<int>(free - rows.begin());
  if (absl::Status filled = FillRow(n, pages); !filled.ok()) {
    *free = Row();
    return filled;
  }
  free->pages = pages;
  free->sequence = sequence;
  free->totals = totals;
  pages->ring().SetStepEvents(events);
  return n;
}

// Memory of a row, and everything about it that does not change from step to step. No step in
// flight reads it.
absl::Status DecodeBatch::Impl::FillRow(int n, SequencePages* pages) {
  Row& row = rows[static_cast<size_t>(n)];
  const auto capacity = static_cast<size_t>(pages->page_capacity());
  const size_t lists = shape.units_per_page(),
               cached = lists * static_cast<size_t>(step_shape.cache_slots);
  constexpr char kWhat[] = "page cache";
  const MemoryPlace& place = shape.place;
  KVD_ASSIGN_OR_RETURN(row.places,
                       PlacedArray<PagePlace>::Make(
                           place, capacity * static_cast<size_t>(shape.num_shards()), kWhat));
  KVD_ASSIGN_OR_RETURN(row.selectable,
                       PlacedArray<uint64_t>::Make(place, (capacity + 63) / 64, kWhat));
  KVD_ASSIGN_OR_RETURN(row.cache, PlacedBytes::Make(place, cached * shape.unit_bytes(), kWhat));
  KVD_ASSIGN_OR_RETURN(row.page_slot, PlacedArray<int32_t>::Make(place, lists * capacity, kWhat));
  KVD_ASSIGN_OR_RETURN(row.slot_page, PlacedArray<int32_t>::Make(place, cached, kWhat));
  KVD_ASSIGN_OR_RETURN(row.slot_step, PlacedArray<uint64_t>::Make(place, cached, kWhat));
  if (options.mode == BatchMode::kHostDriven) {
    KVD_ASSIGN_OR_RETURN(
        row.fetch,
        MissFetch::Make(shape, static_cast<size_t>(num_heads()) * static_cast<size_t>(budget),
                        pages->max_daemons(), options.step));
  }
  KVD_RETURN_IF_ERROR(Fill(row.page_slot, 0xFF, kWhat));
  KVD_RETURN_IF_ERROR(Fill(row.slot_page, 0xFF, kWhat));
  KVD_RETURN_IF_ERROR(Fill(row.slot_step, 0, kWhat));
  KVD_RETURN_IF_ERROR(Fill(row.selectable, 0, kWhat));
  (void)pages->TakeChanges();  // all of it goes up now
  std::vector<PagePlace> places(row.places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    const auto page = static_cast<int>(i / static_cast<size_t>(shape.num_shards()));
    places[i] =
        PlaceOf(*pages, page, static_cast<int>(i % static_cast<size_t>(shape.num_shards())));
  }
  std::vector<const uint8_t*> bases(1);
  const auto rows_n = static_cast<size_t>(options.max_sequences),
             heads = static_cast<size_t>(num_heads());
  std::vector<ResolveRow> maps(heads);
  for (int layer = 0; layer < shape.num_layers(); ++layer) {
    const size_t at = static_cast<size_t>(layer) * rows_n + static_cast<size_t>(n);
    bases[0] = pages->mirror().coarse(layer);
    KVD_RETURN_IF_ERROR(CopyBytes(place, coarse.data() + at, bases.data(), sizeof(bases[0])));
    bases[0] = pages->mirror().fine(layer);
    KVD_RETURN_IF_ERROR(CopyBytes(place, fine.data() + at, bases.data(), sizeof(bases[0])));
    for (int h = 0; h < num_heads(); ++h) {
      const size_t unit = shape.unit_idx(layer, h),
                   slot = unit * static_cast<size_t>(step_shape.cache_slots);
      maps[static_cast<size_t>(h)] = {row.page_slot.data() + unit * capacity,
                                      row.slot_page.data() + slot, row.slot_step.data() + slot,
                                      step_shape.cache_slots};
    }
    KVD_RETURN_IF_ERROR(CopyBytes(place, resolve_rows.data() + at * heads, maps.data(),
                                  heads * sizeof(ResolveRow)));
  }
  const int64_t page_stride = pages->page_capacity();
  const uint64_t* bits = row.selectable.data();
  KVD_RETURN_IF_ERROR(CopyBytes(place, capacities.data() + n, &page_stride, sizeof(page_stride)));
  KVD_RETURN_IF_ERROR(CopyBytes(place, selectable.data() + n, &bits, sizeof(bits)));
  KVD_RETURN_IF_ERROR(CopyBytes(place, row.places.data(), places.data(), row.places.num_bytes()));
  return CopyBytes(place, row.selectable.data(), pages->selectable(), row.selectable.num_bytes());
}

void DecodeBatch::Leave(int row) { impl_->Leave(row); }

void DecodeBatch::Impl::Leave(int row) {
  const GpuScope scope(shape.place.gpu);
  cudaDeviceSynchronize();
  Row& leaving = rows[static_cast<size_t>(row)];
  if (leaving.pages == nullptr) return;
  for (Flight& flight : flights) (void)TakeFigures(flight, /*wait=*/true);
  leaving.pages->ring().SetStepEvents(nullptr);
  // The kernels look at a padding row's tables too, and must find nothing there.
  const auto heads = static_cast<size_t>(num_heads()), n = static_cast<size_t>(row),
             all = rows.size();
  for (size_t layer = 0; layer < static_cast<size_t>(shape.num_layers()); ++layer) {
    const size_t at = layer * all + n;
    cudaMemset(resolve_rows.data() + at * heads, 0, heads * sizeof(ResolveRow));
    cudaMemset(coarse.data() + at, 0, sizeof(void*));
    cudaMemset(fine.data() + at, 0, sizeof(void*));
  }
  cudaMemset(selectable.data() + n, 0, sizeof(void*));
  const StepRow padding;
  cudaMemcpy(tables.rows + n, &padding, sizeof(padding), cudaMemcpyHostToDevice);
  cudaMemset(tables.num_pages + n, 0, sizeof(int32_t));
  cudaDeviceSynchronize();
  leaving = Row();
  std::vector<std::shared_ptr<PageSource>> used(arenas.size());
  for (Row& other : rows) {
    for (int d = 0; other.pages != nullptr && d < other.pages->num_daemons(); ++d) {
      const auto at = std::find(arenas.begin(), arenas.end(), other.pages->source(d));
      if (at != arenas.end()) used[static_cast<size_t>(at - arenas.begin())] = *at;
    }
  }
  arenas.swap(used);
  arenas_changed = true;
}

const BatchReport& DecodeBatch::report() const { return impl_->report; }
const BatchOptions& DecodeBatch::options() const { return impl_->options; }
ScanMode DecodeBatch::scan() const { return impl_->scan; }
size_t DecodeBatch::workspace_bytes() const { return impl_->num_workspace_bytes; }
size_t DecodeBatch::cache_bytes() const {
  size_t bytes = 0;
  for (const Impl::Row& row : impl_->rows) bytes += row.num_bytes();
  return bytes;
}

absl::Status DecodeBatch::BeginStep(cudaStream_t stream) { return impl_->BeginStep(stream); }
absl::Status DecodeBatch::EndStep(cudaStream_t stream) { return impl_->EndStep(stream); }
absl::Status DecodeBatch::Run(int layer, const BatchInput& input, const BatchOutput& output,
                              cudaStream_t stream) {
  return impl_->Run(layer, input, output, stream);
}

}  // namespace kvd
