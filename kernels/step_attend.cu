// LaunchFetchAndAttend: the cluster that attends a (row, KV head) first finds its pages in the page
// cache. Every CTA finds all of them for itself (resolve_row.cuh); a warp fetches those of its own
// units that are missed, and attends. So a hit waits for two reads one after the other, and nobody
// for a launch or a list. The maps are written by the warps that have the units, once all CTAs of
// the cluster have read them.
#include "kernels/attend_row.cuh"
#include "kernels/resolve_row.cuh"
#include "kernels/step_append.cuh"
#include "kernels/step_fail.cuh"
#include "kernels/step_units.cuh"
#include "kernels/unit_copy.cuh"

namespace kvd {
namespace {

struct FetchAndAttendArgs {
  AttendArgs attend;
  FetchArgs fetch;
};

// A row's units by what the page cache has of its pages.
class CachedUnits {
 public:
  using Args = FetchAndAttendArgs;
  static __host__ __device__ __forceinline__ const AttendArgs& Common(const Args& args) {
    return args.attend;
  }
  // Finding needs some memory for a while only: the warps' areas, if they are large enough.
  static int SharedBytes(const Args& args, int area_bytes) {
    const ResolveBatch& resolve = args.fetch.resolve;
    const int scratch = resolve_row::ScratchBytes(resolve.max_pages, resolve.max_slots);
    return OwnBytes(resolve.max_pages) + (scratch > area_bytes ? scratch : 0);
  }

  // Asks for what is older than select: all but the pages.
  __device__ __forceinline__ CachedUnits(const Args& args, int64_t row, int rank,
                                         const attend::UnitMemory& memory)
      : args_(args.fetch),
        row_(static_cast<int>(row)),
        rank_(rank),
        shared_(reinterpret_cast<Shared*>(memory.own)),
        places_(reinterpret_cast<PagePlace*>(memory.own + sizeof(Shared))),
        found_(resolve_row::MakeLists(memory.own + ListsAt(max_pages()), max_pages())),
        scratch_(resolve_row::MakeScratch(ScratchOf(memory), args_.resolve.max_slots)),
        token_(args_.shape, row_, args_.k, args_.v),
        sequence_(args_.rows[row_ / args_.shape.num_kv_heads]),
        maps_(args_.resolve.rows[row_]),
        step_(*args_.resolve.step),
        steps_(resolve_row::ReadSteps(maps_)) {
    for (int w = static_cast<int>(threadIdx.x); w < kMaxListed / 32; w += attend::kThreads)
      shared_->has_failed[w] = 0;
    PrefetchArenas(args_);
    PrefetchMaps(rank * attend::kThreads + static_cast<int>(threadIdx.x));
  }

  // Finds the pages, and fetches the warp's own that are missed.
  __device__ __forceinline__ void Begin(int slot, int num) {
    const int32_t* pages = args_.resolve.pages + int64_t{row_} * max_pages();
    const auto i0 = static_cast<int>(threadIdx.x);
    const int first_page =
        i0 < max_pages() ? pages[i0] : 0;  // asked for before their number is known
    num_pages_ = sequence_.num_tokens < 0 ? 0 : args_.resolve.num_pages[row_];
    if (i0 == 0) {
      shared_->sequence = sequence_;
      shared_->maps = maps_;
    }
    const int num_shards = args_.shape.num_kv_heads / args_.shape.shard_heads,
              shard = head() / args_.shape.shard_heads;
    const auto read_place = [&](int i, int page) {
      places_[i] = sequence_.places[int64_t{page} * num_shards + shard];
    };
    const int num_misses = resolve_row::FindSlots(maps_, step_, steps_, pages, num_pages_,
                                                  first_page, read_place, found_, scratch_);
    ptx::ClusterWait();
    ptx::ClusterArriveRelease();  // the maps have been read
    if (rank_ == 0 && i0 == 0 && sequence_.num_tokens >= 0) {
      StepFigures* figures = args_.figures + row_ / args_.shape.num_kv_heads;
      atomicAdd(&figures->hits, static_cast<uint32_t>(num_pages_ - num_misses));
      if (num_misses > 0) atomicAdd(&figures->misses, static_cast<uint32_t>(num_misses));
    }
    __syncthreads();  // nobody reads the scratch any more: the areas are free
    if (num_misses > 0) FetchOwn(slot, num);
  }

