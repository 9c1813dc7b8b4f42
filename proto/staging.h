// A buffer for bytes on their way in or out: 64-byte aligned, grown when a larger piece needs it, never
// shrunk. Its pages are touched only as far as it was used.
//
// Thread safety: compatible.

#ifndef LOCKS_KVD_PROTO_STAGING_H_
#define LOCKS_KVD_PROTO_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "kernels/check.h"

namespace kvd {

class StagingBuffer {
 public:
  // At least `bytes` bytes; what was there before is lost.
  uint8_t* Reserve(size_t bytes) {
    if (bytes > capacity_) {
      constexpr size_t kAlignment = 4096;
      capacity_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      data_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, capacity_)));
      KVD_CHECK(data_ != nullptr);
    }
    return data_.get();
  }
  uint8_t* data() const { return data_.get(); }
  size_t capacity() const { return capacity_; }

 private:
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };
  std::unique_ptr<uint8_t, Free> data_;
  size_t capacity_ = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_STAGING_H_
