#include "kernels/checksum.h"
#include "kernels/ptx.cuh"

namespace kvd {
namespace {

constexpr int kThreads = 128;

// A long piece gets a CTA of these: one warp would take as long as all records of a page take to
// build.
constexpr int kManyThreads = 1024;
constexpr size_t kLongBytes = size_t{32} << 10;

// One piece a warp; sums of 64-bit words wrap, so their order does not matter.
__global__ void __launch_bounds__(kThreads)
    Checksum64Kernel(const uint8_t* const* data, int64_t num_pieces, int64_t num_words,
                     uint64_t* sums) {
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * (kThreads / 32);
  for (int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; i < num_pieces;
       i += stride) {
    const auto* words = reinterpret_cast<const uint32_t*>(data[i]);
    uint64_t sum = 0;
#pragma unroll 8
    for (int64_t w = lane; w < num_words; w += 32)
      sum += Mix64(words[w] + static_cast<uint64_t>(w + 1) * kGolden64);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ptx::kAllLanes, sum, step);
    if (lane == 0) sums[i] = sum;
  }
}

// One piece a CTA.
__global__ void __launch_bounds__(kManyThreads)
    LongChecksum64Kernel(const uint8_t* const* data, int64_t num_words, uint64_t* sums) {
  __shared__ uint64_t of_warp[kManyThreads / 32];
  const auto* words = reinterpret_cast<const uint32_t*>(data[blockIdx.x]);
  uint64_t sum = 0;
#pragma unroll 4
  for (int64_t w = threadIdx.x; w < num_words; w += kManyThreads)
    sum += Mix64(words[w] + static_cast<uint64_t>(w + 1) * kGolden64);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ptx::kAllLanes, sum, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = of_warp[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ptx::kAllLanes, sum, step);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

}  // namespace

cudaError_t LaunchChecksum64(const uint8_t* const* data, int64_t num_pieces, size_t bytes,
                             uint64_t* sums, cudaStream_t stream) {
  if (num_pieces < 0 || bytes % 4 != 0) return cudaErrorInvalidValue;
  if (num_pieces == 0) return cudaSuccess;
  if (bytes >= kLongBytes && num_pieces < (1 << 20)) {
    LongChecksum64Kernel<<<static_cast<unsigned>(num_pieces), kManyThreads, 0, stream>>>(
        data, static_cast<int64_t>(bytes / 4), sums);
    return cudaGetLastError();
  }
  const int64_t ctas = (num_pieces + kThreads / 32 - 1) / (kThreads / 32);
  const unsigned grid = ctas < (1 << 20) ? static_cast<unsigned>(ctas) : 1u << 20;
  Checksum64Kernel<<<grid, kThreads, 0, stream>>>(data, num_pieces, static_cast<int64_t>(bytes / 4),
                                                  sums);
  return cudaGetLastError();
}

}  // namespace kvd
