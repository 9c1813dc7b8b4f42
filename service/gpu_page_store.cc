#include "service/gpu_page_store.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/arena_io.h"
#include "kernels/checksum.h"
#include "kernels/gather.h"
#include "proto/status.h"
#include "service/log_setup.h"
#include "service/sealer.h"
#include "spdlog/spdlog.h"

namespace kvd {
namespace {

// Entries of one launch; longer lists take several.
constexpr size_t kItems = 2048;
// Pieces that travel at once from one arena's GPU memory; what does not find one free travels
// through host memory.
constexpr size_t kExportables = 8;

// The context, and every page with it, is lost.
void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  spdlog::critical("gpu_failed what={} problem={} meaning=\"its pages are lost: the process ends\"",
                   LogQuote(what), LogQuote(cudaGetErrorString(error)));
  spdlog::default_logger()->flush();
  std::abort();
}

absl::Status NoRoom(const char* what, int gpu, cudaError_t error) {
  (void)cudaGetLastError();
  return absl::ResourceExhaustedError(
      absl::StrFormat("GPU %d: no room for %s: %s", gpu, what, cudaGetErrorString(error)));
}

}  // namespace

// What kernels are told and what they answer, in pinned memory: a launch reads its entries from
// here, once each.
struct GpuPageStore::Tables {
  GatherUnit gathers[kItems];
  PieceCopy copies[kItems];
  PieceCopy more_copies[kItems];
  GenerationCheck checks[kItems];
  HeaderUpdate headers[kItems];
  const uint8_t* units[kItems];
  const uint8_t* metrics[kItems];
  uint8_t* coarse[kItems];
  uint8_t* fine[kItems];
  const uint8_t* records;
  uint64_t sums[kItems];
  uint64_t expected[kItems];
  uint64_t records_sum;
  int32_t non_finite[kItems];
  uint8_t valid[kItems];
};

// A stream with its tables: one operation at a time.
struct GpuPageStore::Lane {
  explicit Lane(int lane_gpu) : gpu(lane_gpu) {}
  const int gpu;
  cudaStream_t stream = nullptr;
  Tables* tables = nullptr;
  ~Lane() {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
    FreePinned(gpu, reinterpret_cast<uint8_t*>(tables));
  }
  void Wait(const char* what) const { CheckCuda(cudaStreamSynchronize(stream), what); }
};

// Takes a lane for one operation.
class GpuPageStore::LaneUse {
 public:
  explicit LaneUse(const GpuPageStore& store) : store_(store) {
    store.UseGpu();
    {
      const std::lock_guard<std::mutex> lock(store.lanes_mutex_);
      if (!store.free_lanes_.empty()) {
        lane_ = std::move(store.free_lanes_.back());
        store.free_lanes_.pop_back();
      }
    }
    if (lane_ != nullptr) return;
    absl::StatusOr<std::unique_ptr<Lane>> made = store.MakeLane(/*priority=*/0);
    if (!made.ok()) CheckCuda(cudaErrorMemoryAllocation, "another lane");
    lane_ = *std::move(made);
  }
  ~LaneUse() {
    const std::lock_guard<std::mutex> lock(store_.lanes_mutex_);
    store_.free_lanes_.push_back(std::move(lane_));
  }
  LaneUse(const LaneUse&) = delete;
  LaneUse& operator=(const LaneUse&) = delete;
  const Lane& lane() const { return *lane_; }

 private:
  const GpuPageStore& store_;
  std::unique_ptr<Lane> lane_;
};

GpuPageStore::GpuPageStore(const ArenaMemory& memory, const RecordRecipe& recipe)
    : PageStore(memory), recipe_(recipe), gpu_(memory.place().gpu) {}

