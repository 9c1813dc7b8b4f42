// The queries of one KV head as a warp keeps them for the first product: integers, cut into digits.
//
// Device code only. Internal to kernels/score*.cu. Lanes: as in score_lanes.cuh.

#ifndef LOCKS_KVD_KERNELS_SCORE_QUERIES_CUH_
#define LOCKS_KVD_KERNELS_SCORE_QUERIES_CUH_

#include <cuda_fp16.h>

#include "kernels/rotate.cuh"
#include "kernels/score_ring.cuh"

namespace kvd::score {

// The queries of one KV head as the A operand, in fixed point: each head is scaled by a power of
// two so that its largest component is in [2^17, 2^18), rounded to integers (an error of 2^-18 of
// that component at most; even dims: sixteenths) and cut into three signed digits, q = 65536 d0 +
// 256 d1 + d2. Even dims are 16 times as large: a code in a low nibble then weighs what one in a
// high nibble does, where it stands. Products of digits and codes are exact, and their sums too.
// Rows of the A operands, one product a line:
//   up to 4 heads:   d0 of heads 0..3, d1 of heads 0..3, d2 of heads 0..3, zeros
//   up to 8 heads:   d0 of heads 0..7, d1 of heads 0..7 | d2 of heads 0..7, zeros
//   up to 16 heads:  d0 of all heads | d1 of all heads | d2 of all heads
template <class S>
struct Queries {
  uint32_t a[S::kMmas][S::kWords][4];
  int32_t start[S::kMmas][4];      // what sums start from: kMagic, less what the codes' offsets add
  int32_t low_start[S::kMmas][4];  // the same for the centroid's low nibbles; only in a full scan
  float middle[S::kSets];          // 7.5 times the sum of the scaled components
  float factor[S::kSets];          // scale * log2(e) * what undoes the power of two
  float half_norm[S::kSets];       // .5 * scale^2 * |q|^2 * log2(e)
};

// Sums of products start at 1.5 2^23 as a float: their bits are then at once those of the float 1.5
// 2^23 + sum, exact for |sum| <= 2^22, which no 256 products of int8 values exceed.
inline constexpr float kMagic = 12582912.0f;
inline constexpr int32_t kMagicBits = 0x4B400000;
// The same with the sign of the float: -1.5 2^23 - sum. Only for sums that are 0.
inline constexpr int32_t kMinusMagicBits = static_cast<int32_t>(0xCB400000u);

// Queries without what is twice there or not needed: few enough words that 8 heads' go to a
// function in registers. As they are they would go by local memory, and stay there for every step;
// those of up to 4 heads are few enough as they are.
template <class S>
struct PackedQueries {
  static constexpr int kRows = S::kPadded == 8 ? 3 : 2 * S::kMmas;  // rows g, g + 8 of each product
  uint32_t a[kRows][S::kWords][2];
  int32_t start[kRows], low_start[S::kOnlyCoarse ? 1 : kRows];
  float middle[S::kSets], factor[S::kSets];

  __device__ __forceinline__ explicit PackedQueries(const Queries<S>& q) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int mma = row / 2, upper = row % 2;
#pragma unroll
      for (int w = 0; w < S::kWords; ++w) {
        a[row][w][0] = q.a[mma][w][upper];
        a[row][w][1] = q.a[mma][w][2 + upper];
      }
      start[row] = q.start[mma][2 * upper];
      if constexpr (!S::kOnlyCoarse) low_start[row] = q.low_start[mma][2 * upper];
    }
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      middle[set] = q.middle[set];
      factor[set] = q.factor[set];
    }
  }
  // But half_norm.
  __device__ __forceinline__ Queries<S> Unpacked() const {
    Queries<S> q = {};
#pragma unroll
    for (int row = 0; row < 2 * S::kMmas; ++row) {
      const int mma = row / 2, upper = row % 2;
      const bool held = row < kRows;
#pragma unroll
      for (int w = 0; w < S::kWords; ++w) {
        q.a[mma][w][upper] = held ? a[row % kRows][w][0] : 0;
        q.a[mma][w][2 + upper] = held ? a[row % kRows][w][1] : 0;
      }
#pragma unroll
      for (int i = 2 * upper; i < 2 * upper + 2; ++i) {
        q.start[mma][i] = held ? start[row % kRows] : kMagicBits;
        if constexpr (!S::kOnlyCoarse)
          q.low_start[mma][i] = held ? low_start[row % kRows] : kMagicBits;
      }
    }
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      q.middle[set] = middle[set];
      q.factor[set] = factor[set];
    }
    return q;
  }
};

