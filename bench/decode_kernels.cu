#include "bench/decode_kernels.h"
#include "bench/synthetic_pages.h"

namespace kvd::bench {
namespace {

constexpr int kThreads = 256;

__host__ __device__ size_t UnitValues(const StepShape& shape) {
  return 2 * static_cast<size_t>(shape.head_dim) * static_cast<size_t>(shape.page_tokens);
}

// One CTA a unit.
__global__ void SyntheticPages(StepShape shape, int first_page, uint16_t* units) {
  const int heads = shape.num_kv_heads;
  const int page = static_cast<int>(blockIdx.x) / (shape.num_layers * heads);
  const int layer = static_cast<int>(blockIdx.x) / heads % shape.num_layers;
  const int head = static_cast<int>(blockIdx.x) % heads;
  const SyntheticUnit unit(static_cast<uint32_t>(first_page + page), static_cast<uint32_t>(layer),
                           static_cast<uint32_t>(head));
  const int values = static_cast<int>(UnitValues(shape));
  uint16_t* out = units + static_cast<size_t>(blockIdx.x) * UnitValues(shape);
  for (int i = static_cast<int>(threadIdx.x); i < values; i += kThreads) {
    const int row = i / shape.head_dim;  // a key's, then a value's
    const auto token = static_cast<uint32_t>(row % shape.page_tokens),
               dim = static_cast<uint32_t>(i % shape.head_dim);
    out[i] = row < shape.page_tokens ? unit.Key(token, dim, unit.MeanSteps(dim))
                                     : unit.Value(token, dim);
  }
}

__global__ void Drift(float* state, uint16_t* values, int64_t count, float rho, float sigma,
                      uint32_t step) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float next = (rho == 0 ? 0.0f : rho * state[i]) +
                     sigma * kNoiseStep *
                         static_cast<float>(NoiseSteps(
                             MixBits(MixBits(step * 0x85EBCA6Bu) + static_cast<uint32_t>(i))));
  state[i] = next;
  values[i] = NoiseToBf16(next);
}

__global__ void UnitTables(UnitTableArgs args) {
  const int heads = args.shape.num_kv_heads, layers = args.shape.num_layers;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= int64_t{args.num_pages} * layers * heads) return;
  const int64_t page = args.first_page + i / (layers * heads);
  const int64_t of_page = i % (layers * heads);  // layer * heads + head
  const auto record = static_cast<size_t>(of_page * args.page_capacity + page);
  args.units[i] = args.pages +
                  static_cast<size_t>(page * layers * heads + of_page) * UnitValues(args.shape) * 2;
  args.coarse_at[i] = args.coarse + record * args.coarse_bytes;
  args.fine_at[i] = args.fine + record * args.fine_bytes;
}

unsigned Ctas(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t LaunchSyntheticPages(const StepShape& shape, int first_page, int num_pages,
                                 uint8_t* units, cudaStream_t stream) {
  const auto count = static_cast<unsigned>(num_pages * shape.num_layers * shape.num_kv_heads);
  SyntheticPages<<<count, kThreads, 0, stream>>>(shape, first_page,
                                                 reinterpret_cast<uint16_t*>(units));
  return cudaGetLastError();
}

cudaError_t LaunchDrift(float* state, uint16_t* values, int64_t count, float rho, uint32_t step,
                        cudaStream_t stream) {
  Drift<<<Ctas(count), kThreads, 0, stream>>>(state, values, count, rho, sqrtf(1 - rho * rho),
                                              step);
  return cudaGetLastError();
}

cudaError_t LaunchUnitTables(const UnitTableArgs& args, cudaStream_t stream) {
  const int64_t count = int64_t{args.num_pages} * args.shape.num_layers * args.shape.num_kv_heads;
  UnitTables<<<Ctas(count), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvd::bench
