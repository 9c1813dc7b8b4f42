// Attend: online softmax over the units of a list, one KV head at a time; o is accumulated in the
// output.
#include <algorithm>
#include <cmath>

#include "kernels/attend.h"
#include "kernels/check.h"
#include "kernels/dtype.h"
#include "kernels/simd.h"
#include "kernels/softmax.h"

namespace kvd::ref {
namespace {

// One KV head's state while its units pass.
struct Workspace {
  float query[simd::kMaxGroup * simd::kMaxHeadDim];
  float logits[simd::kMaxGroup * simd::kLogitStride];
  float decay[simd::kMaxGroup];
  SoftmaxState state[simd::kMaxGroup];
};

void TakeUnit(const AttendArgs& a, const UnitRef& ref, Workspace* w, float* o) {
  KVD_CHECK(ref.num_tokens >= 0 && ref.num_tokens <= a.page_tokens);
  if (ref.num_tokens == 0) return;
  const auto* keys = reinterpret_cast<const uint16_t*>(ref.unit);
  const uint16_t* values = keys + a.page_tokens * a.head_dim;
  simd::KeyLogits(w->query, a.group, keys, ref.num_tokens, a.head_dim, a.dtype, a.softmax_scale,
                  a.logit_softcap, w->logits);
  for (int g = 0; g < a.group; ++g) {
    float* x = w->logits + g * simd::kLogitStride;
    std::fill(x + ref.num_tokens, x + a.page_tokens, kEmptyLse);
    w->decay[g] = Rescale(&w->state[g], *std::max_element(x, x + ref.num_tokens));
    w->state[g].sum += simd::ExpInPlace(x, a.page_tokens, w->state[g].max);
  }
  simd::AddValues(w->logits, a.group, values, ref.num_tokens, a.head_dim, a.dtype, w->decay, o);
}

void AttendHead(const AttendArgs& a, int64_t row, Workspace* w) {
  const int64_t head = row * a.group;  // first query head, over the batch
  float* o = a.o + head * a.head_dim;
  for (int i = 0; i < a.group * a.head_dim; ++i) {
    w->query[i] = FromKv(a.dtype, a.query[head * a.head_dim + i]);
  }
  std::fill_n(w->state, a.group, SoftmaxState{});
  std::fill_n(o, a.group * a.head_dim, 0.0f);
  KVD_CHECK(a.num_units[row] <= a.max_units);
  const UnitRef* units = a.units + row * a.max_units;
  for (int u = 0; u < a.num_units[row]; ++u) TakeUnit(a, units[u], w, o);
  for (int g = 0; g < a.group; ++g) {
    const SoftmaxState& state = w->state[g];
    a.lse[head + g] = Lse(state);
    const float norm = state.sum > 0 ? 1 / state.sum : 0;
    for (int d = 0; d < a.head_dim; ++d) o[g * a.head_dim + d] *= norm;
  }
}

}  // namespace

void Attend(const AttendArgs& a) {
  KVD_CHECK(a.head_dim == 64 || a.head_dim == 96 || a.head_dim == 128 || a.head_dim == 256);
  KVD_CHECK(a.page_tokens == 16 || a.page_tokens == 32);
  KVD_CHECK(a.group >= 1 && a.group <= simd::kMaxGroup);
  Workspace w;
  for (int64_t row = 0; row < static_cast<int64_t>(a.num_sequences) * a.num_kv_heads; ++row) {
    AttendHead(a, row, &w);
  }
}

void MergeAttention(const MergeArgs& a) {
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const MergeWeights m = MergeLse(a.lse1[row], a.lse2[row]);
    for (int64_t i = row * a.head_dim; i < (row + 1) * a.head_dim; ++i) {
      a.o[i] = m.weight1 * a.o1[i] + m.weight2 * a.o2[i];
    }
    a.lse[row] = m.lse;
  }
}

}  // namespace kvd::ref
