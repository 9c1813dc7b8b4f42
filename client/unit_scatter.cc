#include "client/unit_scatter.h"

#include <utility>

#include "client/gpu_scope.h"
#include "client/gpu_status.h"
#include "proto/status.h"

namespace kvd {
namespace {

// Units of one launch: 8 MiB of the usual ones.
constexpr size_t kUnits = 1024;

}  // namespace

absl::StatusOr<std::unique_ptr<UnitScatter>> UnitScatter::Make(int gpu, size_t unit_bytes) {
  constexpr char kWhat[] = "scattering of units";
  const GpuScope scope(gpu);
  KVD_RETURN_IF_ERROR(GpuStatus(scope.error(), kWhat));
  std::unique_ptr<UnitScatter> scatter(new UnitScatter(gpu, unit_bytes));
  KVD_ASSIGN_OR_RETURN(scatter->units_, PlacedArray<GatherUnit>::MakePinned(kUnits, kWhat));
  KVD_ASSIGN_OR_RETURN(scatter->valid_, PlacedArray<uint8_t>::MakePinned(kUnits, kWhat));
  KVD_RETURN_IF_ERROR(
      GpuStatus(cudaStreamCreateWithFlags(&scatter->stream_, cudaStreamNonBlocking), kWhat));
  return scatter;
}

UnitScatter::~UnitScatter() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

void UnitScatter::Add(const uint8_t* unit, uint8_t* destination) {
  if (count_ == kUnits) failed_ = !Run() || failed_;
  units_[count_++] = {unit, nullptr, 0, destination};
}

bool UnitScatter::Run() {
  const size_t count = std::exchange(count_, 0);
  const bool failed_before = std::exchange(failed_, false);
  if (count == 0) return !failed_before;
  const GpuScope scope(gpu_);
  const bool started = scope.error() == cudaSuccess &&
                       LaunchGatherUnits(units_.data(), static_cast<int64_t>(count), unit_bytes_,
                                         valid_.data(), stream_) == cudaSuccess;
  return cudaStreamSynchronize(stream_) == cudaSuccess && started && !failed_before;
}

}  // namespace kvd