// Row g + 8 `upper` of product `mma` holds this digit; 3 for none.
template <class S>
__device__ __forceinline__ int DigitOf(int mma, int upper) {
  if constexpr (S::kPadded == 4) return threadIdx.x % 32 / 16 + 2 * upper;
  if constexpr (S::kPadded == 8) return mma == 0 ? upper : upper == 0 ? 2 : 3;
  return mma;
}

// What a lane reads of the queries of a KV head. Apart from what is made of it, so that the first
// loads are on their way before the ring's second copies: behind all of those they take three times
// as long.
template <class S>
struct QueryBits {
  uint4 at[S::kSets][S::kWords];
};
template <class S>
__device__ __forceinline__ int HeadOf(int set) {
  const int g = threadIdx.x % 32 / 4;
  return S::kPadded == 4 ? g % 4 : g + 8 * set;
}
template <class S>
__device__ __forceinline__ QueryBits<S> FetchQueries(const ScoreArgs& args, int row) {
  QueryBits<S> bits;
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    const uint16_t* source = args.query + (int64_t{row} * args.group + HeadOf<S>(set)) * S::kDim +
                             threadIdx.x % 4 * (S::kDim / 4);
#pragma unroll
    for (int w = 0; w < S::kWords; ++w)
      bits.at[set][w] =
          HeadOf<S>(set) < args.group ? *reinterpret_cast<const uint4*>(source + 8 * w) : uint4{};
  }
  return bits;
}

template <bool kBf16>
__device__ __forceinline__ float2 PairOf(uint32_t bits) {
  if constexpr (kBf16) return ptx::Bf16Pair(bits);
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// Two floats as a pair, rounded to nearest even.
template <bool kBf16>
__device__ __forceinline__ uint32_t BitsOf(float low, float high) {
  if constexpr (kBf16) return ptx::ToBf16Pair(low, high);
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// What RotateQuery makes of the heads that a lane's quad has, in place: the same bits (of a NaN:
// some NaN's). Up to 4 heads the lanes 16 apart have the same dims: each rotates half of them.
template <class S, bool kBf16>
__device__ __forceinline__ void RotateBits(uint4 (&bits)[S::kWords]) {
  constexpr bool kShared = S::kPadded == 4 && S::kDim != 96;
  constexpr int kMine = kShared ? S::kWords / 2 : S::kWords;
  const bool is_upper = kShared && threadIdx.x % 32 >= 16;
  float x[8 * kMine];
#pragma unroll
  for (int w = 0; w < kMine; ++w) {
    const uint4 word = is_upper ? bits[(w + kMine) % S::kWords] : bits[w];
    const uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = PairOf<kBf16>(pairs[i]);
      x[8 * w + 2 * i] = pair.x;
      x[8 * w + 2 * i + 1] = pair.y;
    }
  }
  rotation::Lanes<S::kDim, kShared ? 8 : 4>::Rotate(x);
#pragma unroll
  for (int w = 0; w < kMine; ++w) {
    const uint4 mine = {
        BitsOf<kBf16>(x[8 * w], x[8 * w + 1]), BitsOf<kBf16>(x[8 * w + 2], x[8 * w + 3]),
        BitsOf<kBf16>(x[8 * w + 4], x[8 * w + 5]), BitsOf<kBf16>(x[8 * w + 6], x[8 * w + 7])};
    bits[w] = mine;
    if constexpr (kShared) {
      const uint4 other = {
          __shfl_xor_sync(kAllLanes, mine.x, 16), __shfl_xor_sync(kAllLanes, mine.y, 16),
          __shfl_xor_sync(kAllLanes, mine.z, 16), __shfl_xor_sync(kAllLanes, mine.w, 16)};
      bits[w] = is_upper ? other : mine;
      bits[w + kMine] = is_upper ? mine : other;
    }
  }
}

// One digit of four numbers as four int8 values: byte `byte` of each.
__device__ __forceinline__ uint32_t PackDigit(const uint32_t (&biased)[4], uint32_t byte) {
  const uint32_t pick = byte | (4 + byte) << 4;
  const uint32_t low = __byte_perm(biased[0], biased[1], pick),
                 high = __byte_perm(biased[2], biased[3], pick);
  return __byte_perm(low, high, 0x5410) ^ 0x80808080u;
}

// A set of heads: `bits` as FetchQueries gives them.
template <class S, bool kBf16>
__device__ __forceinline__ void AddQueries(const ScoreArgs& args, const uint4 (&bits)[S::kWords],
                                           int set, Queries<S>* q) {
  uint32_t pairs[S::kWords][4];
  // largest of the low halves and of the high ones: both formats sort as integers
  uint32_t magnitudes = 0;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) {
    pairs[w][0] = bits[w].x, pairs[w][1] = bits[w].y, pairs[w][2] = bits[w].z,
    pairs[w][3] = bits[w].w;
#pragma unroll
    for (int i = 0; i < 4; ++i) magnitudes = __vmaxu2(magnitudes, pairs[w][i] & 0x7FFF7FFFu);
  }
  const float2 largest = PairOf<kBf16>(magnitudes);
  const int exponent =
      max((__float_as_int(ptx::QuadMax(fmaxf(largest.x, largest.y))) >> 23) - 127, -100);
  const float shrink = __int_as_float((127 + 17 - exponent) << 23);
  const float undo = __int_as_float((127 + exponent - 17) << 23);

  int sums[2][S::kMmas][2] = {};  // of the digits of even and of odd dims
  float squares = 0;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) {
    uint32_t biased[2][4];  // dims as integers plus 128 in each digit: even ones, odd ones
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = PairOf<kBf16>(pairs[w][i]);
      const float even = x.x * shrink, odd = x.y * shrink;
      if constexpr (S::kOnlyCoarse) squares += even * even + odd * odd;
      constexpr uint32_t kBias = 0x00808080u - static_cast<uint32_t>(kMagicBits);
      biased[0][i] = __float_as_uint(fmaf(even, 16, kMagic)) + kBias;
      biased[1][i] = __float_as_uint(odd + kMagic) + kBias;
    }
