// DecodeBatch: one layer of a step.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/batch_scan.h"
#include "client/decode_batch_impl.h"
#include "client/step_args.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr char kWhat[] = "decode step";

}  // namespace

absl::Status DecodeBatch::Impl::Run(int layer, const BatchInput& input, const BatchOutput& output,
                                    cudaStream_t stream) {
  if (layer != next_layer) [[unlikely]] {
    return absl::InvalidArgumentError(
        absl::StrCat("layers run in order: expected ", next_layer, ", got ", layer));
  }
  if (layer == 0) {
    const BeginStepArgs begin = {.num_rows = options.max_sequences,
                                 .num_arenas = step_shape.num_arenas,
                                 .arenas = arena_table.data(),
                                 .step = step.data(),
                                 .arena_lost = arena_lost.data(),
                                 .figures = figures.data()};
    KVD_RETURN_IF_ERROR(GpuStatus(LaunchBeginStep(begin, stream), kWhat));
  }
  KVD_RETURN_IF_ERROR(Select(layer, input.q, stream));
  const FetchArgs fetch = {.shape = step_shape,
                           .layer = layer,
                           .rows = tables.rows,
                           .k = input.k,
                           .v = input.v,
                           .arenas = arena_table.data(),
                           .arena_lost = arena_lost.data(),
                           .resolve = ResolveOf(layer),
                           .fetch = options.mode == BatchMode::kCaptured,
                           .max_units = max_units,
                           .units = units.data(),
                           .num_units = num_units.data(),
                           .figures = figures.data()};
  if (options.mode == BatchMode::kCaptured && options.step.verify != VerifyPolicy::kChecksum) {
    AttendArgs attend = AttendArgsOf(shape, options.max_sequences, input.q);
    attend.o = output.o;
    attend.lse = output.lse;
    KVD_RETURN_IF_ERROR(GpuStatus(LaunchFetchAndAttend(fetch, attend, stream), kWhat));
  } else {
    KVD_RETURN_IF_ERROR(AttendListed(fetch, input, output, stream));
  }
  if (reports_mass()) {
    const MassBatch args = {.shape = step_shape,
                            .layer = layer,
                            .always = options.step.mass == MassReport::kAlways,
                            .rows = tables.rows,
                            .lse_stride = lse_stride,
                            .lse = lse.data(),
                            .lse_attended = output.lse,
                            .max_pages = budget,
                            .selected = selected.data(),
                            .num_selected = num_selected.data(),
                            .slots = slots.data(),
                            .mass = mass.data()};
    KVD_RETURN_IF_ERROR(GpuStatus(LaunchStepMass(args, stream), kWhat));
  }
  next_layer = (layer + 1) % shape.num_layers();
  return absl::OkStatus();
}

// By a list of units: where somebody else than the GPU fetches the misses, or looks at them before
// they are attended.
absl::Status DecodeBatch::Impl::AttendListed(const FetchArgs& fetch, const BatchInput& input,
                                             const BatchOutput& output, cudaStream_t stream) {
  KVD_RETURN_IF_ERROR(GpuStatus(LaunchResolve(fetch.resolve, stream), kWhat));
  KVD_RETURN_IF_ERROR(GpuStatus(LaunchFetchPages(fetch, stream), kWhat));
  if (options.mode == BatchMode::kHostDriven)
    return FetchOnHost(fetch.layer, input, output, stream);
  const VerifyArgs verify = {
      .fetch = fetch,
      .coarse = coarse.data() + static_cast<size_t>(fetch.layer) * rows.size(),
      .page_capacity = capacities.data(),
      .coarse_bytes = shape.summary.coarse_bytes,
      .checksum_at = static_cast<size_t>(shape.summary.coarse[kUnitChecksum])};
  KVD_RETURN_IF_ERROR(GpuStatus(LaunchVerifyFetched(verify, stream), kWhat));
  return Attend(input, units.data(), num_units.data(), max_units, output.o, output.lse, stream);
}

absl::Status DecodeBatch::Impl::Select(int layer, const uint16_t* query, cudaStream_t stream) {
  const KvGeometry& g = shape.geometry;
  const size_t at = static_cast<size_t>(layer) * static_cast<size_t>(options.max_sequences);
  ScoreArgs score = ScoreArgsOf(shape, options.max_sequences, query);
  score.coarse = coarse.data() + at;
  score.fine = fine.data() + at;
  score.page_capacity = capacities.data();
  score.num_pages = tables.num_pages;
  score.lse_stride = lse_stride;
  score.lse = lse.data();
  const SelectArgs select = {.num_sequences = options.max_sequences,
                             .num_kv_heads = num_heads(),
                             .group = g.group(),
                             .rule = options.step.rule,
                             .n_sink = options.step.n_sink,
                             .n_win = options.step.n_win,
                             .num_select = budget,
                             .lse = lse.data(),
                             .lse_stride = lse_stride,
                             .num_pages = tables.num_pages,
                             .selectable = selectable.data(),
                             .max_candidates = 0,
                             .candidates = nullptr,
                             .num_candidates = nullptr,
                             .pages = selected.data(),
                             .num_selected = num_selected.data(),
                             .threshold = threshold.data(),
                             .log_norm = log_norm.data(),
                             .num_faults = nullptr,
                             .scratch = select_scratch.data()};
  const CandidateLists lists = {.max_chosen = max_chosen,
                                .out = {.max_candidates = max_candidates,
                                        .candidates = candidates.data(),
                                        .num_candidates = num_candidates.data()}};
  return GpuStatus(LaunchPageSelection(scan, score, select, lists, stream), kWhat);
}

ResolveBatch DecodeBatch::Impl::ResolveOf(int layer) const {
  return {.num_rows = static_cast<int>(list_rows()),
          .max_pages = budget,
          .max_slots = step_shape.cache_slots,
          .rows = resolve_rows.data() + static_cast<size_t>(layer) * list_rows(),
          .pages = selected.data(),
          .num_pages = num_selected.data(),
          .step = step.data(),
          .slots = const_cast<int32_t*>(slots.data()),
          .miss_idx = const_cast<int32_t*>(miss_idx.data()),
          .num_misses = const_cast<int32_t*>(num_misses.data())};
}

absl::Status DecodeBatch::Impl::Attend(const BatchInput& input, const UnitRef* list,
                                       const int32_t* counts, int max_list, float* o,
                                       float* lse_out, cudaStream_t stream) {
  AttendArgs args = AttendArgsOf(shape, options.max_sequences, input.q);
  args.max_units = max_list;
  args.units = list;
  args.num_units = counts;
  args.o = o;
  args.lse = lse_out;
  return GpuStatus(LaunchAttend(args, stream), kWhat);
}

// --- host-driven: the misses travel by the daemons' fetchers while the hits are attended ---------

absl::Status DecodeBatch::Impl::FetchOnHost(int layer, const BatchInput& input,
                                            const BatchOutput& output, cudaStream_t stream) {
  KVD_RETURN_IF_ERROR(ListMisses(layer, stream));
  KVD_RETURN_IF_ERROR(
      Attend(input, units.data(), num_units.data(), max_units, output.o, output.lse, stream));
  for (Row& row : rows) {
    if (row.pages != nullptr) row.fetch->Start(*row.pages, layer);
  }
  KVD_RETURN_IF_ERROR(SettleMisses(layer, stream));
  const bool any = std::any_of(host.num_units.data(), host.num_units.data() + list_rows(),
                               [](int32_t n) { return n > 0; });
  if (!any) return absl::OkStatus();
  KVD_RETURN_IF_ERROR(Attend(input, host.units.data(), host.num_units.data(), budget,
                             fetched_o.data(), fetched_lse.data(), stream));
  KVD_RETURN_IF_ERROR(GpuStatus(
      LaunchMergeAttention({.num_rows = int64_t{options.max_sequences} * shape.num_q_heads(),
                            .head_dim = shape.geometry.head_dim,
                            .o1 = output.o,
                            .lse1 = output.lse,
                            .o2 = fetched_o.data(),
                            .lse2 = fetched_lse.data(),
                            .o = output.o,
                            .lse = output.lse},
                           stream),
      kWhat));
  // The pinned lists are read by that attend; the next layer rewrites them.
  return GpuStatus(cudaStreamSynchronize(stream), kWhat);
}

