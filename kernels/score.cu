#include "kernels/score_scan.cuh"

namespace kvd {

cudaError_t LaunchScoreFull(const ScoreArgs& args, cudaStream_t stream) {
  return score::Launch<false>({args, nullptr, nullptr, 0}, stream);
}

cudaError_t LaunchScoreRefine(const RefineArgs& args, cudaStream_t stream) {
  if (args.max_candidates < 0) return cudaErrorInvalidValue;
  if (args.max_candidates == 0) return cudaSuccess;
  return score::Launch<false>(
      {args.score, args.candidates, args.num_candidates, args.max_candidates}, stream);
}

}  // namespace kvd
