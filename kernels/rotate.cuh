// The rotation of one row by one warp, as RotateQuery does it, bit for bit.
//
// Why a header of its own: the step rotates q in the kernel that appends k and v. Device code only. Internal to kernels/.

#ifndef LOCKS_KVD_KERNELS_ROTATE_CUH_
#define LOCKS_KVD_KERNELS_ROTATE_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/ptx.cuh"
#include "kernels/rotate.h"

namespace kvd::rotation {

static __constant__ RotationSigns kSigns = MakeRotationSigns();

// The factor that makes the transform orthogonal.
inline float Norm(int head_dim) { return 1.0f / sqrtf(static_cast<float>(head_dim == 96 ? 32 : head_dim)); }

__device__ __forceinline__ float ToFloat(KvDtype dtype, uint16_t bits) {
  return dtype == KvDtype::kBf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                                 : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ uint16_t ToBits(KvDtype dtype, float x) {
  if (dtype == KvDtype::kFp16) return __half_as_ushort(__float2half_rn(x));
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

// Lane l holds dims l, l + 32, ...: stages below 32 go across lanes, the rest inside one. Every output is the same tree
// of sums as in the reference, so the bits are the same. Called by whole warps; row and out may be the same.
template <int D>
__device__ __forceinline__ void RotateRow(const uint16_t* row, KvDtype dtype, float norm, uint16_t* out) {
  constexpr int kEach = D / 32;
  constexpr int kSize = D == 96 ? 32 : D;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    x[i] = ToFloat(dtype, row[32 * i + lane]);
    if (kSigns.words[i] >> lane & 1) x[i] = -x[i];
#pragma unroll
    for (int half = 1; half < 32; half *= 2) {
      const float other = __shfl_xor_sync(ptx::kAllLanes, x[i], half);
      x[i] = (lane & half) == 0 ? x[i] + other : other - x[i];
    }
  }
#pragma unroll
  for (int half = 1; half < kSize / 32; half *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((i & half) != 0) continue;
      const float sum = x[i] + x[i + half];
      x[i + half] = x[i] - x[i + half];
      x[i] = sum;
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) out[32 * i + lane] = ToBits(dtype, x[i] * norm);
}

}  // namespace kvd::rotation

#endif  // LOCKS_KVD_KERNELS_ROTATE_CUH_
