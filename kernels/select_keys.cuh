// Scores of pages, as numbers that can be counted, cut and compared, and how CTAs tell each other:
// what all kernels of select have in common, so that a page's score has the same bits whichever of
// them finds it. Device code only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_KEYS_CUH_
#define LOCKS_KVD_KERNELS_SELECT_KEYS_CUH_

#include "kernels/select_row.cuh"

namespace kvd::select {

// --- the order of scores -------------------------------------------------------------------------

// An unsigned integer of the same order; never 0.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  const int bits = __float_as_int(x + 0.0f);  // -0 becomes 0
  return max(static_cast<uint32_t>(bits ^ ((bits >> 31) | static_cast<int>(0x80000000u))), 1u);
}
__device__ __forceinline__ float FromOrderedKey(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

// Score and page as one number of the order in which pages are chosen: larger first.
constexpr int kPageBits = 20;
static_assert(kMaxPages == 1 << kPageBits);
__device__ __forceinline__ uint64_t Pair(uint32_t key, int page) {
  return static_cast<uint64_t>(key) << kPageBits | static_cast<uint32_t>(kMaxPages - 1 - page);
}
__device__ __forceinline__ uint32_t KeyOf(uint64_t pair) { return static_cast<uint32_t>(pair >> kPageBits); }
__device__ __forceinline__ int PageOf(uint64_t pair) {
  return kMaxPages - 1 - static_cast<int>(pair & (kMaxPages - 1));
}

// --- bins ----------------------------------------------------------------------------------------

// 32 bins for each octave of -score from 1 to 240, the best bin first; the last takes all that is
// worse.
constexpr int kBinShift = 18;
constexpr int kFirstBin = 127 << (23 - kBinShift);
constexpr int kLastBin = kBins - 1;
__device__ __forceinline__ int BinOf(float score) {
  const int depth =
      __float_as_int(score) ^ static_cast<int>(0x80000000u);  // the bits of -score; below 0 for scores above 0
  return min(max((depth >> kBinShift) - kFirstBin, 0), kLastBin);
}
// The keys of a bin's weakest and best scores.
__device__ __forceinline__ uint32_t LowKeyOf(int bin) {
  return bin == kLastBin ? 1u : 0x7FFFFFFFu - ((static_cast<uint32_t>(kFirstBin + bin + 1) << kBinShift) - 1);
}
__device__ __forceinline__ uint32_t HighKeyOf(int bin) {
  return bin == 0 ? 0xFFFFFFFFu : 0x7FFFFFFFu - (static_cast<uint32_t>(kFirstBin + bin) << kBinShift);
}

// Where the page that is `need`-th from the best lies, among counted bins; and, where CTAs share a
// row, where this one stands.
struct Found {
  int bin;                // -1: nothing was counted
  uint32_t need;          // min(at most, counted)
  uint32_t above;         // counted in better bins
  uint32_t inside;        // in the bin
  uint32_t lower_above;   // in better bins, by CTAs of lower rank
  uint32_t lower_inside;  // in the bin, likewise
};

// The weakest page chosen is one of the pairs in [low, high]; all above it are chosen. The same in
// every CTA of a row but for the last two fields.
struct Cut {
  uint64_t low, high;
  uint32_t count;         // pages to choose
  uint32_t above;         // pairs above `high`
  uint32_t inside;        // pairs in [low, high]
  uint32_t lower_above;   // pairs above `high` in CTAs of lower rank
  uint32_t lower_inside;  // and in [low, high]
};
__device__ __forceinline__ Cut CutAt(const Found& found) {
  return {Pair(LowKeyOf(found.bin), kMaxPages - 1),
          Pair(HighKeyOf(found.bin), 0),
          found.need,
          found.above,
          found.inside,
          found.lower_above,
          found.lower_inside};
}
// A cut of more than kContenders pairs is cut again into at most kBins bins of 2^shift pairs, the
// best first: a pair's bin, and the cut to the bin that was found.
__device__ __forceinline__ int FineShiftOf(const Cut& cut) {
  return max(0, 64 - __clzll(static_cast<long long>(cut.high - cut.low)) - 8);
}
__device__ __forceinline__ int FineBinOf(const Cut& cut, int shift, uint64_t pair) {
  return kBins - 1 - static_cast<int>((pair - cut.low) >> shift);
}
__device__ __forceinline__ void Narrow(const Found& found, int shift, Cut* cut) {
  cut->low += static_cast<uint64_t>(kBins - 1 - found.bin) << shift;
  cut->high = min(cut->high, cut->low + ((uint64_t{1} << shift) - 1));
  cut->above += found.above;
  cut->inside = found.inside;
  cut->lower_above += found.lower_above;
  cut->lower_inside = found.lower_inside;
}

// --- norms and scores ----------------------------------------------------------------------------

// A warp's state of a row from those of its pieces; the same in all lanes.
__device__ __forceinline__ State MergePieces(const State* states, int num_pieces) {
  constexpr int kEach = kMaxPieces / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  State all[kEach];
  float max = NegativeInfinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int piece = 32 * i + lane;
    all[i] = piece < num_pieces ? states[piece] : State{NegativeInfinity(), 0};
  }
#pragma unroll
  for (const State& state : all) max = fmaxf(max, state.max);
  max = WarpMax(max);
  const float shift = max == NegativeInfinity() ? 0.0f : max;
#pragma unroll
  for (const State& state : all) sum = fmaf(state.sum, ptx::Exp2((state.max - shift) * kLog2e), sum);
  return {max, WarpSum(sum)};
}
// Z_g; -inf if there is no mass.
__device__ __forceinline__ float NormOf(const State& state) {
  return state.max == NegativeInfinity() ? state.max : state.max + logf(state.sum);
}
// What is taken off a head's lse: +inf for a head without mass.
__device__ __forceinline__ float Offset(float norm) { return norm == NegativeInfinity() ? -norm : norm; }

