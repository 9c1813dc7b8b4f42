// The model of the system tests on a GPU.

#ifndef LOCKS_KVD_TESTS_SUPPORT_GPU_GEOMETRY_H_
#define LOCKS_KVD_TESTS_SUPPORT_GPU_GEOMETRY_H_

#include "kernels/layout.h"

namespace kvd::testing {

inline KvGeometry GpuGeometry(int num_layers = 3) {
  return {.num_layers = num_layers,
          .num_q_heads = 8,
          .num_kv_heads = 2,
          .num_shards = 1,
          .head_dim = 128,
          .page_tokens = 16,
          .rank = 8,
          .dtype = KvDtype::kBf16,
          .rotated = true,
          .softmax_scale = 0.088388f,
          .logit_softcap = 0};
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_GPU_GEOMETRY_H_
