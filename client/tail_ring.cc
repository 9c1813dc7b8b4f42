#include "client/tail_ring.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/status.h"
#if KVD_CUDA
#include "client/gpu_scope.h"
#include "client/gpu_status.h"
#include "kernels/step.h"
#endif

namespace kvd {

StepEvents::~StepEvents() {
#if KVD_CUDA
  for (void* event : all) (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
#endif
}

absl::StatusOr<std::unique_ptr<TailRing>> TailRing::Make(const WorkerShape& shape, int n_win) {
  auto ring = std::unique_ptr<TailRing>(new TailRing(shape, n_win + kSlackPages));
  const size_t bytes = static_cast<size_t>(ring->num_pages_) * shape.page_bytes();
  KVD_ASSIGN_OR_RETURN(ring->units_, PlacedBytes::Make(shape.place, bytes, "tail ring"));
  return ring;
}

#if KVD_CUDA
namespace {

constexpr char kWhat[] = "tail ring";

absl::StatusOr<bool> IsPlainHostMemory(const uint8_t* base) {
  cudaPointerAttributes attributes = {};
  KVD_RETURN_IF_ERROR(GpuStatus(cudaPointerGetAttributes(&attributes, base), kWhat));
  return attributes.type == cudaMemoryTypeUnregistered;
}

// Rows of one head from memory that kernels cannot read.
absl::Status CopyRowsUp(const WorkerShape& shape, const EngineKv& kv, int head, int64_t kv_token,
                        int count, uint8_t* to) {
  const size_t row_bytes = static_cast<size_t>(shape.geometry.head_dim) * 2;
  const int64_t from = head * kv.head_stride + kv_token * kv.token_stride;
  for (const auto& [source, place] :
       {std::pair(kv.k, to), std::pair(kv.v, to + shape.unit_bytes() / 2)}) {
    KVD_RETURN_IF_ERROR(GpuStatus(
        cudaMemcpy2DAsync(place, row_bytes, source + from, static_cast<size_t>(kv.token_stride),
                          row_bytes, static_cast<size_t>(count), cudaMemcpyHostToDevice,
                          cudaStreamPerThread),
        kWhat));
  }
  return absl::OkStatus();
}

absl::Status AppendOnGpu(const WorkerShape& shape, std::span<const EngineKv> layers,
                         int64_t kv_token, int64_t token, int count, TailRing& ring) {
  const GpuScope scope(shape.place.gpu);
  KVD_RETURN_IF_ERROR(GpuStatus(scope.error(), kWhat));
  KVD_ASSIGN_OR_RETURN(const bool is_host, IsPlainHostMemory(layers[0].k));
  const int page_tokens = shape.geometry.page_tokens;
  const auto page_idx = static_cast<int>(token / page_tokens);
  const size_t row =
      static_cast<size_t>(token % page_tokens) * static_cast<size_t>(shape.geometry.head_dim) * 2;
  for (int layer = 0; layer < shape.num_layers(); ++layer) {
    const EngineKv& kv = layers[static_cast<size_t>(layer)];
    for (int head = 0; is_host && head < shape.num_heads(); ++head) {
      KVD_RETURN_IF_ERROR(
          CopyRowsUp(shape, kv, head, kv_token, count, ring.unit(page_idx, layer, head) + row));
    }
    if (is_host) continue;
    const AppendTokensArgs args = {.kv = kv,
                                   .kv_token = kv_token,
                                   .token = token,
                                   .count = count,
                                   .layer = layer,
                                   .num_layers = shape.num_layers(),
                                   .num_kv_heads = shape.num_heads(),
                                   .head_dim = shape.geometry.head_dim,
                                   .page_tokens = page_tokens,
                                   .ring_pages = ring.num_pages(),
                                   .ring = ring.page(0)};
    KVD_RETURN_IF_ERROR(GpuStatus(LaunchAppendTokens(args, cudaStreamPerThread), kWhat));
  }
  return GpuStatus(cudaStreamSynchronize(cudaStreamPerThread), kWhat);
}

}  // namespace
#endif

absl::Status TailRing::AppendRows(std::span<const EngineKv> layers, int64_t kv_token, int64_t token,
                                  int count) {
#if KVD_CUDA
  if (shape_.place.on_gpu()) {
    return AppendOnGpu(shape_, layers, kv_token, token, count, *this);
  }
#endif
  const int page_tokens = shape_.geometry.page_tokens;
  const size_t row_bytes = static_cast<size_t>(shape_.geometry.head_dim) * 2;
  const auto page_idx = static_cast<int>(token / page_tokens);
  for (int layer = 0; layer < shape_.num_layers(); ++layer) {
    const EngineKv& kv = layers[static_cast<size_t>(layer)];
    for (int head = 0; head < shape_.num_heads(); ++head) {
      uint8_t* to =
          unit(page_idx, layer, head) + static_cast<size_t>(token % page_tokens) * row_bytes;
      for (int i = 0; i < count; ++i, to += row_bytes) {
        const int64_t from = head * kv.head_stride + (kv_token + i) * kv.token_stride;
        std::memcpy(to, kv.k + from, row_bytes);
        std::memcpy(to + shape_.unit_bytes() / 2, kv.v + from, row_bytes);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status TailRing::ReadPage(int page_idx, uint8_t* to) {
#if KVD_CUDA
  if (shape_.place.on_gpu()) KVD_RETURN_IF_ERROR(AwaitSteps());
#endif
  return CopyBytes(shape_.place, to, page(page_idx), shape_.page_bytes());
}

#if KVD_CUDA
// What this thread copies next comes after every step whose token counts.
absl::Status TailRing::AwaitSteps() {
  std::shared_ptr<StepEvents> events;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    events = step_events_;
  }
  void* const latest = events == nullptr ? nullptr : events->latest.load(std::memory_order_acquire);
  if (latest == nullptr) return absl::OkStatus();
  const GpuScope scope(shape_.place.gpu);
  KVD_RETURN_IF_ERROR(GpuStatus(scope.error(), kWhat));
  return GpuStatus(cudaStreamWaitEvent(cudaStreamPerThread, static_cast<cudaEvent_t>(latest), 0),
                   kWhat);
}
#endif

}  // namespace kvd
