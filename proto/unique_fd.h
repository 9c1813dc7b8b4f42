// A file descriptor that closes itself.
//
// Thread safety: compatible.

#ifndef LOCKS_KVD_PROTO_UNIQUE_FD_H_
#define LOCKS_KVD_PROTO_UNIQUE_FD_H_

#include <unistd.h>

#include <utility>

namespace kvd {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      if (fd_ >= 0) close(fd_);
      fd_ = other.release();
    }
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_UNIQUE_FD_H_
