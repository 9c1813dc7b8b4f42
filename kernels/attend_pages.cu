#include "kernels/attend_pages.h"
#include "kernels/attend_row.cuh"
#include "kernels/step_append.cuh"

namespace kvd {
namespace {

__device__ __forceinline__ StepShape ShapeOf(const AttendPagesArgs& args) {
  StepShape shape = {};
  shape.num_layers = args.num_layers;
  shape.num_kv_heads = args.attend.num_kv_heads;
  shape.head_dim = args.attend.head_dim;
  shape.page_tokens = args.attend.page_tokens;
  return shape;
}

// Where a row's units are, but for what select says.
struct Places {
  const uint8_t* units;  // of page 0; null: padding
  int num_sinks, first_ring_page, tail_page, tail_tokens;
};

// A row's units by its sequence's pages. The tables are read again where a warp asks for more than
// its first units, which few lists are long enough for: kept, they would take registers from the
// products.
class PageUnits {
 public:
  using Args = AttendPagesArgs;
  static __host__ __device__ __forceinline__ const AttendArgs& Common(const Args& args) {
    return args.attend;
  }

  // Reads what is older than select. Every warp reads the token, since which of them has the tail
  // unit is not known yet.
  __device__ __forceinline__ PageUnits(const Args& args, int64_t row, int /*rank*/,
                                       const attend::UnitMemory& /*memory*/)
      : args_(args),
        row_(static_cast<int>(row)),
        token_(ShapeOf(args), row_, args.k, args.v),
        places_(Read()) {}

  static int SharedBytes(const Args& /*args*/, int /*area_bytes*/) { return 0; }
  __device__ __forceinline__ void Begin(int /*slot*/, int /*num*/) const {}
  __device__ __forceinline__ void End(int /*slot*/, int /*num*/) const {}

  // The tail unit is the last.
  __device__ __forceinline__ void Append(int count, int slot, int num) const {
    if (!attend::HasLast(count, slot, num)) return;
    token_.Store(ShapeOf(args_), args_.layer, args_.rows[row_ / args_.attend.num_kv_heads],
                 row_ % args_.attend.num_kv_heads);
  }

  __device__ __forceinline__ int Count() const {
    const int count = places_.num_sinks + args_.num_selected[row_] + places_.tail_page -
                      places_.first_ring_page + 1;
    return places_.units == nullptr ? 0 : count;
  }

  __device__ __forceinline__ UnitRef At(int u, bool is_first) const {
    const Places places = is_first ? places_ : Read();
    const int s = u - places.num_sinks, num_selected = args_.num_selected[row_];
    int page = u;  // a sink
    if (s >= 0 && s < args_.max_selected)
      page = args_.selected[int64_t{row_} * args_.max_selected + s];
    if (s >= num_selected) page = places.first_ring_page + s - num_selected;
    const int64_t stride = int64_t{args_.num_layers} * args_.attend.num_kv_heads * UnitBytes();
    return {places.units + page * stride,
            page == places.tail_page ? places.tail_tokens : args_.attend.page_tokens};
  }

 private:
  __device__ __forceinline__ int UnitBytes() const {
    return args_.attend.head_dim * args_.attend.page_tokens * 4;
  }
  __device__ __forceinline__ Places Read() const {
    const StepRow& sequence = args_.rows[row_ / args_.attend.num_kv_heads];
    const int64_t unit =
        int64_t{args_.layer} * args_.attend.num_kv_heads + row_ % args_.attend.num_kv_heads;
    const Tail tail = TailOf(sequence.num_tokens, args_.attend.page_tokens);
    return {sequence.num_tokens < 0 ? nullptr : sequence.ring + unit * UnitBytes(),
            sequence.num_sinks, sequence.first_ring_page, tail.page, tail.num_tokens + 1};
  }

  const Args& args_;
  int row_;
  WarpToken token_;
  Places places_;
};

}  // namespace

cudaError_t LaunchAttendPages(const AttendPagesArgs& args, cudaStream_t stream) {
  if (args.num_layers < 1 || args.layer < 0 || args.layer >= args.num_layers || args.k == nullptr ||
      args.v == nullptr || args.max_selected < 0)
    return cudaErrorInvalidValue;
  return attend::Launch<PageUnits>(args, stream);
}

}  // namespace kvd
