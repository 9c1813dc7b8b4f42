// How a row of select is cut.
//
// A row's pages are cut into at most kMaxPieces pieces of a size that depends on num_pages alone; a
// head's values of a piece are the work of one warp. Four neighbouring pages are a quad, which a
// lane reads with one load.
// Repeatability: a piece's state is made in one order: every lane its own pages, then the lanes
// together. So Z_g and all that follows depends on the row's values alone. Device code only.
// Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_ROW_CUH_
#define LOCKS_KVD_KERNELS_SELECT_ROW_CUH_

#include <cstdint>

#include "kernels/ptx.cuh"
#include "kernels/select.h"

namespace kvd::select {

using ptx::kAllLanes;

constexpr int kMaxTeam = 32;  // CTAs that share a row
constexpr int kMaxGroup = 16;
constexpr int kQuad = 4;         // pages
constexpr int kRun = 128;        // pages that a warp reads with one instruction
constexpr int kRuns = 4;         // in flight
constexpr int kPieceShift = 9;   // the smallest piece is 512 pages, a run of each lane
constexpr int kMaxPieces = 128;  // of a row
constexpr int kBins = 256;       // of a count of keys
static_assert(kRun * kRuns == 1 << kPieceShift && kMaxTeam <= 32);
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float NegativeInfinity() {
  return __int_as_float(static_cast<int>(0xFF800000u));
}

// (maximum, sum of exp(x - maximum)), -inf and 0 for nothing.
struct State {
  float max;
  float sum;
};

// log2 of a piece's pages.
__host__ __device__ inline int PieceShiftOf(int num_pages) {
  int shift = kPieceShift;
  while (num_pages > kMaxPieces << shift) ++shift;
  return shift;
}

// A row's pages.
struct Row {
  int64_t index;  // n * Hk + hk
  int sequence;
  int num_pages;
  int first_selectable, end_selectable;
  int piece_shift, num_pieces;
  const float* lse;            // of page 0, head 0
  const uint32_t* selectable;  // null: every page
};

__device__ __forceinline__ Row MakeRow(const SelectArgs& args, int sequence, int kv_head,
                                       int num_pages) {
  Row row;
  row.sequence = sequence;
  row.index = int64_t{sequence} * args.num_kv_heads + kv_head;
  row.num_pages = num_pages;
  row.first_selectable = min(args.n_sink, num_pages);
  row.end_selectable = max(row.first_selectable, num_pages - args.n_win);
  row.piece_shift = PieceShiftOf(num_pages);
  row.num_pieces = (num_pages + (1 << row.piece_shift) - 1) >> row.piece_shift;
  row.lse = args.lse + row.index * args.group * args.lse_stride;
  row.selectable = args.selectable == nullptr
                       ? nullptr
                       : reinterpret_cast<const uint32_t*>(args.selectable[sequence]);
  return row;
}

// Which pages of the quad from `page` on may be chosen, in the lowest four bits.
__device__ __forceinline__ uint32_t AllowedOf(const Row& row, int page) {
  uint32_t inside = 15;
  if (page < row.first_selectable || page + kQuad > row.end_selectable) {
    const int low = max(row.first_selectable - page, 0),
              high = min(row.end_selectable - page, kQuad);
    if (low >= high) return 0;
    inside = (15u >> (kQuad - high)) & (15u << low);
  }
  return row.selectable == nullptr ? inside : row.selectable[page / 32] >> (page % 32) & inside;
}

// The largest of the lanes' values; NaN is not allowed.
__device__ __forceinline__ float WarpMax(float x) {
  const int bits = __float_as_int(x);
  const int top = __reduce_max_sync(kAllLanes, bits ^ ((bits >> 31) & 0x7FFFFFFF));
  return __int_as_float(top ^ ((top >> 31) & 0x7FFFFFFF));
}
__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(kAllLanes, x, i);
  return x;
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_ROW_CUH_
