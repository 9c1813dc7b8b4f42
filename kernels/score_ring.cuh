// How the pieces of a scan are dealt to warps and streamed through each warp's ring in shared
// memory: the same for the full, the coarse and the refining scan.
//
// Device code only. Internal to kernels/score*.cu.

#ifndef LOCKS_KVD_KERNELS_SCORE_RING_CUH_
#define LOCKS_KVD_KERNELS_SCORE_RING_CUH_

#include <cstdint>

#include "kernels/ptx.cuh"
#include "kernels/score.h"

namespace kvd::score {

using ptx::kAllLanes;

inline constexpr int kStep = 8;  // records that a warp scores together
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMaxLogit2 =
    1e30f * kLog2e;  // logits saturate at 1e30; here in units of ln 2
inline constexpr float kMaxFloat = 3.4e38f;
inline constexpr float kPlainCenter = 7.9e28f;  // well below kMaxLogit2

struct KernelArgs {
  ScoreArgs score;
  const int32_t* candidates;  // null but in a refining scan
  const int32_t* num_candidates;
  int max_candidates;
};

// --- what is fixed at compile time ---------------------------------------------------------------

// kSteps: steps of eight records in a stage of the ring. kPaddedGroup: query heads, padded to 4, 8
// or 16.
template <int D, int B, int R, int kPaddedGroup, int kSteps, bool kCoarse>
struct Shape {
  static constexpr SummaryLayout kLayout = MakeSummaryLayout(D, B, R);
  static constexpr int kDim = D;
  static constexpr int kTokens = B;
  static constexpr int kRank = R;
  static constexpr int kPadded = kPaddedGroup;
  static constexpr int kSets = kPadded == 16 ? 2 : 1;  // rows of a second product that a lane holds
  static constexpr int kPages =
      kPadded == 4 ? 1 : 2;  // pages of a step whose result a lane ends up with
  static constexpr int kMmas = kPadded == 4   ? 1
                               : kPadded == 8 ? 2
                                              : 3;  // products that take all query digits
  static constexpr int kWords =
      D / 32;  // words of eight int4 codes that a lane supplies of each row
  static constexpr int kTiles = B / 8;  // token tiles of the second product
  static constexpr bool kOnlyCoarse = kCoarse;
  static constexpr int kStepsAStage = kSteps;
  static constexpr int kPiece = kStep * kSteps;  // records of a stage
  static constexpr uint32_t kCoarseBytes = kLayout.coarse_bytes;
  static constexpr uint32_t kFineBytes = kLayout.fine_bytes;
  static constexpr uint32_t kStageBytes = kPiece * (kCoarseBytes + (kCoarse ? 0 : kFineBytes));
  // As many CTAs an SM as its 227 KiB hold and its registers allow: latencies hide behind other
  // warps. Small CTAs spread short work over more SMs. A coarse scan of up to 4 heads has four
  // steps side by side in a warp, and is slower with a third CTA.
  static constexpr int kWarps = 4;
  static constexpr int kStages = 2;
  static constexpr uint32_t kSharedBytes = kWarps * kStages * kStageBytes;
  static constexpr int kCtasThatFit = static_cast<int>(227 * 1024 / (kSharedBytes + 1024));
  static constexpr int kMostCtas = D == 256 || (kCoarse && kPadded == 4) ? 2 : 3;
  static constexpr int kCtasPerSm = kCtasThatFit < kMostCtas ? kCtasThatFit : kMostCtas;
  static_assert(kCtasPerSm >= 1 &&
                (kCoarse || kPiece <= 32));  // a refining scan: a lane copies a record
  static constexpr int kThreads = 32 * kWarps;
};

// --- work ----------------------------------------------------------------------------------------

// A place in the list of all pieces: row r is KV head r % Hk of sequence r / Hk.
struct Place {
  int row;
  int piece;
  int count;  // pages (or candidates) of the row
  int num_pieces;
};

template <class S>
__device__ __forceinline__ int NumPieces(int count) {
  return (count + S::kPiece - 1) / S::kPiece;
}

__device__ __forceinline__ int RowCount(const KernelArgs& args, int row) {
  return args.candidates != nullptr ? args.num_candidates[row]
                                    : args.score.num_pages[row / args.score.num_kv_heads];
}

// Moves on by `pieces`. REQUIRES: that many follow.
template <class S>
__device__ __forceinline__ void Advance(const KernelArgs& args, int pieces, Place* place) {
  place->piece += pieces;
  while (place->piece >= place->num_pieces) {
    const int beyond = place->piece - place->num_pieces;
    ++place->row;
    place->piece = beyond;
    place->count = RowCount(args, place->row);
    place->num_pieces = NumPieces<S>(place->count);
  }
}

// Where the records of a sequence, or of one row, start.
struct Bases {
  int64_t capacity;  // of the sequence
  const uint8_t* coarse;
  const uint8_t* fine;
};

template <class S>
__device__ __forceinline__ Bases ReadBases(const ScoreArgs& args, int n) {
  return {args.page_capacity[n], args.coarse[n], S::kOnlyCoarse ? nullptr : args.fine[n]};
}

// A place and where the records of its row start.
struct Source {
  Place place;
  const uint8_t* coarse;
  const uint8_t* fine;
};

template <class S>
__device__ __forceinline__ void FindRow(const Bases& bases, int head, Source* source) {
  const int64_t first = head * bases.capacity;
  source->coarse = bases.coarse + first * S::kCoarseBytes;
  source->fine = S::kOnlyCoarse ? nullptr : bases.fine + first * S::kFineBytes;
}

template <class S>
__device__ __forceinline__ void Advance(const KernelArgs& args, int pieces, Source* source) {
  const int row = source->place.row, heads = args.score.num_kv_heads;
  Advance<S>(args, pieces, &source->place);
  if (source->place.row != row)
    FindRow<S>(ReadBases<S>(args.score, source->place.row / heads), source->place.row % heads,
               source);
}

__device__ __forceinline__ int InclusiveSum(int x) {
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += left;
  }
  return x;
}

