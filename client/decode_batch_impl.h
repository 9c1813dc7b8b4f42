// The parts of DecodeBatch: memory on the device, its rows, and what the host keeps of them.
// Internal to decode_batch*.cc.
//
// Ownership and order: the host writes pinned copies of the step's tables (a ring of kTableCopies,
// so that it may run ahead of the GPU by that many steps) and enqueues their upload before the
// step's kernels. What only joining and leaving change is uploaded at once: no step in flight reads
// a row that is padding in it.

#ifndef LOCKS_KVD_CLIENT_DECODE_BATCH_IMPL_H_
#define LOCKS_KVD_CLIENT_DECODE_BATCH_IMPL_H_

#include <array>
#include <memory>
#include <vector>

#include "client/decode_batch.h"
#include "client/device_buffer.h"
#include "client/gpu_status.h"
#include "client/miss_fetch.h"
#include "client/sequence_pages.h"
#include "client/stats.h"
#include "kernels/attend.h"
#include "kernels/resolve.h"
#include "kernels/score.h"
#include "kernels/select.h"
#include "kernels/step.h"

namespace kvd {

struct DecodeBatch::Impl {
  static constexpr int kTableCopies = 4;
  static constexpr int kMaxArenas = 256;
  static constexpr size_t kMaxUpdates = 4096;  // pages that change before a step, without a wait

  // A joined sequence.
  struct Row {
    SequencePages* pages = nullptr;  // null: padding
    Sequence* sequence = nullptr;    // may be null
    StepTotals* totals = nullptr;    // may be null
    PlacedArray<PagePlace> places;
    PlacedArray<uint64_t> selectable;
    PlacedBytes cache;
    PlacedArray<int32_t> page_slot;
    PlacedArray<int32_t> slot_page;
    PlacedArray<uint64_t> slot_step;
    std::unique_ptr<MissFetch> fetch;  // host-driven mode only
    size_t num_bytes() const {
      return cache.size() + places.num_bytes() + selectable.num_bytes() + page_slot.num_bytes() +
             slot_page.num_bytes() + slot_step.num_bytes();
    }
  };
  // What a step reads that changes from step to step: rows [N], then num_pages [N]; one upload.
  struct Tables {
    PlacedBytes bytes;
    StepRow* rows = nullptr;
    int32_t* num_pages = nullptr;
    void Set(PlacedBytes memory, size_t n) {
      bytes = std::move(memory);
      rows = reinterpret_cast<StepRow*>(bytes.data());
      num_pages = reinterpret_cast<int32_t*>(bytes.data() + n * sizeof(StepRow));
    }
    static size_t Size(size_t n) { return n * (sizeof(StepRow) + sizeof(int32_t)); }
  };
  // One of the steps in flight.
  struct Flight {
    Tables tables;                         // pinned
    PlacedArray<PeerArena> arenas;         // [kMaxArenas] pinned
    PlacedArray<StepFigures> figures;      // [N] pinned
    PlacedArray<StepMass> mass;            // [N, H] pinned, if it is reported
    PlacedArray<PageUpdate> updates;       // [kMaxUpdates] pinned
    PlacedArray<PagePlace> update_places;  // [kMaxUpdates, shards] pinned
    cudaEvent_t done = nullptr;
    bool pending = false;  // its figures have not been taken over
    uint64_t host_failed = 0;
  };

  Impl(const WorkerShape& worker, const BatchOptions& batch_options)
      : shape(worker), options(batch_options) {}
  ~Impl();

  // decode_batch.cc
  absl::Status Allocate();
  absl::StatusOr<int> Join(SequencePages* pages, Sequence* sequence, StepTotals* totals);
  absl::Status FillRow(int n, SequencePages* pages);
  void Leave(int row);
  absl::Status BeginStep(cudaStream_t stream);
  absl::Status EndStep(cudaStream_t stream);
  absl::Status TakeFigures(Flight& flight, bool wait);
  RowMass MassOfRow(const Flight& flight, size_t n) const;
  absl::Status ApplyChanges(int n, Flight& flight, size_t* used, cudaStream_t stream);
  void DropLostArenas();
  PagePlace PlaceOf(SequencePages& pages, int page, int shard_pos);
  uint32_t ArenaOf(const std::shared_ptr<PageSource>& source);
  absl::Status Outcome() const;