#pragma unroll
    for (int mma = 0; mma < S::kMmas; ++mma) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        if (S::kSets == 2 && upper != set) continue;
        const int digit = DigitOf<S>(mma, upper);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t packed =
              digit == 3 ? 0 : PackDigit(biased[odd], static_cast<uint32_t>(2 - digit) & 3);
          q->a[mma][w][2 * odd + upper] = packed;
          sums[odd][mma][upper] =
              __dp4a(static_cast<int>(packed), 0x01010101, sums[odd][mma][upper]);
        }
      }
    }
  }
  float sum = 0;  // of the scaled dims
#pragma unroll
  for (int mma = 0; mma < S::kMmas; ++mma) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      if (S::kSets == 2 && upper != set) continue;
      const int digit = DigitOf<S>(mma, upper);
      const int even = ptx::QuadSum(sums[0][mma][upper]), odd = ptx::QuadSum(sums[1][mma][upper]);
      const float weight = digit == 0 ? 65536.0f : digit == 1 ? 256.0f : 1.0f;
      sum += weight * (static_cast<float>(odd) + static_cast<float>(even) / 16);
      // Up to 4 heads the third product's start cancels the first two's: see Combine.
      const int32_t zero = S::kPadded == 4 && digit == 3 ? kMinusMagicBits : kMagicBits;
#pragma unroll
      for (int i = 2 * upper; i < 2 * upper + 2;
           ++i) {  // apart, so that they stay where a product takes its start
        q->start[mma][i] = ptx::Keep(zero - 8 * even);
        if constexpr (!S::kOnlyCoarse) q->low_start[mma][i] = ptx::Keep(zero + 128 * odd);
      }
    }
  }
  if constexpr (S::kPadded == 4) sum += __shfl_xor_sync(kAllLanes, sum, 16);
  const float scale = args.softmax_scale;
  q->middle[set] = 7.5f * sum;
  q->factor[set] = fminf(scale * kLog2e * undo, kMaxFloat);
  q->half_norm[set] =
      fminf(.5f * kLog2e * (ptx::QuadSum(squares) * undo * scale) * (undo * scale), kMaxFloat);
}

template <class S, bool kBf16>
__device__ __forceinline__ void AddRotated(const ScoreArgs& args, uint4 (&bits)[S::kWords], int set,
                                           Queries<S>* q) {
  if (args.rotate_query) RotateBits<S, kBf16>(bits);
  AddQueries<S, kBf16>(args, bits, set, q);
}

template <class S>
__device__ __forceinline__ Queries<S> MakeQueries(const ScoreArgs& args, QueryBits<S> read) {
  Queries<S> q = {};
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    if (args.dtype == KvDtype::kBf16) {
      AddRotated<S, true>(args, read.at[set], set, &q);
    } else {
      AddRotated<S, false>(args, read.at[set], set, &q);
    }
  }
  return q;
}

}  // namespace kvd::score

#endif  // LOCKS_KVD_KERNELS_SCORE_QUERIES_CUH_
