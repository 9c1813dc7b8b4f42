// CUDA runtime errors as statuses. Built with KVD_CUDA only.
//
// Why kInternal: a CUDA error that is not about memory means that this process's context is broken;
// every later call fails too.

#ifndef LOCKS_KVD_CLIENT_GPU_STATUS_H_
#define LOCKS_KVD_CLIENT_GPU_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvd {

inline absl::Status GpuStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": CUDA: ", cudaGetErrorString(error)));
}

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_GPU_STATUS_H_
