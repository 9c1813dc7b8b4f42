// One warp's part of decode attention: 16 tokens at a time through its own shared memory, products
// on tensor cores.
//
// Tiles arrive by asynchronous copies: keys and values of a tile stand in an area each, and an area
// is filled again as soon as it has been read, so that half a tile a warp is always on its way.
// Rows are padded by 16 bytes: eight rows at the same dims then lie in different banks. Rows that
// do not count are zeros: units hold anything there.
// Products: logits have heads as rows and tokens as columns; sums have dims as rows and heads as
// columns, for which the logits' layout is the right one as it stands, and which takes half of the
// registers.
// Precision: probabilities enter the second product as two parts of the model's dtype, which keeps
// 2^-17 of each.
// Lanes: lane 4 g + t holds rows g and g + 8 and columns 2 t and 2 t + 1 of every 16 x 8 product
// (ptx.cuh). Device code only. Internal to attend*.cu.

#ifndef LOCKS_KVD_KERNELS_ATTEND_TILE_CUH_
#define LOCKS_KVD_KERNELS_ATTEND_TILE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attend.h"
#include "kernels/ptx.cuh"

namespace kvd::attend {

using ptx::kAllLanes;

constexpr int kTile = 16;  // tokens
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMaxLogit2 = 1e30f * kLog2e;

template <int D, int kPaddedGroup, bool kIsBf16>
struct Shape {
  static constexpr int kDim = D;
  static constexpr int kPadded = kPaddedGroup;  // query heads, padded to 8 or 16
  static constexpr bool kBf16 = kIsBf16;
  static constexpr int kSets = kPadded / 8;  // of eight heads
  static constexpr int kSteps = D / 16;      // products over, or of, 16 dims
  static constexpr uint32_t kRowBytes = 2 * D + 16;
  static constexpr uint32_t kAreaBytes = kTile * kRowBytes;
  static constexpr uint32_t kWarpBytes = 2 * kAreaBytes;
  // Probabilities are kept times 2^kShift: the parts of the smallest that matter are then normal
  // fp16 numbers.
  static constexpr float kShift = kIsBf16 ? 0 : 14;
  // Floats between a warp's heads when it hands over its sums, in its own area.
  static constexpr int kHeadStride = D + 4;
  static_assert(kPadded * kHeadStride * 4 <= kWarpBytes);
};

__device__ __forceinline__ float NegativeInfinity() {
  return __int_as_float(static_cast<int>(0xFF800000u));
}

// 2^(x - max), 0 for an empty part, never NaN.
__device__ __forceinline__ float Weight(float x, float max) {
  return x == NegativeInfinity() ? 0.0f : ptx::Exp2(x - max);
}

// --- a warp's tiles ------------------------------------------------------------------------------

// Unit u of a row is of slot u % kSlots; part p is the slots p, p + kParts, ..: one for each warp
// of a CTA.
constexpr int kSlots = 64;
constexpr int kParts = 8;

// Whether the last of `count` units is of a warp whose slots are [slot, slot + num).
__device__ __forceinline__ bool HasLast(int count, int slot, int num) {
  const int last = (count - 1) % kSlots - slot;
  return count > 0 && last >= 0 && last < num;
}

// A CTA's shared memory, for its units' own use.
struct UnitMemory {
  unsigned char* areas;  // the warps', free until the first unit is asked for
  int area_bytes;
  unsigned char* own;  // SharedBytes()
};

// A row's units as the caller lists them. Other kinds of Units, with the same
// members, are in attend_pages.cu and step_attend.cu.
class ListedUnits {
 public:
  using Args = AttendArgs;
  static __host__ __device__ __forceinline__ const AttendArgs& Common(const Args& args) {
    return args;
  }
  static int SharedBytes(const Args& /*args*/, int /*area_bytes*/) { return 0; }
  // Before the kernel waits for its predecessor. `rank`: of the CTA in its cluster.
  __device__ __forceinline__ ListedUnits(const Args& args, int64_t row, int /*rank*/,
                                         const UnitMemory& /*memory*/)
      : units_(args.units + row * args.max_units),
        num_units_(args.num_units + row),
        max_units_(args.max_units) {}
  // By the warp whose slots are [slot, slot + num): after that wait, whole CTAs; before it reads a
  // unit, `count` being the row's; and whole CTAs again when the cluster has waited for what each
  // CTA did up to Begin.
  __device__ __forceinline__ void Begin(int /*slot*/, int /*num*/) const {}
  __device__ __forceinline__ void Append(int /*count*/, int /*slot*/, int /*num*/) const {}
  __device__ __forceinline__ void End(int /*slot*/, int /*num*/) const {}
  __device__ __forceinline__ int Count() const { return *num_units_; }
  // Unit u, `is_first` of those that its warp asks for; anything from Count() on, so that it can be
  // asked for before that is known.
  __device__ __forceinline__ UnitRef At(int u, bool /*is_first*/) const {
    return u < max_units_ ? units_[u] : UnitRef{nullptr, 0};
  }