template <class T>
__device__ __forceinline__ T FromLane(T x, int lane) {
  return __shfl_sync(kAllLanes, x, lane);
}
__device__ __forceinline__ const uint8_t* FromLane(const uint8_t* x, int lane) {
  return reinterpret_cast<const uint8_t*>(
      __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(x), lane));
}

// Deals the pieces of all rows: CTA c takes the c-th of equal runs of neighbouring pieces, whatever
// the lengths of the sequences, and its warps take turns within it. Returns how many are this
// warp's; they stand kWarps apart from `first` on.
template <class S>
__device__ int TakeRun(const KernelArgs& args, Source* first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A full scan has the same number of pieces for every head of a sequence: its items are
  // sequences, a refining scan's rows.
  const bool refine = args.candidates != nullptr;
  const int heads = args.score.num_kv_heads, rows_an_item = refine ? 1 : heads,
            items_a_sequence = refine ? heads : 1;
  const int num_items = args.score.num_sequences * items_a_sequence;
  const int32_t* counts = refine ? args.num_candidates : args.score.num_pages;
  const auto count_of = [&](int item) { return item < num_items ? counts[item] : 0; };
  // Each lane reads all that the tables say of its first item at once: one wait, not one after the
  // other.
  const int first_count = count_of(lane);
  Bases first_bases = {};
  if (lane < num_items) first_bases = ReadBases<S>(args.score, lane / items_a_sequence);
  int total = 0;
  for (int base = 0; base < num_items; base += 32) {
    const int pieces = rows_an_item * NumPieces<S>(base == 0 ? first_count : count_of(base + lane));
    total += static_cast<int>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(pieces)));
  }
  const int cta = static_cast<int>(blockIdx.x), num_ctas = static_cast<int>(gridDim.x);
  const int share = total / num_ctas, rest = total - share * num_ctas;
  const int run = share + (cta < rest ? 1 : 0);
  if (warp >= run) return 0;
  const int begin = cta * share + min(cta, rest) + warp;

  int before = 0;
  for (int base = 0; base < num_items; base += 32) {
    const int count = base == 0 ? first_count : count_of(base + lane);
    const int pieces = rows_an_item * NumPieces<S>(count);
    const int end = before + InclusiveSum(pieces);
    const unsigned past = __ballot_sync(kAllLanes, end > begin);
    if (past == 0) {
      before = FromLane(end, 31);
      continue;
    }
    const int owner = __ffs(static_cast<int>(past)) - 1, item = base + owner;
    const int offset = begin - (FromLane(end, owner) - FromLane(pieces, owner));
    Place& place = first->place;
    place.count = FromLane(count, owner);
    place.num_pieces = NumPieces<S>(place.count);
    const int row_of_item = offset / place.num_pieces;
    place.row = item * rows_an_item + row_of_item;
    place.piece = offset - row_of_item * place.num_pieces;
    const Bases bases =
        base == 0 ? Bases{FromLane(first_bases.capacity, owner),
                          FromLane(first_bases.coarse, owner), FromLane(first_bases.fine, owner)}
                  : ReadBases<S>(args.score, item / items_a_sequence);
    FindRow<S>(bases, refine ? item % heads : row_of_item, first);
    return (run - warp + S::kWarps - 1) / S::kWarps;
  }
  return 0;
}

