#include "kernels/layout.h"

#include <bit>
#include <cmath>

#include "kernels/checksum.h"

namespace kvd {

const char* Problem(const KvGeometry& g) {
  if (g.head_dim != 64 && g.head_dim != 96 && g.head_dim != 128 && g.head_dim != 256)
    return "head_dim must be 64, 96, 128 or 256";
  if (g.page_tokens != 16 && g.page_tokens != 32) return "page_tokens must be 16 or 32";
  if (g.rank != 4 && g.rank != 8) return "rank must be 4 or 8";
  if (g.num_layers < 1 || g.num_layers > 1024) return "num_layers must be from 1 to 1024";
  if (g.num_kv_heads < 1 || g.num_kv_heads > 256) return "num_kv_heads must be from 1 to 256";
  if (g.num_q_heads < 1 || g.num_q_heads % g.num_kv_heads != 0 || g.group() > 16)
    return "num_q_heads must be 1 to 16 times num_kv_heads";
  if (g.num_shards < 1 || g.num_kv_heads % g.num_shards != 0)
    return "num_shards must divide num_kv_heads";
  if (g.dtype != KvDtype::kBf16 && g.dtype != KvDtype::kFp16) return "dtype must be bf16 or fp16";
  if (!std::isfinite(g.softmax_scale) || g.softmax_scale <= 0)
    return "softmax_scale must be finite and above 0: set the model's own";
  if (!std::isfinite(g.logit_softcap) || g.logit_softcap < 0)
    return "logit_softcap must be finite, 0 for none";
  return nullptr;
}

uint64_t LayoutFingerprint(const KvGeometry& g) {
  const uint32_t words[] = {kLayoutVersion,
                            static_cast<uint32_t>(g.num_layers),
                            static_cast<uint32_t>(g.num_q_heads),
                            static_cast<uint32_t>(g.num_kv_heads),
                            static_cast<uint32_t>(g.num_shards),
                            static_cast<uint32_t>(g.head_dim),
                            static_cast<uint32_t>(g.page_tokens),
                            static_cast<uint32_t>(g.rank),
                            static_cast<uint32_t>(g.dtype),
                            g.rotated ? 1u : 0u,
                            std::bit_cast<uint32_t>(g.softmax_scale),
                            std::bit_cast<uint32_t>(g.logit_softcap)};
  return Checksum64(words, sizeof(words));
}

SlotLayout MakeSlotLayout(const KvGeometry& g) {
  const SummaryLayout summary = MakeSummaryLayout(g);
  return {g.num_layers, g.shard_heads(), MakeUnitLayout(g.head_dim, g.page_tokens).bytes,
          summary.coarse_bytes, summary.fine_bytes};
}

}  // namespace kvd
