// One CTA's slice of a row of many pages: where it lies. A CTA takes consecutive pieces. Device code only. Internal to
// select.cu.

#ifndef LOCKS_KVD_KERNELS_SELECT_SLICE_CUH_
#define LOCKS_KVD_KERNELS_SELECT_SLICE_CUH_

#include "kernels/select_keys.cuh"

namespace kvd::select {

// Byte offsets in a CTA's shared memory of what follows Shared, 16-byte aligned.
struct Offsets {
  int received;  // uint32 [2][cluster][kBins], from all
  int chosen;    // bitset over the slice's pages
  int bins;      // uint8 [slice_groups]
  int passing;   // uint16 [slice_groups]
  int keys;      // uint32 [list_size]
  int list;      // uint16 [list_size]
  int best;      // float [heads][slice_groups]
  int end;
};

// How SelectKernel is laid out; made on the host.
struct Plan {
  int cluster;       // CTAs a row
  int slice_pages;   // the longest slice that lse_stride allows, at most kMaxSlice
  int slice_groups;  // its groups
  int heads;         // whose best values a CTA has in shared memory: all, or none
  int list_size;     // pages of a slice that can get a key; if more deserve one, keys are computed when needed
  Offsets at;
};
constexpr int kMaxSlice = 65536;

// What the CTAs of a cluster write into each other is marked "from all".
struct Shared {
  uint64_t landed[kMaxGroup];                // barriers of the bulk copies, one a head
  uint64_t counts_here[2], contenders_here;  // barriers of what comes from all
  float norm[kMaxGroup];                     // what is taken off a head's lse; +inf for a head without mass
  alignas(16) uint32_t counts[kBins];        // of the slice's keys
  alignas(16) uint64_t mine[kContenders];
  alignas(16) uint64_t contenders[kContenders];  // from all
  uint2 scan[kWarps];
  uint32_t shares[kMaxGroup];                // of the slice's candidates
  Found found;
  uint32_t num_passing;
  uint32_t num_listed;
  uint32_t num_mine;
  uint64_t weakest;  // the pair of the weakest page chosen
};

struct Slice {
  Row row;
  int rank;  // of this CTA in its cluster
  int first_piece, own_pieces;
  int first_page, own_pages;
  int own_groups;
  const float* table;  // best values of the slice's first group, head 0, in global memory; heads are head_stride apart
  int64_t head_stride;
  float* best;         // the same in shared memory, heads slice_groups apart
  uint32_t* chosen;
  uint8_t* bins;
  uint16_t* passing;
  uint32_t* keys;
  uint16_t* list;
  uint32_t* received;
};

// Grid: (rank, KV head, sequence).
__device__ inline Slice MakeSlice(const SelectArgs& args, const Tables& tables, const Plan& plan, int num_pages,
                                  unsigned char* memory) {
  Slice s;
  s.row = MakeRow(args, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), num_pages);
  s.rank = static_cast<int>(blockIdx.x);
  const int each = plan.cluster == 1 ? s.row.num_pieces
                                     : static_cast<int>(static_cast<unsigned>(s.row.num_pieces + plan.cluster - 1) /
                                                        static_cast<unsigned>(plan.cluster));
  s.first_piece = min(s.rank * each, s.row.num_pieces);
  s.own_pieces = min(each, s.row.num_pieces - s.first_piece);
  s.first_page = s.first_piece << s.row.piece_shift;
  s.own_pages = max(0, min(s.own_pieces << s.row.piece_shift, num_pages - s.first_page));
  s.own_groups = s.own_pieces * tables.piece_groups();
  s.head_stride = int64_t{tables.max_pieces} * tables.piece_groups();
  s.table = tables.best + s.row.index * args.group * s.head_stride + int64_t{s.first_piece} * tables.piece_groups();
  s.best = reinterpret_cast<float*>(memory + plan.at.best);
  s.chosen = reinterpret_cast<uint32_t*>(memory + plan.at.chosen);
  s.bins = memory + plan.at.bins;
  s.passing = reinterpret_cast<uint16_t*>(memory + plan.at.passing);
  s.keys = reinterpret_cast<uint32_t*>(memory + plan.at.keys);
  s.list = reinterpret_cast<uint16_t*>(memory + plan.at.list);
  s.received = reinterpret_cast<uint32_t*>(memory + plan.at.received);
  return s;
}

// Starts the copy of the slice's best values, a warp a head. REQUIRES: the barriers are initialised.
__device__ inline void StartCopies(const SelectArgs& args, const Plan& plan, const Slice& s, Shared* shared) {
  const int head = threadIdx.x / 32;
  if (plan.heads == 0 || head >= args.group || threadIdx.x % 32 != 0 || s.own_groups == 0) return;
  const auto bytes = static_cast<uint32_t>(s.own_groups) * 4;
  ptx::BarrierExpect(&shared->landed[head], bytes);
  ptx::BulkCopy(s.best + head * plan.slice_groups, s.table + head * s.head_stride, bytes, &shared->landed[head]);
}
__device__ inline void WaitForCopies(const SelectArgs& args, const Plan& plan, const Slice& s, Shared* shared) {
  if (plan.heads == 0 || s.own_groups == 0) return;
#pragma unroll 1
  for (int g = 0; g < args.group; ++g) ptx::BarrierWait(&shared->landed[g], 0);
}

}  // namespace kvd::select

#endif  // LOCKS_KVD_KERNELS_SELECT_SLICE_CUH_
