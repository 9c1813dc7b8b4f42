// The arithmetic of one warp on eight records: codes as integers, modes to token logits, and the
// log of a page's sum.
//
// Device code only. Internal to kernels/score*.cu.
//
// Lanes: lane 4 g + t of a warp ("g" and "t" below) holds, of every 16 x 8 product, rows g and g +
// 8 and the columns 2 t and 2 t + 1, and supplies the dims [t D/4, (t + 1) D/4) of row g of the
// codes.

#ifndef LOCKS_KVD_KERNELS_SCORE_LANES_CUH_
#define LOCKS_KVD_KERNELS_SCORE_LANES_CUH_

#include <cuda_fp16.h>

#include "kernels/score_queries.cuh"

namespace kvd::score {

// --- codes ---------------------------------------------------------------------------------------

// A value for each of this lane's pages of a step, and each of its heads. Up to 4 heads: page
// PageOf and head g % 4; else pages 2 t and 2 t + 1 and heads g and g + 8.
template <class S>
struct PerPage {
  float at[S::kSets][S::kPages];
};

// In a coarse scan the upper pairs of pages change places: see CoarseTokens4.
template <class S>
__device__ __forceinline__ int PageOf(int i) {
  const int half = threadIdx.x % 32 / 16, t = threadIdx.x % 4;
  return S::kPages == 2 ? 2 * t + i : 2 * t + (S::kOnlyCoarse ? half ^ (t / 2) : half);
}

// One lane's part of a row of int4 codes. `at` is aligned to its size, or to 4 for D = 96.
template <class S>
__device__ __forceinline__ void LoadCodes(const uint8_t* at, uint32_t (&words)[S::kWords]) {
  if constexpr (S::kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < S::kWords / 4; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(at)[i];
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  } else if constexpr (S::kWords == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(at);
    words[0] = v.x, words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < S::kWords; ++i) words[i] = reinterpret_cast<const uint32_t*>(at)[i];
  }
}

// One B operand: int8 codes of the even dims of a word, as they are, and of the odd ones, times 16.
// Even dims' stand there 8 too large, and the odd dims' of the centroid's low nibbles 8 too small:
// what the sums start from makes up for it.
struct Codes {
  uint32_t even, odd;
};
// Of two's complement int4 codes.
__device__ __forceinline__ Codes ModeCodes(uint32_t word) {
  return {ptx::AndXor(word, 0x0F0F0F0Fu, 0x08080808u), word & 0xF0F0F0F0u};
}
// Of nibbles in offset binary: the centroid's.
__device__ __forceinline__ Codes CentroidCodes(uint32_t word) {
  return {word & 0x0F0F0F0Fu, ptx::AndXor(word, 0xF0F0F0F0u, 0x80808080u)};
}

// The products of the queries with eight rows of codes, times 16, as they accumulate.
template <class S>
struct Sums {
  int32_t at[S::kMmas][4];
  // Words are added from 0 on.
  __device__ __forceinline__ void Add(const Queries<S>& q, const int32_t (&start)[S::kMmas][4],
                                      int word, const Codes& codes) {
#pragma unroll
    for (int mma = 0; mma < S::kMmas; ++mma) {
      if (word == 0) {
        ptx::MmaInt8(at[mma], q.a[mma][word], codes.even, codes.odd, start[mma]);
      } else {
        ptx::MmaInt8(at[mma], q.a[mma][word], codes.even, codes.odd, at[mma]);
      }
    }
  }
  __device__ __forceinline__ float Biased(int mma, int i) const {
    return __int_as_float(at[mma][i]);
  }
  __device__ __forceinline__ float Value(int mma, int i) const { return Biased(mma, i) - kMagic; }

  // Column 2 t + i, of the digits that this lane has: with more than 4 heads all of head g (or g +
  // 8). With up to 4 the lower half of the warp gives kMagic more and the upper half as much less,
  // for SumHalves to cancel.
  __device__ __forceinline__ float Combine(int set, int i) const {
    if constexpr (S::kPadded == 4) {
      const float weight = threadIdx.x % 32 >= 16
                               ? 256.0f
                               : 65536.0f;  // upper half: d1 and nothing, lower: d0 and d2
      return fmaf(Biased(0, i), weight, -kMagic * weight) + Biased(0, 2 + i);
    } else if constexpr (S::kPadded == 8) {
      return Value(0, i) * 65536.0f + (Value(0, 2 + i) * 256.0f + Value(1, i));
    } else {
      return Value(0, 2 * set + i) * 65536.0f +
             (Value(1, 2 * set + i) * 256.0f + Value(2, 2 * set + i));
    }
  }
};

