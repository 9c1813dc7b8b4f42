// What a select leaves in memory: the selected pages, or, as the first of a progressive scan's two,
// the candidates and what they have of the norms.
//
// The second select wants Z over all pages, of which refine has changed only the candidates. With r
// = 1 - the sum of the candidates' shares as the first select saw them, Z = ln(r exp(Z as it was) +
// sum of exp(lse) over the candidates). Shares are added as integers: in any order, by any number
// of CTAs, the sum has the same bits. r is off by about 1e-6, so where refine leaves less than
// kLeastKept of a norm, the second select reads the whole row instead. Device code only. Internal
// to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_LISTS_CUH_
#define LOCKS_KVD_KERNELS_SELECT_LISTS_CUH_

#include "kernels/select_keys.cuh"

namespace kvd::select {

struct Lists {
  int max_candidates;
  int32_t* candidates;  // [rows, max_candidates] out; null: pages are selected, nothing is listed
  int32_t* num_candidates;  // [rows] out
  uint32_t* shares;         // [rows, G, kMaxTeam] of the candidates of each CTA, in 1 / kOne of the
                            // head's norm
  float* norms;  // [rows, G] what is taken off a head's lse: +inf for a head without mass
};
constexpr float kOne = 2147483648.0f;  // 2^31
constexpr float kLeastKept = 0.25f;
// candidates: their shares, each rounded by 2^-32, are then off by 2e-6 at most
constexpr int kMostListed = 8192;

// Sinks and window, in order: how many there are, and which page is number i.
__device__ __forceinline__ int NumKept(const Row& row) {
  return row.first_selectable + row.num_pages - row.end_selectable;
}
__device__ __forceinline__ int KeptPage(const Row& row, int i) {
  return i < row.first_selectable ? i : row.end_selectable + i - row.first_selectable;
}

// Where the row's pages are written.
__device__ __forceinline__ int32_t* OutOf(const SelectArgs& args, const Lists& lists,
                                          const Row& row) {
  return lists.candidates == nullptr
             ? args.pages + row.index * args.num_select
             : lists.candidates + row.index * lists.max_candidates + row.first_selectable;
}

// What a threshold's sum over heads is divided by, as a logarithm. Found before anything is waited
// for.
__device__ __forceinline__ float MeanOf(const SelectArgs& args) {
  return args.rule == CombineRule::kShare ? logf(static_cast<float>(args.group)) : 0.0f;
}

// Finishes a row of which `count` pages were chosen, `weakest` the last: what stands around them,
// sinks and window or -1 up to K, by all `threads` of the row; the figures by the first.
__device__ inline void FinishRow(const SelectArgs& args, const Lists& lists, const Row& row,
                                 uint32_t count, uint64_t weakest, float mean, int thread,
                                 int threads) {
  int32_t* out = OutOf(args, lists, row);
  const auto num = static_cast<int>(count);
  if (lists.candidates == nullptr) {
#pragma unroll 1
    for (int64_t i = int64_t{num} + thread; i < args.num_select; i += threads) out[i] = -1;
  } else {
#pragma unroll 1
    for (int i = thread; i < NumKept(row); i += threads)
      out[i - row.first_selectable + (i < row.first_selectable ? 0 : num)] = KeptPage(row, i);
  }
  if (thread != 0) return;
  if (lists.candidates != nullptr) {
    lists.num_candidates[row.index] = num + NumKept(row);
    return;
  }
  args.num_selected[row.index] = num;
  args.threshold[row.index] =
      num == 0 ? -NegativeInfinity() : FromOrderedKey(KeyOf(weakest)) - mean;
}

// --- shares --------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t ShareOf(float lse, float norm) {
  return __float2uint_rn(ptx::Exp2(fmaxf(lse - norm, NegativeInfinity()) * kLog2e) * kOne);
}

// Adds the lanes' shares of a head to the CTA's.
__device__ __forceinline__ void AddShares(uint32_t mine, uint32_t* sum) {
  const uint32_t all = __reduce_add_sync(kAllLanes, mine);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, all);
}

// Leaves a CTA's shares and the row's norms for the second select. REQUIRES: called by all threads.
__device__ __forceinline__ void PutShares(const SelectArgs& args, const Lists& lists,
                                          const Row& row, const float* norm, int rank, int team,
                                          const uint32_t* sums) {
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.x);
  if (rank == 0 && thread < args.group) lists.norms[row.index * args.group + thread] = norm[thread];
  // The places of CTAs that the row does not have are the first CTA's to clear.
  const int last = rank == 0 ? kMaxTeam - team : 0;
#pragma unroll 1
  for (int i = thread; i < args.group * (last + 1); i += static_cast<int>(blockDim.x)) {
    const int g = i % args.group, which = i / args.group;
    lists.shares[(row.index * args.group + g) * kMaxTeam + (which == 0 ? rank : team + which - 1)] =
        which == 0 ? sums[g] : 0;
  }
}

// A warp's r of a head: number `head` of all rows'.
__device__ __forceinline__ float RestOf(const Lists& lists, int64_t head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t sum = __reduce_add_sync(kAllLanes, lists.shares[head * kMaxTeam + lane]);
  constexpr auto kWhole = static_cast<uint32_t>(kOne);
  return static_cast<float>(kWhole - min(sum, kWhole)) / kOne;
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_LISTS_CUH_
