// Copies units between a pool arena, a page cache and an engine's own KV layout.
//
// Thread safety: compatible; readers may gather from memory that its owner reuses meanwhile: that is what
// the generation guard is for. Ownership: views only; allocates nothing.

#ifndef LOCKS_KVD_KERNELS_GATHER_H_
#define LOCKS_KVD_KERNELS_GATHER_H_

#include <cstdint>

#include "kernels/layout.h"

namespace kvd {

// One unit to copy out of an arena.
struct GatherUnit {
  const uint8_t* source;      // unit in the arena
  const PageHeader* header;   // its slot's header
  uint64_t generation;        // expected, even
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

// Copies `unit_bytes` of each unit, then loads its header's generation with acquire order: valid[i] is 1
// only if it equals the expected one, so the bytes are those of that sealed page (guarantee G1). The
// destination of an invalid unit is zeroed. Returns the number of valid units.
int64_t GatherUnits(const GatherUnit* units, int64_t num_units, size_t unit_bytes, uint8_t* valid);

// Packs B tokens of one KV head, starting at `first_token`, into a unit.
void PackUnit(const EngineKv& kv, int head, int64_t first_token, int head_dim, int page_tokens,
              uint8_t* unit);

}  // namespace ref
}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_GATHER_H_
