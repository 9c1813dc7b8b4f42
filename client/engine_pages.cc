#include "client/engine_pages.h"

#include <vector>

#include "proto/status.h"
#if KVD_CUDA
#include "client/gpu_scope.h"
#include "client/gpu_status.h"
#endif

namespace kvd {

absl::Status EnginePages::Read(std::span<const size_t> pages, int shard_pos, uint8_t* slots) const {
#if KVD_CUDA
  if (shape_.place.on_gpu()) return ReadFromGpu(pages, shard_pos, slots);
#endif
  const SlotLayout& slot = shape_.slot;
  for (size_t n = 0; n < pages.size(); ++n) {
    for (int layer = 0; layer < slot.num_layers; ++layer) {
      for (int h = 0; h < slot.shard_heads; ++h) {
        ref::PackUnit(layers_[static_cast<size_t>(layer)], shard_pos * slot.shard_heads + h,
                      token_of(pages[n]), shape_.geometry.head_dim, shape_.geometry.page_tokens,
                      slots + n * slot.slot_bytes() + slot.unit_offset(layer, h));
      }
    }
  }
  return absl::OkStatus();
}

#if KVD_CUDA
namespace {

constexpr char kWhat[] = "put from GPU memory";

// Memory for one batch, from the driver's pool: neither taking it nor giving it back waits for the
// GPU.
template <typename T>
class BatchArray {
 public:
  absl::Status Make(size_t size) {
    return GpuStatus(
        cudaMallocAsync(reinterpret_cast<void**>(&data_), size * sizeof(T), cudaStreamPerThread),
        kWhat);
  }
  absl::Status MakeFrom(const std::vector<T>& values) {
    const absl::Status made = Make(values.size());
    if (!made.ok()) return made;
    return GpuStatus(cudaMemcpyAsync(data_, values.data(), values.size() * sizeof(T),
                                     cudaMemcpyHostToDevice, cudaStreamPerThread),
                     kWhat);
  }
  ~BatchArray() {
    if (data_ != nullptr) cudaFreeAsync(data_, cudaStreamPerThread);
  }
  T* data() { return data_; }

 private:
  T* data_ = nullptr;
};

}  // namespace

// The engine's cache may be in host memory too, as far as the GPU can read that (pinned).
absl::Status EnginePages::ReadFromGpu(std::span<const size_t> pages, int shard_pos,
                                      uint8_t* slots) const {
  const GpuScope scope(shape_.place.gpu);
  KVD_RETURN_IF_ERROR(GpuStatus(scope.error(), kWhat));
  cudaPointerAttributes attributes = {};
  KVD_RETURN_IF_ERROR(GpuStatus(cudaPointerGetAttributes(&attributes, layers_[0].k), kWhat));
  if (attributes.type == cudaMemoryTypeUnregistered) {
    // Plain host memory: packed by the CPU.
    WorkerShape on_host = shape_;
    on_host.place = {};
    return EnginePages(on_host, layers_, first_token_).Read(pages, shard_pos, slots);
  }
  const SlotLayout& slot = shape_.slot;
  const size_t bytes = pages.size() * slot.slot_bytes();
  const auto heads = static_cast<size_t>(slot.shard_heads),
             layers = static_cast<size_t>(slot.num_layers);
  BatchArray<uint8_t> packed;
  KVD_RETURN_IF_ERROR(packed.Make(bytes));
  std::vector<int32_t> unit_heads;
  std::vector<int64_t> unit_tokens;
  for (const size_t page : pages) {
    for (int h = 0; h < slot.shard_heads; ++h) {
      unit_heads.push_back(shard_pos * slot.shard_heads + h);
      unit_tokens.push_back(token_of(page));
    }
  }
  const size_t units = pages.size() * heads;
  std::vector<uint8_t*> out;  // [L][pages][heads]
  for (int layer = 0; layer < slot.num_layers; ++layer) {
    for (size_t u = 0; u < units; ++u) {
      out.push_back(packed.data() + u / heads * slot.slot_bytes() +
                    slot.unit_offset(layer, static_cast<int>(u % heads)));
    }
  }
  BatchArray<int32_t> d_heads;
  BatchArray<int64_t> d_tokens;
  BatchArray<uint8_t*> d_out;
  KVD_RETURN_IF_ERROR(d_heads.MakeFrom(unit_heads));
  KVD_RETURN_IF_ERROR(d_tokens.MakeFrom(unit_tokens));
  KVD_RETURN_IF_ERROR(d_out.MakeFrom(out));
  for (size_t layer = 0; layer < layers; ++layer) {
    const PackArgs args = {.kv = layers_[layer],
                           .num_units = static_cast<int64_t>(units),
                           .heads = d_heads.data(),
                           .first_tokens = d_tokens.data(),
                           .head_dim = shape_.geometry.head_dim,
                           .page_tokens = shape_.geometry.page_tokens,
                           .out = d_out.data() + layer * units};
    KVD_RETURN_IF_ERROR(GpuStatus(LaunchPackUnits(args, cudaStreamPerThread), kWhat));
  }
  KVD_RETURN_IF_ERROR(GpuStatus(
      cudaMemcpyAsync(slots, packed.data(), bytes, cudaMemcpyDeviceToHost, cudaStreamPerThread),
      kWhat));
  return GpuStatus(cudaStreamSynchronize(cudaStreamPerThread), kWhat);
}
#endif

}  // namespace kvd
