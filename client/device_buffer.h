// Memory that is allocated once, at plan or open time: on the host or on a GPU (the place says
// which), or on the host for both to use.
//
// Why a place at run time: the same bookkeeping of pages serves a worker on the CPU and one on a
// GPU; only who touches the bytes differs. Built without CUDA, a GPU place is refused. Thread
// safety: compatible. Not initialised.

#ifndef LOCKS_KVD_CLIENT_DEVICE_BUFFER_H_
#define LOCKS_KVD_CLIENT_DEVICE_BUFFER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/memory_space.h"

namespace kvd {

// Bytes at a place, 256-byte aligned.
class PlacedBytes {
 public:
  PlacedBytes() = default;
  // kResourceExhausted, naming `what`, if the memory cannot be had; kFailedPrecondition: no such
  // GPU.
  static absl::StatusOr<PlacedBytes> Make(const MemoryPlace& place, size_t size,
                                          absl::string_view what);
  // Host memory that kernels can read and write, and copies run from at full speed.
  static absl::StatusOr<PlacedBytes> MakePinned(size_t size, absl::string_view what);
  PlacedBytes(PlacedBytes&& other) noexcept;
  PlacedBytes& operator=(PlacedBytes&& other) noexcept;
  ~PlacedBytes();

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  const MemoryPlace& place() const { return place_; }

 private:
  MemoryPlace place_;
  bool pinned_ = false;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// The same as elements of a plain type.
template <typename T>
class PlacedArray {
 public:
  PlacedArray() = default;
  static absl::StatusOr<PlacedArray> Make(const MemoryPlace& place, size_t size,
                                          absl::string_view what) {
    return From(PlacedBytes::Make(place, size * sizeof(T), what), size);
  }
  static absl::StatusOr<PlacedArray> MakePinned(size_t size, absl::string_view what) {
    return From(PlacedBytes::MakePinned(size * sizeof(T), what), size);
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data()); }
  size_t size() const { return size_; }
  size_t num_bytes() const { return size_ * sizeof(T); }
  // Host or pinned memory only.
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }

 private:
  static absl::StatusOr<PlacedArray> From(absl::StatusOr<PlacedBytes> bytes, size_t size) {
    if (!bytes.ok()) return bytes.status();
    PlacedArray array;
    array.bytes_ = *std::move(bytes);
    array.size_ = size;
    return array;
  }
  PlacedBytes bytes_;
  size_t size_ = 0;
};

// True unless `data` is in a GPU's memory (pinned memory is the host's).
bool IsHostMemory(const void* data);

// Copies `size` bytes between memory at `place` and any memory of the host or of a GPU. Blocking:
// waits for the copy, on a stream of the calling thread's own. kInternal: the CUDA runtime's error.
absl::Status CopyBytes(const MemoryPlace& place, void* to, const void* from, size_t size);
// The same for `rows` rows of `size` bytes, whose starts are `to_stride` and `from_stride` bytes
// apart.
absl::Status CopyRows(const MemoryPlace& place, void* to, size_t to_stride, const void* from,
                      size_t from_stride, size_t size, size_t rows);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_DEVICE_BUFFER_H_
