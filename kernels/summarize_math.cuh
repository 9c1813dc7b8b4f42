// Scalar and warp arithmetic of the record builder, and fp32 values as two fp16 parts for matrix
// products.
//
// Device code only. Internal to kernels/summarize*.

#ifndef LOCKS_KVD_KERNELS_SUMMARIZE_MATH_CUH_
#define LOCKS_KVD_KERNELS_SUMMARIZE_MATH_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/ptx.cuh"

namespace kvd::summarize {

using ptx::kAllLanes;

inline constexpr float kMaxBf16 = 0x1.FEp127f;

// --- small arithmetic --------------------------------------------------------------------------

// Clamps x, then rounds half to even. REQUIRES: integer bounds of magnitude under 2^22.
__device__ __forceinline__ float RoundClamped(float x, float low, float high) {
  constexpr float kMagic = 0x1.8p23f;
  return __fadd_rn(__fadd_rn(fminf(fmaxf(x, low), high), kMagic), -kMagic);
}

// The low four bits of an integer of magnitude under 2^22.
__device__ __forceinline__ uint32_t Nibble(float x) { return __float_as_uint(x + 0x1.8p23f) & 15; }

__device__ __forceinline__ uint32_t RoundToBf16(float x) {
  const uint32_t u = __float_as_uint(x);
  return (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
}
__device__ __forceinline__ float Bf16ToFloat(uint32_t bits) { return __uint_as_float(bits << 16); }

struct Scale {
  uint32_t bits;  // as stored, bf16
  float value;    // what it stands for, times 2^exponent
};
// The nearest bf16 with a prescale of 2^exponent undone.
__device__ __forceinline__ Scale RoundScale(float x, int exponent) {
  const uint32_t bits = RoundToBf16(fminf(ldexpf(x, -exponent), kMaxBf16));
  return {bits, ldexpf(Bf16ToFloat(bits), exponent)};
}

// floor(log2 x) of a positive finite x, denormals too.
__device__ __forceinline__ int FloorLog2(float x) {
  const uint32_t u = __float_as_uint(x);
  return u >= 0x800000u ? static_cast<int>(u >> 23) - 127 : -118 - __clz(static_cast<int>(u));
}

// 2^e for -126 <= e <= 127.
__device__ __forceinline__ float PowerOfTwo(int e) {
  return __uint_as_float(static_cast<uint32_t>(e + 127) << 23);
}

__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Largest of the warp's non-negative values.
__device__ __forceinline__ float WarpMax(float x) {
  return __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(x)));
}

// --- pairs of fp16 -----------------------------------------------------------------------------

__device__ __forceinline__ uint32_t PackHalves(float x, float y) {
  const __half2 pair = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 UnpackHalves(uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// x = high + low to 22 bits: the matrix products of fp32 values are three products of such parts.
struct SplitPair {
  uint32_t high, low;
};
__device__ __forceinline__ SplitPair Split(float x, float y) {
  const uint32_t high = PackHalves(x, y);
  const float2 rounded = UnpackHalves(high);
  return {high, PackHalves(x - rounded.x, y - rounded.y)};
}

struct SplitTile {
  uint32_t high[4], low[4];
};

// c += a b for split operands; the product of the low parts is beyond fp32.
__device__ __forceinline__ void MultiplySplit(float (&c)[4], const SplitTile& a, SplitPair b0,
                                              SplitPair b1) {
  ptx::MmaFp16(c, a.high, b0.high, b1.high, c);
  ptx::MmaFp16(c, a.high, b0.low, b1.low, c);
  ptx::MmaFp16(c, a.low, b0.high, b1.high, c);
}

}  // namespace kvd::summarize

#endif  // LOCKS_KVD_KERNELS_SUMMARIZE_MATH_CUH_
