// Copies units between a pool arena, a page cache and an engine's own KV layout.
//
// Thread safety: compatible; readers may gather from memory that its owner reuses meanwhile: that
// is what the generation guard is for. Ownership: views only; allocates nothing.

#ifndef LOCKS_KVD_KERNELS_GATHER_H_
#define LOCKS_KVD_KERNELS_GATHER_H_

#include <cstdint>

#include "kernels/layout.h"

#if KVD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvd {

// One unit to copy out of an arena.
struct GatherUnit {
  const uint8_t* source;  // unit in the arena
  // its slot's header; null: the source is the caller's own and does not change: valid
  const PageHeader* header;
  uint64_t generation;  // expected: even, and seen sealed before the copy began (Match gives such)
  uint8_t* destination;
};

// Where an engine keeps a sequence's K and V of one layer: any order of page, head and token.
// Strides are in bytes; each token row of D values is contiguous.
struct EngineKv {
  const uint8_t* k;
  const uint8_t* v;
  int64_t head_stride;
  int64_t token_stride;
};

namespace ref {

// Copies `unit_bytes` of each unit, then loads its header's generation with acquire order: valid[i]
// is 1 only if it equals the expected one, so the bytes are those of that sealed page (guarantee
// G1). The destination of an invalid unit is zeroed. Returns the number of valid units.
int64_t GatherUnits(const GatherUnit* units, int64_t num_units, size_t unit_bytes, uint8_t* valid);

// Packs B tokens of one KV head, starting at `first_token`, into a unit.
void PackUnit(const EngineKv& kv, int head, int64_t first_token, int head_dim, int page_tokens,
              uint8_t* unit);

}  // namespace ref

#if KVD_CUDA
// GatherUnits on the GPU: every pointer, and every pointer behind one, can be read on the device;
// sources and destinations are 16-byte aligned. Nothing is written to a destination before its
// unit's generation was checked. `valid` as above.
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable.
// Limits:   unit_bytes is a multiple of 2048, up to 32 KiB (every geometry of Problem has that).
// Errors:   cudaErrorInvalidValue if a limit is violated (nothing is enqueued); else the launch's.
[[nodiscard]] cudaError_t LaunchGatherUnits(const GatherUnit* units, int64_t num_units,
                                            size_t unit_bytes, uint8_t* valid, cudaStream_t stream);

// PackUnit for `num_units` units: entry i packs head heads[i] from token first_tokens[i] on into
// out[i]. The engine's rows and the units are 16-byte aligned. Stream and Errors as above.
struct PackArgs {
  EngineKv kv;  // device memory
  int64_t num_units;
  const int32_t* heads;         // [num_units], device
  const int64_t* first_tokens;  // [num_units], device
  int head_dim;
  int page_tokens;
  uint8_t* const* out;  // [num_units], device
};
[[nodiscard]] cudaError_t LaunchPackUnits(const PackArgs& args, cudaStream_t stream);
#endif

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_GATHER_H_
