#include "bench/decode_fetch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/gpu_timing.h"
#include "bench/report.h"
#include "bench/synthetic_pages.h"
#include "client/peer_fetcher.h"
#include "kernels/gather.h"
#include "kernels/step.h"
#include "tests/support/gpu.h"

namespace kvd::bench {
namespace {

using testing::DeviceArray;

// Lists of so many bytes together are not in the L2 (60 MiB) when they come round again.
constexpr size_t kRotatedBytes = size_t{256} << 20;

StepShape StepShapeOf(const WorkerShape& worker, int cache_slots) {
  const KvGeometry& g = worker.geometry;
  return {.num_rows = 1,
          .num_layers = g.num_layers,
          .num_kv_heads = worker.num_heads(),
          .shard_heads = g.shard_heads(),
          .group = g.group(),
          .head_dim = g.head_dim,
          .page_tokens = g.page_tokens,
          .cache_slots = cache_slots,
          .num_arenas = 1};
}

std::vector<uint8_t> UnitOf(const WorkerShape& shape, int page, int layer, int head) {
  std::vector<uint8_t> unit(shape.unit_bytes());
  const KvGeometry& g = shape.geometry;
  FillSyntheticUnit(SyntheticUnit(static_cast<uint32_t>(page), static_cast<uint32_t>(layer),
                                  static_cast<uint32_t>(head)),
                    static_cast<uint32_t>(g.head_dim), static_cast<uint32_t>(g.page_tokens),
                    reinterpret_cast<uint16_t*>(unit.data()));
  return unit;
}

absl::Status Wrong(const char* what, int page, int layer, int head) {
  return absl::DataLossError(absl::StrCat(what, ": page ", page, ", layer ", layer, ", head ", head,
                                          " has other bytes than were put"));
}

// A scattered unit of the prompt.
struct Place {
  int page, layer, head;
};
std::vector<Place> RandomPlaces(const WorkerShape& shape, int num_pages, int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Place> places;
  for (int i = 0; i < count; ++i) {
    places.push_back({static_cast<int>(random() % static_cast<uint32_t>(num_pages)),
                      static_cast<int>(random() % static_cast<uint32_t>(shape.num_layers())),
                      static_cast<int>(random() % static_cast<uint32_t>(shape.num_heads()))});
  }
  return places;
}

// The tables of LaunchFetchPages for lists [variant][head] of ascending pages.
struct FetchTables {
  FetchTables(const WorkerShape& worker, const DecodePool& pool, const PeerArena& peer,
              int num_pages, int count, int variants)
      : shape(StepShapeOf(worker, count)),
        units_per_head(count),
        pages(Lists(worker, num_pages, count, variants)),
        device_pages(pages),
        places(PlacesOf(pool, num_pages)),
        arena(std::vector<PeerArena>{peer}),
        lost(std::vector<uint32_t>{0}),
        iota(Iota(count, worker.num_heads())),
        counts(std::vector<int32_t>(static_cast<size_t>(worker.num_heads()), count)),
        slots(pages.size()),
        page_slot(std::vector<int32_t>(static_cast<size_t>(num_pages), 0)),
        slot_page(std::vector<int32_t>(static_cast<size_t>(count), 0)),
        slot_step(std::vector<uint64_t>(static_cast<size_t>(count), 1)),
        resolve_rows(
            std::vector<ResolveRow>(static_cast<size_t>(worker.num_heads()),
                                    {page_slot.data(), slot_page.data(), slot_step.data(), count})),
        step(std::vector<uint64_t>{1}),
        selectable(static_cast<size_t>(num_pages / 64 + 1)),
        local(worker.units_per_page() * worker.unit_bytes()),
        token(static_cast<size_t>(worker.num_heads() * worker.geometry.head_dim)),
        cache(worker.units_per_page() * static_cast<size_t>(count) * worker.unit_bytes()),
        rows(std::vector<StepRow>{{.num_tokens = 0,
                                   .num_pages = num_pages,
                                   .num_sinks = 0,
                                   .first_ring_page = 0,
                                   .ring_pages = 1,
                                   .ring = local.data(),
                                   .sinks = local.data(),
                                   .places = places.data(),
                                   .selectable = selectable.data(),
                                   .cache = cache.data()}}),
        units(static_cast<size_t>(worker.num_heads() * (count + 2))),
        num_units(static_cast<size_t>(worker.num_heads())),
        figures(1) {
    selectable.Poison(0xFF);
    figures.Poison(0);
    local.Poison(0);
    token.Poison(0);
    cache.Poison();
    // Every slot of a row is claimed, in order, by its list.
    std::vector<int32_t> claimed;
    for (size_t i = 0; i < pages.size(); ++i)
      claimed.push_back(static_cast<int32_t>(i % static_cast<size_t>(count)));
    slots.Upload(claimed);
  }

