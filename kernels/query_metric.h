// The query metric of a model: per pooled layer and KV head the mean of q q' over its group's
// queries.
//
// Why: queries decide which modes of a page matter; with it the encoder E1S keeps those (on Gemma-3
// the selectable recall at 512 tokens goes from .90 to .97; ARCHITECTURE.md, "Encoders").
// Only daemons read it. It is not in the fingerprint: records made with and without it are read
// alike.
// File: bench/trace/FORMAT.md ("KVDQMETR", version 1; unrotated fp32 matrices, a checksum at the
// end).
// Thread safety: immutable after Load.

#ifndef LOCKS_KVD_KERNELS_QUERY_METRIC_H_
#define LOCKS_KVD_KERNELS_QUERY_METRIC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/layout.h"

namespace kvd {

class QueryMetric {
 public:
  // Reads `path` and prepares each matrix for `geometry`: rotated if the geometry is, plus
  // .01 tr(S) / D on the diagonal. Returns an empty string on success, else what is wrong: which
  // field, what was expected, what came (a missing file, wrong magic, version, L, Hk, D, checksum,
  // a non-finite or asymmetric matrix). On failure `out` is unchanged. May allocate.
  static std::string Load(const std::string& path, const KvGeometry& geometry, QueryMetric* out);

  // The [D, D] matrix of one pooled layer (0-based position, not the model's id) and KV head.
  const float* at(int layer_idx, int head) const {
    return matrices_.data() + (static_cast<size_t>(layer_idx) * static_cast<size_t>(num_kv_heads_) +
                               static_cast<size_t>(head)) *
                                  static_cast<size_t>(head_dim_) * static_cast<size_t>(head_dim_);
  }
  bool empty() const { return matrices_.empty(); }
  uint64_t file_checksum() const { return file_checksum_; }  // shown in Stats and metrics

 private:
  int num_kv_heads_ = 0;
  int head_dim_ = 0;
  uint64_t file_checksum_ = 0;
  std::vector<float> matrices_;
};

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_QUERY_METRIC_H_
