// Goal: the examples of deploy/docs/client-guide.md work. Method: they stand here, are run in its
// order against two daemons that keep two copies of each page, one of which dies, then both; every
// output is compared with dense attention in double precision; and the page's text is compared with
// these lines.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <numeric>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/kv_client.h"
#include "proto/pool.grpc.pb.h"
#include "tests/client/engine_cache.h"
#include "tests/client/example_text.h"
#include "tests/client/fake_pool.h"
#include "tests/support/daemon_process.h"

namespace {

using kvd::testing::DaemonProcess;
using kvd::testing::ExampleOf;
using kvd::testing::SequenceData;

constexpr int kPages = 70;    // of the prompt: three stripes
constexpr int kTail = 5;      // tokens of the prompt after its last page
constexpr int kDecoded = 40;  // tokens that may be decoded
constexpr double kTolerance = 1e-4;

// What an engine has: tokens, its KV cache of the prompt, and one layer's queries, keys and values
// of the next token.
class Engine {
 public:
  Engine() : cache_(data_), tokens_(static_cast<size_t>(kPages * 16 + kTail)) {
    std::iota(tokens_.begin(), tokens_.end(), 7u);
  }
  const kvd::KvGeometry& geometry() const { return data_.geometry; }
  int num_layers() const { return geometry().num_layers; }
  const std::vector<uint32_t>& tokens() const { return tokens_; }
  const std::vector<kvd::EngineKv>& layers() const { return cache_.layers(); }
  void Recompute(const std::vector<int>& pages) {
    num_recomputed_ += static_cast<int>(pages.size());
  }
  kvd::StepInput Project(int layer, int64_t token) {
    q_ = kvd::testing::RandomKv(int64_t{geometry().num_q_heads} * geometry().head_dim,
                                geometry().dtype, 2.0f, static_cast<uint64_t>(token * 100 + layer));
    k_ = data_.Rows(data_.keys, layer, token);
    v_ = data_.Rows(data_.values, layer, token);
    layer_ = layer;
    token_ = token;
    o_.assign(q_.size(), 0);
    lse_.assign(static_cast<size_t>(geometry().num_q_heads), 0);
    return {q_.data(), k_.data(), v_.data()};
  }
  kvd::StepOutput Output() { return {o_.data(), lse_.data()}; }
  void UseOutput(const kvd::LayerResult& result) {
    bytes_fetched_ += result.bytes_fetched;
    for (int h = 0; h < geometry().num_q_heads; ++h) {
      const int d = geometry().head_dim;
      const auto truth =
          data_.Attend(layer_, h, q_.data() + h * d, std::vector<int>{}, 0, token_ + 1);
      for (int i = 0; i < d; ++i) {
        worst_ = std::max(
            worst_, std::abs(truth.o[static_cast<size_t>(i)] - o_[static_cast<size_t>(h * d + i)]));
      }
    }
  }

  // For the test: since the last call.
  double TakeWorst() { return std::exchange(worst_, 0.0); }
  int64_t TakeBytesFetched() { return std::exchange(bytes_fetched_, 0); }
  int num_recomputed() const { return num_recomputed_; }