  __device__ __forceinline__ void Append(int count, int slot, int num) const {
    if (attend::HasLast(count, slot, num))
      token_.Store(args_.shape, args_.layer, shared_->sequence, head());
  }

  __device__ __forceinline__ int Count() const {
    const StepRow& sequence = shared_->sequence;
    const Tail tail = TailOf(sequence.num_tokens, args_.shape.page_tokens);
    return sequence.num_tokens < 0
               ? 0
               : sequence.num_sinks + num_pages_ + tail.page - sequence.first_ring_page + 1;
  }

  __device__ __forceinline__ UnitRef At(int u, bool /*is_first*/) const {
    const StepRow& sequence = shared_->sequence;
    const StepShape& shape = args_.shape;
    const int i = u - sequence.num_sinks;
    if (i < 0)
      return {sequence.sinks + UnitOffset(shape, u, args_.layer, head()), shape.page_tokens};
    if (i < num_pages_) {
      const int slot = found_.slots[i];
      return {CacheUnit(args_, sequence, head(), max(slot, 0)),
              slot < 0 || HasFailed(i) ? 0 : shape.page_tokens};
    }
    const Tail tail = TailOf(sequence.num_tokens, shape.page_tokens);
    const int page = sequence.first_ring_page + i - num_pages_;
    return {sequence.ring + UnitOffset(shape, page % sequence.ring_pages, args_.layer, head()),
            page == tail.page ? tail.num_tokens + 1 : shape.page_tokens};
  }

  // Writes the maps' entries of the warp's own pages.
  __device__ __forceinline__ void End(int slot, int num) const {
    const ResolveRow& maps = shared_->maps;
    int32_t* const slots = args_.resolve.slots + int64_t{row_} * max_pages();
    for (int k = lane(); OwnPage(k, slot, num) < num_pages_; k += 32) {
      const int i = OwnPage(k, slot, num);
      if (i < 0) continue;
      const int page = found_.pages[i], at = found_.slots[i];
      slots[i] = at;
      if (at < 0) continue;
      if (IsMiss(i)) {
        if (const int old_page = maps.slot_page[at]; old_page >= 0) maps.page_slot[old_page] = -1;
        maps.page_slot[page] = at;
        maps.slot_page[at] = page;
      }
      maps.slot_step[at] = *args_.resolve.step;
      if (HasFailed(i)) FailUnit(args_, shared_->sequence, row_, i, page, at);
    }
    if (rank_ != 0) return;
    for (int i = num_pages_ + static_cast<int>(threadIdx.x); i < max_pages(); i += attend::kThreads)
      slots[i] = -1;
  }

 private:
  struct Shared {
    StepRow sequence;
    ResolveRow maps;
    uint32_t has_failed[kMaxListed / 32];  // bits, by position
  };
  static_assert(sizeof(Shared) % 8 == 0 && alignof(PagePlace) <= 8);
  // Behind it places, PagePlace [K], and what is found; then, perhaps, what finding needs.
  static __host__ __device__ __forceinline__ int ListsAt(int max_pages) {
    return (static_cast<int>(sizeof(Shared) + sizeof(PagePlace) * static_cast<size_t>(max_pages)) +
            15) /
           16 * 16;
  }
  static __host__ __device__ __forceinline__ int OwnBytes(int max_pages) {
    return ListsAt(max_pages) + (resolve_row::ListBytes(max_pages) + 15) / 16 * 16;
  }
  __device__ __forceinline__ unsigned char* ScratchOf(const attend::UnitMemory& memory) const {
    const bool fits =
        resolve_row::ScratchBytes(max_pages(), args_.resolve.max_slots) <= memory.area_bytes;
    return fits ? memory.areas : memory.own + OwnBytes(max_pages());
  }