// Up to 4 heads: the sum over both halves of the warp (lanes 16 apart) of `mine`, where the other
// half asks for `theirs` at the same time: one exchange serves both.
__device__ __forceinline__ float SumHalves(float mine, float theirs) {
  return mine + __shfl_xor_sync(kAllLanes, theirs, 16);
}

// --- from modes to token logits ------------------------------------------------------------------

// y = 2^9 times a mode's share of a token logit, in units of ln 2, for a coefficient of 1. Below
// this sum over a lane's two modes (of four lanes) no page's logits reach 2^+-120 beside its
// centroid's: the sum of exponentials needs no shift, and y fits fp16.
inline constexpr float kYScale = 512;
inline constexpr float kPlainY = 118;

// The coefficients of two modes (rows of int8) for tokens kTiles g .. as B operands, times 2^-9,
// exact.
template <class S>
__device__ __forceinline__ void LoadCoefficients(const uint8_t* row0, const uint8_t* row1,
                                                 uint32_t (&tiles)[S::kTiles]) {
  const int g = threadIdx.x % 32 / 4;
  uint32_t pairs[S::kTiles / 2];  // bytes: mode 0 token i, i + 1; mode 1 token i, i + 1
  if constexpr (S::kTiles == 2) {
    pairs[0] = __byte_perm(reinterpret_cast<const uint16_t*>(row0)[g],
                           reinterpret_cast<const uint16_t*>(row1)[g], 0x5410);
  } else {
    const uint32_t a = reinterpret_cast<const uint32_t*>(row0)[g],
                   b = reinterpret_cast<const uint32_t*>(row1)[g];
    pairs[0] = __byte_perm(a, b, 0x5410);
    pairs[1] = __byte_perm(a, b, 0x7632);
  }
#pragma unroll
  for (int i = 0; i < S::kTiles; ++i) {
    // The byte c + 128 as a subnormal is (c + 128) 2^-24; times 2^15, less 2^-2, it is c 2^-9.
    const uint32_t bits =
        ptx::AndXor(i % 2 == 0 ? pairs[i / 2] : pairs[i / 2] >> 8, 0x00FF00FFu, 0x00800080u);
    const __half2 value =
        __hfma2(*reinterpret_cast<const __half2*>(&bits), __half2half2(__ushort_as_half(0x7800)),
                __half2half2(__ushort_as_half(0xB400)));
    tiles[i] = *reinterpret_cast<const uint32_t*>(&value);
  }
}

// x as a sum of two fp16 values, for two modes at once.
struct Split {
  uint32_t high, low;
};
__device__ __forceinline__ Split SplitPair(float x0, float x1) {
  const __half2 high = __floats2half2_rn(x0, x1);
  const float2 back = __half22float2(high);
  const __half2 low = __floats2half2_rn(x0 - back.x, x1 - back.y);
  return {*reinterpret_cast<const uint32_t*>(&high), *reinterpret_cast<const uint32_t*>(&low)};
}

// False also for NaN.
__device__ __forceinline__ bool IsPlain(float y0, float y1, float limit) {
  return fabsf(y0) + fabsf(y1) < limit;
}

__device__ __forceinline__ float Saturate(float x, float limit) {
  return fminf(fmaxf(x, -limit), limit);
}

// y of a mode, or a center, at any size: finite. A NaN can only be an infinity times a sum of 0.
__device__ __forceinline__ float SaturateY(float y) { return y == y ? Saturate(y, 1e33f) : 0; }
__device__ __forceinline__ float SaturateCenter(float c) {
  return c == c ? Saturate(c, kMaxLogit2) : 0;
}

// A power of two that `largest` is divided by to stay under 2^14; 1 if it is there already.
__device__ __forceinline__ float Excess(float largest) {
  const int exponent = (__float_as_int(largest) >> 23) - 127;
  return exponent < 14 ? 1.0f : __int_as_float((127 + exponent - 13) << 23);
}