// Brings this layer's misses to the host and adds them to their rows' fetches.
absl::Status DecodeBatch::Impl::ListMisses(int layer, cudaStream_t stream) {
  const auto download = [&](auto& to, const auto& from) {
    return GpuStatus(
        cudaMemcpyAsync(to.data(), from.data(), from.num_bytes(), cudaMemcpyDeviceToHost, stream),
        kWhat);
  };
  KVD_RETURN_IF_ERROR(download(host.num_misses, num_misses));
  KVD_RETURN_IF_ERROR(download(host.miss_idx, miss_idx));
  KVD_RETURN_IF_ERROR(download(host.selected, selected));
  KVD_RETURN_IF_ERROR(download(host.slots, slots));
  KVD_RETURN_IF_ERROR(GpuStatus(cudaStreamSynchronize(stream), kWhat));
  const auto k = static_cast<size_t>(budget), heads = static_cast<size_t>(num_heads());
  for (size_t n = 0; n < rows.size(); ++n) {
    Row& row = rows[n];
    if (row.pages == nullptr) continue;
    row.fetch->Clear();
    for (size_t h = 0; h < heads; ++h) {
      const size_t list = n * heads + h;
      for (int m = 0; m < host.num_misses[list]; ++m) {
        const auto i = static_cast<size_t>(host.miss_idx[list * k + static_cast<size_t>(m)]);
        const int slot = host.slots[list * k + i];
        const size_t at = shape.unit_idx(layer, static_cast<int>(h)) *
                              static_cast<size_t>(step_shape.cache_slots) +
                          static_cast<size_t>(slot);
        row.fetch->Add(host.selected[list * k + i], static_cast<int32_t>(h), slot,
                       row.cache.data() + at * shape.unit_bytes());
      }
    }
  }
  return absl::OkStatus();
}

// Waits for the misses; lists those that came. The page cache forgets the others, and no later
// layer selects them.
absl::Status DecodeBatch::Impl::SettleMisses(int layer, cudaStream_t stream) {
  const auto k = static_cast<size_t>(budget), heads = static_cast<size_t>(num_heads());
  std::fill(host.num_units.data(), host.num_units.data() + list_rows(), 0);
  bool all_valid = true;
  for (size_t n = 0; n < rows.size(); ++n) {
    Row& row = rows[n];
    if (row.pages == nullptr) continue;
    UnitCounts counts;
    const int64_t bytes = row.fetch->Finish(*row.pages, layer, counts);
    for (const Miss& miss : row.fetch->misses()) {
      const size_t list = n * heads + static_cast<size_t>(miss.head);
      const bool is_valid = miss.outcome == Miss::Outcome::kVerified;
      all_valid = all_valid && is_valid;
      host_failed += is_valid ? 0 : 1;
      // Its place in the order of miss_idx: that of the slot, which no other miss of the list has.
      for (int m = 0; m < host.num_misses[list]; ++m) {
        const auto i = static_cast<size_t>(host.miss_idx[list * k + static_cast<size_t>(m)]);
        if (host.slots[list * k + i] == miss.cache_slot)
          host.valid[list * k + static_cast<size_t>(m)] = is_valid ? 1 : 0;
      }
      if (!is_valid) continue;
      host.units[list * k + static_cast<size_t>(host.num_units[list]++)] = {
          miss.destination, shape.geometry.page_tokens};
    }
    if (row.totals == nullptr) continue;
    row.totals->misses.Add(counts.misses + static_cast<int64_t>(row.fetch->misses().size()));
    row.totals->verified_units.Add(counts.verified);
    row.totals->missing_units.Add(counts.missing);
    row.totals->late_units.Add(counts.late);
    row.totals->failed_units.Add(counts.failed);
    row.totals->bytes_fetched.Add(bytes);
  }
  if (all_valid) return absl::OkStatus();
  KVD_RETURN_IF_ERROR(
      GpuStatus(LaunchEvictInvalid(ResolveOf(layer), host.valid.data(), stream), kWhat));
  const MaskFailedArgs mask = {.num_rows = options.max_sequences,
                               .num_kv_heads = num_heads(),
                               .max_pages = budget,
                               .rows = tables.rows,
                               .selected = selected.data(),
                               .num_selected = num_selected.data(),
                               .slots = slots.data()};
  return GpuStatus(LaunchMaskFailed(mask, stream), kWhat);
}

}  // namespace kvd