  cudaError_t Launch(int variant, cudaStream_t stream) {
    const auto at =
        static_cast<size_t>(variant) * static_cast<size_t>(shape.num_kv_heads * units_per_head);
    const ResolveBatch resolve = {.num_rows = shape.num_kv_heads,
                                  .max_pages = units_per_head,
                                  .max_slots = units_per_head,
                                  .rows = resolve_rows.data(),
                                  .pages = device_pages.data() + at,
                                  .num_pages = counts.data(),
                                  .step = step.data(),
                                  .slots = slots.data() + at,
                                  .miss_idx = iota.data(),
                                  .num_misses = counts.data()};
    return LaunchFetchPages({.shape = shape,
                             .layer = variant % shape.num_layers,
                             .rows = rows.data(),
                             .k = token.data(),
                             .v = token.data(),
                             .arenas = arena.data(),
                             .arena_lost = lost.data(),
                             .resolve = resolve,
                             .fetch = true,
                             .max_units = units_per_head + 2,
                             .units = units.data(),
                             .num_units = num_units.data(),
                             .figures = figures.data()},
                            stream);
  }

  static std::vector<int32_t> Lists(const WorkerShape& worker, int num_pages, int per_head,
                                    int variants) {
    std::mt19937 random(11);
    std::vector<int32_t> all;
    for (int i = 0; i < variants * worker.num_heads(); ++i) {
      std::vector<int32_t> list;
      const int stride = num_pages / per_head;  // one in each stretch: ascending and distinct
      for (int j = 0; j < per_head; ++j)
        list.push_back(j * stride + static_cast<int32_t>(random() % static_cast<uint32_t>(stride)));
      all.insert(all.end(), list.begin(), list.end());
    }
    return all;
  }
  static std::vector<PagePlace> PlacesOf(const DecodePool& pool, int num_pages) {
    std::vector<PagePlace> places;
    for (int p = 0; p < num_pages; ++p)
      places.push_back({pool.slot(p).generation, pool.slot(p).slot, 0});
    return places;
  }
  static std::vector<int32_t> Iota(int count, int times) {
    std::vector<int32_t> values;
    for (int i = 0; i < count * times; ++i) values.push_back(i % count);
    return values;
  }

