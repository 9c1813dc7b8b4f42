// Kernels that start while their predecessor in the stream still runs (programmatic dependent
// launch): a launch's own cost, a cluster's start and the set-up of shared memory then hide behind
// the predecessor's end. What it saves, and where it loses, is in kernels/README.md ("Launches").
//
// A kernel that is launched by LaunchOverlapped
//   - calls WaitForPredecessor() in every thread before it reads what the kernel just before it
//     writes, or writes what that one reads or writes. What still earlier kernels wrote is there
//     from the start: a kernel lets its successor start only after its own wait. A kernel that
//     reads such things ahead says so in its header.
//   - calls LetSuccessorStart() after that. Not always at once: CTAs that start in the room of the
//     first few that end are dealt unevenly over the SMs, and hold that room while they wait.
// The predecessor need not know: one that never calls LetSuccessorStart() does so by ending, and
// one that is no kernel is waited for as ever. Since each kernel waits for its predecessor's end,
// all earlier ones have ended too: a foreign kernel that lets its successor start before its own
// wait would break that, and must not come before one of ours.
// Capturable: becomes a programmatic edge of the graph.

#ifndef LOCKS_KVD_KERNELS_LAUNCH_CUH_
#define LOCKS_KVD_KERNELS_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kvd {

// Returns when all that earlier kernels in the stream wrote can be read.
__device__ __forceinline__ void WaitForPredecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may start once every CTA of this one has come here or ended.
__device__ __forceinline__ void LetSuccessorStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits for a kernel's parameters, which come by lines of 64 bytes: before WaitForPredecessor(), or
// each would be waited for after it. They start 16 bytes into a line.
template <class T>
__device__ __forceinline__ void AwaitParameters(const T& args) {
  constexpr int kWords = sizeof(T) / sizeof(uint32_t);
  const auto* words = reinterpret_cast<const uint32_t*>(&args);
#pragma unroll
  for (int i = 0; i < kWords; i += 16) asm volatile("" ::"r"(words[i]) : "memory");
  asm volatile("" ::"r"(words[kWords - 1]) : "memory");
}

// kernel<<<grid, threads, shared_bytes, stream>>>(args...), in clusters of `cluster` CTAs along x
// (0: as the kernel was declared), with the rights and duties above.
template <class... Parameters>
cudaError_t LaunchOverlapped(void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                             size_t shared_bytes, unsigned cluster, cudaStream_t stream,
                             const Parameters&... args) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster == 0 ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_LAUNCH_CUH_
