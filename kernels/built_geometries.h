// Which geometries the GPU kernels of this build are compiled for.
//
// Why: score, attend and summarize are compiled once for each geometry; all of them take many
// minutes and tens of megabytes. The default build has the ones of most models; the CMake option
// KVD_ALL_GEOMETRIES adds the rest.
// Thread safety: pure functions.
// Errors: a launcher answers cudaErrorNotSupported for a geometry that is valid but not built;
// hosts ask GpuProblem() first, for the sentence.

#ifndef LOCKS_KVD_KERNELS_BUILT_GEOMETRIES_H_
#define LOCKS_KVD_KERNELS_BUILT_GEOMETRIES_H_

#include "kernels/layout.h"

namespace kvd {

#if KVD_ALL_GEOMETRIES
inline constexpr bool kAllGeometries = true;
#else
inline constexpr bool kAllGeometries = false;
#endif

// Any group, dtype and soft cap; attend any page_tokens too.
constexpr bool IsBuiltHeadDim(int head_dim) {
  return kAllGeometries || head_dim == 64 || head_dim == 128;
}
constexpr bool IsBuilt(int head_dim, int page_tokens, int rank) {
  return IsBuiltHeadDim(head_dim) && (kAllGeometries || (page_tokens == 16 && rank == 8));
}

// Returns nullptr if this build's GPU kernels have `geometry`, else a sentence that says what to
// do; a static string.
// REQUIRES: Problem(geometry) == nullptr.
inline const char* GpuProblem(const KvGeometry& geometry) {
  if (IsBuilt(geometry.head_dim, geometry.page_tokens, geometry.rank)) return nullptr;
  return "this build's GPU kernels have head_dim 64 and 128, page_tokens 16, rank 8: build with "
         "-DKVD_ALL_GEOMETRIES=ON, or "
         "keep the memory on the host";
}

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_BUILT_GEOMETRIES_H_
