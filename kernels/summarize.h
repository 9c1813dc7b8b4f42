// Builds the record of a unit from its keys: a quantised centroid and the R strongest modes of the
// centred page.
//
// Why: a page's record (10% of its bytes) lets a reader estimate the page's attention mass without
// reading the page. It is built once, by the daemon that seals the page, and copied ever after.
// Thread safety: compatible; units are independent. Ownership: views only.
// Source: LOCKS (arXiv 2607.24555) section 3; differs by the rotation, the least-squares refit,
// folded scales and the query metric (kernels/README.md, "Encoders").
//
// Shapes (slowest to fastest)  dtype       notes
//   units      [U] pointers    bf16|fp16   each [K: B x D][V: B x D]
//   metric     [D, D]          fp32        of the unit's layer and head (QueryMetric::at), or null
//   coarse     [U] pointers    bytes       out, SummaryLayout::coarse_bytes each
//   fine       [U] pointers    bytes       out, SummaryLayout::fine_bytes each
// Memory: none allocated; about 220 KiB of the calling thread's stack.
// Numerics: equal inputs give equal bytes on one backend; between backends compare logits, not
// codes.

#ifndef LOCKS_KVD_KERNELS_SUMMARIZE_H_
#define LOCKS_KVD_KERNELS_SUMMARIZE_H_

#include <cstdint>
#include <span>

#include "kernels/layout.h"

#if KVD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvd {

// How codes are chosen; decoders do not care.
enum class Encoder : uint32_t {
  kE0 = 0,   // plain rounding, the paper's
  kE1 = 1,   // clip search and least-squares refit
  kE1S = 2,  // E1 in the query metric; needs `metric`
};

struct SummarizeArgs {
  int head_dim;
  int page_tokens;
  int rank;
  KvDtype dtype;
  bool rotated;
  Encoder encoder;
  const uint8_t* unit;  // one unit
  const float* metric;  // [D, D], rotated and ridged; used by kE1S only, else null
  uint8_t* coarse;      // out
  uint8_t* fine;        // out
};

namespace ref {

// Writes both parts of one unit's record, its unit checksum included.
// REQUIRES: every key is finite (FirstNonFinite), metric != nullptr iff encoder == kE1S.
void Summarize(const SummarizeArgs& args);

}  // namespace ref

#if KVD_CUDA
// Records of many units in one launch. All pointers, and all pointers behind them, are to device
// memory, 16-byte aligned.
struct SummarizeUnitsArgs {
  int head_dim;
  int page_tokens;
  int rank;
  KvDtype dtype;
  bool rotated;
  Encoder encoder;
  int64_t num_units;              // U
  const uint8_t* const* units;    // [U]
  const uint8_t* const* metrics;  // [U] packed, of the unit's layer and head; kE1S only, else null
  uint8_t* const* coarse;         // [U] out
  uint8_t* const* fine;           // [U] out
  int32_t* non_finite;            // [U] out: FirstNonFinite of K and V, -1 if all are finite
};

// A metric as the kernel's matrix products read it: made once, when a model's metric is loaded.
constexpr size_t PackedMetricBytes(int head_dim) {
  const auto tiles = static_cast<size_t>(head_dim / 16);
  return 2 * tiles * tiles * 512 + 128;
}

// Packs `num_metrics` matrices [D, D] (rotated and ridged, as QueryMetric::at gives them) into as
// many times PackedMetricBytes(D) bytes, one after another.
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable.
// Errors:   cudaErrorInvalidValue for another head_dim; else the launch's.
[[nodiscard]] cudaError_t LaunchPackMetrics(const float* metrics, int num_metrics, int head_dim,
                                            uint8_t* packed, cudaStream_t stream);

// Writes both parts of every unit's record, checksum included, and whether the unit may be sealed:
// the record of one with a NaN or Inf is all zeros.
// Stream:   enqueues on `stream` only; allocates nothing; needs no workspace; no host sync;
//           capturable. The tables are read when the kernel runs.
// Limits:   D in {64, 96, 128, 256}; B in {16, 32}; R in {4, 8}; U <= 2^31.
// Speed:    units of one metric best stand together in the list: it is then read from L1. K and V
//           are read once in any order.
// Numerics: equal inputs give equal bytes, wherever a unit stands in the list; against
//           ref::Summarize compare logits (kernels/README.md, "Tolerances").
// Errors:   cudaErrorInvalidValue if a limit is violated, or if metrics is null with kE1S or not
//           null without, cudaErrorNotSupported for a geometry that is not built
//           (kernels/built_geometries.h); nothing is enqueued then; else the launch's.
[[nodiscard]] cudaError_t LaunchSummarize(const SummarizeUnitsArgs& args, cudaStream_t stream);
#endif

// Index of the first NaN or Inf among `count` values of `dtype`, or -1. Covers K and V of a unit in
// one call with count = 2 B D.
int64_t FirstNonFinite(const void* values, int64_t count, KvDtype dtype);

// The parts of a record, decoded to fp32. Used by tests, tools and the reference scorer. Products
// beyond fp32 (keys near the largest bf16, rotated) saturate at its largest finite value.
struct DecodedRecord {
  // All [D] or row-major; in the rotated space if the record is.
  float centroid[256];        // s_mu * mu8
  float basis[8][256];        // V4 (integers)
  float coefficients[8][32];  // g_k * C8[k][t]
  float tau;
  uint64_t unit_checksum;
};
void DecodeRecord(const uint8_t* coarse, const uint8_t* fine, int head_dim, int page_tokens,
                  int rank, DecodedRecord* out);

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_SUMMARIZE_H_
