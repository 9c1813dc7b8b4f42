// A client under a light load that keeps its metrics in a file, for tests of what Prometheus sees.
// It puts prompts with a common beginning, decodes a few tokens of each, and writes MetricsText to
// FILE, whole and at once, four times a second, until its standard input ends.
// usage: metrics_client FILE shared|ucx DAEMON...
//        metrics_client --list-metrics      prints the table of deploy/docs/metrics.md

#include <sys/select.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/kv_client.h"
#include "proto/status.h"
#include "tests/client/fake_pool.h"

namespace kvd::testing {
namespace {

constexpr int kCommonPages = 30;
constexpr int kOwnPages = 10;
constexpr int kDecoded = 40;  // tokens of each prompt
constexpr absl::Duration kTokenTime = absl::Milliseconds(4);
constexpr absl::Duration kWriteInterval = absl::Milliseconds(250);

class Load {
 public:
  Load(std::unique_ptr<KvClient> client, std::string file)
      : client_(std::move(client)), file_(std::move(file)) {
    const KvGeometry& g = client_->shape().geometry;
    const int64_t tokens = int64_t{kCommonPages + kOwnPages} * g.page_tokens;
    tokens_.resize(static_cast<size_t>(tokens));
    for (uint64_t layer = 0; layer < static_cast<uint64_t>(g.num_layers); ++layer) {
      k_.push_back(RandomKv(g.num_kv_heads * tokens * g.head_dim, g.dtype, 1, 10 + layer));
      v_.push_back(RandomKv(g.num_kv_heads * tokens * g.head_dim, g.dtype, 1, 50 + layer));
    }
    for (size_t i = 0; i < k_.size(); ++i) {
      layers_.push_back({reinterpret_cast<const uint8_t*>(k_[i].data()),
                         reinterpret_cast<const uint8_t*>(v_[i].data()), tokens * g.head_dim * 2,
                         int64_t{g.head_dim} * 2});
    }
    q_ = RandomKv(int64_t{g.num_q_heads} * g.head_dim + kDecoded, g.dtype, 2, 90);
    o_.resize(q_.size());
    lse_.resize(static_cast<size_t>(g.num_q_heads));
  }

  // One prompt from Put to its last token. Its own pages are new: `number` tells them apart.
  absl::Status RunPrompt(uint32_t number) {
    const KvGeometry& g = client_->shape().geometry;
    std::iota(tokens_.begin(), tokens_.end(), 0u);
    for (auto t = tokens_.begin() + kCommonPages * g.page_tokens; t != tokens_.end(); ++t) {
      *t += 100000 * (number + 1);
    }
    const std::vector<PageKey> keys = client_->PageKeys(tokens_);
    {
      KVD_ASSIGN_OR_RETURN(
          const PutReport put,
          client_->Put(
              {.keys = keys, .num_pages = static_cast<int>(keys.size()), .layers = layers_}));
      KVD_RETURN_IF_ERROR(put.first_failure);
    }
    SequenceOptions options;
    options.max_tokens = static_cast<int64_t>(tokens_.size()) + kDecoded;
    options.step.budget = 8;
    KVD_ASSIGN_OR_RETURN(const std::unique_ptr<Sequence> sequence,
                         client_->OpenSequence(keys, options));
    for (int t = 0; t < kDecoded && !Stopped(); ++t) {
      for (int layer = 0; layer < g.num_layers; ++layer) {
        const auto l = static_cast<size_t>(layer);
        // Another query for each token: other pages.
        const StepInput input = {q_.data() + t, k_[l].data() + t, v_[l].data() + t};
        KVD_RETURN_IF_ERROR(sequence->Run(layer, input, {o_.data(), lse_.data()}));
      }
    }
    return absl::OkStatus();
  }

  // Waits for a token's time and writes the file when it is due; true once nobody wants more.
  bool Stopped() {
    if (absl::Now() >= next_write_) {
      next_write_ = absl::Now() + kWriteInterval;
      std::ofstream(file_ + ".tmp") << client_->MetricsText();
      std::rename((file_ + ".tmp").c_str(), file_.c_str());
    }
    fd_set inputs;
    FD_ZERO(&inputs);
    FD_SET(STDIN_FILENO, &inputs);
    timeval wait = absl::ToTimeval(kTokenTime);
    return select(STDIN_FILENO + 1, &inputs, nullptr, nullptr, &wait) > 0;
  }

 private:
  const std::unique_ptr<KvClient> client_;
  const std::string file_;
  std::vector<uint32_t> tokens_;
  std::vector<std::vector<uint16_t>> k_, v_;  // [L] of [heads][T, D]
  std::vector<EngineKv> layers_;
  std::vector<uint16_t> q_;  // of token t: from q_[t]
  std::vector<float> o_, lse_;
  absl::Time next_write_ = absl::InfinitePast();
};

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "metrics_client: %s\n", status.ToString().c_str());
  return 1;
}

int Run(const std::vector<std::string>& args) {
  if (args.size() == 1 && args[0] == "--list-metrics") {
    std::fputs(MetricsMarkdown(kClientPrefix, ClientMetricTable()).c_str(), stdout);
    return 0;
  }
  if (args.size() < 3) return 2;
  const PathKind path = args[1] == "ucx" ? PathKind::kUcx : PathKind::kShared;
  ClientOptions options;
  options.daemons.assign(args.begin() + 2, args.end());
  options.tenant = "test";
  options.model = "model";
  options.geometry = SmallGeometry();
  options.weights_id = "weights";
  options.rope = "theta=10000";
  options.best_path = path;
  options.required_path = path;
  absl::StatusOr<std::unique_ptr<KvClient>> client = KvClient::Make(options);
  if (!client.ok()) return Fail(client.status());
  Load load(*std::move(client), args[0]);
  for (uint32_t number = 0; !load.Stopped(); ++number) {
    // Two clients put the same common pages, and others of their own.
    const absl::Status status = load.RunPrompt(number * 2 + (path == PathKind::kUcx ? 1 : 0));
    if (!status.ok()) return Fail(status);
  }
  return 0;
}

}  // namespace
}  // namespace kvd::testing

int main(int argc, char** argv) {
  return kvd::testing::Run(std::vector<std::string>(argv + 1, argv + argc));
}
