#include "bench/synthetic_trace.h"

#include <cstring>

#include "tests/support/kv_data.h"

namespace kvd::bench {
namespace {

constexpr int kPageTokens = 16;
constexpr testing::Regime kRegimes[] = {testing::Regime::kDiffuse,      testing::Regime::kNeedle,
                                        testing::Regime::kOutlierToken, testing::Regime::kSink,
                                        testing::Regime::kHeadOffset,   testing::Regime::kWalk};

// Copies rows of one head into an array of [rows, heads, D].
void Scatter(const uint16_t* rows, int num_rows, int heads, int head, int dim, uint16_t* out) {
  for (int r = 0; r < num_rows; ++r)
    std::memcpy(
        out + (static_cast<size_t>(r) * static_cast<size_t>(heads) + static_cast<size_t>(head)) *
                  static_cast<size_t>(dim),
        rows + static_cast<size_t>(r) * static_cast<size_t>(dim), static_cast<size_t>(dim) * 2);
}

}  // namespace

KvTrace MakeSyntheticTrace(int num_tokens, int num_steps) {
  KvTrace trace;
  trace.num_layers = static_cast<int>(std::size(kRegimes));
  trace.num_kv_heads = 2;
  trace.num_q_heads = 6;
  trace.head_dim = 64;
  trace.num_tokens = num_tokens;
  trace.num_steps = num_steps;
  trace.model = "synthetic";
  trace.text = "synthetic regimes";
  for (int i = 0; i < num_tokens; ++i) trace.prompt_tokens.push_back(static_cast<uint32_t>(i));
  for (int i = 0; i < num_steps; ++i)
    trace.step_tokens.push_back(static_cast<uint32_t>(num_tokens + i));
  const auto dim = static_cast<size_t>(trace.head_dim);
  const auto heads = static_cast<size_t>(trace.num_kv_heads);
  for (int l = 0; l < trace.num_layers; ++l) {
    trace.layer_ids.push_back(static_cast<uint32_t>(l));
    KvTrace::Layer layer;
    layer.k.resize(static_cast<size_t>(num_tokens) * heads * dim);
    layer.v.resize(layer.k.size());
    layer.step_k.resize(static_cast<size_t>(num_steps) * heads * dim);
    layer.step_v.resize(layer.step_k.size());
    layer.step_q.resize(static_cast<size_t>(num_steps * trace.num_q_heads) * dim);
    for (int h = 0; h < trace.num_kv_heads; ++h) {
      testing::SyntheticSpec spec;
      spec.regime = kRegimes[l];
      spec.head_dim = trace.head_dim;
      spec.group = trace.group();
      spec.page_tokens = kPageTokens;
      spec.num_pages = (num_tokens + num_steps + kPageTokens - 1) / kPageTokens;
      spec.num_steps = num_steps;
      spec.seed = static_cast<uint64_t>(l * trace.num_kv_heads + h + 1);
      const testing::SyntheticHead data = testing::MakeSyntheticHead(spec);
      trace.softmax_scale = data.softmax_scale;
      const size_t after = static_cast<size_t>(num_tokens) * dim;
      Scatter(data.keys.data(), num_tokens, trace.num_kv_heads, h, trace.head_dim, layer.k.data());
      Scatter(data.values.data(), num_tokens, trace.num_kv_heads, h, trace.head_dim,
              layer.v.data());
      Scatter(data.keys.data() + after, num_steps, trace.num_kv_heads, h, trace.head_dim,
              layer.step_k.data());
      Scatter(data.values.data() + after, num_steps, trace.num_kv_heads, h, trace.head_dim,
              layer.step_v.data());
      Scatter(data.query.data(), num_steps, trace.num_kv_heads, h, trace.group() * trace.head_dim,
              layer.step_q.data());
    }
    trace.layers.push_back(std::move(layer));
  }
  return trace;
}

absl::StatusOr<KvTrace> LoadTrace(const std::string& path) {
  if (path == "synthetic") return MakeSyntheticTrace(6144, 64);
  return KvTrace::Load(path);
}

}  // namespace kvd::bench
