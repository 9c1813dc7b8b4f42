// The bytes of a page: units, slots, records and headers. Every size and offset of the project
// comes from here, so that no two places can disagree.
//
// Thread safety: pure functions and plain values.
// Source: the record is the progressive form of LOCKS' page summary (arXiv 2607.24555, section 3):
// the same codes, cut into a coarse part that is scanned for every page and a fine part that is
// read for candidates; see ARCHITECTURE.md, "The record".

#ifndef LOCKS_KVD_KERNELS_LAYOUT_H_
#define LOCKS_KVD_KERNELS_LAYOUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/check.h"

namespace kvd {

// Raised whenever the meaning or place of a stored byte changes; part of every fingerprint.
inline constexpr uint32_t kLayoutVersion = 1;
// Modes whose codes stand in the coarse part of a record.
inline constexpr int kCoarseModes = 2;
// Pages a sequence may have (16M tokens at B = 16); bounds every page index.
inline constexpr int kMaxPages = 1 << 20;

enum class KvDtype : uint32_t { kBf16 = 1, kFp16 = 2 };

// What a model's pooled KV cache looks like. Covered field by field by the fingerprint.
struct KvGeometry {
  int32_t num_layers = 0;    // L: layers that are pooled (sliding-window layers are not)
  int32_t num_q_heads = 0;   // H
  int32_t num_kv_heads = 0;  // Hk, of the whole model
  int32_t num_shards = 1;    // fixed groups of KV heads; Hk % num_shards == 0
  int32_t head_dim = 0;      // D: 64, 96, 128 or 256
  int32_t page_tokens = 16;  // B: 16 or 32
  int32_t rank = 8;          // R: 4 or 8
  KvDtype dtype = KvDtype::kBf16;
  bool rotated = true;      // records and queries are rotated (kernels/rotate.h)
  float softmax_scale = 0;  // > 0, the model's own
  float logit_softcap = 0;  // 0: none

