// Kernels that start while their predecessor in the stream still runs (programmatic dependent launch): a launch's
// own cost, a cluster's start and the set-up of shared memory then hide behind the predecessor's end. What it saves,
// and where it loses, is in kernels/README.md ("Launches").
//
// A kernel that is launched by LaunchOverlapped
//   - calls WaitForPredecessor() in every thread before it reads or writes anything in global memory: until then
//     nothing that earlier kernels wrote is there, and what they read must not change;
//   - calls LetSuccessorStart() near its end. Not at once: CTAs that start in the room of the first few that end are
//     dealt unevenly over the SMs, and hold that room while they wait.
// The predecessor need not know: one that never calls LetSuccessorStart() does so by ending, and one that is no kernel
// is waited for as ever. Since each kernel waits for its predecessor's end, all earlier ones have ended too.
// Capturable: becomes a programmatic edge of the graph.

#ifndef LOCKS_KVD_KERNELS_LAUNCH_CUH_
#define LOCKS_KVD_KERNELS_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <cstddef>

namespace kvd {

// Returns when all that earlier kernels in the stream wrote can be read.
__device__ __forceinline__ void WaitForPredecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may start once every CTA of this one has come here or ended.
__device__ __forceinline__ void LetSuccessorStart() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// kernel<<<grid, threads, shared_bytes, stream>>>(args...), in clusters of `cluster` CTAs along x (0: as the kernel
// was declared), with the rights and duties above.
template <class... Parameters>
cudaError_t LaunchOverlapped(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes,
                             unsigned cluster, cudaStream_t stream, const Parameters&... args) {
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