  // What is looked up by page: no scan between two steps leaves it in the L2. `thread`: of the
  // cluster.
  __device__ __forceinline__ void PrefetchMaps(int thread) const {
    constexpr int kLine = 128;
    const auto prefetch = [](const void* at) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    };
    constexpr int kSlotsOfLine = kLine / static_cast<int>(sizeof(int32_t)),
                  kPlacesOfLine = kLine / static_cast<int>(sizeof(PagePlace));
    if (thread * kSlotsOfLine < sequence_.num_pages)
      prefetch(maps_.page_slot + thread * kSlotsOfLine);
    const int num_shards = args_.shape.num_kv_heads / args_.shape.shard_heads;
    const int place = (head() * attend::kThreads * attend::kParts + thread) * kPlacesOfLine;
    if (place < sequence_.num_pages * num_shards) prefetch(sequence_.places + place);
  }

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ int head() const { return row_ % args_.shape.num_kv_heads; }
  __device__ __forceinline__ int max_pages() const { return args_.resolve.max_pages; }
  __device__ __forceinline__ bool IsMiss(int i) const {
    return (found_.is_miss[i / 32] >> (i % 32) & 1) != 0;
  }
  __device__ __forceinline__ bool HasFailed(int i) const {
    return (shared_->has_failed[i / 32] >> (i % 32) & 1) != 0;
  }
  // The position among the pages of unit k of those that a warp has; below 0: a sink.
  __device__ __forceinline__ int OwnPage(int k, int slot, int num) const {
    return slot + k % num + k / num * attend::kSlots - shared_->sequence.num_sinks;
  }

  // Fetches the warp's own misses; notes those that did not come.
  __device__ __forceinline__ void FetchOwn(int slot, int num) {
    for (int first = 0; OwnPage(first, slot, num) < num_pages_; first += 32) {
      const int mine = OwnPage(first + lane(), slot, num);
      uint32_t left = __ballot_sync(ptx::kAllLanes, mine >= 0 && mine < num_pages_ && IsMiss(mine));
      for (; left != 0; left &= left - 1) {
        const int i = OwnPage(first + __ffs(static_cast<int>(left)) - 1, slot, num);
        const Source source = SourceOf(args_, places_[i], head());
        if (source.unit != nullptr && Copy(source, i)) continue;
        if (lane() == 0) atomicOr(&shared_->has_failed[i / 32], 1u << (i % 32));
      }
    }
    __syncwarp();  // the warp's other lanes read what this one has written
  }

  // A unit into its slot, by pieces that a warp holds. Whether all of it was what its generation
  // names.
  __device__ bool Copy(const Source& source, int i) const {
    using Team = UnitTeam<1, 16>;
    constexpr size_t kPiece = Team::kThreads * 16 * sizeof(uint4);
    uint8_t* const to = CacheUnit(args_, shared_->sequence, head(), found_.slots[i]);
    const size_t bytes = UnitBytes(args_.shape);
    for (size_t at = 0; at < bytes; at += kPiece) {
      const int words = static_cast<int>(min(kPiece, bytes - at) / sizeof(uint4));
      Team team;
      if (!team.Load(source.unit + at, words, source.header, source.generation)) return false;
      team.Store(to + at, words, false);
    }
    return true;
  }

  const FetchArgs& args_;
  int row_, rank_;
  Shared* shared_;
  PagePlace* places_;
  resolve_row::Lists found_;
  resolve_row::Scratch scratch_;
  WarpToken token_;
  StepRow sequence_;
  ResolveRow maps_;
  uint64_t step_;
  resolve_row::FirstSteps steps_;
  int num_pages_ = 0;
};

// The same by lists in global memory: for K of thousands at head dim 256, which shared memory has
// no room for.
cudaError_t LaunchListed(const FetchArgs& fetch, AttendArgs attend, cudaStream_t stream) {
  attend.max_units = fetch.max_units;
  attend.units = fetch.units;
  attend.num_units = fetch.num_units;
  cudaError_t error = LaunchResolve(fetch.resolve, stream);
  if (error == cudaSuccess) error = LaunchFetchPages(fetch, stream);
  return error == cudaSuccess ? LaunchAttend(attend, stream) : error;
}

}  // namespace

cudaError_t LaunchFetchAndAttend(const FetchArgs& fetch, const AttendArgs& attend,
                                 cudaStream_t stream) {
  const StepShape& shape = fetch.shape;
  if (!IsValid(fetch) || !fetch.fetch || attend.num_sequences != shape.num_rows ||
      attend.num_kv_heads != shape.num_kv_heads || attend.head_dim != shape.head_dim ||
      attend.page_tokens != shape.page_tokens || UnitBytes(shape) > kMaxUnitBytes)
    return cudaErrorInvalidValue;
  const cudaError_t error = attend::Launch<CachedUnits>({attend, fetch}, stream);
  return error == cudaErrorLaunchOutOfResources ? LaunchListed(fetch, attend, stream) : error;
}

}  // namespace kvd
