// One unit copied by a team of warps: all of it on its way at once, held in registers until its
// generation is known.
//
// Why teams of warps and not a CTA a unit: a launch places about 430 CTAs a microsecond, and each
// warp pays for the fence of the guard. Why one header: gather and the step's fetch must use the
// very same guard (guard.cuh). Device code only. Internal to kernels/.

#ifndef LOCKS_KVD_KERNELS_UNIT_COPY_CUH_
#define LOCKS_KVD_KERNELS_UNIT_COPY_CUH_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/guard.cuh"

namespace kvd {

inline constexpr size_t kMaxUnitBytes = 32 * 1024;  // that a team can hold; a multiple of 2048

// kWarps warps with neighbouring numbers, kLoads vectors of 16 bytes a thread. All members are to
// be called by all threads of the team together.
template <int kWarps, int kLoads>
class UnitTeam {
 public:
  static constexpr int kThreads = 32 * kWarps;

  // Number of this thread's team in the CTA, and of the thread in the team.
  __device__ __forceinline__ static int index() { return static_cast<int>(threadIdx.x) / kThreads; }
  __device__ __forceinline__ static int rank() { return static_cast<int>(threadIdx.x) % kThreads; }

  // Whether `mine` holds in all threads of the team, which wait for each other.
  __device__ __forceinline__ static bool All(bool mine) {
    if constexpr (kWarps == 1) {
      return __all_sync(0xFFFFFFFFu, mine) != 0;
    } else {
      int all;
      asm volatile(
          "{\n"
          ".reg .pred mine, all;\n"
          "setp.ne.s32 mine, %1, 0;\n"
          "barrier.cta.red.and.pred all, %2, %3, mine;\n"
          "selp.s32 %0, 1, 0, all;\n"
          "}\n"
          : "=r"(all)
          : "r"(static_cast<int>(mine)), "r"(1 + index()), "n"(kThreads)
          : "memory");
      return all != 0;
    }
  }

  // Reads the unit; true if what was read is the content that `generation` names. `header`: null
  // for memory that does not change.
  __device__ __forceinline__ bool Load(const uint8_t* unit, int num_words, const PageHeader* header,
                                       uint64_t generation) {
    if (header != nullptr && rank() == 0) guard::Prefetch(header);
    const auto* source = reinterpret_cast<const uint4*>(unit);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int at = k * kThreads + rank();
      words_[k] = at < num_words ? guard::Load(source + at) : uint4{0, 0, 0, 0};
    }
    // Every thread looks after its own loads: the unit counts if all of them saw the expected
    // generation.
    return header == nullptr || All(guard::StillSealed(header, generation));
  }

  // Writes what was read, or zeros.
  __device__ __forceinline__ void Store(uint8_t* to, int num_words, bool zeros) const {
    auto* destination = reinterpret_cast<uint4*>(to);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int at = k * kThreads + rank();
      if (at < num_words) __stcg(destination + at, zeros ? uint4{0, 0, 0, 0} : words_[k]);
    }
  }

 private:
  uint4 words_[kLoads];
};

// Calls launch.operator()<UnitTeam>() with the smallest team that holds a unit of `unit_bytes`;
// cudaErrorInvalidValue if none does.
template <class Launch>
cudaError_t WithTeamFor(size_t unit_bytes, const Launch& launch) {
  if (unit_bytes == 0 || unit_bytes % 2048 != 0 || unit_bytes > kMaxUnitBytes)
    return cudaErrorInvalidValue;
  if (unit_bytes <= 4 * 1024) return launch.template operator()<UnitTeam<1, 8>>();
  if (unit_bytes <= 8 * 1024) return launch.template operator()<UnitTeam<1, 16>>();
  if (unit_bytes <= 16 * 1024) return launch.template operator()<UnitTeam<2, 16>>();
  return launch.template operator()<UnitTeam<4, 16>>();
}

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_UNIT_COPY_CUH_
