// LaunchFetchPages: teams of warps share the misses of all rows, spread over the SMs first;
// meanwhile the last warps of the first CTAs list the units of the rows, and the last CTAs append
// their tokens.
#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/step_append.cuh"
#include "kernels/step_fail.cuh"
#include "kernels/step_units.cuh"
#include "kernels/unit_copy.cuh"

namespace kvd {
namespace {

constexpr int kThreads = 256;
constexpr int kListThreads = 128;  // the last of a CTA
constexpr int kListBarrier = 15;   // named; teams have 1 to 8
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kMaxRows = 2048;  // (sequence, KV head) pairs
// One an SM, which are placed in .3 us; they have 8 units of up to 8 KiB each on their way.
constexpr int kFetchCtas = 132;

struct Shared {
  uint32_t is_miss[kMaxListed / 32];
  int32_t first_miss[kMaxRows + 1];  // of each row, in the numbering of all misses
  int32_t warp_sums[kThreads / 32];
};

// Position of a row's first selected page in its list of units.
__device__ __forceinline__ int FirstSelected(const StepRow& row) { return row.num_sinks; }

__device__ __forceinline__ void ListBarrier() {
  asm volatile("barrier.cta.sync %0, %1;" ::"n"(kListBarrier), "n"(kListThreads) : "memory");
}

// Everything of row `r` but its misses, whose entries are written by those who fetch them. Called
// by the threads that list; `rank`: of this one.
__device__ void ListRow(const FetchArgs& args, int r, int rank, Shared* shared) {
  const StepShape& shape = args.shape;
  const ResolveBatch& resolve = args.resolve;
  const int head = r % shape.num_kv_heads;
  const StepRow row = args.rows[r / shape.num_kv_heads];
  UnitRef* units = args.units + int64_t{r} * args.max_units;
  if (row.num_tokens < 0) {
    if (rank == 0) args.num_units[r] = 0;
    return;
  }
  const int num_pages = resolve.num_pages[r], num_misses = resolve.num_misses[r];
  const int64_t at = int64_t{r} * resolve.max_pages;
  for (int w = rank; w < (num_pages + 31) / 32; w += kListThreads) shared->is_miss[w] = 0;
  ListBarrier();
  for (int m = rank; m < num_misses; m += kListThreads) {
    const int i = resolve.miss_idx[at + m];
    atomicOr(&shared->is_miss[i / 32], 1u << (i % 32));
  }
  ListBarrier();
  const size_t bytes = UnitBytes(shape);
  const int64_t tail_page = row.num_tokens / shape.page_tokens;
  const int ring_pages = static_cast<int>(tail_page) - row.first_ring_page + 1;
  const int first_ring = FirstSelected(row) + num_pages;
  for (int i = rank; i < first_ring + ring_pages; i += kListThreads) {
    UnitRef unit = {nullptr, shape.page_tokens};
    if (i < row.num_sinks) {
      unit.unit =
          row.sinks +
          bytes * static_cast<size_t>(
                      (int64_t{i} * shape.num_layers + args.layer) * shape.num_kv_heads + head);
    } else if (i < first_ring) {
      const int page = i - row.num_sinks;
      const bool is_miss = (shared->is_miss[page / 32] >> (page % 32) & 1) != 0;
      if (is_miss && args.fetch) continue;
      const int slot = resolve.slots[at + page];
      unit.unit = CacheUnit(args, row, head, max(slot, 0));
      if (slot < 0 || is_miss) unit.num_tokens = 0;
    } else {
      const int64_t page = row.first_ring_page + i - first_ring;
      unit.unit = row.ring + bytes * static_cast<size_t>(
                                         ((page % row.ring_pages) * shape.num_layers + args.layer) *
                                             shape.num_kv_heads +
                                         head);
      if (page == tail_page)
        unit.num_tokens = static_cast<int>(row.num_tokens % shape.page_tokens) + 1;
    }
    units[i] = unit;
  }
  if (rank != 0) return;
  args.num_units[r] = first_ring + ring_pages;
  StepFigures* figures = args.figures + r / shape.num_kv_heads;
  atomicAdd(&figures->hits, static_cast<uint32_t>(num_pages - num_misses));
  if (num_misses > 0) atomicAdd(&figures->misses, static_cast<uint32_t>(num_misses));
}

// Numbers the misses of all rows; returns how many there are.
__device__ int NumberMisses(const FetchArgs& args, Shared* shared) {
  const int num_rows = args.resolve.num_rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int first = 0; first < num_rows; first += kThreads) {
    const int r = first + static_cast<int>(threadIdx.x);
    // Two loads at once: what resolve left for padding is not looked at, but can be read.
    const int num = r < num_rows ? args.resolve.num_misses[r] : 0;
    const int mine =
        r < num_rows && args.rows[r / args.shape.num_kv_heads].num_tokens >= 0 ? num : 0;
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) shared->warp_sums[warp] = sum;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w == warp) sum += all;
      all += shared->warp_sums[w];
    }
    if (r < num_rows) shared->first_miss[r] = before + sum - mine;
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) shared->first_miss[num_rows] = before;
  __syncthreads();
  return before;
}

// Fetches miss `m` of row `r`.
template <class Team>
__device__ void Fetch(const FetchArgs& args, int r, int m) {
  const StepShape& shape = args.shape;
  const int head = r % shape.num_kv_heads, num_shards = shape.num_kv_heads / shape.shard_heads;
  const StepRow sequence = args.rows[r / shape.num_kv_heads];
  const int64_t at = int64_t{r} * args.resolve.max_pages;
  const int position = args.resolve.miss_idx[at + m];
  const int page = args.resolve.pages[at + position], slot = args.resolve.slots[at + position];
  const Source source =
      SourceOf(args, sequence.places[int64_t{page} * num_shards + head / shape.shard_heads], head);
  const int num_words = static_cast<int>(UnitBytes(shape) / 16);
  uint8_t* to = CacheUnit(args, sequence, head, max(slot, 0));
  Team team;
  const bool sealed = source.unit != nullptr && slot >= 0 &&
                      team.Load(source.unit, num_words, source.header, source.generation);
  if (sealed) team.Store(to, num_words, false);
  if (Team::rank() != 0) return;
  args.units[int64_t{r} * args.max_units + FirstSelected(sequence) + position] = {
      to, sealed ? shape.page_tokens : 0};
  if (!sealed && slot >= 0) FailUnit(args, sequence, r, position, page, slot);
}

template <class Team>
__global__ void __launch_bounds__(kThreads)
    FetchPagesKernel(const __grid_constant__ FetchArgs args) {
  __shared__ Shared shared;
  const int num_rows = args.resolve.num_rows, grid = static_cast<int>(gridDim.x);
  // The first CTAs list, the last append: neither waits for what the other reads. k and v are older
  // than resolve.
  const int first_token = grid - 1 - static_cast<int>(blockIdx.x);
  const int rank = first_token < num_rows ? static_cast<int>(threadIdx.x) : kThreads;
  TokenWord token(args.shape, first_token, args.k, args.v, rank);
  AwaitParameters(args);
  WaitForPredecessor();
  const int num_misses = args.fetch ? NumberMisses(args, &shared) : 0;
  LetSuccessorStart();
  for (int r = first_token; r < num_rows; r += grid) {
    if (r != first_token) token = TokenWord(args.shape, r, args.k, args.v, rank);
    token.Store(args.shape, args.layer, args.rows[r / args.shape.num_kv_heads],
                r % args.shape.num_kv_heads);
  }
  if (threadIdx.x >= kThreads - kListThreads) {
    for (int r = static_cast<int>(blockIdx.x); r < num_rows; r += grid) {
      ListRow(args, r, static_cast<int>(threadIdx.x) - (kThreads - kListThreads), &shared);
      ListBarrier();
    }
  }
  int row = 0;
  for (int i = Team::index() * grid + static_cast<int>(blockIdx.x); i < num_misses;
       i += kThreads / Team::kThreads * grid) {
    // The last row that begins at or before miss i.
    int low = row, high = num_rows;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (shared.first_miss[middle] <= i)
        low = middle;
      else
        high = middle;
    }
    row = low;
    Fetch<Team>(args, row, i - shared.first_miss[row]);
  }
}

}  // namespace

cudaError_t LaunchFetchPages(const FetchArgs& args, cudaStream_t stream) {
  static_assert(kThreads >= 2 * 256 / 8, "a thread has at most one word of a token");
  const ResolveBatch& resolve = args.resolve;
  if (!IsValid(args) || resolve.num_rows > kMaxRows || args.max_units < resolve.max_pages)
    return cudaErrorInvalidValue;
  return WithTeamFor(UnitBytes(args.shape), [&]<class Team>() -> cudaError_t {
    if (resolve.num_rows == 0) return cudaSuccess;
    return LaunchOverlapped(FetchPagesKernel<Team>, kFetchCtas, kThreads, 0, 0, stream, args);
  });
}

}  // namespace kvd
