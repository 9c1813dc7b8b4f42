// A buffer for bytes on their way in or out: 64-byte aligned, grown when a larger piece needs it,
// never shrunk. Its pages are touched only as far as it was used, unless a GPU reads and writes it
// too: then all are in memory.
//
// Thread safety: compatible.

#ifndef LOCKS_KVD_PROTO_STAGING_H_
#define LOCKS_KVD_PROTO_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "kernels/check.h"
#include "kernels/memory_space.h"
#include "proto/gpu_memory.h"

namespace kvd {

struct FreeStaging {
  int gpu = -1;  // that the memory is pinned for; -1: it is not
  void operator()(uint8_t* data) const { gpu >= 0 ? FreePinned(gpu, data) : std::free(data); }
};

class StagingBuffer {
 public:
  // At least `bytes` bytes that can be copied from and to memory at `place`; what was there before
  // is lost. Once reserved for a GPU it stays fit for it.
  uint8_t* Reserve(size_t bytes, const MemoryPlace& place = {}) {
    const int pinned_for = data_.get_deleter().gpu;
    if (bytes > capacity_ || (place.on_gpu() && pinned_for < 0)) {
      constexpr size_t kAlignment = 4096;
      const int gpu = place.on_gpu() ? place.gpu : pinned_for;
      capacity_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      data_.reset();
      uint8_t* data = gpu >= 0 ? AllocatePinned(gpu, capacity_)
                               : static_cast<uint8_t*>(std::aligned_alloc(kAlignment, capacity_));
      data_ = std::unique_ptr<uint8_t, FreeStaging>(data, FreeStaging{gpu});
      KVD_CHECK(data_ != nullptr);
    }
    return data_.get();
  }
  uint8_t* data() const { return data_.get(); }
  size_t capacity() const { return capacity_; }

 private:
  std::unique_ptr<uint8_t, FreeStaging> data_;
  size_t capacity_ = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_STAGING_H_
