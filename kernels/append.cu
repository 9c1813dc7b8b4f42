#include "kernels/append.h"

namespace kvd {
namespace {

constexpr int kThreads = 64;  // a row of 256 values is 32 words of 16 bytes, for K and for V

__global__ void __launch_bounds__(kThreads) AppendKernel(const AppendArgs args) {
  const int words = args.head_dim / 8;
  const int64_t row = blockIdx.x;
  const int token = args.token[row / args.num_kv_heads];
  auto* unit = reinterpret_cast<uint4*>(args.tails[row]);
  for (int at = static_cast<int>(threadIdx.x); at < 2 * words; at += kThreads) {
    const int half = at / words, word = at % words;
    const auto* source = reinterpret_cast<const uint4*>(half == 0 ? args.k : args.v) + row * words;
    unit[(half * args.page_tokens + token) * words + word] = source[word];
  }
}

}  // namespace

cudaError_t LaunchAppend(const AppendArgs& args, cudaStream_t stream) {
  if (args.num_sequences < 0 || args.num_kv_heads < 1 || args.head_dim <= 0 ||
      args.head_dim % 8 != 0 || args.page_tokens < 1)
    return cudaErrorInvalidValue;
  if (args.num_sequences == 0) return cudaSuccess;
  const auto rows =
      static_cast<unsigned>(args.num_sequences) * static_cast<unsigned>(args.num_kv_heads);
  AppendKernel<<<rows, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvd
