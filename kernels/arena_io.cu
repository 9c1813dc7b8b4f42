#include "kernels/arena_io.h"
#include "kernels/guard.cuh"

namespace kvd {
namespace {

constexpr int kThreads = 128;
constexpr int kLoads = 4;                       // 16 bytes each, in flight before the first store
constexpr int kWordsOfCta = kThreads * kLoads;  // 8 KiB
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

__device__ __forceinline__ void StoreWord(uint4* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void StoreRelaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// One part of a piece a CTA.
__global__ void __launch_bounds__(kThreads)
    CopyPiecesKernel(const PieceCopy* copies, int num_words, int num_parts) {
  const PieceCopy copy = copies[blockIdx.x / static_cast<unsigned>(num_parts)];
  const int first = static_cast<int>(blockIdx.x % static_cast<unsigned>(num_parts)) * kWordsOfCta;
  const auto* from = reinterpret_cast<const uint4*>(copy.from);
  auto* to = reinterpret_cast<uint4*>(copy.to);
  uint4 words[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int at = first + k * kThreads + static_cast<int>(threadIdx.x);
    words[k] = at < num_words ? guard::Load(from + at) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int at = first + k * kThreads + static_cast<int>(threadIdx.x);
    if (at < num_words) StoreWord(to + at, words[k]);
  }
}

__global__ void __launch_bounds__(kThreads)
    CheckGenerationsKernel(const GenerationCheck* checks, int64_t num_checks, uint8_t* valid) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < num_checks) valid[i] = guard::StillSealed(checks[i].header, checks[i].generation) ? 1 : 0;
}

__global__ void __launch_bounds__(kThreads)
    PublishHeadersKernel(const HeaderUpdate* updates, int64_t num_updates) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= num_updates) return;
  const HeaderUpdate update = updates[i];
  if (update.generation % 2 == 0) {
    auto* key = reinterpret_cast<uint64_t*>(update.header->key);
    StoreRelaxed(key, update.key[0]);
    StoreRelaxed(key + 1, update.key[1]);
    StoreRelaxed(&update.header->summary_checksum, update.summary_checksum);
  }
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(update.header), "l"(update.generation)
               : "memory");
}

unsigned CtasFor(int64_t num_items) {
  return static_cast<unsigned>((num_items + kThreads - 1) / kThreads);
}

}  // namespace

cudaError_t LaunchCopyPieces(const PieceCopy* copies, int64_t num_copies, size_t bytes,
                             cudaStream_t stream) {
  if (num_copies < 0 || bytes % 16 != 0 || bytes > (size_t{1} << 30)) return cudaErrorInvalidValue;
  if (num_copies == 0 || bytes == 0) return cudaSuccess;
  const int num_words = static_cast<int>(bytes / 16);
  const int num_parts = (num_words + kWordsOfCta - 1) / kWordsOfCta;
  if (num_copies > kMaxGrid / num_parts) return cudaErrorInvalidValue;
  CopyPiecesKernel<<<static_cast<unsigned>(num_copies * num_parts), kThreads, 0, stream>>>(
      copies, num_words, num_parts);
  return cudaGetLastError();
}

cudaError_t LaunchCheckGenerations(const GenerationCheck* checks, int64_t num_checks,
                                   uint8_t* valid, cudaStream_t stream) {
  if (num_checks < 0 || num_checks > kMaxGrid) return cudaErrorInvalidValue;
  if (num_checks == 0) return cudaSuccess;
  CheckGenerationsKernel<<<CtasFor(num_checks), kThreads, 0, stream>>>(checks, num_checks, valid);
  return cudaGetLastError();
}

cudaError_t LaunchPublishHeaders(const HeaderUpdate* updates, int64_t num_updates,
                                 cudaStream_t stream) {
  if (num_updates < 0 || num_updates > kMaxGrid) return cudaErrorInvalidValue;
  if (num_updates == 0) return cudaSuccess;
  PublishHeadersKernel<<<CtasFor(num_updates), kThreads, 0, stream>>>(updates, num_updates);
  return cudaGetLastError();
}

}  // namespace kvd
