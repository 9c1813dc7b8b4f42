// Append: two row copies for each KV head.
#include <cstring>

#include "kernels/append.h"
#include "kernels/check.h"
#include "kernels/layout.h"

namespace kvd::ref {

void Append(const AppendArgs& a) {
  const size_t row_bytes = static_cast<size_t>(a.head_dim) * 2;
  const size_t v_offset = MakeUnitLayout(a.head_dim, a.page_tokens).k_bytes;
  for (int n = 0; n < a.num_sequences; ++n) {
    KVD_CHECK(a.token[n] >= 0 && a.token[n] < a.page_tokens);
    const size_t offset = static_cast<size_t>(a.token[n]) * row_bytes;
    for (int hk = 0; hk < a.num_kv_heads; ++hk) {
      const int64_t row = static_cast<int64_t>(n) * a.num_kv_heads + hk;
      uint8_t* unit = a.tails[row];
      std::memcpy(unit + offset, a.k + row * a.head_dim, row_bytes);
      std::memcpy(unit + v_offset + offset, a.v + row * a.head_dim, row_bytes);
    }
  }
}

}  // namespace kvd::ref
