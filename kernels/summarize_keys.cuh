// A unit's keys in one warp: loading, prescale, rotation, centroid, and the centred keys as
// operands of the 16x8x16 matrix product.
//
// How: lane 4 g + t holds tokens g, g + 8, ... and of each token dims 32 i + 8 t .. + 7: one
// 16-byte access. A *tile* is 16 dims: tile 2 i + h holds dims 32 i + 8 t + 4 h .. + 3 of every t.
// In the operands of a matrix product over dims these four are places 2 t, 2 t + 1, 2 t + 8, 2 t +
// 9; every operand permutes the dims alike, so nothing is ever moved between lanes. What a lane
// cannot keep in registers it keeps in slots of its own in shared memory, [slot][lane] of 16 bytes:
// no barrier is needed.
// Device code only. Internal to kernels/summarize*.

#ifndef LOCKS_KVD_KERNELS_SUMMARIZE_KEYS_CUH_
#define LOCKS_KVD_KERNELS_SUMMARIZE_KEYS_CUH_

#include "kernels/checksum.h"
#include "kernels/rotate.h"
#include "kernels/summarize.h"
#include "kernels/summarize_math.cuh"

namespace kvd::summarize {

inline constexpr int kModes = 8;  // rows of the products; ranks below leave some empty

struct KernelArgs {
  SummarizeUnitsArgs args;
  SummaryLayout layout;
};

struct Lane {
  int id, g, t;
};

// The warp's part of shared memory, in bytes.
template <int D, int B>
struct Shape {
  static constexpr int kTiles = D / 16;
  static constexpr int kPieces = D / 32;  // 16-byte pieces of a token that a lane loads
  static constexpr int kRows = B / 8;     // tokens of a lane
  static constexpr int kSets = B / 16;    // sets of 16 tokens: the rows of a product
  static constexpr int kGramStride = B + 1;
  static constexpr int kScratchFloats = B * kGramStride + B;  // a Gram and an order of tokens
  static constexpr SummaryLayout kLayout =
      MakeSummaryLayout(D, B, kModes);  // of the largest record
  static constexpr int kRecordBytes = static_cast<int>(kLayout.coarse_bytes + kLayout.fine_bytes);
  static constexpr int kKeysAt = 0;  // [kRows][kTiles][32] slots
  static constexpr int kScratchAt = kKeysAt + 4 * B * D;
  static constexpr int kRecordAt = kScratchAt + (4 * kScratchFloats + 15) / 16 * 16;
  static constexpr int kBytes = kRecordAt + kRecordBytes;
  // What the centroid's rounding left stands at the record's end, over the last modes, until these
  // are known.
  static constexpr int kRemainderAt = kBytes - 2 * D;
  static_assert(kRecordBytes - 2 * D >= static_cast<int>(kLayout.coarse_bytes) + D / 2 &&
                kBytes % 16 == 0);
};

// --- loading -----------------------------------------------------------------------------------

struct Loaded {
  uint64_t checksum;
  float largest;  // |k|
  bool finite;
};

__device__ __forceinline__ float ToFloat(bool is_bf16, uint32_t bits) {
  return is_bf16 ? Bf16ToFloat(bits)
                 : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// What the four words of a 16-byte piece, number `word` of the unit and after, add to the checksum.
__device__ __forceinline__ uint64_t MixWords(uint4 x, int word) {
  const uint64_t at = static_cast<uint64_t>(word + 1) * kGolden64;
  return Mix64(x.x + at) + Mix64(x.y + at + kGolden64) + Mix64(x.z + at + 2 * kGolden64) +
         Mix64(x.w + at + 3 * kGolden64);
}

// 16 bytes from global to the lane's own slot in shared memory, past L1; visible to it after
// CopyWait.
__device__ __forceinline__ void CopyAsync(uint4* shared, const uint4* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ptx::SharedAddress(shared)),
               "l"(global)
               : "memory");
}
__device__ __forceinline__ void CopyWait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Reads the unit once, all of it in flight together. The keys' bits stay in the lane's slots, in
// the half that RotateKeys fills last.
template <int D, int B>
__device__ Loaded LoadUnit(const uint8_t* unit, bool is_bf16, Lane lane, uint4* keys) {
  using S = Shape<D, B>;
  constexpr int kWords = B * D / 8;  // of 16 bytes, in K and in V
  const auto* words = reinterpret_cast<const uint4*>(unit);
  uint4* values = keys + lane.id;
  uint4* raw = values + kWords;
  const int first =
      lane.g * (D / 8) + lane.t;  // the lane's piece n: 4 (n % kPieces) after its token n / kPieces
#pragma unroll 4
  for (int n = 0; n < S::kRows * S::kPieces; ++n) {
    const int at = first + n / S::kPieces * D + n % S::kPieces * 4;
    CopyAsync(raw + 32 * n, words + at);
    CopyAsync(values + 32 * n, words + kWords + at);
  }
  CopyWait();
  const uint32_t exponent = is_bf16 ? 0x7F807F80u : 0x7C007C00u;
  const uint32_t carry = 0x80008000u - exponent;  // moves exponents of all ones into the sign
  uint64_t sum = 0;
  uint32_t high = 0, low = 0, bad = 0;
#pragma unroll 1
  for (int n = 0; n < S::kRows * S::kPieces; ++n) {
    const int at = first + n / S::kPieces * D + n % S::kPieces * 4;
    const uint4 k = raw[32 * n], v = values[32 * n];
    sum += MixWords(k, 4 * at) + MixWords(v, 4 * (kWords + at));
    const uint32_t pairs[8] = {k.x, k.y, k.z, k.w, v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      bad |= (pairs[j] & exponent) + carry;
      if (j >= 4) continue;
      high = max(high, pairs[j] & 0x7FFFFFFFu);
      low = max(low, pairs[j] << 17);
    }
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  const uint32_t largest = __reduce_max_sync(kAllLanes, max(high >> 16, low >> 17));
  const bool finite = !__any_sync(kAllLanes, (bad & 0x80008000u) != 0);
  return {sum, ToFloat(is_bf16, largest), finite};
}

// Index of the first NaN or Inf of a unit. REQUIRES: there is one.
template <int D, int B>
__device__ int FindNonFinite(const uint8_t* unit, bool is_bf16, Lane lane) {
  const uint32_t exponent = is_bf16 ? 0x7F80u : 0x7C00u;
  const auto* bits = reinterpret_cast<const uint16_t*>(unit);
  int first = 2 * B * D;
  for (int i = lane.id; i < 2 * B * D; i += 32) {
    if ((bits[i] & exponent) != exponent) continue;
    first = i;
    break;
  }
  return static_cast<int>(__reduce_min_sync(kAllLanes, static_cast<unsigned>(first)));
}

// --- rotation ----------------------------------------------------------------------------------

static __constant__ RotationSigns kSigns = MakeRotationSigns();

// Sylvester's Hadamard matrix times one token's dims: x[i][e] is dim 32 i + 8 t + e.
template <int D>
__device__ __forceinline__ void Hadamard(float (&x)[D / 32][8], Lane lane) {
  constexpr int kPieces = D / 32;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
#pragma unroll
    for (int half = 1; half < 8; half *= 2) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if ((e & half) != 0) continue;
        const float sum = x[i][e] + x[i][e + half];
        x[i][e + half] = x[i][e] - x[i][e + half];
        x[i][e] = sum;
      }
    }