absl::StatusOr<std::unique_ptr<PageStore>> GpuPageStore::Make(const ArenaMemory& memory,
                                                              const RecordRecipe& recipe) {
  std::unique_ptr<GpuPageStore> store(new GpuPageStore(memory, recipe));
  if (const cudaError_t set = cudaSetDevice(store->gpu_); set != cudaSuccess) {
    return NoRoom("a context", store->gpu_, set);
  }
  int least = 0;
  int greatest = 0;
  (void)cudaDeviceGetStreamPriorityRange(&least, &greatest);
  // A lock is held while headers are published: that goes before everything else of this process.
  KVD_ASSIGN_OR_RETURN(store->publish_lane_, store->MakeLane(greatest));
  KVD_ASSIGN_OR_RETURN(auto lane, store->MakeLane(/*priority=*/0));
  store->free_lanes_.push_back(std::move(lane));
  if (recipe.encoder == Encoder::kE1S) KVD_RETURN_IF_ERROR(store->PackMetric());
  return std::unique_ptr<PageStore>(std::move(store));
}

GpuPageStore::~GpuPageStore() {
  UseGpu();
  if (packed_metric_ != nullptr) (void)cudaFree(packed_metric_);
  FreeExportable(gpu_, exportable_memory_);
}

void GpuPageStore::UseGpu() const { CheckCuda(cudaSetDevice(gpu_), "cudaSetDevice"); }

absl::StatusOr<std::unique_ptr<GpuPageStore::Lane>> GpuPageStore::MakeLane(int priority) const {
  auto lane = std::make_unique<Lane>(gpu_);
  lane->tables = reinterpret_cast<Tables*>(AllocatePinned(gpu_, sizeof(Tables)));
  if (lane->tables == nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "GPU %d: no room for %d bytes of pinned host memory: raise the memory limit", gpu_,
        sizeof(Tables)));
  }
  const cudaError_t made =
      cudaStreamCreateWithPriority(&lane->stream, cudaStreamNonBlocking, priority);
  if (made != cudaSuccess) return NoRoom("a stream", gpu_, made);
  return lane;
}

absl::Status GpuPageStore::PackMetric() {
  const KvGeometry& g = recipe_.geometry;
  const auto num_matrices = static_cast<size_t>(g.num_layers) * static_cast<size_t>(g.num_kv_heads);
  const size_t matrix_bytes =
      static_cast<size_t>(g.head_dim) * static_cast<size_t>(g.head_dim) * sizeof(float);
  void* packed = nullptr;
  if (const cudaError_t got = cudaMalloc(&packed, num_matrices * PackedMetricBytes(g.head_dim));
      got != cudaSuccess) {
    return NoRoom("the packed query metric", gpu_, got);
  }
  packed_metric_ = static_cast<uint8_t*>(packed);
  StagingBuffer plain;
  std::memcpy(plain.Reserve(num_matrices * matrix_bytes, place()), recipe_.metric->at(0, 0),
              num_matrices * matrix_bytes);
  CheckCuda(LaunchPackMetrics(reinterpret_cast<const float*>(plain.data()),
                              static_cast<int>(num_matrices), g.head_dim, packed_metric_,
                              publish_lane_->stream),
            "packing of the query metric");
  publish_lane_->Wait("packing of the query metric");
  return absl::OkStatus();
}

void GpuPageStore::PublishGone(std::span<const Gone> gone) {
  UseGpu();
  const std::lock_guard<std::mutex> lock(publish_mutex_);
  HeaderUpdate* const headers = publish_lane_->tables->headers;
  for (size_t first = 0; first < gone.size(); first += kItems) {
    const size_t count = std::min(kItems, gone.size() - first);
    for (size_t i = 0; i < count; ++i) {
      headers[i] = {memory_.header(gone[first + i].slot), gone[first + i].generation, {0, 0}, 0};
    }
    CheckCuda(LaunchPublishHeaders(headers, static_cast<int64_t>(count), publish_lane_->stream),
              "publishing");
    publish_lane_->Wait("publishing");
  }
}

void GpuPageStore::PublishSealed(uint32_t slot, uint64_t generation, const PageKey& key,
                                 uint64_t summary_checksum) {
  const LaneUse use(*this);
  HeaderUpdate& header = use.lane().tables->headers[0];
  header = {memory_.header(slot), generation, {0, 0}, summary_checksum};
  std::memcpy(header.key, key.data(), sizeof(header.key));
  CheckCuda(LaunchPublishHeaders(&header, 1, use.lane().stream), "publishing");
  use.lane().Wait("publishing");
}

