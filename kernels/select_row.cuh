// One CTA's slice of a row of select: where it lies, how CTAs of a cluster write into each other, and the norms of
// the heads.
//
// A row's pages are cut into at most kMaxPieces pieces of a size that depends on num_pages alone; a CTA takes
// consecutive pieces. The first `resident` pages of the slice are copied into shared memory once, the others are
// read again from L2.
// Repeatability: a piece's (maximum, sum) is the work of one warp, in one order; a head's norm is the sum over
// pieces, in one order. So Z_g depends on the row's values alone, whatever the number of CTAs. Device code only.
// Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_ROW_CUH_
#define LOCKS_KVD_KERNELS_SELECT_ROW_CUH_

#include <cooperative_groups.h>

#include <cstdint>

#include "kernels/ptx.cuh"
#include "kernels/select.h"

namespace kvd::select {

namespace cg = cooperative_groups;
using ptx::kAllLanes;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = 16;
constexpr int kMaxGroup = 16;
constexpr int kRun = 128;        // pages that a warp reads with one instruction
constexpr int kRuns = 4;         // in flight
constexpr int kPieceShift = 9;   // the smallest piece is 512 pages
constexpr int kMaxPieces = 128;  // of a row
constexpr int kBins = 256;       // of a count of keys
constexpr int kContenders = 256;
constexpr int kNotAllowed = 255;  // in place of a page's bin
static_assert(kRun * kRuns == 1 << kPieceShift && kMaxGroup <= kWarps && kBins == kContenders);
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Byte offsets in a CTA's shared memory of what follows Shared, 16-byte aligned.
struct Offsets {
  int states;    // float2 [G][kMaxPieces], from all
  int received;  // uint32 [2][cluster][kBins], from all
  int allowed;   // bitset over the slice
  int chosen;    // the same; candidates before
  int bins;      // uint8 [slice_pages]
  int keys;      // uint32 [list_size]
  int list;      // uint16 [list_size]
  int values;    // float [G][resident_pages]
  int end;
};

// How a launch is laid out; made on the host.
struct Plan {
  int cluster;         // CTAs a row
  int slice_pages;     // the longest slice that lse_stride allows
  int resident_pages;  // of a slice, in shared memory
  int list_size;       // pages of a slice that can get a key; if more deserve one, keys are computed when needed
  Offsets at;
};

// Where the page that is `need`-th from the best lies, among counted bins.
struct Found {
  int bin;               // -1: nothing was counted
  uint32_t need;         // min(at most, counted)
  uint32_t above;        // counted in better bins
  uint32_t inside;       // in the bin
  uint32_t lower_above;  // in better bins, by CTAs of lower rank
  uint32_t lower_inside;
};

// What the CTAs of a cluster write into each other is marked "from all".
struct Shared {
  uint64_t landed[kMaxGroup];                             // barriers of the bulk copies, one a head
  uint64_t states_here, counts_here[2], contenders_here;  // barriers of what comes from all
  float norm[kMaxGroup];                   // what is taken off a head's lse; +inf for a head without mass
  uint32_t peak[kMaxGroup];                // ordered keys, for kPeak
  uint32_t peaks[kMaxCluster][kMaxGroup];  // from all
  alignas(16) uint32_t counts[kBins];      // of the slice's keys
  alignas(16) uint64_t mine[kContenders];
  alignas(16) uint64_t contenders[kContenders];  // from all
  uint2 scan[kWarps];
  Found found;
  uint32_t num_listed;
  uint32_t num_mine;
  uint64_t weakest;  // the pair of the weakest page chosen
};

// log2 of a piece's pages.
__host__ __device__ inline int PieceShiftOf(int num_pages) {
  int shift = kPieceShift;
  while (num_pages > kMaxPieces << shift) ++shift;
  return shift;
}

struct Row {
  int64_t index;  // n * Hk + hk
  int sequence;
  int rank;  // of this CTA in its cluster
  int num_pages;
  int first_selectable, end_selectable;
  int piece_shift, num_pieces;
  int first_piece, own_pieces;
  int first_page, own_pages;  // the slice
  int resident_pieces;
  int resident;      // pages of the slice in shared memory
  const float* lse;  // of the slice's first page, head 0
  float* values;
  int values_stride;
  uint32_t* allowed;
  uint32_t* chosen;
  uint8_t* bins;
  uint32_t* keys;
  uint16_t* list;
  float2* states;
  uint32_t* received;
};

__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(static_cast<int>(0xFF800000u)); }