#pragma unroll
    for (int half = 1; half < 4; half *= 2) {
      const float sign = (lane.t & half) == 0 ? 1.0f : -1.0f;
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[i][e] = fmaf(sign, x[i][e], __shfl_xor_sync(kAllLanes, x[i][e], half));
    }
  }
#pragma unroll
  for (int half = 1; half < (D == 96 ? 1 : kPieces); half *= 2) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if ((i & half) != 0) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float sum = x[i][e] + x[i + half][e];
        x[i + half][e] = x[i][e] - x[i + half][e];
        x[i][e] = sum;
      }
    }
  }
}

// k' in fp32, slot [row][tile], from the bits that LoadUnit left. A row's bits are read before they
// are written over: row r ends at slot (r + 1) kTiles, row r + 1's bits begin at (kRows + r + 1)
// kTiles / 2.
template <int D, int B>
__device__ void RotateKeys(bool is_bf16, bool rotated, int exponent, Lane lane, uint4* keys) {
  using S = Shape<D, B>;
  const float norm = rotated ? 1.0f / sqrtf(static_cast<float>(D == 96 ? 32 : D)) : 1.0f;
  const float first =
      PowerOfTwo(exponent / 2);  // in two steps: 2^133, for denormal keys, is no fp32
  const float second = PowerOfTwo(exponent - exponent / 2) * norm;
  const uint4* raw = keys + B * D / 8;
#pragma unroll 1
  for (int r = 0; r < S::kRows; ++r) {
    float x[S::kPieces][8];
#pragma unroll
    for (int i = 0; i < S::kPieces; ++i) {
      const uint4 bits = raw[(r * S::kPieces + i) * 32 + lane.id];
      const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
      const uint32_t signs = rotated ? kSigns.words[i] >> (8 * lane.t) : 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const uint32_t half = e % 2 == 0 ? pairs[e / 2] & 0xFFFFu : pairs[e / 2] >> 16;
        const float scaled = ToFloat(is_bf16, half) * first * second;
        x[i][e] = __uint_as_float(__float_as_uint(scaled) ^ ((signs << (31 - e)) & 0x80000000u));
      }
    }
    if (rotated) Hadamard<D>(x, lane);
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      const float* y = x[tile / 2] + 4 * (tile % 2);
      keys[(r * S::kTiles + tile) * 32 + lane.id] = {__float_as_uint(y[0]), __float_as_uint(y[1]),
                                                     __float_as_uint(y[2]), __float_as_uint(y[3])};
    }
  }
}

