// Select on the GPU. Rows of few pages, and lists of candidates, are the work of clusters
// (select_few.cuh); rows of many pages that of teams of CTAs, up to the whole GPU
// (select_many.cuh).
//
// Repeatability: atomics count integers or set bits, and no result depends on their order.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "kernels/select_few_rank.cuh"
#include "kernels/select_many_rank.cuh"

namespace kvd {
namespace {

using namespace select;  // NOLINT(build/namespaces): this file's other parts

// --- host ----------------------------------------------------------------------------------------

constexpr int kSharedBytes = 227 * 1024;  // what a CTA may have

// Where the bins' depths begin (select_keys.cuh): K pages of this score would have a mean share of
// e / K.
float ZeroOf(const SelectArgs& args) {
  return std::min(-1.0f, 1.0f + std::log(static_cast<float>(args.group) /
                                         static_cast<float>(std::max(args.num_select, 1))));
}

int MaxPieces(int64_t lse_stride) {
  return std::min(kMaxPieces,
                  static_cast<int>((lse_stride + (1 << kPieceShift) - 1) >> kPieceShift));
}

// CTAs of a team at most, on a device that runs `num_sms` at once; 1 where it cannot run two for
// every row.
constexpr int kMostCtas = 132;
int MostInTeam(int64_t num_rows, int64_t lse_stride, int num_sms) {
  return static_cast<int>(
      std::clamp<int64_t>(std::min(num_sms, kMostCtas) / std::max<int64_t>(num_rows, 1), 1,
                          std::min(kMaxTeam, MaxPieces(lse_stride))));
}

// The scratch, in bytes from its start. It does not depend on the device: on a smaller one some of
// it stays empty.
struct Scratch {
  int64_t row_words;  // of a row, both sets
  size_t turns, keys, shares, norms, end;
};
Scratch MakeScratch(int64_t num_rows, int group, int64_t lse_stride) {
  const auto rows = static_cast<size_t>(num_rows), heads = rows * static_cast<size_t>(group);
  const int team = MostInTeam(num_rows, lse_stride, kMostCtas);
  Scratch scratch = {};
  scratch.row_words = team == 1 ? 0 : 2 * NumWords(group, team);
  scratch.turns = rows * static_cast<size_t>(scratch.row_words) * sizeof(uint64_t);
  scratch.keys = (scratch.turns + rows * sizeof(uint32_t) + 127) / 128 * 128;
  scratch.shares = scratch.keys + rows * static_cast<size_t>(lse_stride) * sizeof(uint32_t);
  scratch.norms = scratch.shares + heads * kMaxTeam * sizeof(uint32_t);
  scratch.end = scratch.norms + heads * sizeof(float);
  return scratch;
}

// The longest slice of a row of at most `num_pages` pages.
int LongestSlice(int num_pages, int team) {
  int longest = 0;
  for (int shift = kPieceShift; shift <= PieceShiftOf(num_pages); ++shift) {
    const int most = std::min(num_pages, kMaxPieces << shift), piece = 1 << shift;
    const int pieces = (most + piece - 1) / piece;
    longest = std::max(longest, (pieces + team - 1) / team * piece);
  }
  return longest;
}

// Rows of many pages, where `num_sms` CTAs run at once.
ManyPlan MakeManyPlan(const SelectArgs& args, int num_sms) {
  const int64_t rows = int64_t{args.num_sequences} * args.num_kv_heads;
  const Scratch scratch = MakeScratch(rows, args.group, args.lse_stride);
  ManyPlan plan = {};
  plan.zero = ZeroOf(args);
  plan.team = scratch.row_words == 0 ? 1 : MostInTeam(rows, args.lse_stride, num_sms);
  const auto pages = static_cast<int>(args.lse_stride);
  plan.slice = LongestSlice(pages, plan.team);
  plan.guess_shift = PieceShiftOf(pages);
  plan.guess = (std::max(pages >> plan.guess_shift, 1) + plan.team - 1) / plan.team;
  plan.received = static_cast<int>((sizeof(FewShared) + 15) / 16 * 16);
  plan.states = plan.received + (plan.team == 1 ? 0 : 2 * kCountSums * kBins * 4);
  plan.chosen = plan.states + args.group * kMaxPieces * static_cast<int>(sizeof(State));
  plan.values = plan.chosen + plan.slice / 8;
  const int room = (kSharedBytes - plan.values) / 4;  // values
  if (args.max_candidates > 0) {                      // keys are written by list: not in place
    plan.near_keys = std::min(plan.slice, room / kRun * kRun);
  } else if (plan.slice * (args.group + 1) <= room) {
    plan.kept = plan.near_keys = plan.slice;
  } else {
    plan.kept = plan.near_keys = std::min(plan.slice, room / args.group / kRun * kRun);
  }
  const bool in_place = plan.kept > 0 && plan.kept * (args.group + 1) > room;
  plan.keys = plan.values + (in_place ? 0 : plan.kept * args.group * 4);
  plan.end = plan.values + (plan.kept * args.group + (in_place ? 0 : plan.near_keys)) * 4;
  plan.row_words = scratch.row_words;
  auto* memory = static_cast<unsigned char*>(args.scratch);
  plan.words = reinterpret_cast<uint64_t*>(memory);
  plan.turns = reinterpret_cast<uint32_t*>(memory + scratch.turns);
  plan.far_keys = reinterpret_cast<uint32_t*>(memory + scratch.keys);
  return plan;
}

// Rows, or lists, of at most `num` pages: as many CTAs a row as give each about kEach values; fewer
// where they would not all run at once. Nothing for rows that do not fit, and for so many that
// their clusters would run in turns.
std::optional<FewPlan> MakeFewPlan(const SelectArgs& args, int num, bool listed) {
  constexpr int kCtasAtOnce = 132;
  constexpr int64_t kEach = 4096;
  if (args.rule != CombineRule::kShare || num > kFewPages) return std::nullopt;
  const int64_t rows = int64_t{args.num_sequences} * args.num_kv_heads;
  const int pieces = FewPieces(num), full = std::max(num >> kPieceShift, 1);
  FewPlan plan = {};
  plan.zero = ZeroOf(args);
  int& shift = plan.cluster_shift;
  while (plan.cluster() < kFewCluster &&
         int64_t{full << kPieceShift} * args.group > kEach * plan.cluster())
    ++shift;
  while (shift > 0 && plan.cluster() * rows > kCtasAtOnce) --shift;
  for (;; ++shift) {
    plan.most = SliceOf(pieces, shift);
    if (plan.most <= kFewSlice && plan.most * args.group <= kFewValues) break;
    if (plan.cluster() == kFewCluster) return std::nullopt;
  }
  if (!listed && shift > 0 && plan.cluster() * rows > kCtasAtOnce) return std::nullopt;
  plan.guess = SliceOf(full, shift);
  plan.received = static_cast<int>((sizeof(FewShared) + 15) / 16 * 16);
  plan.states = plan.received + (shift == 0 ? 0 : 2 * plan.cluster() * kBins * 4);
  plan.pages = plan.states + args.group * kMaxPieces * static_cast<int>(sizeof(State));
  plan.values = plan.pages + (listed ? plan.most * 4 : 0);
  plan.end = plan.values + plan.most * args.group * 4;
  return plan;
}

bool IsValid(const SelectArgs& args) {
  constexpr int kMaxGrid = 65535;
  return args.num_sequences >= 0 && args.num_sequences <= kMaxGrid && args.num_kv_heads >= 1 &&
         args.num_kv_heads <= kMaxGrid && args.group >= 1 && args.group <= kMaxGroup &&
         (args.rule == CombineRule::kShare || args.rule == CombineRule::kPeak) &&
         args.n_sink >= 0 && args.n_win >= 0 && args.num_select >= 0 && args.lse_stride >= 4 &&
         args.lse_stride <= kMaxPages && args.lse_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(args.lse) % 16 == 0 && args.max_candidates >= 0 &&
         args.scratch != nullptr && reinterpret_cast<uintptr_t>(args.scratch) % 128 == 0;
}

template <class... Parameters>
cudaError_t AllowShared(void (*kernel)(Parameters...)) {
  for (const auto& [attribute, value] :
       {std::pair(cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        std::pair(cudaFuncAttributeNonPortableClusterSizeAllowed, 1)}) {
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, attribute, value); e != cudaSuccess)
      return e;
  }
  return cudaSuccess;
}

cudaError_t LaunchFew(const SelectArgs& args, const Lists& lists, const FewPlan& plan, bool listed,
                      cudaStream_t stream) {
  constexpr int kLeast = 128;
  const int tasks = (plan.most >> kPieceShift) * args.group;
  const int threads = std::clamp(std::max(32 * tasks, plan.most / kQuad), kLeast, kFewThreads);
  const auto kernel = listed ? SelectFewKernel<true> : SelectFewKernel<false>;
  if (const cudaError_t e = AllowShared(kernel); e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(plan.cluster()), static_cast<unsigned>(args.num_kv_heads),
                  static_cast<unsigned>(args.num_sequences));
  return LaunchOverlapped(kernel, grid, static_cast<unsigned>(threads),
                          static_cast<size_t>(plan.end),
                          plan.cluster_shift == 0 ? 0u : static_cast<unsigned>(plan.cluster()),
                          stream, args, lists, plan);
}

cudaError_t LaunchMany(const SelectArgs& args, const Lists& lists, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e =
          cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess)
    return e;
  if (const cudaError_t e = AllowShared(SelectManyKernel); e != cudaSuccess) return e;
  const ManyPlan plan = MakeManyPlan(args, num_sms);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.team), static_cast<unsigned>(args.num_kv_heads),
                        static_cast<unsigned>(args.num_sequences));
  config.blockDim = kManyThreads;
  config.dynamicSmemBytes = static_cast<size_t>(plan.end);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = plan.team == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, SelectManyKernel, args, lists, plan);
}

