// The rotation of one row, as RotateQuery does it, bit for bit: by a warp, or by the few lanes that
// score has for a row.
//
// Device code only. Internal to kernels/.

#ifndef LOCKS_KVD_KERNELS_ROTATE_CUH_
#define LOCKS_KVD_KERNELS_ROTATE_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/ptx.cuh"
#include "kernels/rotate.h"

namespace kvd::rotation {

static __constant__ RotationSigns kSigns = MakeRotationSigns();

// The factor that makes the transform orthogonal.
__host__ __device__ inline float Norm(int head_dim) {
  return 1.0f / sqrtf(static_cast<float>(head_dim == 96 ? 32 : head_dim));
}

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

// One stage inside a lane, if it has one of this size: x[i] and x[i + kHalf] become their sum and
// their difference.
template <int kHalf, int kNum>
__device__ __forceinline__ void StageInLane(float (&x)[kNum]) {
  if constexpr (kHalf < kNum) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      if ((i & kHalf) != 0) continue;
      const float sum = x[i] + x[i + kHalf];
      x[i + kHalf] = x[i] - x[i + kHalf];
      x[i] = sum;
    }
  }
}

// One stage whose other half is in the lane `step` away. Multiplying by 1 or -1 is exact: other + x
// or other - x, rounded once.
template <int kNum>
__device__ __forceinline__ void StageAcrossLanes(int step, float (&x)[kNum]) {
  const float sign = (threadIdx.x & static_cast<unsigned>(step)) == 0 ? 1.0f : -1.0f;
#pragma unroll
  for (int i = 0; i < kNum; ++i)
    x[i] = fmaf(x[i], sign, __shfl_xor_sync(ptx::kAllLanes, x[i], step));
}

// Lane l holds dims l, l + 32, ...: stages below 32 go across lanes, the rest inside one. Every
// output is the same tree of sums as in the reference, so the bits are the same. Called by whole
// warps; row and out may be the same.
template <int D>
__device__ __forceinline__ void RotateRow(const uint16_t* row, KvDtype dtype, float norm,
                                          uint16_t* out) {
  constexpr int kEach = D / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = ToFloat(dtype, row[32 * i + lane]);
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = (kSigns.words[i] >> lane & 1) != 0 ? -x[i] : x[i];
#pragma unroll
  for (int half = 1; half < 32; half *= 2) StageAcrossLanes(half, x);
  if constexpr (D != 96) {
    StageInLane<1>(x);
    StageInLane<2>(x);
    StageInLane<4>(x);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) out[32 * i + lane] = ToBits(dtype, x[i] * norm);
}

// D 96: each lane of a quad has three groups of 8 dims of twelve, four of which are a matrix. One
// stage between groups `step` (1 or 2) apart, which may be in any place of any lane.
__device__ __forceinline__ void StageAcrossGroups(int step, float (&x)[24]) {
  const int t = static_cast<int>(threadIdx.x) % 4,
            first_lane = static_cast<int>(threadIdx.x) % 32 - t;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float after[3];
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      const int group = 3 * t + s, partner = group ^ step;
      float other = 0;
#pragma unroll
      for (int place = 0; place < 3; ++place) {
        const float value = __shfl_sync(ptx::kAllLanes, x[8 * place + i], first_lane + partner / 3);
        if (partner % 3 == place) other = value;
      }
      after[s] = (group & step) == 0 ? x[8 * s + i] + other : other - x[8 * s + i];
    }
#pragma unroll
    for (int s = 0; s < 3; ++s) x[8 * s + i] = after[s];
  }
}

// Lanes that have a row together, dims in order: a quad, lane t with dims [t D/4, (t + 1) D/4); or
// two quads 16 lanes apart, the upper one with the second half of what lane t would have.
template <int D, int kLanes>
struct Lanes {
  static_assert(kLanes == 4 || (kLanes == 8 && D != 96));
  static constexpr int kEach = D / kLanes;
  __device__ __forceinline__ static int FirstDim() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return lane % 4 * (D / 4) + (kLanes == 8 ? lane / 16 * kEach : 0);
  }

  // x: this lane's dims. The sums are RotateRow's. Called by whole warps.
  __device__ __forceinline__ static void Rotate(float (&x)[kEach]) {
    constexpr int kWords = sizeof(kSigns.words) / sizeof(uint32_t);
    const int first = FirstDim();
#pragma unroll
    for (int base = 0; base < kEach; base += 32) {
      const int word = (first + base) / 32;
      const uint32_t signs =
          __funnelshift_r(kSigns.words[word], kSigns.words[min(word + 1, kWords - 1)], first % 32);
#pragma unroll
      for (int i = 0; i < 32 && base + i < kEach; ++i)
        x[base + i] =
            __uint_as_float(__float_as_uint(x[base + i]) ^ (signs << (31 - i) & 0x80000000u));
    }
    StageInLane<1>(x);
    StageInLane<2>(x);
    StageInLane<4>(x);
    if constexpr (D == 96) {
      StageAcrossGroups(1, x);
      StageAcrossGroups(2, x);
    } else {
      StageInLane<8>(x);
      StageInLane<16>(x);
      StageInLane<32>(x);
      if constexpr (kLanes == 8) StageAcrossLanes(16, x);
      StageAcrossLanes(1, x);
      StageAcrossLanes(2, x);
    }
    const float norm = Norm(D);
#pragma unroll
    for (float& value : x) value *= norm;
  }
};

}  // namespace kvd::rotation

#endif  // LOCKS_KVD_KERNELS_ROTATE_CUH_