 private:
  const SequenceData data_ =
      SequenceData::Random(kvd::testing::SmallGeometry(), kPages * 16 + kTail + kDecoded, 1);
  const kvd::testing::EngineCache cache_;
  std::vector<uint32_t> tokens_;
  std::vector<uint16_t> q_, k_, v_;
  std::vector<float> o_, lse_;
  int layer_ = 0;
  int64_t token_ = 0;
  double worst_ = 0;
  int64_t bytes_fetched_ = 0;
  int num_recomputed_ = 0;
};

// [connect]
absl::StatusOr<std::unique_ptr<kvd::KvClient>> Connect(const std::string& members_file,
                                                       const Engine& engine) {
  kvd::ClientOptions options;
  options.members_file = members_file;  // or daemons, or members_dns
  options.allow_partial = true;         // start although a daemon is down
  options.tenant = "test";              // with certificates (options.tls) leave it empty
  options.model = "model";
  options.geometry = engine.geometry();
  options.weights_id = "weights";
  options.rope = "theta=10000";
  options.required_path = kvd::PathKind::kUcx;  // refuse anything slower
  options.client_name = "worker-0";             // as locksctl sessions shows it
  options.on_event = [](const kvd::ClientEvent& event) {
    std::clog << kvd::EventName(event.kind) << " " << event.daemon << " " << event.detail << "\n";
  };
  return kvd::KvClient::Make(std::move(options));
}
// [/connect]

// [open]
absl::StatusOr<std::unique_ptr<kvd::Sequence>> PutAndOpen(kvd::KvClient& client,
                                                          const Engine& engine) {
  const std::vector<kvd::PageKey> keys = client.PageKeys(engine.tokens());
  const auto put = client.Put(
      {.keys = keys, .num_pages = static_cast<int>(keys.size()), .layers = engine.layers()});
  if (!put.ok()) return put.status();
  if (put->num_failed > 0) std::clog << put->num_failed << ": " << put->first_failure << "\n";

  kvd::SequenceOptions options;
  options.max_tokens = static_cast<int64_t>(engine.tokens().size()) + 1000;
  options.step.budget = 128;  // pages a layer and KV head
  options.step.loss = kvd::LossPolicy::kRecompute;
  options.step.fetch_timeout = absl::Seconds(1);
  options.step.failover_after = absl::Milliseconds(200);
  auto sequence = client.OpenSequence(keys, options);
  if (!sequence.ok()) return sequence.status();
  // What is not in the pool stays here: the prompt's last tokens, and all after a page that failed.
  const int64_t done = (*sequence)->num_tokens();
  const int rest = static_cast<int>(static_cast<int64_t>(engine.tokens().size()) - done);
  const absl::Status appended = (*sequence)->AppendTail(engine.layers(), done, rest);
  if (!appended.ok()) return appended;
  return sequence;  // it has leases of its own; those of `put` end here
}
// [/open]

// [step]
absl::Status DecodeToken(kvd::Sequence& sequence, Engine& engine) {
  absl::Status status;
  const int64_t token = sequence.num_tokens();
  for (int layer = 0; layer < engine.num_layers(); ++layer) {
    const kvd::StepInput input = engine.Project(layer, token);  // queries, the token's k and v
    status.Update(sequence.Run(layer, input, engine.Output()));
    if (!status.ok() && !absl::IsUnavailable(status)) return status;
    engine.UseOutput(sequence.result());
  }
  return status;
}
// [/step]

// [loss]
absl::Status DecodeOrRecompute(kvd::KvClient& client, kvd::Sequence& sequence, Engine& engine) {
  const absl::Status decoded = DecodeToken(sequence, engine);
  const std::vector<int> missing = sequence.MissingPages();
  if (!absl::IsUnavailable(decoded) || missing.empty()) return decoded;
  engine.Recompute(missing);
  std::vector<kvd::PageKey> keys;  // of all pages before, since placement goes by stripes
  for (int page = 0; page <= missing.back(); ++page) keys.push_back(sequence.key(page));
  const auto put = client.Put(
      {.keys = keys, .num_pages = static_cast<int>(keys.size()), .layers = engine.layers()});
  if (!put.ok()) return put.status();
  const auto repaired = sequence.Repair(missing);
  if (!repaired.ok()) return repaired.status();
  return repaired->still_missing.empty() ? absl::OkStatus() : decoded;
}
// [/loss]

// [prefix]
// Bytes of the longest resident prefix, for an engine that attends by itself.
absl::StatusOr<int> FetchPrefix(kvd::KvClient& client, const Engine& engine) {
  const auto fetched = client.FetchPages(client.PageKeys(engine.tokens()));
  if (!fetched.ok()) return fetched.status();
  // fetched->units: [num_pages][layers][heads] units of [K: B x D][V: B x D]
  return fetched->num_pages;
}
// [/prefix]

// [metrics]
// The answer of the engine's metrics endpoint: its own figures, then the client's.
std::string Metrics(const kvd::KvClient& client, const std::string& own) {
  return own + client.MetricsText();
}
// [/metrics]

class GuideExampleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(kvd::testing::HaveDaemonBinary()) << "build locks-kvd first";
    for (int d = 0; d < 2; ++d) {
      kvd::testing::DaemonSpec spec;
      spec.geometry = engine_.geometry();
      auto dir = std::make_unique<kvd::testing::TempDir>();
      auto config = kvd::testing::MakeConfig(spec, dir->path());
      config.mutable_cluster()->set_name(absl::StrCat("kv-", d));
      config.mutable_cluster()->set_members_file(members_file());
      config.mutable_cluster()->set_poll_ms(100);
      config.mutable_cluster()->set_replicas(2);
      auto daemon = DaemonProcess::Start(std::move(dir), config);
      ASSERT_TRUE(daemon.ok()) << daemon.status();
      daemons_.push_back(*std::move(daemon));
    }
    std::ofstream(members_file() + ".new")
        << absl::StrCat("members { name: \"kv-0\" address: \"", daemons_[0]->address(), "\" }\n",
                        "members { name: \"kv-1\" address: \"", daemons_[1]->address(), "\" }\n");
    std::filesystem::rename(members_file() + ".new", members_file());
    auto client = Connect(members_file(), engine_);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }
  std::string members_file() const { return dir_.path() + "/members"; }
  static bool WaitFor(const std::function<bool()>& condition) {
    for (int i = 0; i < 1500; ++i) {
      if (condition()) return true;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }
  // Of the only daemon that is attached; empty if there is none, or more.
  std::string AttachedIncarnation() const {
    std::vector<std::string> attached;
    for (const kvd::DaemonView& daemon : client_->Daemons()) {
      if (daemon.attached) attached.push_back(daemon.incarnation);
    }
    return attached.size() == 1 ? attached[0] : "";
  }
  int PagesAt(size_t daemon) const {
    const auto stub = locks_kvd::v1::Pool::NewStub(
        grpc::CreateChannel(daemons_[daemon]->address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    locks_kvd::v1::StatsReply reply;
    if (!stub->Stats(&context, {}, &reply).ok()) return -1;
    return static_cast<int>(reply.arenas(0).slots_sealed());
  }

  Engine engine_;
  kvd::testing::TempDir dir_;
  std::vector<std::unique_ptr<DaemonProcess>> daemons_;
  std::unique_ptr<kvd::KvClient> client_;
};

TEST_F(GuideExampleTest, AWorkerDecodesThroughTheDeathOfOneDaemonAndOfBoth) {
  {
    auto first = PutAndOpen(*client_, engine_);
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_EQ((*first)->num_open_pages(), kPages);
    EXPECT_EQ((*first)->num_tokens(), kPages * 16 + kTail);
    ASSERT_TRUE(DecodeToken(**first, engine_).ok());
    EXPECT_LT(engine_.TakeWorst(), kTolerance);
    EXPECT_GT(engine_.TakeBytesFetched(), 0);
  }
  // Once the copies are there, a sequence that is opened holds each page at both.
  ASSERT_TRUE(WaitFor([&] { return PagesAt(0) == kPages && PagesAt(1) == kPages; }));
  auto opened = PutAndOpen(*client_, engine_);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::unique_ptr<kvd::Sequence> sequence = *std::move(opened);

  daemons_[0]->Kill();
  const absl::Status survived = DecodeToken(*sequence, engine_);
  EXPECT_TRUE(survived.ok()) << survived;
  EXPECT_LT(engine_.TakeWorst(), kTolerance);
  EXPECT_EQ(engine_.num_recomputed(), 0);

  ASSERT_TRUE(WaitFor([&] { return !AttachedIncarnation().empty(); }));
  const std::string before = AttachedIncarnation();
  daemons_[1]->Kill();
  ASSERT_TRUE(daemons_[1]->Restart().ok());
  ASSERT_TRUE(
      WaitFor([&] { return !AttachedIncarnation().empty() && AttachedIncarnation() != before; }));
  absl::Status status = DecodeOrRecompute(*client_, *sequence, engine_);
  EXPECT_TRUE(status.ok()) << status;
  engine_.TakeWorst();  // that token was made without the pages
  EXPECT_EQ(engine_.num_recomputed(), kPages);
  status = DecodeToken(*sequence, engine_);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_LT(engine_.TakeWorst(), kTolerance);
  EXPECT_EQ(*FetchPrefix(*client_, engine_), kPages);
  EXPECT_THAT(Metrics(*client_, "own 1\n"),
              testing::AllOf(testing::StartsWith("own 1\n"),
                             testing::HasSubstr("locks_kv_client_loss_actions_total")));
}

// Formulas of the operator's guide, section 2.
TEST_F(GuideExampleTest, ASequenceTakesTheMemoryThatTheOperatorsGuideSays) {
  ASSERT_TRUE(PutAndOpen(*client_, engine_).ok());
  const auto sequence =
      client_->OpenSequence(client_->PageKeys(engine_.tokens()),
                            {.max_tokens = 2001, .step = {.budget = 16, .cache_ratio = 3}});
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  const size_t units_per_page = 2 * 2;
  const size_t unit = 2 * 16 * 64 * 2;
  const size_t record = kvd::MakeSummaryLayout(engine_.geometry()).record_bytes();
  EXPECT_EQ((*sequence)->mirror_bytes(), 126 * units_per_page * record);  // ceil(2001 / 16)
  EXPECT_EQ((*sequence)->cache_bytes(), 3 * 16 * units_per_page * unit);
}

TEST(GuideTextTest, TheExamplesAreTheGuidesText) {
  const std::string guide = KVD_SOURCE_DIR "/deploy/docs/client-guide.md";
  const std::vector<std::string> names = {"connect", "open", "step", "loss", "prefix", "metrics"};
  for (const std::string& name : names) {
    const std::string code = ExampleOf(KVD_SOURCE_DIR "/tests/client/guide_example_test.cc",
                                       "// [" + name + "]", "// [/" + name + "]");
    EXPECT_FALSE(code.empty()) << name;
    EXPECT_EQ(code, ExampleOf(guide, "```cpp " + name, "```"));
  }
  std::ifstream file(guide);
  std::stringstream text;
  text << file.rdbuf();
  size_t count = 0;
  for (size_t at = text.str().find("```cpp"); at != std::string::npos;
       at = text.str().find("```cpp", at + 1))
    ++count;
  EXPECT_EQ(count, names.size()) << "every example of the guide is compiled";
}

}  // namespace