constexpr float kLowest = -3.402823466e38f;

// Four neighbours' best shares and scores, ln sum_g exp(x_g - norm_g) in the order of the heads.
struct Scores {
  float top[kQuad];
  float score[kQuad];
};

// Four heads' lse of four pages, as shares; NaN counts as -inf, and so do heads that there are not.
constexpr int kHeads = 4;
__device__ __forceinline__ void ReadShares(int group, const float* norm, const float* values, int64_t stride, int first,
                                           float (&x)[kHeads][kQuad]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int g = min(first + h, group - 1);
    const float4 v = *reinterpret_cast<const float4*>(values + g * stride);
    const float off = first + h < group ? norm[g] : -NegativeInfinity();
    x[h][0] = fmaxf(v.x - off, NegativeInfinity());
    x[h][1] = fmaxf(v.y - off, NegativeInfinity());
    x[h][2] = fmaxf(v.z - off, NegativeInfinity());
    x[h][3] = fmaxf(v.w - off, NegativeInfinity());
  }
}
__device__ __forceinline__ float TopOf(const float (&x)[kHeads][kQuad], int i, float top) {
  return fmaxf(fmaxf(fmaxf(top, x[0][i]), fmaxf(x[1][i], x[2][i])), x[3][i]);
}

// `values`: of head 0, those of a head `stride` after the last's; `norm`: of each head. Written so
// that no compiler has a choice where to round.
__device__ __forceinline__ Scores ScoresOf(int group, const float* norm, const float* values, int64_t stride) {
  float x[kHeads][kQuad];
  Scores s;
  ReadShares(group, norm, values, stride, 0, x);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    s.top[i] = TopOf(x, i, kLowest);
    s.score[i] = ptx::Exp2((x[0][i] - s.top[i]) * kLog2e);
#pragma unroll
    for (int h = 1; h < kHeads; ++h) s.score[i] = __fadd_rn(s.score[i], ptx::Exp2((x[h][i] - s.top[i]) * kLog2e));
  }
#pragma unroll 1
  for (int first = kHeads; first < group; first += kHeads) {
    ReadShares(group, norm, values, stride, first, x);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float top = TopOf(x, i, s.top[i]);
      float sum = fmaf(s.score[i], ptx::Exp2((s.top[i] - top) * kLog2e), ptx::Exp2((x[0][i] - top) * kLog2e));
#pragma unroll
      for (int h = 1; h < kHeads; ++h) sum = __fadd_rn(sum, ptx::Exp2((x[h][i] - top) * kLog2e));
      s.score[i] = sum;
      s.top[i] = top;
    }
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    // The sum is 0 or at least 1: no rounding puts a score below its top, on which the bound
    // relies.
    const float log2 = ptx::Log2(s.score[i]);
    s.score[i] = fmaf(s.score[i] >= 1 ? fmaxf(log2, 0) : log2, kLn2, s.top[i]);
  }
  return s;
}

// --- writing into the shared memory of another CTA -----------------------------------------------

// What is written this way counts towards the bytes that `barrier` of the same CTA expects. A CTA
// that is alone in its cluster writes its own memory as usual and waits for its own threads: Send
// wants two CTAs at least.
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

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_KEYS_CUH_