  int group() const { return num_q_heads / num_kv_heads; }       // G
  int shard_heads() const { return num_kv_heads / num_shards; }  // KV heads of one shard
  friend bool operator==(const KvGeometry&, const KvGeometry&) = default;
};

// Returns nullptr if `geometry` is supported, else a sentence that names the field, what was
// expected and what to do. The pointer is to a static string.
const char* Problem(const KvGeometry& geometry);

// A 64-bit fingerprint of kLayoutVersion and every field of `geometry`; both ends of a session
// compare it at attach, before any byte is exchanged.
uint64_t LayoutFingerprint(const KvGeometry& geometry);

// --- unit: [K: B x D][V: B x D], contiguous, 2 bytes an element ----------------------------------

struct UnitLayout {
  size_t k_bytes;  // also the offset of V
  size_t bytes;
};
constexpr UnitLayout MakeUnitLayout(int head_dim, int page_tokens) {
  const size_t half = static_cast<size_t>(head_dim) * static_cast<size_t>(page_tokens) * 2;
  return {half, 2 * half};
}

// --- record: a coarse part and a fine part, stored and mirrored apart ----------------------------

enum CoarseField : int {
  kCentroidHigh,        // hi[D/2]: high nibbles of the centroid, offset binary; even dim low
  kCoarseBasis,         // V4[2][D/2]: int4, two's complement; even dim in the low nibble
  kCoarseCoefficients,  // C8[2][B]: int8
  kCoarseScales,        // g[2]: bf16
  kCentroidScale,       // s_mu: bf16
  kTau,                 // tau: bf16, 0 without a query metric
  kUnitChecksum,        // 8 bytes: Checksum64 of the unit
  kNumCoarseFields,
};
enum FineField : int {
  kCentroidLow,       // lo[D/2]: low nibbles of the centroid
  kFineBasis,         // V4[R-2][D/2]
  kFineCoefficients,  // C8[R-2][B]
  kFineScales,        // g[R-2]: bf16
  kNumFineFields,
};

// Offsets in bytes from the start of each part; sizes are rounded up to 16 (the rest is zeros).
struct SummaryLayout {
  uint32_t coarse[kNumCoarseFields];
  uint32_t fine[kNumFineFields];
  uint32_t coarse_bytes;
  uint32_t fine_bytes;
  uint32_t record_bytes() const { return coarse_bytes + fine_bytes; }
};

constexpr SummaryLayout MakeSummaryLayout(int head_dim, int page_tokens, int rank) {
  const auto row = static_cast<uint32_t>(head_dim / 2);
  const auto tokens = static_cast<uint32_t>(page_tokens);
  const auto fine_modes = static_cast<uint32_t>(rank - kCoarseModes);
  const uint32_t coarse_sizes[kNumCoarseFields] = {
      row, kCoarseModes * row, kCoarseModes * tokens, kCoarseModes * 2, 2, 2, 8};
  const uint32_t fine_sizes[kNumFineFields] = {row, fine_modes * row, fine_modes * tokens,
                                               fine_modes * 2};
  SummaryLayout layout = {};
  uint32_t at = 0;
  for (int f = 0; f < kNumCoarseFields; ++f) {
    layout.coarse[f] = at;
    at += coarse_sizes[f];
  }
  layout.coarse_bytes = (at + 15) / 16 * 16;
  at = 0;
  for (int f = 0; f < kNumFineFields; ++f) {
    layout.fine[f] = at;
    at += fine_sizes[f];
  }
  layout.fine_bytes = (at + 15) / 16 * 16;
  return layout;
}
constexpr SummaryLayout MakeSummaryLayout(const KvGeometry& g) {
  return MakeSummaryLayout(g.head_dim, g.page_tokens, g.rank);
}

static_assert(MakeSummaryLayout(128, 16, 8).coarse_bytes == 240);
static_assert(MakeSummaryLayout(128, 16, 8).fine_bytes == 560);
static_assert(MakeSummaryLayout(128, 32, 8).coarse_bytes == 272);
static_assert(MakeSummaryLayout(96, 16, 8).coarse_bytes == 192);
static_assert(MakeSummaryLayout(256, 16, 8).fine_bytes == 1008);
static_assert(MakeSummaryLayout(64, 16, 4).coarse[kUnitChecksum] % 8 == 0);

// --- slot: one page of one shard -----------------------------------------------------------------

// Checksum64 of the unit whose record's coarse part is at `coarse`.
inline uint64_t UnitChecksumOf(const uint8_t* coarse, const SummaryLayout& layout) {
  uint64_t checksum;
  std::memcpy(&checksum, coarse + layout.coarse[kUnitChecksum], sizeof(checksum));
  return checksum;
}

// Units of a slot stand as [L][shard heads]; its records as all coarse parts [L][shard heads], then
// all fine parts [L][shard heads].
struct SlotLayout {
  int32_t num_layers;
  int32_t shard_heads;
  size_t unit_bytes;
  uint32_t coarse_bytes;
  uint32_t fine_bytes;

  size_t num_units() const {
    return static_cast<size_t>(num_layers) * static_cast<size_t>(shard_heads);
  }
  size_t unit_idx(int layer, int head) const {
    return static_cast<size_t>(layer) * static_cast<size_t>(shard_heads) +
           static_cast<size_t>(head);
  }
  size_t slot_bytes() const { return num_units() * unit_bytes; }
  size_t summary_bytes() const { return num_units() * (coarse_bytes + fine_bytes); }
  size_t unit_offset(int layer, int head) const { return unit_idx(layer, head) * unit_bytes; }
  size_t coarse_offset(int layer, int head) const { return unit_idx(layer, head) * coarse_bytes; }
  size_t fine_offset(int layer, int head) const {
    return num_units() * coarse_bytes + unit_idx(layer, head) * fine_bytes;
  }
};
SlotLayout MakeSlotLayout(const KvGeometry& geometry);

// --- page header: one per slot, in memory that readers map read-only -----------------------------

// The daemon publishes it; it never reads it back (its truth is private). `generation` is even only
// while the slot is sealed; it turns odd before any byte of the slot changes, and only grows.
struct alignas(64) PageHeader {
  std::atomic<uint64_t> generation;
  uint8_t key[16];            // page key
  uint64_t summary_checksum;  // Checksum64 of the slot's records, summary_bytes() long
  uint8_t reserved[32];
};
static_assert(sizeof(PageHeader) == 64 && std::atomic<uint64_t>::is_always_lock_free);

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_LAYOUT_H_
