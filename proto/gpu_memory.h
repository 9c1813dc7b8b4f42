// GPU memory that another process can map: a CUDA VMM allocation with a POSIX descriptor.
//
// Why not cudaIpcGetMemHandle: it fails between containers of separate PID, IPC and mount
// namespaces, and maps writable; this way works there and an importer maps read-only
// (ARCHITECTURE.md, decision 26). The driver's functions are looked up at run time, so that a
// program built with CUDA starts on a machine without a GPU. There, and in a program built without
// CUDA, NumGpus is 0 and everything else answers kFailedPrecondition: callers need no #if.
// Thread safety: immutable once made. Blocking: making and freeing take milliseconds; never in a
// step. A call leaves the calling thread's current GPU as it was; a thread that has used none yet
// is left at `gpu`.

#ifndef LOCKS_KVD_PROTO_GPU_MEMORY_H_
#define LOCKS_KVD_PROTO_GPU_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/unique_fd.h"

namespace kvd {

// Allocations are whole granules; both ends round alike.
inline constexpr size_t kGpuGranule = size_t{2} << 20;
constexpr size_t GpuRounded(size_t bytes) {
  return (bytes + kGpuGranule - 1) / kGpuGranule * kGpuGranule;
}

#if KVD_CUDA
inline constexpr bool kBuiltWithCuda = true;
#else
inline constexpr bool kBuiltWithCuda = false;
#endif

// Visible GPUs; 0 without CUDA, a driver or a GPU.
int NumGpus();
// OK if `gpu` is one of them; else kFailedPrecondition: how many there are, and why none.
absl::Status CheckGpu(int gpu);
// UUID of a GPU in hex, the same in every process of a host whatever it may see;
// kFailedPrecondition if there is no such GPU.
absl::StatusOr<std::string> GpuUuid(int gpu);

// Makes `gpu`, and its primary context, the calling thread's: for threads of ours that go on to use
// no other.
absl::Status MakeGpuCurrent(int gpu);

class GpuMemory {
 public:
  // GpuRounded(bytes) bytes on `gpu`, zeroed, mapped there for reading and writing, with a
  // descriptor to hand out. kResourceExhausted: the GPU has no room; kFailedPrecondition: no such
  // GPU, or it cannot export descriptors.
  static absl::StatusOr<std::unique_ptr<GpuMemory>> Make(int gpu, size_t bytes);
  // Maps another process's allocation, on whichever GPU of this host it is, for reading on `gpu`. A
  // write to it faults. The mapping needs the descriptor no longer than this call.
  // kFailedPrecondition says why it is impossible: no peer access, the owner's GPU is not visible
  // here, not such a descriptor, or an allocation that is smaller than GpuRounded(bytes).
  static absl::StatusOr<std::unique_ptr<GpuMemory>> MapReadOnly(int gpu, int descriptor,
                                                                size_t bytes);
  // REQUIRES: nothing enqueued on any GPU still uses it. Waits for the GPU before it unmaps, so
  // that a kernel in flight cannot fault.
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  uint8_t* data() const { return data_; }  // device address, kGpuGranule-aligned
  size_t bytes() const { return bytes_; }  // rounded
  int gpu() const { return gpu_; }
  // The descriptor that Make exported; empty after that, and of a mapping.
  UniqueFd TakeDescriptor() { return std::move(descriptor_); }

 private:
  GpuMemory(int gpu, size_t bytes) : gpu_(gpu), bytes_(GpuRounded(bytes)) {}
  // Maps an allocation whole and gives the handle up, whether it succeeds or not: the mapping keeps
  // the memory.
  absl::Status MapHandle(uint64_t handle, bool writable);

  const int gpu_;
  const size_t bytes_;
  uint8_t* data_ = nullptr;               // reserved addresses
  [[maybe_unused]] bool mapped_ = false;  // without CUDA nothing ever is
  UniqueFd descriptor_;
};

// Host memory that kernels of `gpu` can read and write, 4096-byte aligned; null if it cannot be
// had. Freed by FreePinned with the same `gpu`: neither makes a context on another one.
uint8_t* AllocatePinned(int gpu, size_t bytes);
void FreePinned(int gpu, uint8_t* data);

// Memory of `gpu` that UCX may open to another process of this host (cuda_ipc), as pieces on their
// way need: whole granules, so that nothing else is in what that process maps, which it maps
// writable. Null if it cannot be had. Freeing waits for what the GPU still does with it.
uint8_t* AllocateExportable(int gpu, size_t bytes);
void FreeExportable(int gpu, uint8_t* data);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_GPU_MEMORY_H_
