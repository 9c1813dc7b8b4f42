// What a captured decode step does between the big kernels, for a batch of sequences: begin,
// append, list and fetch the selected units from mapped arenas, and take over what the host changed
// between two replays.
//
// Why: a CUDA graph fixes pointers and sizes, sequences do not. Everything that changes from step
// to step (pages, lengths, which sequences take part, where their memory is) is read from the
// device tables below when a kernel runs; the host rewrites them between replays, in stream order.
// GPU only; the host-driven CPU step has its own way.
// Thread safety: compatible. Ownership: views only; allocates nothing. Every pointer, and every
// pointer behind one, is to memory that the GPU can read; units and their bases are 16-byte
// aligned.

#ifndef LOCKS_KVD_KERNELS_STEP_H_
#define LOCKS_KVD_KERNELS_STEP_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attend.h"
#include "kernels/gather.h"
#include "kernels/layout.h"
#include "kernels/resolve.h"

namespace kvd {

// A daemon's arena that is mapped into this process, as kernels see it.
struct PeerArena {
  // [num_slabs] addresses of slot 0, 1, ... of each slab: [L][shard heads] units
  const uint8_t* const* slabs = nullptr;
  const PageHeader* headers = nullptr;  // [num_slots]; null: no such daemon, or not mapped
  const uint32_t* lost = nullptr;       // word in host memory; not 0 once the session is fenced
  uint32_t num_slots = 0;
  uint32_t slots_per_slab = 0;
};

// Where a page of one shard is, with the generation that Match or Seal gave.
struct PagePlace {
  uint64_t generation = 0;
  uint32_t slot = 0;
  uint32_t daemon = 0;  // index into the arenas
};
static_assert(sizeof(PagePlace) == 16);

// One row of a batch: a sequence, or padding (num_tokens < 0: nothing is read or written for it).
struct StepRow {
  int64_t num_tokens = -1;      // of the sequence before this step's token, which becomes its last
  int32_t num_pages = 0;        // sealed and mirrored: these are scanned
  int32_t num_sinks = 0;        // pages [0, num_sinks) are attended from `sinks`
  int32_t first_ring_page = 0;  // pages [first_ring_page, tail page] from `ring`
  int32_t ring_pages = 1;       // page p stands in place p % ring_pages
  uint8_t* ring = nullptr;      // [ring_pages][L][heads] units
  const uint8_t* sinks = nullptr;     // [sinks][L][heads] units
  const PagePlace* places = nullptr;  // [P_cap][shards held]
  // bitset over pages: the step clears the bits of pages that were not there
  uint64_t* selectable = nullptr;
  uint8_t* cache = nullptr;  // [L][heads][cache slots] units
};

// Figures of one row's step, added up over its layers by the kernels; cleared by LaunchBeginStep.
struct StepFigures {
  static constexpr int kMaxFailures = 59;
  uint32_t hits;
  uint32_t misses;        // units that were asked for
  uint32_t failed;        // of these: not there any more, or damaged; left out of attend
  uint32_t damaged;       // of these: with another checksum than their record has
  uint32_t num_failures;  // the first kMaxFailures of these are named
  int32_t failed_pages[kMaxFailures];
};

// What a batch of one model has in common in every layer.
struct StepShape {
  int num_rows;      // N
  int num_layers;    // L
  int num_kv_heads;  // heads: of this worker
  int shard_heads;   // KV heads of one shard; heads = shards held * shard_heads
  int group;         // G
  int head_dim;
  int page_tokens;
  int cache_slots;  // S, of each (row, layer, head)
  int num_arenas;   // daemons
};

// --- begin ---------------------------------------------------------------------------------------

// Once a step, before its first layer: raises *step, notes which arenas are lost (read once a
// step), clears the figures.
struct BeginStepArgs {
  int num_rows;  // N
  int num_arenas;
  const PeerArena* arenas;  // [num_arenas]
  uint64_t* step;           // [1]
  uint32_t* arena_lost;     // [num_arenas]
  StepFigures* figures;     // [N]
};
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable. Tables are read
//           when it runs.
// Errors:   cudaErrorInvalidValue for a shape that the kernels do not have (nothing is enqueued);
//           else the launch's.
[[nodiscard]] cudaError_t LaunchBeginStep(const BeginStepArgs& args, cudaStream_t stream);

// --- prompt's rest -------------------------------------------------------------------------------

// Copies `count` tokens of one layer from an engine's cache to a sequence's ring.
struct AppendTokensArgs {
  EngineKv kv;       // device memory, rows 16-byte aligned
  int64_t kv_token;  // index in the engine's cache of the first token
  int64_t token;     // its index in the sequence
  int count;
  int layer;
  int num_layers;
  int num_kv_heads;
  int head_dim;
  int page_tokens;
  int ring_pages;
  uint8_t* ring;  // [ring_pages][L][heads] units
};
// Stream and errors as LaunchBeginStep.
[[nodiscard]] cudaError_t LaunchAppendTokens(const AppendTokensArgs& args, cudaStream_t stream);

// --- append, list and fetch ----------------------------------------------------------------------

// Writes each row's k and v into its tail unit of `layer`; lists, per (row, head), what attend
// reads: sinks, selected pages in the page cache, ring pages, tail (its rows up to and with this
// step's token); and fetches the misses among them into their cache slots, straight from the mapped
// arenas. k and v are read before LaunchResolve has ended: it cannot write them.
// Guard: as LaunchGatherUnits (kernels/gather.h): nothing is written to a slot before the
// generation was checked after the copy (LaunchFetchAndAttend: of each 8 KiB of it). A unit that is
// not there is listed with 0 tokens, its page forgotten in the cache and its bit of `selectable`
// cleared; it is counted and, up to kMaxFailures, named in the row's figures.
struct FetchArgs {
  StepShape shape;
  int layer;
  const StepRow* rows;  // [N]
  const uint16_t* k;    // [N, heads, D] of the model's dtype, 16-byte aligned
  const uint16_t* v;
  const PeerArena* arenas;
  const uint32_t* arena_lost;  // as LaunchBeginStep left it
  ResolveBatch resolve;  // [N * heads] rows, after LaunchResolve; slots of failed units become -1
  bool fetch;            // false: misses are listed with 0 tokens and somebody else fetches them
  int max_units;         // U_max >= sinks + K + ring pages
  UnitRef* units;        // [N, heads, U_max] out
  int32_t* num_units;    // [N, heads] out; 0 for padding
  StepFigures* figures;  // [N]
};
// Stream and errors as LaunchBeginStep.
[[nodiscard]] cudaError_t LaunchFetchPages(const FetchArgs& args, cudaStream_t stream);

// LaunchResolve, LaunchFetchPages and LaunchAttend over what it lists in one launch, with the same
// maps, slots, selectable bits, figures, o and lse; but no list is written, nor miss_idx and
// num_misses. Where shared memory has no room for K pages (above some 3,200 at head dim 256) it is
// those three. REQUIRES: fetch.fetch; of `attend`, the units are not used.
// Stream:   as above. All but the selected pages is read before the kernel just before has ended
//           (kernels/launch.cuh): that one, select, must write nothing else that is read here.
[[nodiscard]] cudaError_t LaunchFetchAndAttend(const FetchArgs& fetch, const AttendArgs& attend,
                                               cudaStream_t stream);

// --- damage --------------------------------------------------------------------------------------

// After LaunchFetchPages: compares each fetched unit with the checksum in its record. One that
// differs is as if it had not been there.
struct VerifyArgs {
  FetchArgs fetch;
  const uint8_t* const* coarse;  // [N] coarse parts of this layer, [heads][page capacity]
  const int64_t* page_capacity;  // [N]
  size_t coarse_bytes;           // of a record
  size_t checksum_at;            // in them: SummaryLayout::coarse[kUnitChecksum]
};
// Stream and errors as LaunchBeginStep.
[[nodiscard]] cudaError_t LaunchVerifyFetched(const VerifyArgs& args, cudaStream_t stream);

// --- loss and mass -------------------------------------------------------------------------------

// Clears the bits of selected pages whose slot is -1, so that no later layer selects them:
// LaunchFetchPages does so itself for what it fetches; after LaunchEvictInvalid for what somebody
// else did.
struct MaskFailedArgs {
  int num_rows;
  int num_kv_heads;
  int max_pages;                // K
  const StepRow* rows;          // [N]
  const int32_t* selected;      // [N, heads, K]
  const int32_t* num_selected;  // [N, heads]
  const int32_t* slots;         // [N, heads, K]
};
// Stream and errors as LaunchBeginStep.
[[nodiscard]] cudaError_t LaunchMaskFailed(const MaskFailedArgs& args, cudaStream_t stream);

// Of one query head, added up over the layers of a step: kernels/mass.h has what the shares mean.
struct StepMass {
  float unread;  // estimated share of the mass that was not attended
  float lost;    // the part of it whose page is missing
};
// After attend. Layer 0 begins the sums. Reads every page's estimate once more for rows with
// missing pages, for all if `always`; other rows and padding add nothing.
struct MassBatch {
  StepShape shape;
  int layer;
  bool always;
  const StepRow* rows;          // [N]
  int64_t lse_stride;           // at most kMaxPages
  const float* lse;             // [N, H, lse_stride] as the scan left it
  const float* lse_attended;    // [N, H]
  int max_pages;                // K
  const int32_t* selected;      // [N, heads, K]
  const int32_t* num_selected;  // [N, heads]
  const int32_t* slots;         // [N, heads, K]; -1: was not attended
  StepMass* mass;               // [N, H] in and out
};
// Stream and errors as LaunchBeginStep. Equal inputs give equal bits.
[[nodiscard]] cudaError_t LaunchStepMass(const MassBatch& args, cudaStream_t stream);

// --- what the host changed -----------------------------------------------------------------------

// One page's row of a sequence, as the host has it now.
struct PageUpdate {
  int32_t page;
  uint32_t flags;  // kSelectable, kForget
  static constexpr uint32_t kSelectable = 1;
  // what the page cache holds of it is another page's bytes now
  static constexpr uint32_t kForget = 2;
};
struct PageUpdateArgs {
  int num_updates;
  int num_shards;
  const PageUpdate* updates;    // [num_updates]
  const PagePlace* new_places;  // [num_updates, shards held]
  PagePlace* places;            // [P_cap, shards held]
  uint64_t* selectable;
  // The page cache's maps of all (layer, head), one after the other (kernels/resolve.h); 0 rows:
  // there is none.
  int num_cache_rows;     // L * heads
  int64_t page_capacity;  // P_cap
  int cache_slots;        // S
  int32_t* page_slot;     // [rows, P_cap]
  int32_t* slot_page;     // [rows, S]
  uint64_t* slot_step;    // [rows, S]
};
[[nodiscard]] cudaError_t LaunchPageUpdates(const PageUpdateArgs& args, cudaStream_t stream);

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_STEP_H_
