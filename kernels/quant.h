// Packing of the codes of a record: int4 pairs and the centroid's two nibbles.
//
// Why: every reader and writer of a record goes through these few functions, so that nibble order
// and signs are decided once (kernels/layout.h: the even dim stands in the low nibble).
// Thread safety: pure functions. Host and device.

#ifndef LOCKS_KVD_KERNELS_QUANT_H_
#define LOCKS_KVD_KERNELS_QUANT_H_

#include <cstdint>

#include "kernels/check.h"

namespace kvd {

KVD_HD inline int LowNibble(uint8_t byte) { return byte & 15; }
KVD_HD inline int HighNibble(uint8_t byte) { return byte >> 4; }

// The value of a two's complement int4, -8..7.
KVD_HD constexpr int SignedNibble(int nibble) { return (nibble ^ 8) - 8; }

// Two int4 codes in -8..7 (or two nibbles in 0..15) in one byte.
KVD_HD constexpr uint8_t PackNibbles(int even, int odd) {
  return static_cast<uint8_t>((even & 15) | ((odd & 15) << 4));
}

// Code `dim` of a packed row of int4 codes.
KVD_HD inline int Int4At(const uint8_t* row, int dim) {
  const uint8_t byte = row[dim / 2];
  return SignedNibble(dim % 2 == 0 ? LowNibble(byte) : HighNibble(byte));
}

// An int8 code is cut as mu8 = 16 hi + lo, hi = floor(mu8 / 16) in -8..7 and lo in 0..15. The
// coarse part stores hi + 8 ("offset binary"), the fine part lo.
KVD_HD constexpr int CentroidHighNibble(int mu8) { return (mu8 + 128) >> 4; }
KVD_HD constexpr int CentroidLowNibble(int mu8) { return (mu8 + 128) & 15; }
KVD_HD constexpr int CentroidCode(int high_nibble, int low_nibble) {
  return 16 * high_nibble + low_nibble - 128;
}
// What the coarse scan uses for the centroid: the middle of the 16 codes that share the high
// nibble.
KVD_HD constexpr float CoarseCentroidCode(int high_nibble) {
  return static_cast<float>(16 * high_nibble - 128) + 7.5f;
}

static_assert(CentroidCode(CentroidHighNibble(-127), CentroidLowNibble(-127)) == -127);
static_assert(CentroidHighNibble(-1) == 7 && CentroidLowNibble(-1) == 15);
static_assert(SignedNibble(8) == -8 && SignedNibble(7) == 7);

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_QUANT_H_