  const StepShape shape;
  const int units_per_head;
  const std::vector<int32_t> pages;
  DeviceArray<int32_t> device_pages;
  DeviceArray<PagePlace> places;
  DeviceArray<PeerArena> arena;
  DeviceArray<uint32_t> lost;
  DeviceArray<int32_t> iota;
  DeviceArray<int32_t> counts;
  DeviceArray<int32_t> slots;
  DeviceArray<int32_t> page_slot;
  DeviceArray<int32_t> slot_page;
  DeviceArray<uint64_t> slot_step;
  DeviceArray<ResolveRow> resolve_rows;
  DeviceArray<uint64_t> step;
  DeviceArray<uint64_t> selectable;
  DeviceArray<uint8_t> local;
  DeviceArray<uint16_t> token;
  DeviceArray<uint8_t> cache;  // [L][heads][units_per_head] units
  DeviceArray<StepRow> rows;
  DeviceArray<UnitRef> units;
  DeviceArray<int32_t> num_units;
  DeviceArray<StepFigures> figures;
};

}  // namespace

absl::StatusOr<double> FetchPagesUs(PoolSession& session, const DecodePool& pool, int num_pages,
                                    int units_per_head, int num_layers) {
  const WorkerShape& worker = session.shape();
  const std::shared_ptr<Attachment> attachment = session.attachment();
  const PeerFetcher* peer = attachment->fetcher->peer();
  if (peer == nullptr) return absl::FailedPreconditionError("the session is not on the peer path");
  const size_t layer_bytes =
      static_cast<size_t>(worker.num_heads() * units_per_head) * worker.unit_bytes();
  const int graphs = std::max(
      1, static_cast<int>(kRotatedBytes / (layer_bytes * static_cast<size_t>(num_layers))));
  FetchTables tables(worker, pool, peer->arena(), num_pages, units_per_head, graphs * num_layers);
  const double us = MedianUs(graphs * num_layers, [&](int i, cudaStream_t stream) {
    KVD_CUDA_OK(tables.Launch(i, stream));
  });
  if (const uint32_t failed = tables.figures.Download()[0].failed; failed != 0) {
    return absl::DataLossError(absl::StrCat(failed, " units were not there"));
  }
  // The last lists stand in the cache: those of the last num_layers variants, each in its layer.
  std::vector<uint8_t> got(worker.unit_bytes());
  for (int i = 0; i < 64; ++i) {
    const int variant = graphs * num_layers - 1 - i % std::min(num_layers, worker.num_layers());
    const int layer = variant % worker.num_layers(), head = i % worker.num_heads(),
              slot = i * 7 % units_per_head;
    const int page = tables.pages[static_cast<size_t>(
        (variant * worker.num_heads() + head) * units_per_head + slot)];
    const size_t at = (worker.unit_idx(layer, head) * static_cast<size_t>(units_per_head) +
                       static_cast<size_t>(slot)) *
                      worker.unit_bytes();
    KVD_CUDA_OK(
        cudaMemcpy(got.data(), tables.cache.data() + at, got.size(), cudaMemcpyDeviceToHost));
    if (got != UnitOf(worker, page, layer, head)) return Wrong("fetch of pages", page, layer, head);
  }
  return us;
}

absl::StatusOr<double> GatherUs(PoolSession& session, const DecodePool& pool, int num_pages,
                                int num_units) {
  const WorkerShape& worker = session.shape();
  const std::shared_ptr<Attachment> attachment = session.attachment();
  const PeerFetcher* peer = attachment->fetcher->peer();
  if (peer == nullptr) return absl::FailedPreconditionError("the session is not on the peer path");
  const int lists = std::max(
      2, static_cast<int>(kRotatedBytes / (static_cast<size_t>(num_units) * worker.unit_bytes())));
  const std::vector<Place> places = RandomPlaces(worker, num_pages, lists * num_units, 5);
  DeviceArray<uint8_t> out(places.size() * worker.unit_bytes());
  std::vector<GatherUnit> table;
  for (size_t i = 0; i < places.size(); ++i) {
    const SlotRef slot = pool.slot(places[i].page);
    table.push_back({peer->memory().unit(slot.slot, places[i].layer, places[i].head),
                     peer->memory().header(slot.slot), slot.generation,
                     out.data() + i * worker.unit_bytes()});
  }
  const DeviceArray<GatherUnit> device_table(table);
  DeviceArray<uint8_t> valid(places.size());
  valid.Poison(0);
  const double us = MedianUs(lists, [&](int i, cudaStream_t stream) {
    const auto at = static_cast<size_t>(i * num_units);
    KVD_CUDA_OK(LaunchGatherUnits(device_table.data() + at, num_units, worker.unit_bytes(),
                                  valid.data() + at, stream));
  });
  for (const uint8_t ok : valid.Download()) {
    if (ok != 1) return absl::DataLossError("a unit was not there");
  }
  std::vector<uint8_t> got(worker.unit_bytes());
  for (size_t i = 0; i < places.size(); i += places.size() / 64 + 1) {
    KVD_CUDA_OK(
        cudaMemcpy(got.data(), out.data() + i * got.size(), got.size(), cudaMemcpyDeviceToHost));
    const Place& at = places[i];
    if (got != UnitOf(worker, at.page, at.layer, at.head))
      return Wrong("gather", at.page, at.layer, at.head);
  }
  return us;
}

absl::StatusOr<double> FetcherUs(PoolSession& session, const DecodePool& pool, int num_pages,
                                 int num_units, int repetitions) {
  const WorkerShape& worker = session.shape();
  const std::shared_ptr<Attachment> attachment = session.attachment();
  Fetcher& fetcher = *attachment->fetcher;
  if (fetcher.destination_space() != MemorySpace::kGpu) {
    return absl::FailedPreconditionError(
        absl::StrCat("the ", PathName(fetcher.path()), " path does not deliver to a GPU"));
  }
  DeviceArray<uint8_t> out(static_cast<size_t>(num_units) * worker.unit_bytes());
  std::vector<uint8_t*> destinations;
  for (int i = 0; i < num_units; ++i)
    destinations.push_back(out.data() + static_cast<size_t>(i) * worker.unit_bytes());
  std::vector<uint8_t> valid(static_cast<size_t>(num_units)), got(worker.unit_bytes());
  std::vector<double> us;
  for (int r = 0; r < repetitions + 3; ++r) {
    const std::vector<Place> places =
        RandomPlaces(worker, num_pages, num_units, static_cast<uint32_t>(100 + r));
    std::vector<FetchEntry> entries;
    for (const Place& at : places) {
      const SlotRef slot = pool.slot(at.page);
      entries.push_back({slot.slot, static_cast<uint16_t>(at.layer), static_cast<uint16_t>(at.head),
                         slot.generation});
    }
    FetchList list;
    list.entries = entries;
    list.destinations = destinations.data();
    list.valid = valid.data();
    list.deadline = absl::Seconds(20);
    const absl::Time start = absl::Now();
    fetcher.Start(list);
    fetcher.Wait(list);
    if (r >= 3) us.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
    if (list.num_valid != num_units)
      return absl::DataLossError(absl::StrCat(list.num_valid, " units of ", num_units, " came"));
    const auto i = static_cast<size_t>(r * 31 % num_units);
    KVD_CUDA_OK(cudaMemcpy(got.data(), destinations[i], got.size(), cudaMemcpyDeviceToHost));
    if (got != UnitOf(worker, places[i].page, places[i].layer, places[i].head)) {
      return Wrong("fetch of a list", places[i].page, places[i].layer, places[i].head);
    }
  }
  return Median(us);
}

double CopyGbPerS(int to_gpu, int from_gpu) {
  constexpr size_t kBytes = size_t{1} << 30;
  uint8_t *from = nullptr, *to = nullptr;
  int before = 0;
  KVD_CUDA_OK(cudaGetDevice(&before));
  KVD_CUDA_OK(cudaSetDevice(from_gpu));
  KVD_CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&from), kBytes));
  KVD_CUDA_OK(cudaMemset(from, 1, kBytes));
  KVD_CUDA_OK(cudaDeviceSynchronize());
  KVD_CUDA_OK(cudaSetDevice(to_gpu));
  // Without peer access the copy would go through host memory.
  if (to_gpu != from_gpu) {
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(from_gpu, 0);
    if (enabled != cudaErrorPeerAccessAlreadyEnabled) KVD_CUDA_OK(enabled);
  }
  KVD_CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&to), kBytes));
  // Not in a graph: copies between GPUs cannot be captured.
  const testing::Stream stream;
  cudaEvent_t begin = nullptr, end = nullptr;
  KVD_CUDA_OK(cudaEventCreate(&begin));
  KVD_CUDA_OK(cudaEventCreate(&end));
  std::vector<double> all_us;
  for (int round = 0; round < 8; ++round) {
    KVD_CUDA_OK(cudaEventRecord(begin, stream.get()));
    KVD_CUDA_OK(to_gpu == from_gpu
                    ? cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, stream.get())
                    : cudaMemcpyPeerAsync(to, to_gpu, from, from_gpu, kBytes, stream.get()));
    KVD_CUDA_OK(cudaEventRecord(end, stream.get()));
    stream.Wait();
    float ms = 0;
    KVD_CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
    if (round >= 3) all_us.push_back(double{ms} * 1e3);
  }
  KVD_CUDA_OK(cudaEventDestroy(begin));
  KVD_CUDA_OK(cudaEventDestroy(end));
  const double us = Median(all_us);
  KVD_CUDA_OK(cudaFree(to));
  KVD_CUDA_OK(cudaFree(from));
  KVD_CUDA_OK(cudaSetDevice(before));
  return static_cast<double>(kBytes) / us / 1e3;
}

}  // namespace kvd::bench
