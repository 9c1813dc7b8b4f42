#include <cmath>

#include "kernels/rotate.cuh"

namespace kvd {
namespace {

constexpr int kThreads = 128;

// One row a warp.
template <int D>
__global__ void __launch_bounds__(kThreads)
    RotateQueryKernel(const uint16_t* query, int64_t num_rows, KvDtype dtype, float norm,
                      uint16_t* out) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (row < num_rows) rotation::RotateRow<D>(query + row * D, dtype, norm, out + row * D);
}

}  // namespace

cudaError_t LaunchRotateQuery(const uint16_t* query, int64_t num_rows, int head_dim, KvDtype dtype,
                              uint16_t* out, cudaStream_t stream) {
  if (num_rows < 0 || (dtype != KvDtype::kBf16 && dtype != KvDtype::kFp16))
    return cudaErrorInvalidValue;
  if (head_dim != 64 && head_dim != 96 && head_dim != 128 && head_dim != 256)
    return cudaErrorInvalidValue;
  if (num_rows == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>((num_rows + kThreads / 32 - 1) / (kThreads / 32));
  const float norm = rotation::Norm(head_dim);
  switch (head_dim) {
    case 64:
      RotateQueryKernel<64><<<grid, kThreads, 0, stream>>>(query, num_rows, dtype, norm, out);
      break;
    case 96:
      RotateQueryKernel<96><<<grid, kThreads, 0, stream>>>(query, num_rows, dtype, norm, out);
      break;
    case 128:
      RotateQueryKernel<128><<<grid, kThreads, 0, stream>>>(query, num_rows, dtype, norm, out);
      break;
    default:
      RotateQueryKernel<256><<<grid, kThreads, 0, stream>>>(query, num_rows, dtype, norm, out);
      break;
  }
  return cudaGetLastError();
}

}  // namespace kvd
