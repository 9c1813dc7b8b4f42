// Aligned memory that is allocated once, at plan or open time, and never in a step.
//
// Thread safety: compatible. Memory is not initialised: a page of it that is never written takes no
// RAM.

#ifndef LOCKS_KVD_CLIENT_BUFFER_H_
#define LOCKS_KVD_CLIENT_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvd {

template <typename T>
class Buffer {
 public:
  Buffer() = default;

  // kResourceExhausted, naming `what`, if the memory cannot be had.
  static absl::StatusOr<Buffer> Make(size_t size, absl::string_view what) {
    const size_t bytes = (size * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    Buffer buffer;
    buffer.size_ = size;
    buffer.data_.reset(static_cast<T*>(std::aligned_alloc(kAlignment, bytes + kAlignment)));
    if (buffer.data_ == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat(what, ": no memory for ", bytes, " bytes; lower max_tokens or the budget"));
    }
    return buffer;
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_.get()[i]; }
  const T& operator[](size_t i) const { return data_.get()[i]; }
  T* begin() { return data_.get(); }
  T* end() { return data_.get() + size_; }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_BUFFER_H_