// A row's place and this CTA's part of it. Grid: (rank, KV head, sequence).
__device__ inline Row MakeRow(const SelectArgs& args, const Plan& plan, int num_pages, unsigned char* memory) {
  Row row;
  row.rank = static_cast<int>(blockIdx.x);
  row.sequence = static_cast<int>(blockIdx.z);
  row.index = int64_t{row.sequence} * args.num_kv_heads + blockIdx.y;
  row.num_pages = num_pages;
  row.first_selectable = min(args.n_sink, num_pages);
  row.end_selectable = max(row.first_selectable, num_pages - args.n_win);
  row.piece_shift = PieceShiftOf(num_pages);
  const int piece = 1 << row.piece_shift;
  row.num_pieces = (num_pages + piece - 1) >> row.piece_shift;
  const int each = static_cast<int>(static_cast<unsigned>(row.num_pieces + plan.cluster - 1) /
                                    static_cast<unsigned>(plan.cluster));
  row.first_piece = min(row.rank * each, row.num_pieces);
  row.own_pieces = min(each, row.num_pieces - row.first_piece);
  row.first_page = row.first_piece << row.piece_shift;
  row.own_pages = max(0, min(row.own_pieces << row.piece_shift, num_pages - row.first_page));
  row.resident_pieces = min(plan.resident_pages >> row.piece_shift, row.own_pieces);
  row.resident = row.resident_pieces << row.piece_shift;
  row.lse = args.lse + row.index * args.group * args.lse_stride + row.first_page;
  row.values_stride = plan.resident_pages;
  row.values = reinterpret_cast<float*>(memory + plan.at.values);
  row.allowed = reinterpret_cast<uint32_t*>(memory + plan.at.allowed);
  row.chosen = reinterpret_cast<uint32_t*>(memory + plan.at.chosen);
  row.bins = memory + plan.at.bins;
  row.keys = reinterpret_cast<uint32_t*>(memory + plan.at.keys);
  row.list = reinterpret_cast<uint16_t*>(memory + plan.at.list);
  row.states = reinterpret_cast<float2*>(memory + plan.at.states);
  row.received = reinterpret_cast<uint32_t*>(memory + plan.at.received);
  return row;
}

// --- writing into the shared memory of another CTA --------------------------------------------------

// What is written this way counts towards the bytes that `barrier` of the same CTA expects. A CTA that is alone in
// its cluster writes its own memory as usual and waits for its own threads: Send wants two CTAs at least.
template <class T>
__device__ __forceinline__ void SendTo(bool alone, int rank, T* place, const T& value, const uint64_t* barrier) {
  if (alone) {
    *place = value;
  } else {
    ptx::Send(rank, place, value, barrier);
  }
}

__device__ __forceinline__ void ExpectFromAll(bool alone, uint64_t* barrier, uint32_t bytes) {
  if (!alone) ptx::BarrierExpect(barrier, bytes);
}
// REQUIRES: called by all threads of the CTA.
__device__ __forceinline__ void WaitForAll(bool alone, uint64_t* barrier, uint32_t parity) {
  if (alone) {
    __syncthreads();
  } else {
    ptx::BarrierWait(barrier, parity);
  }
}

// --- values ----------------------------------------------------------------------------------------

// Starts the copy of the resident pages, a warp a head. REQUIRES: the barriers are initialised.
__device__ inline void StartCopies(const SelectArgs& args, const Row& row, Shared* shared) {
  const int pages = min(row.resident, row.own_pages);
  const int warp = threadIdx.x / 32;
  if (warp >= args.group || threadIdx.x % 32 != 0 || pages == 0) return;
  const auto bytes = static_cast<uint32_t>((pages + 3) / 4 * 16);  // lse_stride is a multiple of 4
  ptx::BarrierExpect(&shared->landed[warp], bytes);
  ptx::BulkCopy(row.values + warp * row.values_stride, row.lse + warp * args.lse_stride, bytes,
                &shared->landed[warp]);
}

