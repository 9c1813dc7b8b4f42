// The keys and values of decode_bench: any page of any length of prompt, without keeping it. The
// host's function, for what is put into a daemon, and the GPU's, for what stays in the worker, give
// the same bits.
//
// Keys are noise of variance 1 around a mean of the page's own, whose size is .5 for most pages and
// 3 for one in eight: a query then finds a few hundred pages that matter among tens of thousands,
// and which ones changes with it. Noise is triangular: the sum of two uniform bytes. Thread safety:
// pure functions.

#ifndef LOCKS_KVD_BENCH_SYNTHETIC_PAGES_H_
#define LOCKS_KVD_BENCH_SYNTHETIC_PAGES_H_

#include <cstdint>

#include "kernels/dtype.h"

#ifdef __CUDACC__
#define KVD_HOST_DEVICE __host__ __device__
#else
#define KVD_HOST_DEVICE
#endif

namespace kvd::bench {

KVD_HOST_DEVICE inline uint32_t MixBits(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
// Noise is counted in steps of 1 / 104.5, its standard deviation, in whole numbers: sums of it are
// exact on either side.
KVD_HOST_DEVICE inline int NoiseSteps(uint32_t bits) {
  return static_cast<int>(bits & 0xFF) + static_cast<int>((bits >> 8) & 0xFF) - 255;
}
inline constexpr float kNoiseStep = 1.0f / 104.5f;
// Round to nearest even of a finite value: ToBf16 (kernels/dtype.h), on either side.
KVD_HOST_DEVICE inline uint16_t NoiseToBf16(float x) {
  union {
    float value;
    uint32_t bits;
  } word = {x};
  return static_cast<uint16_t>((word.bits + 0x7FFFu + ((word.bits >> 16) & 1u)) >> 16);
}

// One page of one layer and KV head.
struct SyntheticUnit {
  uint32_t seed;
  int half_means;  // size of the mean, in halves

  KVD_HOST_DEVICE SyntheticUnit(uint32_t page, uint32_t layer, uint32_t head)
      : seed(MixBits(page * 0x9E3779B9u + MixBits(layer * 256 + head + 1))),
        half_means(MixBits(seed ^ 0xA5A5A5A5u) % 8 == 0 ? 6 : 1) {}
  KVD_HOST_DEVICE int MeanSteps(uint32_t dim) const {
    return half_means * NoiseSteps(MixBits(seed + (1u << 22) + dim));
  }
  KVD_HOST_DEVICE uint16_t Key(uint32_t token, uint32_t dim, int mean_steps) const {
    const int half_steps = 2 * NoiseSteps(MixBits(seed + (token << 10) + dim + 1)) + mean_steps;
    return NoiseToBf16(kNoiseStep / 2 * static_cast<float>(half_steps));
  }
  KVD_HOST_DEVICE uint16_t Value(uint32_t token, uint32_t dim) const {
    return NoiseToBf16(kNoiseStep * static_cast<float>(NoiseSteps(
                                        MixBits(seed + (1u << 20) + (token << 10) + dim + 1))));
  }
};

// The unit as it is stored: [K: B x D][V: B x D]. For the host.
inline void FillSyntheticUnit(const SyntheticUnit& unit, uint32_t head_dim, uint32_t page_tokens,
                              uint16_t* out) {
  int mean_steps[256];
  for (uint32_t d = 0; d < head_dim; ++d) mean_steps[d] = unit.MeanSteps(d);
  for (uint32_t t = 0; t < page_tokens; ++t) {
    for (uint32_t d = 0; d < head_dim; ++d) out[t * head_dim + d] = unit.Key(t, d, mean_steps[d]);
  }
  out += page_tokens * head_dim;
  for (uint32_t t = 0; t < page_tokens; ++t) {
    for (uint32_t d = 0; d < head_dim; ++d) out[t * head_dim + d] = unit.Value(t, d);
  }
}

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_SYNTHETIC_PAGES_H_
