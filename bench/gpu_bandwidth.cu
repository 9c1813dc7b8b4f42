#include <algorithm>

#include "bench/gpu_bandwidth.h"
#include "kernels/ptx.cuh"

namespace kvd::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 8;
constexpr uint32_t kStageBytes = 16 * 1024;
constexpr int kStages = 6;

__device__ __forceinline__ uint32_t Fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

__global__ void __launch_bounds__(kThreads)
    ReadKernel(const uint4* data, size_t num_words, uint32_t* sink) {
  uint32_t folded = 0;
  const size_t step = size_t{gridDim.x} * kThreads * kLoads;
  for (size_t base = size_t{blockIdx.x} * kThreads * kLoads + threadIdx.x; base < num_words;
       base += step) {
    uint4 v[kLoads] = {};
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (base + k * kThreads < num_words) v[k] = __ldcs(data + base + k * kThreads);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) folded ^= Fold(v[k]);
  }
  if (folded == 0x12345678u) *sink = folded;
}

// The score kernels' way of reading, without the arithmetic: a ring of stages in shared memory.
__global__ void __launch_bounds__(kThreads)
    BulkReadKernel(const uint8_t* data, size_t num_pieces, uint32_t* sink) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t full[kStages];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) ptx::BarrierInit(full + s, 1);
    ptx::BarrierInitFence();
  }
  __syncthreads();
  const auto start = [&](size_t i, int stage) {
    if (threadIdx.x != 0 || i >= num_pieces) return;
    ptx::BarrierExpect(full + stage, kStageBytes);
    ptx::BulkCopy(ring + stage * kStageBytes, data + i * kStageBytes, kStageBytes, full + stage);
  };
  for (int s = 0; s < kStages; ++s)
    start(blockIdx.x + size_t{gridDim.x} * static_cast<unsigned>(s), s);
  uint32_t folded = 0;
  int turn = 0;
  for (size_t i = blockIdx.x; i < num_pieces; i += gridDim.x, ++turn) {
    const int stage = turn % kStages;
    ptx::BarrierWait(full + stage, static_cast<uint32_t>(turn / kStages) & 1);
    const auto* words = reinterpret_cast<const uint4*>(ring + stage * kStageBytes);
    for (unsigned w = threadIdx.x; w < kStageBytes / 16; w += kThreads) folded ^= Fold(words[w]);
    __syncthreads();
    start(i + size_t{gridDim.x} * kStages, stage);
  }
  if (folded == 0x12345678u) *sink = folded;
}

__global__ void __launch_bounds__(kThreads)
    CopyKernel(const uint4* from, size_t num_words, uint4* to) {
  constexpr int kEach = 4;
  const size_t base = size_t{blockIdx.x} * kThreads * kEach + threadIdx.x;
  uint4 v[kEach] = {};
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (base + k * kThreads < num_words) v[k] = from[base + k * kThreads];
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (base + k * kThreads < num_words) to[base + k * kThreads] = v[k];
}

}  // namespace

cudaError_t LaunchRead(ReadKind kind, const uint8_t* data, size_t bytes, uint32_t* sink,
                       cudaStream_t stream) {
  int device = 0, num_sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e =
          cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess)
    return e;
  if (kind == ReadKind::kVectorLoads) {
    const size_t ctas = (bytes / 16 + kThreads * kLoads - 1) / (kThreads * kLoads);
    const auto grid =
        static_cast<unsigned>(std::min<size_t>(ctas, 8 * static_cast<size_t>(num_sms)));
    ReadKernel<<<grid, kThreads, 0, stream>>>(reinterpret_cast<const uint4*>(data), bytes / 16,
                                              sink);
    return cudaGetLastError();
  }
  constexpr int kShared = kStages * kStageBytes;
  if (const cudaError_t e = cudaFuncSetAttribute(
          BulkReadKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      e != cudaSuccess)
    return e;
  BulkReadKernel<<<static_cast<unsigned>(2 * num_sms), kThreads, kShared, stream>>>(
      data, bytes / kStageBytes, sink);
  return cudaGetLastError();
}

cudaError_t LaunchCopy(const uint8_t* from, size_t bytes, uint8_t* to, cudaStream_t stream) {
  const size_t ctas = (bytes / 16 + kThreads * 4 - 1) / (kThreads * 4);
  CopyKernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(
      reinterpret_cast<const uint4*>(from), bytes / 16, reinterpret_cast<uint4*>(to));
  return cudaGetLastError();
}

}  // namespace kvd::bench
