#include <cstdint>

#include "kernels/gather.h"
#include "kernels/launch.cuh"
#include "kernels/unit_copy.cuh"

namespace kvd {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kFullGrid = 1u << 20;

// One unit a team, kThreads / Team::kThreads of them a CTA.
template <class Team>
__global__ void __launch_bounds__(kThreads)
    GatherUnitsKernel(const GatherUnit* units, int64_t num_units, int num_words, uint8_t* valid) {
  constexpr int kTeams = kThreads / Team::kThreads;
  WaitForPredecessor();
  for (int64_t i = int64_t{blockIdx.x} * kTeams + Team::index(); i < num_units;
       i += int64_t{gridDim.x} * kTeams) {
    const GatherUnit unit = units[i];
    Team team;
    const bool sealed = team.Load(unit.source, num_words, unit.header, unit.generation);
    if (i + int64_t{gridDim.x} * kTeams >= num_units) LetSuccessorStart();
    team.Store(unit.destination, num_words, !sealed);
    if (Team::rank() == 0) valid[i] = sealed ? 1 : 0;
  }
}

__global__ void __launch_bounds__(kThreads) PackUnitsKernel(const PackArgs args) {
  const int row_words = args.head_dim / 8;
  const int words = args.page_tokens * row_words;
  for (int64_t i = blockIdx.x; i < args.num_units; i += gridDim.x) {
    auto* out = reinterpret_cast<uint4*>(args.out[i]);
    const int64_t head = args.heads[i] * args.kv.head_stride;
    for (int at = static_cast<int>(threadIdx.x); at < 2 * words; at += kThreads) {
      const int row = at % words / row_words, word = at % row_words;
      const uint8_t* base = at < words ? args.kv.k : args.kv.v;
      const uint8_t* source = base + head + (args.first_tokens[i] + row) * args.kv.token_stride;
      out[at] = reinterpret_cast<const uint4*>(source)[word];
    }
  }
}

unsigned GridOf(int64_t num_units) {
  return num_units < kFullGrid ? static_cast<unsigned>(num_units) : kFullGrid;
}

}  // namespace

cudaError_t LaunchGatherUnits(const GatherUnit* units, int64_t num_units, size_t unit_bytes,
                              uint8_t* valid, cudaStream_t stream) {
  return WithTeamFor(unit_bytes, [&]<class Team>() -> cudaError_t {
    if (num_units < 0) return cudaErrorInvalidValue;
    if (num_units == 0) return cudaSuccess;
    constexpr int kTeams = kThreads / Team::kThreads;
    const unsigned grid = GridOf((num_units + kTeams - 1) / kTeams);
    return LaunchOverlapped(GatherUnitsKernel<Team>, grid, kThreads, 0, 0, stream, units, num_units,
                            static_cast<int>(unit_bytes / 16), valid);
  });
}

cudaError_t LaunchPackUnits(const PackArgs& args, cudaStream_t stream) {
  if (args.num_units < 0 || args.head_dim <= 0 || args.head_dim % 8 != 0 || args.page_tokens <= 0)
    return cudaErrorInvalidValue;
  if (args.num_units == 0) return cudaSuccess;
  PackUnitsKernel<<<GridOf(args.num_units), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvd
