// The coarse scan, apart from score.cu so that the two compile side by side.
#include "kernels/score_scan.cuh"

namespace kvd {

cudaError_t LaunchScoreCoarse(const ScoreArgs& args, cudaStream_t stream) {
  return score::Launch<true>({args, nullptr, nullptr, 0}, stream);
}

}  // namespace kvd
