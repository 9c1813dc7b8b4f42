// Where bytes live: part of every view that could be either.
//
// Thread safety: plain values.

#ifndef LOCKS_KVD_KERNELS_MEMORY_SPACE_H_
#define LOCKS_KVD_KERNELS_MEMORY_SPACE_H_

namespace kvd {

enum class MemorySpace {
  kHost,  // this process may read it with ordinary loads
  kGpu,   // only kernels and copies of the CUDA runtime may touch it
};

struct MemoryPlace {
  MemorySpace space = MemorySpace::kHost;
  int gpu = -1;  // CUDA ordinal; -1 with kHost
  bool on_gpu() const { return space == MemorySpace::kGpu; }
  friend bool operator==(const MemoryPlace&, const MemoryPlace&) = default;
};
constexpr MemoryPlace OnGpu(int gpu) { return {MemorySpace::kGpu, gpu}; }

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_MEMORY_SPACE_H_