 private:
  const UnitRef* units_;
  const int32_t* num_units_;
  int max_units_;
};

// Goes through a warp's units of kEach neighbouring parts, from slot `slot` on, 16 tokens at a
// time: part by part, and in each through units slot, slot + kSlots, ... Lanes hold the references
// of the next 32 / kEach units of each part. All members but `mine` are the same in all lanes.
template <int kEach, class Units>
class Tiles {
 public:
  // Asks for the first units and their count.
  __device__ __forceinline__ Tiles(const Units& units, int slot) : units_(units), slot_(slot) {
    Load(0, true);
    num_units_ = units_.Count();
  }
  __device__ __forceinline__ int num_units() const { return num_units_; }
  // Moves on; false at the end.
  __device__ __forceinline__ bool Next() {
    first_ += kTile;
    while (first_ >= tokens_) {
      ++turn_;
      while (slot_ + part() + turn_ * kSlots >= num_units_) {
        if (kEach == 1 || ++part_ == kEach) return false;
        turn_ = 0;
      }
      if (kEach == 1 ? turn_ != 0 && turn_ % 32 == 0 : turn_ / kTurns != window_)
        Load(turn_ / kTurns, false);
      const int lane = part() * kTurns + turn_ % kTurns;
      unit_ = reinterpret_cast<const uint8_t*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine_.unit), lane));
      tokens_ = __shfl_sync(kAllLanes, mine_.num_tokens, lane);
      first_ = 0;
    }
    return true;
  }
  // Of the tile; a warp with one part has no need to keep it.
  __device__ __forceinline__ int part() const { return kEach == 1 ? 0 : part_; }
  __device__ __forceinline__ int num_tokens() const { return min(kTile, tokens_ - first_); }
  // Rows from the tile's first token on, of keys, or of values `offset` bytes later.
  __device__ __forceinline__ const uint8_t* Rows(int row_bytes) const {
    return unit_ + first_ * row_bytes;
  }

 private:
  static constexpr int kTurns = 32 / kEach;
  __device__ __forceinline__ void Load(int window, bool is_first) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    mine_ = units_.At(slot_ + lane / kTurns + (window * kTurns + lane % kTurns) * kSlots, is_first);
    window_ = window;
  }
  const Units& units_;
  int slot_;
  int num_units_;
  UnitRef mine_;
  const uint8_t* unit_ = nullptr;
  int part_ = 0, turn_ = -1, window_ = 0, tokens_ = 0, first_ = 0;
};

// Starts the copies of a tile's rows into an area; rows from `num_tokens` on become zeros.
template <class S>
__device__ __forceinline__ void StartRows(uint32_t area, const uint8_t* rows, int num_tokens) {
  constexpr int kPieces = S::kDim / 8;  // of 16 bytes, a row
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTile * kPieces / 32; ++i) {
    const int piece = 32 * i + lane, row = piece / kPieces;
    ptx::AsyncCopy16(area + static_cast<uint32_t>(row) * S::kRowBytes +
                         static_cast<uint32_t>(piece % kPieces) * 16,
                     rows + piece * 16, row < num_tokens ? 16 : 0);
  }
}

// --- queries, sums -------------------------------------------------------------------------------