void GpuPageStore::WriteUnits(std::span<const UnitWrite> writes) {
  const LaneUse use(*this);
  PieceCopy* const copies = use.lane().tables->copies;
  for (size_t first = 0; first < writes.size(); first += kItems) {
    const size_t count = std::min(kItems, writes.size() - first);
    for (size_t i = 0; i < count; ++i) {
      const UnitWrite& write = writes[first + i];
      copies[i] = {write.from, memory_.unit(write.slot, write.layer, write.head)};
    }
    CheckCuda(LaunchCopyPieces(copies, static_cast<int64_t>(count), slot_layout_.unit_bytes,
                               use.lane().stream),
              "writing units");
    use.lane().Wait("writing units");
  }
}

void GpuPageStore::WriteRecords(std::span<const RecordsWrite> writes) {
  const LaneUse use(*this);
  PieceCopy* const copies = use.lane().tables->copies;
  for (size_t first = 0; first < writes.size(); first += kItems) {
    const size_t count = std::min(kItems, writes.size() - first);
    for (size_t i = 0; i < count; ++i) {
      copies[i] = {writes[first + i].from, memory_.summary(writes[first + i].slot)};
    }
    CheckCuda(LaunchCopyPieces(copies, static_cast<int64_t>(count), slot_layout_.summary_bytes(),
                               use.lane().stream),
              "writing records");
    use.lane().Wait("writing records");
  }
}

// Units [first, first + count) of a slot, in [L][shard heads] order.
void GpuPageStore::SummarizeUnits(const Lane& lane, size_t first, size_t count, uint32_t slot,
                                  uint32_t shard) const {
  const KvGeometry& g = recipe_.geometry;
  Tables& tables = *lane.tables;
  uint8_t* const records = memory_.summary(slot);
  const bool with_metric = recipe_.encoder == Encoder::kE1S;
  for (size_t i = 0; i < count; ++i) {
    const int layer = static_cast<int>(first + i) / slot_layout_.shard_heads;
    const int head = static_cast<int>(first + i) % slot_layout_.shard_heads;
    tables.units[i] = memory_.unit(slot, layer, head);
    tables.coarse[i] = records + slot_layout_.coarse_offset(layer, head);
    tables.fine[i] = records + slot_layout_.fine_offset(layer, head);
    const auto matrix = static_cast<size_t>(layer) * static_cast<size_t>(g.num_kv_heads) +
                        size_t{shard} * static_cast<size_t>(slot_layout_.shard_heads) +
                        static_cast<size_t>(head);
    tables.metrics[i] =
        with_metric ? packed_metric_ + matrix * PackedMetricBytes(g.head_dim) : nullptr;
  }
  const SummarizeUnitsArgs args = {.head_dim = g.head_dim,
                                   .page_tokens = g.page_tokens,
                                   .rank = g.rank,
                                   .dtype = g.dtype,
                                   .rotated = g.rotated,
                                   .encoder = recipe_.encoder,
                                   .num_units = static_cast<int64_t>(count),
                                   .units = tables.units,
                                   .metrics = with_metric ? tables.metrics : nullptr,
                                   .coarse = tables.coarse,
                                   .fine = tables.fine,
                                   .non_finite = tables.non_finite};
  CheckCuda(LaunchSummarize(args, lane.stream), "building records");
}

absl::StatusOr<uint64_t> GpuPageStore::BuildRecords(uint32_t slot, uint32_t shard,
                                                    uint32_t page_idx) {
  const LaneUse use(*this);
  const Lane& lane = use.lane();
  Tables& tables = *lane.tables;
  const size_t num_units = slot_layout_.num_units();
  const auto heads = static_cast<size_t>(slot_layout_.shard_heads);
  for (size_t first = 0; first < num_units; first += kItems) {
    const size_t count = std::min(kItems, num_units - first);
    SummarizeUnits(lane, first, count, slot, shard);
    if (first + count == num_units) {
      tables.records = memory_.summary(slot);
      CheckCuda(LaunchChecksum64(&tables.records, 1, slot_layout_.summary_bytes(),
                                 &tables.records_sum, lane.stream),
                "checksum of records");
    }
    lane.Wait("building records");
    for (size_t i = 0; i < count; ++i) {
      if (tables.non_finite[i] < 0) continue;
      const size_t unit = first + i;
      return NonFiniteError(recipe_.geometry, shard, page_idx, static_cast<int>(unit / heads),
                            static_cast<int>(unit % heads), tables.non_finite[i]);
    }
  }
  return tables.records_sum;
}

