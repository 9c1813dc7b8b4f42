// The example of client/README.md, compiled, run against a real daemon, and compared with the
// README's text.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "client/kv_client.h"
#include "tests/client/example_text.h"
#include "tests/client/fake_pool.h"
#include "tests/support/daemon_process.h"

namespace {

using kvd::testing::ExampleOf;
using kvd::testing::RandomKv;

// What an engine would have: a prompt's tokens and its KV cache, one layer a [heads][T, D] array.
struct Engine {
  kvd::KvGeometry geometry = kvd::testing::SmallGeometry();
  std::vector<uint32_t> tokens = std::vector<uint32_t>(100);
  std::vector<std::vector<uint16_t>> k, v;
  std::vector<kvd::EngineKv> layers;
  std::vector<uint16_t> q, new_k, new_v;
  std::vector<float> o, lse;

  Engine() {
    std::iota(tokens.begin(), tokens.end(), 7u);
    const int d = geometry.head_dim;
    for (uint64_t layer = 0; layer < 2; ++layer) {
      k.push_back(RandomKv(2 * 100 * d, geometry.dtype, 1, 10 + layer));
      v.push_back(RandomKv(2 * 100 * d, geometry.dtype, 1, 20 + layer));
    }
    for (size_t layer = 0; layer < 2; ++layer) {
      layers.push_back({reinterpret_cast<const uint8_t*>(k[layer].data()),
                        reinterpret_cast<const uint8_t*>(v[layer].data()), int64_t{100} * d * 2,
                        int64_t{d} * 2});
    }
    q = RandomKv(int64_t{geometry.num_q_heads} * d, geometry.dtype, 1, 30);
    new_k = RandomKv(int64_t{geometry.num_kv_heads} * d, geometry.dtype, 1, 31);
    new_v = RandomKv(int64_t{geometry.num_kv_heads} * d, geometry.dtype, 1, 32);
    o.resize(q.size());
    lse.resize(static_cast<size_t>(geometry.num_q_heads));
  }
};

absl::Status Decode(const std::string& daemon, Engine& engine) {
  // [example]
  kvd::ClientOptions options;
  options.daemons = {daemon};
  options.tenant = "test";
  options.model = "model";
  options.geometry = engine.geometry;
  options.weights_id = "weights";
  options.rope = "theta=10000";
  auto client = kvd::KvClient::Make(options);
  if (!client.ok()) return client.status();

  // Prefill: name the prompt's complete pages and put them; what is resident is not sent again.
  const std::vector<kvd::PageKey> keys = (*client)->PageKeys(engine.tokens);
  const int num_pages = static_cast<int>(keys.size());
  auto put = (*client)->Put({.keys = keys, .num_pages = num_pages, .layers = engine.layers});
  if (!put.ok()) return put.status();

  // Decode: lease and mirror the pages, append the prompt's last tokens, then run each layer.
  auto sequence = (*client)->OpenSequence(keys, {.max_tokens = 4096, .step = {.budget = 4}});
  if (!sequence.ok()) return sequence.status();
  const int64_t done = (*sequence)->num_tokens();
  const int rest = static_cast<int>(static_cast<int64_t>(engine.tokens.size()) - done);
  if (auto status = (*sequence)->AppendTail(engine.layers, done, rest); !status.ok()) return status;
  for (int layer = 0; layer < engine.geometry.num_layers; ++layer) {
    auto status =
        (*sequence)->Run(layer, {engine.q.data(), engine.new_k.data(), engine.new_v.data()},
                         {engine.o.data(), engine.lse.data()});
    if (!status.ok()) return status;
  }
  // [/example]
  EXPECT_EQ(put->num_new, 6) << put->first_failure;
  EXPECT_EQ((*sequence)->num_open_pages(), 6);
  EXPECT_EQ((*sequence)->num_tokens(), 101);
  return absl::OkStatus();
}

TEST(ReadmeExampleTest, ItRuns) {
  ASSERT_TRUE(kvd::testing::HaveDaemonBinary()) << "build locks-kvd first";
  Engine engine;
  kvd::testing::DaemonSpec spec;
  spec.geometry = engine.geometry;
  auto daemon = kvd::testing::DaemonProcess::Start(spec);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const absl::Status status = Decode((*daemon)->address(), engine);
  EXPECT_TRUE(status.ok()) << status;
  for (const float x : engine.o) ASSERT_TRUE(std::isfinite(x));
}

TEST(ReadmeExampleTest, ItIsTheReadmesText) {
  const std::string code = ExampleOf(KVD_SOURCE_DIR "/tests/client/readme_example_test.cc",
                                     "// [example]", "// [/example]", 2);
  EXPECT_FALSE(code.empty());
  EXPECT_EQ(code, ExampleOf(KVD_SOURCE_DIR "/client/README.md", "```cpp", "```"));
}

}  // namespace
