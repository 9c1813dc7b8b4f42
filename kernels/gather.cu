#include <cstdint>

#include "kernels/gather.h"
#include "kernels/guard.cuh"

namespace kvd {
namespace {

constexpr int kThreads = 128;
constexpr size_t kMaxUnitBytes = 32 * 1024;
constexpr unsigned kFullGrid = 1u << 20;

// One unit a CTA. A thread holds its kLoads x 16 bytes in registers until the generation is known.
template <int kLoads>
__global__ void __launch_bounds__(kThreads) GatherUnitsKernel(const GatherUnit* units, int64_t num_units, int num_words,
                                                              uint8_t* valid) {
  for (int64_t i = blockIdx.x; i < num_units; i += gridDim.x) {
    const GatherUnit unit = units[i];
    const bool guarded = unit.header != nullptr;
    if (guarded && threadIdx.x == 0) guard::Prefetch(unit.header);
    const auto* source = reinterpret_cast<const uint4*>(unit.source);
    auto* destination = reinterpret_cast<uint4*>(unit.destination);
    uint4 words[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int at = k * kThreads + static_cast<int>(threadIdx.x);
      words[k] = at < num_words ? guard::Load(source + at) : uint4{0, 0, 0, 0};
    }
    // Every thread looks after its own loads; the unit is valid if all of them saw the expected value.
    const bool sealed = !guarded || __syncthreads_and(guard::StillSealed(unit.header, unit.generation)) != 0;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int at = k * kThreads + static_cast<int>(threadIdx.x);
      if (at < num_words) __stcg(destination + at, sealed ? words[k] : uint4{0, 0, 0, 0});
    }
    if (threadIdx.x == 0) valid[i] = sealed ? 1 : 0;
  }
}

__global__ void __launch_bounds__(kThreads) PackUnitsKernel(const PackArgs args) {
  const int row_words = args.head_dim / 8;
  const int words = args.page_tokens * row_words;
  for (int64_t i = blockIdx.x; i < args.num_units; i += gridDim.x) {
    auto* out = reinterpret_cast<uint4*>(args.out[i]);
    const int64_t head = args.heads[i] * args.kv.head_stride;
    for (int at = static_cast<int>(threadIdx.x); at < 2 * words; at += kThreads) {
      const int row = at % words / row_words, word = at % row_words;
      const uint8_t* base = at < words ? args.kv.k : args.kv.v;
      const uint8_t* source = base + head + (args.first_tokens[i] + row) * args.kv.token_stride;
      out[at] = reinterpret_cast<const uint4*>(source)[word];
    }
  }
}

unsigned GridOf(int64_t num_units) {
  return num_units < kFullGrid ? static_cast<unsigned>(num_units) : kFullGrid;
}

}  // namespace

cudaError_t LaunchGatherUnits(const GatherUnit* units, int64_t num_units, size_t unit_bytes, uint8_t* valid,
                              cudaStream_t stream) {
  if (num_units < 0 || unit_bytes == 0 || unit_bytes % 2048 != 0 || unit_bytes > kMaxUnitBytes)
    return cudaErrorInvalidValue;
  if (num_units == 0) return cudaSuccess;
  const int num_words = static_cast<int>(unit_bytes / 16);
  const unsigned grid = GridOf(num_units);
  if (unit_bytes <= 4 * 1024) {
    GatherUnitsKernel<2><<<grid, kThreads, 0, stream>>>(units, num_units, num_words, valid);
  } else if (unit_bytes <= 8 * 1024) {
    GatherUnitsKernel<4><<<grid, kThreads, 0, stream>>>(units, num_units, num_words, valid);
  } else if (unit_bytes <= 16 * 1024) {
    GatherUnitsKernel<8><<<grid, kThreads, 0, stream>>>(units, num_units, num_words, valid);
  } else {
    GatherUnitsKernel<16><<<grid, kThreads, 0, stream>>>(units, num_units, num_words, valid);
  }
  return cudaGetLastError();
}

cudaError_t LaunchPackUnits(const PackArgs& args, cudaStream_t stream) {
  if (args.num_units < 0 || args.head_dim <= 0 || args.head_dim % 8 != 0 || args.page_tokens <= 0)
    return cudaErrorInvalidValue;
  if (args.num_units == 0) return cudaSuccess;
  PackUnitsKernel<<<GridOf(args.num_units), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvd
