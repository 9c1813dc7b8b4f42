#include <cuda_fp16.h>

#include "kernels/ptx.cuh"
#include "kernels/rotate.h"

namespace kvd {
namespace {

constexpr int kThreads = 128;
__constant__ RotationSigns kSigns = MakeRotationSigns();

__device__ float ToFloat(KvDtype dtype, uint16_t bits) {
  return dtype == KvDtype::kBf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                                 : __half2float(__ushort_as_half(bits));
}

__device__ uint16_t ToBits(KvDtype dtype, float x) {
  if (dtype == KvDtype::kFp16) return __half_as_ushort(__float2half_rn(x));
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

// One row a warp; lane l holds dims l, l + 32, ...: stages below 32 go across lanes, the rest inside one.
// Every output is the same tree of sums as in the reference, so the bits are the same.
template <int D>
__global__ void __launch_bounds__(kThreads) RotateQueryKernel(const uint16_t* query, int64_t num_rows, KvDtype dtype,
                                                              float norm, uint16_t* out) {
  constexpr int kEach = D / 32;
  constexpr int kSize = D == 96 ? 32 : D;
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (row >= num_rows) return;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    x[i] = ToFloat(dtype, query[row * D + 32 * i + lane]);
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
  for (int i = 0; i < kEach; ++i) out[row * D + 32 * i + lane] = ToBits(dtype, x[i] * norm);
}

}  // namespace

cudaError_t LaunchRotateQuery(const uint16_t* query, int64_t num_rows, int head_dim, KvDtype dtype, uint16_t* out,
                              cudaStream_t stream) {
  if (num_rows < 0 || (dtype != KvDtype::kBf16 && dtype != KvDtype::kFp16)) return cudaErrorInvalidValue;
  if (head_dim != 64 && head_dim != 96 && head_dim != 128 && head_dim != 256) return cudaErrorInvalidValue;
  if (num_rows == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>((num_rows + kThreads / 32 - 1) / (kThreads / 32));
  const float norm = 1.0f / sqrtf(static_cast<float>(head_dim == 96 ? 32 : head_dim));
  switch (head_dim) {
    case 64: RotateQueryKernel<64><<<grid, kThreads, 0, stream>>>(query, num_rows, dtype, norm, out); break;
    case 96: RotateQueryKernel<96><<<grid, kThreads, 0, stream>>>(query, num_rows, dtype, norm, out); break;
    case 128: RotateQueryKernel<128><<<grid, kThreads, 0, stream>>>(query, num_rows, dtype, norm, out); break;
    default: RotateQueryKernel<256><<<grid, kThreads, 0, stream>>>(query, num_rows, dtype, norm, out); break;
  }
  return cudaGetLastError();
}

}  // namespace kvd