cudaError_t Launch(const SelectArgs& args, const Lists& lists, cudaStream_t stream) {
  if (!IsValid(args)) return cudaErrorInvalidValue;
  if (args.num_sequences == 0) return cudaSuccess;
  const std::optional<FewPlan> few = MakeFewPlan(args, static_cast<int>(args.lse_stride), false);
  return few.has_value() ? LaunchFew(args, lists, *few, false, stream)
                         : LaunchMany(args, lists, stream);
}

Lists MakeLists(const SelectArgs& args, const CandidateOut& out) {
  const Scratch scratch =
      MakeScratch(int64_t{args.num_sequences} * args.num_kv_heads, args.group, args.lse_stride);
  auto* memory = static_cast<unsigned char*>(args.scratch);
  return {out.max_candidates, out.candidates, out.num_candidates,
          reinterpret_cast<uint32_t*>(memory + scratch.shares),
          reinterpret_cast<float*>(memory + scratch.norms)};
}

}  // namespace

size_t SelectGpuScratchBytes(int64_t num_rows, int group, int64_t lse_stride) {
  return MakeScratch(num_rows, group, lse_stride).end;
}

cudaError_t LaunchSelect(const SelectArgs& args, cudaStream_t stream) {
  return Launch(args, Lists{}, stream);
}

cudaError_t LaunchSelectCandidates(const SelectArgs& args, const CandidateOut& out,
                                   cudaStream_t stream) {
  if (args.max_candidates != 0 || out.candidates == nullptr ||
      int64_t{out.max_candidates} < int64_t{args.num_select} + args.n_sink + args.n_win)
    return cudaErrorInvalidValue;
  return Launch(args, MakeLists(args, out), stream);
}

cudaError_t LaunchSelectAmong(const SelectArgs& args, cudaStream_t stream) {
  if (!IsValid(args) || args.max_candidates == 0) return cudaErrorInvalidValue;
  if (args.num_sequences == 0) return cudaSuccess;
  const std::optional<FewPlan> few = args.max_candidates > kMostListed
                                         ? std::nullopt
                                         : MakeFewPlan(args, args.max_candidates, true);
  return few.has_value() ? LaunchFew(args, MakeLists(args, {}), *few, true, stream)
                         : Launch(args, {}, stream);
}

}  // namespace kvd
