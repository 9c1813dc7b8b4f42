// Decode attention over listed units, and the merge of two partial results.
#include "kernels/attend_row.cuh"

namespace kvd {
namespace {

constexpr int kMergeThreads = 128;

__global__ void __launch_bounds__(kMergeThreads) MergeAttentionKernel(const MergeArgs args) {
  const int64_t row = blockIdx.x;
  const float lse1 = args.lse1[row], lse2 = args.lse2[row];
  __syncthreads();  // lse may be lse1 or lse2: all have read them
  const float max = fmaxf(lse1, lse2);
  const bool empty = max == attend::NegativeInfinity();
  const float lse = empty ? max : max + log1pf(expf(fminf(lse1, lse2) - max));
  const float weight1 = empty ? 0 : expf(lse1 - lse), weight2 = empty ? 0 : expf(lse2 - lse);
  for (int d = static_cast<int>(threadIdx.x); d < args.head_dim; d += kMergeThreads) {
    const int64_t at = row * args.head_dim + d;
    args.o[at] = weight1 * args.o1[at] + weight2 * args.o2[at];
  }
  if (threadIdx.x == 0) args.lse[row] = lse;
}

}  // namespace

cudaError_t LaunchAttend(const AttendArgs& args, cudaStream_t stream) {
  return attend::Launch<attend::ListedUnits>(args, stream);
}

cudaError_t LaunchMergeAttention(const MergeArgs& args, cudaStream_t stream) {
  if (args.num_rows < 0 || args.head_dim < 1) return cudaErrorInvalidValue;
  if (args.num_rows == 0) return cudaSuccess;
  MergeAttentionKernel<<<static_cast<unsigned>(args.num_rows), kMergeThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvd
