// Reading memory that its owner may rewrite meanwhile: loads that no stale cache line can serve,
// and the look at the generation that decides whether they count (guarantee G1).
//
// Why a header of its own: gather, the step's fetch and the filling of a mirror must use the very
// same guard. Device code only. Internal to kernels/.

#ifndef LOCKS_KVD_KERNELS_GUARD_CUH_
#define LOCKS_KVD_KERNELS_GUARD_CUH_

#include <cstdint>

#include "kernels/layout.h"

namespace kvd::guard {

// Relaxed at system scope: the owner may rewrite the bytes meanwhile. Such a load is served by the
// L2 of the memory's own device, never by a line that this SM's L1 still holds from before.
__device__ __forceinline__ uint4 Load(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// The header is wanted last but then at once: has it near.
__device__ __forceinline__ void Prefetch(const PageHeader* header) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(header));
}

// The generation after this thread's loads. The fence keeps the header's load behind them: a byte
// of a later write then implies a generation that is already odd, or later still.
__device__ __forceinline__ uint64_t GenerationAfter(const PageHeader* header) {
  uint64_t generation;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(generation) : "l"(header) : "memory");
  return generation;
}

// True if this thread's loads so far were of the content that `expected` names.
__device__ __forceinline__ bool StillSealed(const PageHeader* header, uint64_t expected) {
  return GenerationAfter(header) == expected && expected % 2 == 0;
}

}  // namespace kvd::guard

#endif  // LOCKS_KVD_KERNELS_GUARD_CUH_