// --- the ring ------------------------------------------------------------------------------------

// Starts the copies of a piece into `stage`: all its coarse parts, then all its fine parts. Called
// by the whole warp.
template <class S>
__device__ __forceinline__ void StartCopy(const KernelArgs& args, const Source& source,
                                          uint8_t* stage, uint64_t* barrier) {
  const int lane = threadIdx.x % 32;
  const int first = source.place.piece * S::kPiece;
  const auto num = static_cast<uint32_t>(min(S::kPiece, source.place.count - first));
  uint8_t* fine_stage = stage + S::kPiece * S::kCoarseBytes;
  if (lane == 0)
    ptx::BarrierExpect(barrier, num * (S::kCoarseBytes + (S::kOnlyCoarse ? 0 : S::kFineBytes)));
  if (!S::kOnlyCoarse && args.candidates != nullptr) {
    __syncwarp();
    if (lane < static_cast<int>(num)) {
      const int64_t page =
          args.candidates[int64_t{source.place.row} * args.max_candidates + first + lane];
      ptx::BulkCopy(stage + lane * S::kCoarseBytes, source.coarse + page * S::kCoarseBytes,
                    S::kCoarseBytes, barrier);
      ptx::BulkCopy(fine_stage + lane * S::kFineBytes, source.fine + page * S::kFineBytes,
                    S::kFineBytes, barrier);
    }
    return;
  }
  if (lane != 0) return;
  ptx::BulkCopy(stage, source.coarse + int64_t{first} * S::kCoarseBytes, num * S::kCoarseBytes,
                barrier);
  if constexpr (!S::kOnlyCoarse)
    ptx::BulkCopy(fine_stage, source.fine + int64_t{first} * S::kFineBytes, num * S::kFineBytes,
                  barrier);
}

// lse = -inf for the pages that a sequence does not have.
__device__ inline void FillBeyondTheEnd(const ScoreArgs& args, int64_t warp, int64_t num_warps) {
  constexpr int kRun = 512;
  const int lane = threadIdx.x % 32;
  const int64_t runs = (args.lse_stride + kRun - 1) / kRun;
  const int num_heads = args.num_kv_heads * args.group;
  for (int base = 0; base < args.num_sequences; base += 32) {
    const int count = base + lane < args.num_sequences ? args.num_pages[base + lane] : 0;
    unsigned shorter =
        __ballot_sync(kAllLanes, base + lane < args.num_sequences && count < args.lse_stride);
    for (; shorter != 0; shorter &= shorter - 1) {
      const int owner = __ffs(static_cast<int>(shorter)) - 1;
      const int num_pages = __shfl_sync(kAllLanes, count, owner);
      const int64_t first_run = num_pages / kRun;
      const int64_t num_runs = (runs - first_run) * num_heads;
      for (int64_t i = warp; i < num_runs; i += num_warps) {
        float* row =
            args.lse + (int64_t{base + owner} * num_heads + i % num_heads) * args.lse_stride;
        const int64_t start = (first_run + i / num_heads) * kRun;
        const int64_t end = min(start + kRun, args.lse_stride);
        for (int64_t p = max(start, int64_t{num_pages}) + lane; p < end; p += 32)
          row[p] = __int_as_float(static_cast<int>(0xFF800000u));
      }
    }
  }
}

}  // namespace kvd::score

#endif  // LOCKS_KVD_KERNELS_SCORE_RING_CUH_