  // decode_batch_layer.cc
  absl::Status Run(int layer, const BatchInput& input, const BatchOutput& output,
                   cudaStream_t stream);
  absl::Status Select(int layer, const uint16_t* query, cudaStream_t stream);
  ResolveBatch ResolveOf(int layer) const;
  absl::Status Attend(const BatchInput& input, const UnitRef* list, const int32_t* counts,
                      int max_list, float* o, float* lse, cudaStream_t stream);
  absl::Status AttendListed(const FetchArgs& fetch, const BatchInput& input,
                            const BatchOutput& output, cudaStream_t stream);
  absl::Status FetchOnHost(int layer, const BatchInput& input, const BatchOutput& output,
                           cudaStream_t stream);
  absl::Status ListMisses(int layer, cudaStream_t stream);
  absl::Status SettleMisses(int layer, cudaStream_t stream);

  // With other options a step does without that launch.
  bool reports_mass() const {
    return options.step.mass == MassReport::kAlways || options.step.loss == LossPolicy::kGoOn;
  }
  int num_heads() const { return shape.num_heads(); }
  size_t list_rows() const {
    return static_cast<size_t>(options.max_sequences) * static_cast<size_t>(num_heads());
  }

  const WorkerShape shape;
  const BatchOptions options;
  StepShape step_shape = {};
  ScanMode scan = ScanMode::kFull;
  int page_capacity = 0;  // of the longest sequence
  int64_t lse_stride = 0;
  int budget = 0;
  int max_chosen = 0;
  int max_candidates = 0;
  int max_units = 0;
  int next_layer = 0;
  uint64_t num_steps = 0;    // begun
  uint64_t host_failed = 0;  // units of this step that did not come, host-driven mode

  std::vector<Row> rows;  // [N]
  // [kMaxArenas] of the device's table; null: free
  std::vector<std::shared_ptr<PageSource>> arenas;
  bool arenas_changed = true;
  std::array<Flight, kTableCopies> flights;
  std::shared_ptr<StepEvents> events = std::make_shared<StepEvents>();  // `done` of the flights
  BatchReport report;
  size_t num_workspace_bytes = 0;

  // Device.
  Tables tables;
  PlacedArray<PeerArena> arena_table;       // [kMaxArenas]
  PlacedArray<const uint8_t*> coarse;       // [L, N]
  PlacedArray<const uint8_t*> fine;         // [L, N]
  PlacedArray<int64_t> capacities;          // [N]
  PlacedArray<const uint64_t*> selectable;  // [N]
  PlacedArray<ResolveRow> resolve_rows;     // [L, N, heads]
  PlacedArray<float> lse;                   // [N, H, lse_stride]
  PlacedArray<uint8_t> select_scratch;
  PlacedArray<int32_t> selected;      // [N, heads, K]
  PlacedArray<int32_t> num_selected;  // [N, heads]
  PlacedArray<float> threshold;       // [N, heads]
  PlacedArray<float> log_norm;        // [N, H]
  PlacedArray<int32_t> candidates;    // [N, heads, max_candidates]
  PlacedArray<int32_t> num_candidates;
  PlacedArray<int32_t> slots;        // [N, heads, K]
  PlacedArray<int32_t> miss_idx;     // [N, heads, K]
  PlacedArray<int32_t> num_misses;   // [N, heads]
  PlacedArray<UnitRef> units;        // [N, heads, max_units]
  PlacedArray<int32_t> num_units;    // [N, heads]
  PlacedArray<uint64_t> step;        // [1]
  PlacedArray<uint32_t> arena_lost;  // [kMaxArenas]
  PlacedArray<StepFigures> figures;  // [N]
  PlacedArray<StepMass> mass;        // [N, H], if it is reported

  // Host-driven mode: pinned copies of the lists, and the fetched part of attend.
  struct HostLists {
    PlacedArray<int32_t> selected, slots, miss_idx, num_misses;
    PlacedArray<UnitRef> units;      // [N, heads, K] of what was fetched
    PlacedArray<int32_t> num_units;  // [N, heads]
    PlacedArray<uint8_t> valid;      // [N, heads, K] in the order of miss_idx
  } host;
  PlacedArray<float> fetched_o;    // [N, H, D]
  PlacedArray<float> fetched_lse;  // [N, H]
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_DECODE_BATCH_IMPL_H_
