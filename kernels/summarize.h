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
