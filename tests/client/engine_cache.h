// An engine's side of the library's tests: its KV cache, and a decode step that is compared with
// dense attention.

#ifndef LOCKS_KVD_TESTS_CLIENT_ENGINE_CACHE_H_
#define LOCKS_KVD_TESTS_CLIENT_ENGINE_CACHE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "client/sequence.h"
#include "tests/client/fake_pool.h"

namespace kvd::testing {

// What an engine holds: K and V of a layer as [heads][T, D].
class EngineCache {
 public:
  explicit EngineCache(const SequenceData& data) {
    const auto& g = data.geometry;
    for (int layer = 0; layer < g.num_layers; ++layer) {
      std::vector<uint16_t> k;
      std::vector<uint16_t> v;
      for (int h = 0; h < g.num_kv_heads; ++h) {
        const auto& keys = data.keys[data.at(layer, h)];
        const auto& values = data.values[data.at(layer, h)];
        k.insert(k.end(), keys.begin(), keys.end());
        v.insert(v.end(), values.begin(), values.end());
      }
      k_.push_back(std::move(k));
      v_.push_back(std::move(v));
    }
    for (size_t i = 0; i < k_.size(); ++i) {
      layers_.push_back({reinterpret_cast<const uint8_t*>(k_[i].data()),
                         reinterpret_cast<const uint8_t*>(v_[i].data()),
                         data.num_tokens * g.head_dim * 2, int64_t{g.head_dim} * 2});
    }
  }
  const std::vector<EngineKv>& layers() const { return layers_; }

 private:
  std::vector<std::vector<uint16_t>> k_;
  std::vector<std::vector<uint16_t>> v_;
  std::vector<EngineKv> layers_;
};

// Decodes the next token of `data` by a step whose budget covers every page: each layer must equal
// dense attention in double precision; `worst` grows to the largest difference.
inline absl::Status DecodeToken(Sequence& sequence, const SequenceData& data, double* worst) {
  const auto& g = data.geometry;
  const int64_t token = sequence.num_tokens();
  std::vector<int> no_pages;
  absl::Status status;
  for (int layer = 0; layer < g.num_layers; ++layer) {
    const auto q = RandomKv(int64_t{g.num_q_heads} * g.head_dim, g.dtype, 2.0f,
                            static_cast<uint64_t>(token * 100 + layer));
    const auto k = data.Rows(data.keys, layer, token);
    const auto v = data.Rows(data.values, layer, token);
    std::vector<float> o(q.size());
    std::vector<float> lse(static_cast<size_t>(g.num_q_heads));
    status.Update(sequence.Run(layer, {q.data(), k.data(), v.data()}, {o.data(), lse.data()}));
    for (int h = 0; h < g.num_q_heads; ++h) {
      const auto truth = data.Attend(layer, h, q.data() + h * g.head_dim, no_pages, 0, token + 1);
      *worst = std::max(*worst, std::abs(truth.lse - lse[static_cast<size_t>(h)]));
      for (int i = 0; i < g.head_dim; ++i) {
        *worst = std::max(*worst, std::abs(truth.o[static_cast<size_t>(i)] -
                                           o[static_cast<size_t>(h * g.head_dim + i)]));
      }
    }
  }
  return status;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_CLIENT_ENGINE_CACHE_H_
