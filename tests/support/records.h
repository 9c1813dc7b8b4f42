// Records made of random codes: every code, scale and tau that a decoder must accept, with no
// encoder in between. For tests and benchmarks of score.
//
// Thread safety: pure functions; the same arguments give the same bytes on every machine.

#ifndef LOCKS_KVD_TESTS_SUPPORT_RECORDS_H_
#define LOCKS_KVD_TESTS_SUPPORT_RECORDS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/layout.h"

namespace kvd::testing {

// How far `lse` may be from the truth (kernels/README.md): absolute up to a magnitude of 32,
// relative above.
inline double LseTolerance(double truth) { return std::max(1e-3, 3e-5 * std::fabs(truth)); }

inline void PutBf16(uint8_t* at, float x) {
  const uint16_t bits = ToBf16(x);
  std::memcpy(at, &bits, sizeof(bits));
}

struct RandomRecords {
  SummaryLayout layout;
  std::vector<uint8_t> coarse;  // [count] records, contiguous
  std::vector<uint8_t> fine;

  uint8_t* coarse_at(int64_t i) { return coarse.data() + i * layout.coarse_bytes; }
  uint8_t* fine_at(int64_t i) { return fine.data() + i * layout.fine_bytes; }
  // Scale of mode k of record i.
  uint8_t* mode_scale(int64_t i, int k) {
    return k < kCoarseModes ? coarse_at(i) + layout.coarse[kCoarseScales] + 2 * k
                            : fine_at(i) + layout.fine[kFineScales] + 2 * (k - kCoarseModes);
  }
};

// Logits of a query of unit variance and a softmax scale of 1 / sqrt(D) then have a standard
// deviation of about 75 centroid_scale between pages and 340 sqrt(R) mode_scale within one.
struct RandomRecordSpec {
  int head_dim = 128;
  int page_tokens = 16;
  int rank = 8;
  int64_t count = 64;
  float centroid_scale = .04f;
  float mode_scale = .002f;
  float tau = .01f;
  uint64_t seed = 1;
};

inline RandomRecords MakeRandomRecords(const RandomRecordSpec& spec) {
  RandomRecords r;
  r.layout = MakeSummaryLayout(spec.head_dim, spec.page_tokens, spec.rank);
  r.coarse.resize(static_cast<size_t>(spec.count) * r.layout.coarse_bytes);
  r.fine.resize(static_cast<size_t>(spec.count) * r.layout.fine_bytes);
  std::mt19937_64 random(spec.seed);
  for (auto* bytes : {&r.coarse, &r.fine}) {
    for (size_t i = 0; i < bytes->size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(bytes->data() + i, &word, std::min<size_t>(8, bytes->size() - i));
    }
  }
  const auto factor = [&random] { return .5f + static_cast<float>(random() % 1024) / 1024; };
  for (int64_t i = 0; i < spec.count; ++i) {
    for (int k = 0; k < spec.rank; ++k) {
      PutBf16(r.mode_scale(i, k), spec.mode_scale * factor() * (k % 2 == 0 ? 1.0f : -1.0f));
    }
    PutBf16(r.coarse_at(i) + r.layout.coarse[kCentroidScale], spec.centroid_scale * factor());
    PutBf16(r.coarse_at(i) + r.layout.coarse[kTau], spec.tau * factor());
  }
  return r;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_RECORDS_H_