// --- centring ----------------------------------------------------------------------------------

// Takes the mean over tokens off the keys in their slots; returns the largest magnitude that is
// left. Halves of the page are folded onto each other, so that equal tokens give exactly their own
// value and leave 0.
template <int D, int B>
__device__ float Centre(Lane lane, uint4* keys, float (&mean)[D / 16][4]) {
  using S = Shape<D, B>;
  float largest = 0;
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
    float x[S::kRows][4];
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      const uint4 bits = keys[(r * S::kTiles + tile) * 32 + lane.id];
      x[r][0] = __uint_as_float(bits.x), x[r][1] = __uint_as_float(bits.y);
      x[r][2] = __uint_as_float(bits.z), x[r][3] = __uint_as_float(bits.w);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = x[0][e] + x[1][e];
      if constexpr (S::kRows == 4) sum += x[2][e] + x[3][e];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
      mean[tile][e] = sum * (1.0f / B);
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        x[r][e] = __fsub_rn(x[r][e], mean[tile][e]);
        largest = fmaxf(largest, fabsf(x[r][e]));
      }
    }
#pragma unroll
    for (int r = 0; r < S::kRows; ++r)
      keys[(r * S::kTiles + tile) * 32 + lane.id] = {
          __float_as_uint(x[r][0]), __float_as_uint(x[r][1]), __float_as_uint(x[r][2]),
          __float_as_uint(x[r][3])};
  }
  return WarpMax(largest);
}

// Turns the centred keys, times `factor`, into split operands in place: those of set m and a tile
// stand in the slots of rows 2 m (high parts) and 2 m + 1 (low parts). Returns the sum of squares.
template <int D, int B>
__device__ float SplitKeys(float factor, Lane lane, uint4* keys) {
  using S = Shape<D, B>;
  float squares = 0;
#pragma unroll 4
  for (int i = 0; i < S::kSets * S::kTiles; ++i) {
    const int slot = (i / S::kTiles * 2 * S::kTiles + i % S::kTiles) * 32 + lane.id;
    const uint4 upper = keys[slot], lower = keys[slot + S::kTiles * 32];
    const uint32_t bits[8] = {upper.x, upper.y, upper.z, upper.w,
                              lower.x, lower.y, lower.z, lower.w};
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = __uint_as_float(bits[j]) * factor;
      squares = fmaf(x[j], x[j], squares);
    }
    const SplitPair a0 = Split(x[0], x[1]), a1 = Split(x[4], x[5]), a2 = Split(x[2], x[3]),
                    a3 = Split(x[6], x[7]);
    keys[slot] = {a0.high, a1.high, a2.high, a3.high};
    keys[slot + S::kTiles * 32] = {a0.low, a1.low, a2.low, a3.low};
  }
  return WarpSum(squares);
}

// Tokens 16 m .. + 15 of a tile: rows of a left operand. Registers 0 and 2 (1 and 3) are also the
// right operand whose columns are the first (last) eight of these tokens.
template <int D, int B>
__device__ __forceinline__ SplitTile LoadKeys(const uint4* keys, int m, int tile, Lane lane) {
  using S = Shape<D, B>;
  const int slot = (2 * m * S::kTiles + tile) * 32 + lane.id;
  const uint4 high = keys[slot], low = keys[slot + S::kTiles * 32];
  return {{high.x, high.y, high.z, high.w}, {low.x, low.y, low.z, low.w}};
}

}  // namespace kvd::summarize

#endif  // LOCKS_KVD_KERNELS_SUMMARIZE_KEYS_CUH_
