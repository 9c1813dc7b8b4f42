// Seeded keys, values and queries for tests and benchmarks: the synthetic regimes
// (kernels/README.md, "Synthetic data") and the adversarial pages, each with what is expected of
// it.
//
// Thread safety: pure functions. The same arguments give the same bits: of RandomKv and
// AdversarialPages on every machine, of MakeSyntheticHead in one build (it rounds results of libm's
// cos and exp).

#ifndef LOCKS_KVD_TESTS_SUPPORT_KV_DATA_H_
#define LOCKS_KVD_TESTS_SUPPORT_KV_DATA_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/layout.h"

namespace kvd::testing {

enum class Regime {
  kDiffuse,
  kNeedle,
  kOutlierToken,
  kOutlierChannels,
  kSink,
  kHeadOffset,
  kWalk,
};

struct SyntheticSpec {
  Regime regime = Regime::kDiffuse;
  int head_dim = 128;
  int group = 4;
  int page_tokens = 16;
  int num_pages = 512;
  int num_steps = 1;  // queries; more than one is a walk
  KvDtype dtype = KvDtype::kBf16;
  uint64_t seed = 1;
};

// One layer and KV head. Bit patterns of `dtype`.
struct SyntheticHead {
  std::vector<uint16_t> keys;    // [P * B, D] post-RoPE
  std::vector<uint16_t> values;  // [P * B, D]
  std::vector<uint16_t> query;   // [steps, G, D]
  float softmax_scale;
  std::vector<uint8_t> Unit(int page, int head_dim, int page_tokens) const;  // packed K then V
};
SyntheticHead MakeSyntheticHead(const SyntheticSpec& spec);

// Uniform fill of `count` values in N(0, sigma^2), rounded to `dtype`.
std::vector<uint16_t> RandomKv(int64_t count, KvDtype dtype, float sigma, uint64_t seed);

// The query metric of `queries` ([n, D] bit patterns) as QueryMetric::at gives it: mean of q q',
// rotated if the records are, plus .01 tr(S) / D on the diagonal.
std::vector<float> MetricOfQueries(const std::vector<uint16_t>& queries, int head_dim,
                                   KvDtype dtype, bool rotated);

// A page that breaks careless encoders.
struct AdversarialPage {
  std::string name;
  std::vector<uint16_t> keys;  // [B, D]
  int max_modes;               // modes with non-zero scale may not exceed this; -1: no expectation
  bool exact;                  // logits must be right to the centroid's and coefficients' rounding
};
std::vector<AdversarialPage> AdversarialPages(int head_dim, int page_tokens, int rank,
                                              KvDtype dtype);

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_KV_DATA_H_