// The queries of a KV head as A operands: rows g and g + 8 are heads.
template <class S>
struct Queries {
  uint32_t a[S::kSteps][2 * S::kSets];
};
template <class S>
__device__ __forceinline__ Queries<S> LoadQueries(const AttendArgs& args, int64_t row) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Queries<S> q;
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    const int head = g + 8 * set;
    const auto* source =
        reinterpret_cast<const uint32_t*>(args.query + (row * args.group + head) * S::kDim);
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      q.a[step][set] = head < args.group ? source[8 * step + t] : 0;
      q.a[step][S::kSets + set] = head < args.group ? source[8 * step + 4 + t] : 0;
    }
  }
  return q;
}

// A warp's running softmax. max: of head g + 8 set, the same in its four lanes; sum: each lane's
// own tokens; o[set][step][2 j + i]: dim 16 step + 8 j + g of head 8 set + 2 t + i.
template <class S>
struct State {
  float max[S::kSets];
  float sum[S::kSets];
  float o[S::kSets][S::kSteps][4];
};

template <class S>
__device__ __forceinline__ void Product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  if constexpr (S::kBf16) {
    ptx::MmaBf16(d, a, b0, b1, d);
  } else {
    ptx::MmaFp16(d, a, b0, b1, d);
  }
}

// Logits in units of ln 2: x[set][2 j + i] is token 8 j + 2 t + i; -inf from num_tokens on.
template <class S>
__device__ __forceinline__ void TileLogits(const AttendArgs& args, uint32_t keys, int num_tokens,
                                           const Queries<S>& q, float (&x)[S::kSets][4]) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  float acc[2][4] = {};
  const uint32_t mine = keys + static_cast<uint32_t>(lane / 16 * 8 + lane % 8) * S::kRowBytes +
                        static_cast<uint32_t>(lane / 8 % 2) * 16;
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) {
    uint32_t b[4];
    ptx::LoadMatrices(b, mine + static_cast<uint32_t>(step) * 32);
    uint32_t a[4] = {};
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      a[set] = q.a[step][set];
      a[2 + set] = q.a[step][S::kSets + set];
    }
    Product<S>(acc[0], a, b[0], b[1]);
    Product<S>(acc[1], a, b[2], b[3]);
  }
  const float scale2 = args.softmax_scale * kLog2e;
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float logit = acc[i / 2][2 * set + i % 2] * scale2;
      if (args.logit_softcap > 0)
        logit = args.logit_softcap * kLog2e * tanhf(logit * kLn2 / args.logit_softcap);
      logit = fminf(fmaxf(logit, -kMaxLogit2), kMaxLogit2);
      x[set][i] = 8 * (i / 2) + 2 * t + i % 2 < num_tokens ? logit : NegativeInfinity();
    }
  }
}

// A pair of probabilities as two parts.
struct Split {
  uint32_t high, low;
};
template <class S>
__device__ __forceinline__ Split SplitPair(float x, float y) {
  if constexpr (S::kBf16) {
    const __nv_bfloat162 high = __floats2bfloat162_rn(x, y);
    const auto bits = *reinterpret_cast<const uint32_t*>(&high);
    const float2 back = ptx::Bf16Pair(bits);
    const __nv_bfloat162 low = __floats2bfloat162_rn(x - back.x, y - back.y);
    return {bits, *reinterpret_cast<const uint32_t*>(&low)};
  } else {
    const __half2 high = __floats2half2_rn(x, y);
    const float2 back = __half22float2(high);
    const __half2 low = __floats2half2_rn(x - back.x, y - back.y);
    return {*reinterpret_cast<const uint32_t*>(&high), *reinterpret_cast<const uint32_t*>(&low)};
  }
}

// Takes a tile's logits into the state; `parts` become its probabilities: [set][tokens 0..7,
// 8..15].
template <class S>
__device__ __forceinline__ void AddLogits(const float (&x)[S::kSets][4], State<S>* state,
                                          Split (&parts)[S::kSets][2]) {
  float decay[S::kSets];
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    const float top = ptx::QuadMax(fmaxf(fmaxf(x[set][0], x[set][1]), fmaxf(x[set][2], x[set][3])));
    const float max = fmaxf(state->max[set], top);
    decay[set] = Weight(state->max[set], max);
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = Weight(x[set][i] + S::kShift, max);
    parts[set][0] = SplitPair<S>(p[0], p[1]);
    parts[set][1] = SplitPair<S>(p[2], p[3]);
    state->max[set] = max;
    state->sum[set] = state->sum[set] * decay[set] + ((p[0] + p[1]) + (p[2] + p[3]));
  }
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    const int owner = threadIdx.x % 4 * 8;  // a lane of head 2 t
    const float even = __shfl_sync(kAllLanes, decay[set], owner),
                odd = __shfl_sync(kAllLanes, decay[set], owner + 4);
#pragma unroll
    for (float(&o)[4] : state->o[set]) o[0] *= even, o[1] *= odd, o[2] *= even, o[3] *= odd;
  }
}

template <class S>
__device__ __forceinline__ void AddValues(uint32_t values, const Split (&parts)[S::kSets][2],
                                          State<S>* state) {
  const int lane = threadIdx.x % 32;
  const uint32_t mine = values + static_cast<uint32_t>(lane / 16 * 8 + lane % 8) * S::kRowBytes +
                        static_cast<uint32_t>(lane / 8 % 2) * 16;
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) {
    uint32_t a[4];
    ptx::LoadMatricesTransposed(a, mine + static_cast<uint32_t>(step) * 32);
#pragma unroll
    for (int set = 0; set < S::kSets; ++set) {
      Product<S>(state->o[set][step], a, parts[set][0].high, parts[set][1].high);
      Product<S>(state->o[set][step], a, parts[set][0].low, parts[set][1].low);
    }
  }
}

// Starts the copies of a warp's first tile. `area`: kWarpBytes of shared memory of its own.
template <class S, class Tiles>
__device__ __forceinline__ void StartTile(const AttendArgs& args, uint32_t area,
                                          const Tiles& tiles) {
  constexpr int kRow = 2 * S::kDim;
  StartRows<S>(area, tiles.Rows(kRow), tiles.num_tokens());
  ptx::AsyncCommit();
  StartRows<S>(area + S::kAreaBytes, tiles.Rows(kRow) + args.page_tokens * kRow,
               tiles.num_tokens());
  ptx::AsyncCommit();
}

template <class S>
__device__ __forceinline__ State<S> EmptyState() {
  State<S> state = {};
#pragma unroll
  for (float& max : state.max) max = NegativeInfinity();
  return state;
}

// Takes the warp's tile, whose copies are on their way, into the state, and starts those of the
// next. *more: there is one.
template <class S, class Tiles>
__device__ __forceinline__ void AttendTile(const AttendArgs& args, uint32_t area,
                                           const Queries<S>& q, Tiles* tiles, bool* more,
                                           State<S>* state) {
  constexpr int kRow = 2 * S::kDim;
  const uint32_t keys = area, values = area + S::kAreaBytes;
  const int num_tokens = tiles->num_tokens(), to_values = args.page_tokens * kRow;
  float x[S::kSets][4];
  Split parts[S::kSets][2];
  ptx::AsyncWait<1>();
  __syncwarp();
  TileLogits<S>(args, keys, num_tokens, q, x);
  __syncwarp();  // the keys have been read
  *more = tiles->Next();
  if (*more) StartRows<S>(keys, tiles->Rows(kRow), tiles->num_tokens());
  ptx::AsyncCommit();
  AddLogits<S>(x, state, parts);
  ptx::AsyncWait<1>();
  __syncwarp();
  AddValues<S>(values, parts, state);
  __syncwarp();
  if (*more) StartRows<S>(values, tiles->Rows(kRow) + to_values, tiles->num_tokens());
  ptx::AsyncCommit();
}

// All tiles of a warp with one part. A function of its own: written into the kernel's loop over
// parts, as it is where there are several, it costs registers that this one then has to spill (3%
// at batch 1).
template <class S, class Tiles>
__device__ __forceinline__ State<S> AttendOnly(const AttendArgs& args, uint32_t area,
                                               const Queries<S>& q, Tiles* tiles, bool* more) {
  State<S> state = EmptyState<S>();
#pragma unroll 1
  while (*more) AttendTile<S>(args, area, q, tiles, more, &state);
  return state;
}

}  // namespace kvd::attend

#endif  // LOCKS_KVD_KERNELS_ATTEND_TILE_CUH_