// A page's value of head 0, and how far apart heads are.
struct Place {
  const float* value;
  int64_t stride;
};
__device__ __forceinline__ Place PlaceOf(const SelectArgs& args, const Row& row, int p) {
  return p < row.resident ? Place{row.values + p, row.values_stride} : Place{row.lse + p, args.lse_stride};
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

__device__ __forceinline__ float SumExp(const float4 (&x)[kRuns], float shift) {
  float sum[kRuns];
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    sum[i] = (ptx::Exp2((x[i].x - shift) * kLog2e) + ptx::Exp2((x[i].y - shift) * kLog2e)) +
             (ptx::Exp2((x[i].z - shift) * kLog2e) + ptx::Exp2((x[i].w - shift) * kLog2e));
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Puts -inf in place of the values from `left` on; each run lies kRun pages after the last. Out of line, as is what
// follows: seldom needed.
__device__ __noinline__ void MaskFrom(int left, float4* x) {
  for (int i = 0; i < 4 * kRuns; ++i)
    if (left - i / 4 * kRun <= i % 4) (&x[i / 4].x)[i % 4] = NegativeInfinity();
}

// Replaces NaN by -inf; returns how many.
__device__ __noinline__ int DropNaNs(float4* x) {
  int num = 0;
  for (int i = 0; i < 4 * kRuns; ++i) {
    float* f = &x[i / 4].x + i % 4;
    num += isnan(*f);
    if (isnan(*f)) *f = NegativeInfinity();
  }
  return num;
}

// (maximum, sum of exp(x - maximum)) of a head over a piece of the slice, the work of one warp. NaN is left out and
// counted. `lse`: of the piece's first page.
__device__ __forceinline__ float2 PieceState(const Row& row, const float* lse, int piece, int* num_faults) {
  const int begin = piece << row.piece_shift, end = begin + (1 << row.piece_shift);
  float max = NegativeInfinity(), sum = 0;
#pragma unroll 1
  for (int run = begin; run < end; run += kRuns * kRun) {
    const int first = run + 4 * (static_cast<int>(threadIdx.x) % 32);
    const bool whole = run + kRuns * kRun <= row.own_pages;
    float4 x[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int p = first + i * kRun;
      x[i] = float4{0, 0, 0, 0};
      if (whole || p < row.own_pages) x[i] = *reinterpret_cast<const float4*>(lse + p - begin);
    }
    if (!whole) {
      float4 cut[kRuns] = {x[0], x[1], x[2], x[3]};
      MaskFrom(row.own_pages - first, cut);
#pragma unroll
      for (int i = 0; i < kRuns; ++i) x[i] = cut[i];
    }
    float top = max;
#pragma unroll
    for (const float4& v : x) top = fmaxf(fmaxf(top, fmaxf(v.x, v.y)), fmaxf(v.z, v.w));
    top = WarpMax(top);
    const float shift = top == NegativeInfinity() ? 0.0f : top;
    float add = SumExp(x, shift);
    if (__any_sync(kAllLanes, isnan(add))) {
      float4 clean[kRuns] = {x[0], x[1], x[2], x[3]};
      *num_faults += DropNaNs(clean);
      add = SumExp(clean, shift);
    }
    sum = sum * ptx::Exp2((max - shift) * kLog2e) + add;
    max = top;
  }
  return {max, WarpSum(sum)};
}

// Computes the state of every head over every piece of the slice and hands it to all CTAs of the cluster. Pieces that
// are not resident come first, while the others are still on their way. Returns the NaNs that this lane saw.
__device__ inline int SpreadStates(const SelectArgs& args, const Plan& plan, const Row& row, Shared* shared) {
  const int lane = threadIdx.x % 32;
  int num_faults = 0;
  if (row.own_pieces == 0) return 0;
  int g = 0, i = threadIdx.x / 32;
  while (true) {
    while (i >= row.own_pieces) i -= row.own_pieces, ++g;
    if (g >= args.group) return num_faults;
    const int piece = row.own_pieces - 1 - i;
    if (piece < row.resident_pieces) ptx::BarrierWait(&shared->landed[g], 0);
    const Place place = PlaceOf(args, row, piece << row.piece_shift);
    const float2 state = PieceState(row, place.value + g * place.stride, piece, &num_faults);
    auto* out = reinterpret_cast<uint64_t*>(row.states + g * kMaxPieces + row.first_piece + piece);
    const uint64_t bits = static_cast<uint64_t>(__float_as_uint(state.y)) << 32 | __float_as_uint(state.x);
    if (lane < plan.cluster) SendTo(plan.cluster == 1, lane, out, bits, &shared->states_here);
    i += kWarps;
  }
}

// Z_g from the states of all pieces, a warp a head, into shared->norm.
__device__ inline void MergeStates(const SelectArgs& args, const Row& row, Shared* shared) {
  const int lane = threadIdx.x % 32, g = threadIdx.x / 32;
  if (g >= args.group) return;
  float max = NegativeInfinity(), sum = 0;
  float2 s[kMaxPieces / 32];
#pragma unroll
  for (int i = 0; i < kMaxPieces / 32; ++i) {
    const int piece = 32 * i + lane;
    s[i] = piece < row.num_pieces ? row.states[g * kMaxPieces + piece] : float2{NegativeInfinity(), 0};
    max = fmaxf(max, s[i].x);
  }
  max = WarpMax(max);
  const float shift = max == NegativeInfinity() ? 0.0f : max;
#pragma unroll
  for (const float2& v : s) sum += v.y * ptx::Exp2((v.x - shift) * kLog2e);
  sum = WarpSum(sum);
  const float norm = max == NegativeInfinity() ? max : max + logf(sum);
  if (lane == 0) {
    shared->norm[g] = max == NegativeInfinity() ? -max : norm;
    if (row.rank == 0) args.log_norm[row.index * args.group + g] = norm;
  }
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_ROW_CUH_