PageStore::SlotSums GpuPageStore::SumsOf(uint32_t slot) const {
  const LaneUse use(*this);
  const Lane& lane = use.lane();
  Tables& tables = *lane.tables;
  const size_t num_units = slot_layout_.num_units();
  const uint32_t field = MakeSummaryLayout(recipe_.geometry).coarse[kUnitChecksum];
  const uint8_t* const records = memory_.summary(slot);
  SlotSums sums;
  sums.units.resize(num_units);
  sums.expected.resize(num_units);
  for (size_t first = 0; first < num_units; first += kItems) {
    const size_t count = std::min(kItems, num_units - first);
    for (size_t i = 0; i < count; ++i)
      tables.units[i] = memory_.slot_base(slot) + (first + i) * slot_layout_.unit_bytes;
    CheckCuda(LaunchChecksum64(tables.units, static_cast<int64_t>(count), slot_layout_.unit_bytes,
                               tables.sums, lane.stream),
              "checksums of units");
    CheckCuda(cudaMemcpy2DAsync(tables.expected, sizeof(uint64_t),
                                records + first * slot_layout_.coarse_bytes + field,
                                slot_layout_.coarse_bytes, sizeof(uint64_t), count,
                                cudaMemcpyDeviceToHost, lane.stream),
              "checksums of units");
    if (first == 0) {
      tables.records = records;
      CheckCuda(LaunchChecksum64(&tables.records, 1, slot_layout_.summary_bytes(),
                                 &tables.records_sum, lane.stream),
                "checksum of records");
    }
    lane.Wait("checksums");
    std::copy_n(tables.sums, count, sums.units.begin() + static_cast<std::ptrdiff_t>(first));
    std::copy_n(tables.expected, count, sums.expected.begin() + static_cast<std::ptrdiff_t>(first));
  }
  sums.records = tables.records_sum;
  return sums;
}

void GpuPageStore::ReadUnits(std::span<const Read> reads, std::span<uint8_t> valid) const {
  const LaneUse use(*this);
  Tables& tables = *use.lane().tables;
  for (size_t first = 0; first < reads.size(); first += kItems) {
    const size_t count = std::min(kItems, reads.size() - first);
    for (size_t i = 0; i < count; ++i) {
      const FetchEntry& entry = reads[first + i].entry;
      tables.gathers[i] = {memory_.unit(entry.slot, entry.layer, entry.head),
                           memory_.header(entry.slot), entry.generation, reads[first + i].to};
    }
    CheckCuda(LaunchGatherUnits(tables.gathers, static_cast<int64_t>(count),
                                slot_layout_.unit_bytes, tables.valid, use.lane().stream),
              "reading units");
    use.lane().Wait("reading units");
    std::copy_n(tables.valid, count, valid.begin() + static_cast<std::ptrdiff_t>(first));
  }
}

void GpuPageStore::ReadSummaries(std::span<const Read> reads, std::span<uint8_t> valid) const {
  const LaneUse use(*this);
  Tables& tables = *use.lane().tables;
  const cudaStream_t stream = use.lane().stream;
  for (size_t first = 0; first < reads.size(); first += kItems) {
    const size_t count = std::min(kItems, reads.size() - first);
    for (size_t i = 0; i < count; ++i) {
      const Read& read = reads[first + i];
      const PageHeader* header = memory_.header(read.entry.slot);
      tables.copies[i] = {reinterpret_cast<const uint8_t*>(header), read.to};
      tables.more_copies[i] = {memory_.summary(read.entry.slot), read.to + sizeof(PageHeader)};
      tables.checks[i] = {header, read.entry.generation};
    }
    const auto num = static_cast<int64_t>(count);
    CheckCuda(LaunchCopyPieces(tables.copies, num, sizeof(PageHeader), stream), "reading headers");
    CheckCuda(LaunchCopyPieces(tables.more_copies, num, slot_layout_.summary_bytes(), stream),
              "reading records");
    CheckCuda(LaunchCheckGenerations(tables.checks, num, tables.valid, stream), "reading records");
    use.lane().Wait("reading records");
    for (size_t i = 0; i < count; ++i) {
      valid[first + i] = tables.valid[i];
      if (valid[first + i] == 0)
        std::memset(reads[first + i].to, 0, sizeof(PageHeader) + slot_layout_.summary_bytes());
    }
  }
}

