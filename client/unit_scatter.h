// Puts units that came together where a worker's list wants them, in a GPU's memory: one kernel for
// as many as came.
//
// Why: copy calls cost 2 to 4 us each, and a list has hundreds of units.
// Thread safety: compatible. Hot path: Add and Run allocate nothing. Built with KVD_CUDA only.

#ifndef LOCKS_KVD_CLIENT_UNIT_SCATTER_H_
#define LOCKS_KVD_CLIENT_UNIT_SCATTER_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/device_buffer.h"
#include "kernels/gather.h"

namespace kvd {

class UnitScatter {
 public:
  // Destinations are in memory of `gpu`. kResourceExhausted; kInternal: the CUDA runtime's error.
  static absl::StatusOr<std::unique_ptr<UnitScatter>> Make(int gpu, size_t unit_bytes);
  ~UnitScatter();
  UnitScatter(const UnitScatter&) = delete;
  UnitScatter& operator=(const UnitScatter&) = delete;

  // `unit`, in pinned memory or on the GPU, 16-byte aligned, must stay as it is until Run returned.
  // Runs by itself what has become too much to remember.
  void Add(const uint8_t* unit, uint8_t* destination);
  // Waits for all that was added. False: a CUDA error, now or in an Add since the last Run;
  // destinations are undefined.
  bool Run();

 private:
  UnitScatter(int gpu, size_t unit_bytes) : gpu_(gpu), unit_bytes_(unit_bytes) {}

  const int gpu_;
  const size_t unit_bytes_;
  cudaStream_t stream_ = nullptr;
  PlacedArray<GatherUnit> units_;  // pinned
  PlacedArray<uint8_t> valid_;     // pinned; always 1: what was added does not change
  size_t count_ = 0;
  bool failed_ = false;
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_UNIT_SCATTER_H_
