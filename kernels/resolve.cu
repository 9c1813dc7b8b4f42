// Resolve on the GPU: one CTA a row (resolve_row.cuh).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/resolve_row.cuh"

namespace kvd {
namespace {

using resolve_row::kMaxThreads;

__global__ void __launch_bounds__(kMaxThreads)
    ResolveKernel(const __grid_constant__ ResolveBatch batch) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int64_t index = blockIdx.x;
  const resolve_row::Lists found = resolve_row::MakeLists(memory, batch.max_pages);
  const resolve_row::Scratch scratch =
      resolve_row::MakeScratch(memory + resolve_row::ListBytes(batch.max_pages), batch.max_slots);
  AwaitParameters(batch);
  WaitForPredecessor();
  const ResolveRow row = batch.rows[index];
  const uint64_t step = *batch.step;
  const int num_pages = batch.num_pages[index], i0 = static_cast<int>(threadIdx.x);
  const int32_t* pages = batch.pages + index * batch.max_pages;
  const int num_misses = resolve_row::FindSlots(
      row, step, resolve_row::ReadSteps(row), pages, num_pages, i0 < num_pages ? pages[i0] : 0,
      [](int, int) {}, found, scratch);
  LetSuccessorStart();
  int32_t* slots = batch.slots + index * batch.max_pages;
  int32_t* misses = batch.miss_idx + index * batch.max_pages;
  for (int i = i0; i < batch.max_pages; i += static_cast<int>(blockDim.x)) {
    const int slot = i < num_pages ? found.slots[i] : -1;
    slots[i] = slot;
    misses[i] = i < num_misses ? scratch.misses[i] : -1;
    if (slot < 0) continue;
    row.slot_step[slot] = step;
    if ((found.is_miss[i / 32] >> (i % 32) & 1) == 0) continue;
    const int32_t page = found.pages[i], old_page = row.slot_page[slot];
    if (old_page >= 0) row.page_slot[old_page] = -1;
    row.page_slot[page] = slot;
    row.slot_page[slot] = page;
  }
  if (i0 == 0) batch.num_misses[index] = num_misses;
}

// A warp a row would do: units that fail are rare.
constexpr int kEvictThreads = 128;

__global__ void __launch_bounds__(kEvictThreads)
    EvictKernel(const __grid_constant__ ResolveBatch batch, const uint8_t* valid) {
  const int64_t index = blockIdx.x;
  const ResolveRow row = batch.rows[index];
  const int num_misses = batch.num_misses[index];
  for (int m = static_cast<int>(threadIdx.x); m < num_misses; m += kEvictThreads) {
    if (valid[index * batch.max_pages + m] != 0) continue;
    const int64_t at = index * batch.max_pages + batch.miss_idx[index * batch.max_pages + m];
    const int slot = batch.slots[at];
    row.page_slot[batch.pages[at]] = -1;
    row.slot_page[slot] = -1;
    row.slot_step[slot] = 0;
    batch.slots[at] = -1;
  }
}

bool IsValid(const ResolveBatch& batch) {
  return batch.num_rows >= 0 && batch.max_pages >= 0 && batch.max_slots >= 0 &&
         batch.max_slots <= kMaxCacheSlots;
}

}  // namespace

cudaError_t LaunchResolve(const ResolveBatch& batch, cudaStream_t stream) {
  if (!IsValid(batch)) return cudaErrorInvalidValue;
  if (batch.num_rows == 0) return cudaSuccess;
  const int work = std::max(batch.max_slots / 2, batch.max_pages);
  const unsigned threads = work <= 128 ? 128 : work <= 256 ? 256 : work <= 512 ? 512 : kMaxThreads;
  const int bytes = resolve_row::ListBytes(batch.max_pages) +
                    resolve_row::ScratchBytes(batch.max_pages, batch.max_slots);
  if (const cudaError_t e =
          cudaFuncSetAttribute(ResolveKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      e != cudaSuccess)
    return e;
  return LaunchOverlapped(ResolveKernel, static_cast<unsigned>(batch.num_rows), threads,
                          static_cast<size_t>(bytes), 0, stream, batch);
}

cudaError_t LaunchEvictInvalid(const ResolveBatch& batch, const uint8_t* valid,
                               cudaStream_t stream) {
  if (!IsValid(batch)) return cudaErrorInvalidValue;
  if (batch.num_rows == 0) return cudaSuccess;
  EvictKernel<<<static_cast<unsigned>(batch.num_rows), kEvictThreads, 0, stream>>>(batch, valid);
  return cudaGetLastError();
}

}  // namespace kvd
