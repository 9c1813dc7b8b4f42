#include "client/device_buffer.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#if KVD_CUDA
#include <cuda_runtime_api.h>

#include "client/gpu_scope.h"
#include "client/gpu_status.h"
#endif

namespace kvd {
namespace {

constexpr size_t kAlignment = 256;

absl::Status NoMemory(absl::string_view what, size_t size, absl::string_view where,
                      absl::string_view why) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": no memory for ", size, " bytes ", where, why,
                   "; lower max_tokens, max_sequences or the budget"));
}

}  // namespace

absl::StatusOr<PlacedBytes> PlacedBytes::Make(const MemoryPlace& place, size_t size,
                                              absl::string_view what) {
  PlacedBytes bytes;
  bytes.place_ = place;
  bytes.size_ = size;
  const size_t rounded = (size + kAlignment) / kAlignment * kAlignment;
  if (!place.on_gpu()) {
    bytes.data_ = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, rounded));
    if (bytes.data_ == nullptr) return NoMemory(what, size, "on the host", "");
    return bytes;
  }
#if KVD_CUDA
  const GpuScope scope(place.gpu);
  if (scope.error() != cudaSuccess) {
    (void)cudaGetLastError();
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": GPU ", place.gpu, ": ", cudaGetErrorString(scope.error())));
  }
  if (const cudaError_t got = cudaMalloc(reinterpret_cast<void**>(&bytes.data_), rounded);
      got != cudaSuccess) {
    (void)cudaGetLastError();
    return NoMemory(what, size, absl::StrCat("on GPU ", place.gpu, ": "), cudaGetErrorString(got));
  }
  return bytes;
#else
  return absl::FailedPreconditionError(absl::StrCat(
      what, ": memory of GPU ", place.gpu, " is wanted, and this library was built without CUDA"));
#endif
}

absl::StatusOr<PlacedBytes> PlacedBytes::MakePinned(size_t size, absl::string_view what) {
#if KVD_CUDA
  PlacedBytes bytes;
  bytes.pinned_ = true;
  bytes.size_ = size;
  if (const cudaError_t got =
          cudaHostAlloc(reinterpret_cast<void**>(&bytes.data_), size + kAlignment,
                        cudaHostAllocPortable | cudaHostAllocMapped);
      got != cudaSuccess) {
    (void)cudaGetLastError();
    return NoMemory(what, size, "pinned on the host: ", cudaGetErrorString(got));
  }
  return bytes;
#else
  return Make({}, size, what);
#endif
}

PlacedBytes::PlacedBytes(PlacedBytes&& other) noexcept
    : place_(other.place_),
      pinned_(other.pinned_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

PlacedBytes& PlacedBytes::operator=(PlacedBytes&& other) noexcept {
  std::swap(place_, other.place_);
  std::swap(pinned_, other.pinned_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PlacedBytes::~PlacedBytes() {
  if (data_ == nullptr) return;
#if KVD_CUDA
  // A failure here means that the context is gone, and the memory with it.
  if (pinned_) {
    (void)cudaFreeHost(data_);
    return;
  }
  if (place_.on_gpu()) {
    (void)cudaFree(data_);
    return;
  }
#endif
  std::free(data_);
}

bool IsHostMemory(const void* data) {
#if KVD_CUDA
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, data) == cudaSuccess) {
    return attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged;
  }
  (void)cudaGetLastError();
#else
  (void)data;
#endif
  return true;
}

absl::Status CopyBytes(const MemoryPlace& place, void* to, const void* from, size_t size) {
  return CopyRows(place, to, size, from, size, size, 1);
}

absl::Status CopyRows(const MemoryPlace& place, void* to, size_t to_stride, const void* from,
                      size_t from_stride, size_t size, size_t rows) {
  if (size == 0 || rows == 0) return absl::OkStatus();
  if (!place.on_gpu()) {
    for (size_t row = 0; row < rows; ++row) {
      std::memcpy(static_cast<uint8_t*>(to) + row * to_stride,
                  static_cast<const uint8_t*>(from) + row * from_stride, size);
    }
    return absl::OkStatus();
  }
#if KVD_CUDA
  // Not the legacy stream: that one waits for, and disturbs, whatever the engine captures
  // meanwhile.
  const GpuScope scope(place.gpu);
  cudaError_t done = scope.error();
  if (done == cudaSuccess && rows == 1) {
    done = cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, cudaStreamPerThread);
  } else if (done == cudaSuccess) {
    done = cudaMemcpy2DAsync(to, to_stride, from, from_stride, size, rows, cudaMemcpyDefault,
                             cudaStreamPerThread);
  }
  if (done == cudaSuccess) done = cudaStreamSynchronize(cudaStreamPerThread);
  return GpuStatus(done, "copy");
#else
  return absl::FailedPreconditionError(
      "memory of a GPU is wanted, and this library was built without CUDA");
#endif
}

}  // namespace kvd
