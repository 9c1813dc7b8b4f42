// Reads a KV trace: the post-RoPE keys, values and queries of a real model (bench/trace/FORMAT.md).
//
// Thread safety: immutable after Load. Values are bit patterns of the trace's dtype.

#ifndef LOCKS_KVD_BENCH_KV_TRACE_H_
#define LOCKS_KVD_BENCH_KV_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/layout.h"

namespace kvd::bench {

class KvTrace {
 public:
  // kNotFound, or kDataLoss naming the field, what was expected and what came.
  static absl::StatusOr<KvTrace> Load(const std::string& path);

  int num_layers = 0;  // dumped layers
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int64_t num_tokens = 0;  // T of the prompt
  int num_steps = 0;
  KvDtype dtype = KvDtype::kBf16;
  float softmax_scale = 0;
  float logit_softcap = 0;
  float rope_theta = 0;
  std::string model;
  std::string text;
  std::vector<uint32_t> layer_ids;
  std::vector<uint32_t> prompt_tokens;
  std::vector<uint32_t> step_tokens;

  struct Layer {
    std::vector<uint16_t> k;       // [T, Hk, D]
    std::vector<uint16_t> v;       // [T, Hk, D]
    std::vector<uint16_t> step_q;  // [S, H, D]
    std::vector<uint16_t> step_k;  // [S, Hk, D]
    std::vector<uint16_t> step_v;  // [S, Hk, D]
  };
  std::vector<Layer> layers;

  int group() const { return num_q_heads / num_kv_heads; }
  // The geometry of a pool arena for this trace.
  KvGeometry geometry(int page_tokens, int rank) const;
};

}  // namespace kvd::bench

#endif  // LOCKS_KVD_BENCH_KV_TRACE_H_