uint8_t* GpuPageStore::TakeExportable() const {
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard<std::mutex> lock(exportable_mutex_);
  if (!std::exchange(exportable_asked_for_, true)) {
    exportable_memory_ = AllocateExportable(gpu_, kExportables * kMaxPieceBytes);
    if (exportable_memory_ == nullptr) {
      spdlog::warn(
          "gpu_pieces_missing gpu={} bytes={} meaning=\"the GPU has no room: fetches over ucx go "
          "through host memory\"",
          gpu_, kExportables * kMaxPieceBytes);
    }
    for (size_t i = 0; exportable_memory_ != nullptr && i < kExportables; ++i) {
      exportables_.push_back({exportable_memory_ + i * kMaxPieceBytes, now});
    }
  }
  const auto usable =
      std::find_if(exportables_.begin(), exportables_.end(),
                   [now](const Exportable& free) { return free.usable_from <= now; });
  if (usable == exportables_.end()) return nullptr;
  uint8_t* const piece = usable->piece;
  exportables_.erase(usable);
  return piece;
}

void GpuPageStore::GiveExportable(uint8_t* piece,
                                  std::chrono::steady_clock::time_point usable_from) const {
  const std::lock_guard<std::mutex> lock(exportable_mutex_);
  exportables_.push_back({piece, usable_from});
}

PageStore::PageBytes GpuPageStore::ReadPage(uint32_t slot, StagingBuffer* staging) const {
  const size_t page_bytes = slot_layout_.slot_bytes(), record_bytes = slot_layout_.summary_bytes();
  uint8_t* const to = staging->Reserve(page_bytes + record_bytes + sizeof(PageHeader), place());
  const LaneUse use(*this);
  const cudaStream_t stream = use.lane().stream;
  CheckCuda(
      cudaMemcpyAsync(to, memory_.slot_base(slot), page_bytes, cudaMemcpyDeviceToHost, stream),
      "reading a page");
  CheckCuda(cudaMemcpyAsync(to + page_bytes, memory_.summary(slot), record_bytes,
                            cudaMemcpyDeviceToHost, stream),
            "reading a page");
  CheckCuda(cudaMemcpyAsync(to + page_bytes + record_bytes, memory_.header(slot),
                            sizeof(PageHeader), cudaMemcpyDeviceToHost, stream),
            "reading a page");
  use.lane().Wait("reading a page");
  PageBytes bytes = {to, to + page_bytes, 0};
  std::memcpy(&bytes.summary_checksum,
              to + page_bytes + record_bytes + offsetof(PageHeader, summary_checksum),
              sizeof(bytes.summary_checksum));
  return bytes;
}

std::vector<uint64_t> GpuPageStore::SummaryChecksums(std::span<const uint32_t> slots) const {
  const LaneUse use(*this);
  const Lane& lane = use.lane();
  std::vector<uint64_t> sums;
  for (size_t first = 0; first < slots.size(); first += kItems) {
    const size_t count = std::min(kItems, slots.size() - first);
    for (size_t i = 0; i < count; ++i) {
      const auto* const header = reinterpret_cast<const uint8_t*>(memory_.header(slots[first + i]));
      CheckCuda(
          cudaMemcpyAsync(&lane.tables->sums[i], header + offsetof(PageHeader, summary_checksum),
                          sizeof(uint64_t), cudaMemcpyDeviceToHost, lane.stream),
          "reading headers");
    }
    lane.Wait("reading headers");
    sums.insert(sums.end(), lane.tables->sums, lane.tables->sums + count);
  }
  return sums;
}

}  // namespace kvd
