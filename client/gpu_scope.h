// Makes a GPU the calling thread's current one for as long as it lives, and then puts back what
// was.
//
// Why: the threads of an engine come in with whatever GPU they use themselves. Only a thread that
// had a context gets its
// GPU back: making a context on a GPU that nobody asked for would take hundreds of MiB there. Needs
// KVD_CUDA.
// Thread safety: one thread.

#ifndef LOCKS_KVD_CLIENT_GPU_SCOPE_H_
#define LOCKS_KVD_CLIENT_GPU_SCOPE_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace kvd {

class GpuScope {
 public:
  explicit GpuScope(int gpu) {
    const bool had_one = HasContext();
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && (before_ != gpu || !had_one)) error_ = cudaSetDevice(gpu);
    changed_ = error_ == cudaSuccess && before_ != gpu && had_one;
  }
  ~GpuScope() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  GpuScope(const GpuScope&) = delete;
  GpuScope& operator=(const GpuScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  // The driver's function is looked up, so that a program without a driver starts.
  static bool HasContext() {
    static const auto get_current = [] {
      void* found = nullptr;
      cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
      const cudaError_t error = cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &found, 12000,
                                                                 cudaEnableDefault, &result);
      if (error != cudaSuccess) (void)cudaGetLastError();
      const bool usable = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
      return usable ? reinterpret_cast<decltype(&cuCtxGetCurrent)>(found) : nullptr;
    }();
    CUcontext context = nullptr;
    return get_current != nullptr && get_current(&context) == CUDA_SUCCESS && context != nullptr;
  }

  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_GPU_SCOPE_H_