__device__ __forceinline__ float SoftCap(float x, float cap) {
  const float e = ptx::Exp2(Saturate(2 * kLog2e * x / cap, 120));
  return cap - 2 * cap / (e + 1);
}

template <int kCount>
__device__ __forceinline__ float SumOfPowers(const float (&x)[kCount]) {
  float sum = ptx::Exp2(x[0]);
#pragma unroll
  for (int i = 1; i < kCount; ++i) sum += ptx::Exp2(x[i]);
  return sum;
}

// log2 of the sum of 2^x over a page's tokens, with every guard: x are this lane's logits beside
// the centroid's `center`. `shifted`: the page's logits are not plain. With a soft cap the center
// is inside the cap and the caller must not add it again.
template <int kCount>
__device__ __forceinline__ float GuardedLogSum(float (&x)[kCount], float center, float cap2,
                                               bool shifted) {
  float largest = -kMaxFloat;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (cap2 > 0) x[i] = SoftCap(Saturate(x[i] + center, kMaxLogit2), cap2);
    x[i] = Saturate(x[i], kMaxLogit2);
    largest = fmaxf(largest, x[i]);
  }
  largest = ptx::QuadMax(largest);
  const float shift = shifted || cap2 > 0 ? largest : 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] -= shift;
  return shift + ptx::Log2(ptx::QuadSum(SumOfPowers(x)));
}

// Sums `part` of each of eight pages over the quad; lane t gets those of pages 2 t and 2 t + 1.
// Adds in QuadSum's order: the same bits.
__device__ __forceinline__ float2 ScatterSums(const float (&part)[8]) {
  const int t = threadIdx.x % 4;
  float half[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float keep = t >= 2 ? part[4 + i] : part[i], send = t >= 2 ? part[i] : part[4 + i];
    half[i] = keep + __shfl_xor_sync(kAllLanes, send, 2);
  }
  float out[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float keep = t % 2 ? half[2 + i] : half[i], send = t % 2 ? half[i] : half[2 + i];
    out[i] = keep + __shfl_xor_sync(kAllLanes, send, 1);
  }
  return {out[0], out[1]};
}

// As ScatterSums, for four pages a quad: lane t gets that of part t.
__device__ __forceinline__ float ScatterSum4(const float (&part)[4]) {
  const int t = threadIdx.x % 4;
  float half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float keep = t >= 2 ? part[2 + i] : part[i], send = t >= 2 ? part[i] : part[2 + i];
    half[i] = keep + __shfl_xor_sync(kAllLanes, send, 2);
  }
  return (t % 2 ? half[1] : half[0]) + __shfl_xor_sync(kAllLanes, t % 2 ? half[0] : half[1], 1);
}

// Where this lane's results of a row go.
template <class S>
struct Output {
  float* rows[S::kSets];  // null: a head beyond the group

  // The results, in units of ln 2, of the step that starts at page (or candidate) `first`.
  __device__ __forceinline__ void Store(const KernelArgs& args, const Place& place, int first,
                                        const PerPage<S>& lse2) const {
#pragma unroll
    for (int i = 0; i < S::kPages; ++i) {
      const int idx = first + PageOf<S>(i);
      if (idx >= place.count) continue;
      int page = idx;
      if (!S::kOnlyCoarse && args.candidates != nullptr)
        page = args.candidates[int64_t{place.row} * args.max_candidates + idx];
#pragma unroll
      for (int set = 0; set < S::kSets; ++set)
        if (rows[set] != nullptr) ptx::StoreKept(rows[set] + page, lse2.at[set][i] * kLn2);
    }
  }
};

template <class S>
__device__ __forceinline__ Output<S> OutputOf(const ScoreArgs& args, int row) {
  Output<S> out;
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    const int head = HeadOf<S>(set);
    out.rows[set] = head < args.group
                        ? args.lse + (int64_t{row} * args.group + head) * args.lse_stride
                        : nullptr;
  }
  return out;
}

}  // namespace kvd::score

#endif  // LOCKS_KVD_KERNELS_SCORE_LANES_CUH_
