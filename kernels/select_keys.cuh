// Scores of pages, as numbers that can be counted, cut and compared, and how CTAs tell each other:
// what all kernels of select have in common, so that a page's score has the same bits whichever of
// them finds it. Device code only. Internal to select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_KEYS_CUH_
#define LOCKS_KVD_KERNELS_SELECT_KEYS_CUH_

#include "kernels/select_row.cuh"

namespace kvd::select {

// --- the order of scores -------------------------------------------------------------------------

// An unsigned integer of the same order; never 0. REQUIRES: x is not NaN.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  const int bits = __float_as_int(x + 0.0f);  // -0 becomes 0
  return static_cast<uint32_t>(bits ^ ((bits >> 31) | static_cast<int>(0x80000000u)));
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
__device__ __forceinline__ uint32_t KeyOf(uint64_t pair) {
  return static_cast<uint32_t>(pair >> kPageBits);
}
__device__ __forceinline__ int PageOf(uint64_t pair) {
  return kMaxPages - 1 - static_cast<int>(pair & (kMaxPages - 1));
}

// --- bins ----------------------------------------------------------------------------------------

// The shares of a head sum to 1, so no more than K pages have a mean share of 1 / K or more: the
// K-th lies below, mostly by a few nats. Bins are of the depth below e / K, the best first: 64 for
// each octave from 1 to 8, 16 from there to 128; the first takes all that is better, the last all
// that is worse. `zero`, where depths begin, is -1 at most: a depth is then no larger than its
// score, and no two scores have the same.
constexpr int kLastBin = kBins - 1;
constexpr int kFineShift = 17, kCoarseShift = 19;
constexpr int kFirstFine = 127 << (23 - kFineShift), kFirstCoarse = 130 << (23 - kCoarseShift);
constexpr int kFineBins = (130 << (23 - kFineShift)) - kFirstFine;
static_assert(kFineBins + (134 << (23 - kCoarseShift)) - kFirstCoarse == kBins);
__device__ __forceinline__ int BinOf(float score, float zero) {
  const int depth = __float_as_int(zero - score);  // below 0 for scores above
  const int fine = (depth >> kFineShift) - kFirstFine,
            coarse = (depth >> kCoarseShift) + (kFineBins - kFirstCoarse);
  return fine < kFineBins ? max(fine, 0) : min(coarse, kLastBin);
}
// The weakest key of a bin.
__device__ __forceinline__ uint32_t LowKeyOf(int bin, float zero) {
  if (bin == kLastBin) return 1;
  const int next = bin + 1;
  const int depth = next <= kFineBins ? (next + kFirstFine) << kFineShift
                                      : (next - kFineBins + kFirstCoarse) << kCoarseShift;
  uint32_t key = OrderedKey(zero - __int_as_float(depth));  // but for rounding
#pragma unroll 1
  while (BinOf(FromOrderedKey(key), zero) > bin) ++key;
#pragma unroll 1
  while (BinOf(FromOrderedKey(key - 1), zero) <= bin) --key;
  return key;
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
// `low_keys`: of each bin.
__device__ __forceinline__ Cut CutAt(const Found& found, const uint32_t* low_keys) {
  return {Pair(low_keys[found.bin], kMaxPages - 1),
          Pair(found.bin == 0 ? 0xFFFFFFFFu : low_keys[found.bin - 1] - 1, 0),
          found.need,
          found.above,
          found.inside,
          found.lower_above,
          found.lower_inside};
}
// A cut of too many pairs is cut again into at most kBins bins of 2^shift pairs, the
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
  for (const State& state : all)
    sum = fmaf(state.sum, ptx::Exp2((state.max - shift) * kLog2e), sum);
  return {max, WarpSum(sum)};
}
// Z_g; -inf if there is no mass.
__device__ __forceinline__ float NormOf(const State& state) {
  return state.max == NegativeInfinity() ? state.max : state.max + logf(state.sum);
}
// What is taken off a head's lse: +inf for a head without mass.
__device__ __forceinline__ float Offset(float norm) {
  return norm == NegativeInfinity() ? -norm : norm;
}

constexpr float kLowest = -3.402823466e38f;

// Four heads' lse of four pages, and what is taken off them to make them shares: +inf for heads
// that there are not.
constexpr int kHeads = 4;
struct Heads {
  float4 lse[kHeads];
};
// As shares; NaN counts as -inf.
__device__ __forceinline__ void SharesOf(const Heads& heads, const float* norm,
                                         float (&x)[kHeads][kQuad]) {
  const float4 norms = *reinterpret_cast<const float4*>(norm);
  const float off[kHeads] = {norms.x, norms.y, norms.z, norms.w};
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    x[h][0] = fmaxf(heads.lse[h].x - off[h], NegativeInfinity());
    x[h][1] = fmaxf(heads.lse[h].y - off[h], NegativeInfinity());
    x[h][2] = fmaxf(heads.lse[h].z - off[h], NegativeInfinity());
    x[h][3] = fmaxf(heads.lse[h].w - off[h], NegativeInfinity());
  }
}
// Four heads from `first` on; those after the last head are its again. `at`: of head 0, heads
// `stride` apart.
__device__ __forceinline__ Heads ReadHeads(int group, int first, const float* at, int64_t stride) {
  Heads heads;
  at += first * stride;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    heads.lse[h] = *reinterpret_cast<const float4*>(at);
    if (first + h + 1 < group) at += stride;
  }
  return heads;
}
__device__ __forceinline__ float TopOf(const float (&x)[kHeads][kQuad], int i, float top) {
  return fmaxf(fmaxf(fmaxf(top, x[0][i]), fmaxf(x[1][i], x[2][i])), x[3][i]);
}

// Four neighbours' scores, ln sum_g exp(x_g - norm_g) in the order of the heads. Read(first) gives
// four heads' values; `norm` is of all heads, aligned, and +inf up to kMaxGroup. Written so that no
// compiler has a choice where to round.
struct Scores {
  float score[kQuad];
};
template <class Read>
__device__ __forceinline__ Scores ScoresOf(int group, const float* norm, Read read) {
  float x[kHeads][kQuad], top[kQuad];
  Scores s;
  SharesOf(read(0), norm, x);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    top[i] = TopOf(x, i, kLowest);
    s.score[i] = ptx::Exp2((x[0][i] - top[i]) * kLog2e);
#pragma unroll
    for (int h = 1; h < kHeads; ++h)
      s.score[i] = __fadd_rn(s.score[i], ptx::Exp2((x[h][i] - top[i]) * kLog2e));
  }
#pragma unroll 1
  for (int first = kHeads; first < group; first += kHeads) {
    SharesOf(read(first), norm + first, x);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float more = TopOf(x, i, top[i]);
      float sum = fmaf(s.score[i], ptx::Exp2((top[i] - more) * kLog2e),
                       ptx::Exp2((x[0][i] - more) * kLog2e));
#pragma unroll
      for (int h = 1; h < kHeads; ++h) sum = __fadd_rn(sum, ptx::Exp2((x[h][i] - more) * kLog2e));
      s.score[i] = sum;
      top[i] = more;
    }
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) s.score[i] = fmaf(ptx::Log2(s.score[i]), kLn2, top[i]);
  return s;
}

// --- writing into the shared memory of another CTA -----------------------------------------------

// What is written this way counts towards the bytes that `barrier` of the same CTA expects. A CTA
// that is alone in its cluster writes its own memory as usual and waits for its own threads: Send
// wants two CTAs at least.
template <class T>
__device__ __forceinline__ void SendTo(bool alone, int rank, T* place, const T& value,
                                       const uint64_t* barrier) {
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
