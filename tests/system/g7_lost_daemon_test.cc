// G7: losing a daemon never takes a worker down. One of two daemons is killed between two layers of
// a token; the worker learns which pages are gone, does what its policy says, and repairs honestly.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <set>

#include "client/kv_client.h"
#include "proto/placement.h"
#include "tests/support/path_parameter.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

class LostDaemonTest : public ::testing::TestWithParam<PathKind> {
 protected:
  static constexpr int kPages = 70;  // three stripes
  static constexpr int kSteps = 10;  // tokens of the data that steps may append

  void SetUp() override {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    DaemonSpec spec;
    spec.geometry = geometry_;
    std::vector<std::string> names;
    for (auto& daemon : daemons_) {
      auto started = DaemonProcess::Start(spec);
      ASSERT_TRUE(started.ok()) << started.status();
      daemon = *std::move(started);
      names.push_back(daemon->address());
    }
    ClientOptions options = OptionsFor(names, GetParam());
    options.on_event = [this](const ClientEvent& event) {
      if (event.kind == ClientEvent::Kind::kDaemonLost) ++num_lost_;
    };
    auto client = KvClient::Make(std::move(options));
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    MakeData(names);
    ASSERT_EQ(Put(kPages).num_failed, 0);
  }

  // A prompt whose stripes both daemons own some of; the owner of the second is to be killed.
  void MakeData(const std::vector<std::string>& names) {
    data_ = SequenceData::Random(geometry_, kPages * geometry_.page_tokens + kSteps, 1);
    for (int layer = 0; layer < geometry_.num_layers; ++layer) {
      for (int head = 0; head < geometry_.num_kv_heads; ++head) {
        const auto& k = data_.keys[data_.at(layer, head)];
        const auto& v = data_.values[data_.at(layer, head)];
        auto& at_k = k_[static_cast<size_t>(layer)];
        auto& at_v = v_[static_cast<size_t>(layer)];
        at_k.insert(at_k.end(), k.begin(), k.end());
        at_v.insert(at_v.end(), v.begin(), v.end());
      }
    }
    for (size_t i = 0; i < k_.size(); ++i) {
      layers_.push_back({reinterpret_cast<const uint8_t*>(k_[i].data()),
                         reinterpret_cast<const uint8_t*>(v_[i].data()),
                         data_.num_tokens * geometry_.head_dim * 2,
                         int64_t{geometry_.head_dim} * 2});
    }
    std::vector<uint32_t> tokens(static_cast<size_t>(kPages * geometry_.page_tokens));
    for (uint32_t prompt = 1;; ++prompt) {
      std::iota(tokens.begin(), tokens.end(), prompt * 100000);
      keys_ = client_->PageKeys(tokens);
      owners_ = PlacePages(keys_, names);
      victim_ = owners_[kPages / 2];
      if (std::count(owners_.begin(), owners_.end(), victim_) != kPages) return;
    }
  }
  PutReport Put(int num_pages) {
    auto report = client_->Put({.keys = keys_,
                                .first_page = 0,
                                .num_pages = num_pages,
                                .layers = layers_,
                                .first_token = 0});
    EXPECT_TRUE(report.ok()) << report.status();
    return *std::move(report);
  }
  std::unique_ptr<Sequence> Open(LossPolicy loss) {
    const StepOptions step = {
        .budget = 200, .loss = loss, .fetch_timeout = absl::Milliseconds(500)};
    auto sequence =
        client_->OpenSequence(keys_, {.max_tokens = data_.num_tokens + 100, .step = step});
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return sequence.ok() ? *std::move(sequence) : nullptr;
  }

  // One layer of the next token. `worst`: against exact attention over every page but `without`.
  absl::Status RunLayer(Sequence& sequence, int layer, const std::set<int>& without,
                        double* worst) {
    const auto& g = geometry_;
    const int64_t token = layer == 0 ? sequence.num_tokens() : token_;
    token_ = token;
    const auto q = RandomKv(int64_t{g.num_q_heads} * g.head_dim, g.dtype, 2.0f,
                            static_cast<uint64_t>(token * 100 + layer));
    const auto k = data_.Rows(data_.keys, layer, token);
    const auto v = data_.Rows(data_.values, layer, token);
    std::vector<float> o(q.size());
    std::vector<float> lse(static_cast<size_t>(g.num_q_heads));
    absl::Status status =
        sequence.Run(layer, {q.data(), k.data(), v.data()}, {o.data(), lse.data()});
    std::vector<int> all(kPages);
    std::iota(all.begin(), all.end(), 0);
    std::vector<int> pages;
    for (const int page : all) {
      if (without.count(page) == 0) pages.push_back(page);
    }
    exact_lost_.clear();
    for (int h = 0; h < g.num_q_heads; ++h) {
      const auto truth = data_.Attend(layer, h, q.data() + h * g.head_dim, pages,
                                      kPages * g.page_tokens, token + 1);
      *worst = std::max(*worst, std::abs(truth.lse - lse[static_cast<size_t>(h)]));
      const auto whole =
          data_.Attend(layer, h, q.data() + h * g.head_dim, all, kPages * g.page_tokens, token + 1);
      exact_lost_.push_back(1 - std::exp(truth.lse - whole.lse));
      for (int i = 0; i < g.head_dim; ++i) {
        *worst = std::max(*worst, std::abs(truth.o[static_cast<size_t>(i)] -
                                           o[static_cast<size_t>(h * g.head_dim + i)]));
      }
    }
    return status;
  }
  absl::Status RunToken(Sequence& sequence, const std::set<int>& without, double* worst) {
    absl::Status status;
    for (int layer = 0; layer < geometry_.num_layers; ++layer) {
      status.Update(RunLayer(sequence, layer, without, worst));
    }
    return status;
  }

  // Decodes a token, kills the owner between the layers of the next, ends that token.
  void KillInTheMiddle(Sequence& sequence) {
    double worst = 0;
    const absl::Status before = RunToken(sequence, {}, &worst);
    ASSERT_TRUE(before.ok()) << before;
    ASSERT_LT(worst, kTolerance);
    ASSERT_TRUE(RunLayer(sequence, 0, {}, &worst).ok());
    daemons_[static_cast<size_t>(victim_)]->Kill();
    // What this layer answers depends on what had been fetched; that it returns is the point.
    const absl::Status middle = RunLayer(sequence, 1, {}, &worst);
    EXPECT_TRUE(middle.ok() || middle.code() == absl::StatusCode::kUnavailable ||
                middle.code() == absl::StatusCode::kAborted)
        << middle;
    ASSERT_TRUE(WaitFor([&] { return num_lost_ == 1; }));
  }
  // The victim's pages, and those of them that the sequence holds no copy of (sink and window).
  std::vector<int> VictimsPages() const {
    std::vector<int> pages;
    for (int page = 0; page < kPages; ++page) {
      if (owners_[static_cast<size_t>(page)] == victim_) pages.push_back(page);
    }
    return pages;
  }
  std::set<int> Unattended() const {
    std::set<int> pages;
    for (const int page : VictimsPages()) {
      if (page != 0 && page != kPages - 1) pages.insert(page);
    }
    return pages;
  }
  void ExpectLostMass(const Sequence& sequence) {
    const auto lost = sequence.result().lost_mass;
    ASSERT_EQ(lost.size(), static_cast<size_t>(geometry_.num_q_heads));
    // The estimate comes from the records. These keys are independent noise, the worst that a
    // record of few modes can be asked to keep: it misses part of the energy, and the mass of
    // unread pages is estimated low.
    for (size_t h = 0; h < lost.size(); ++h) {
      EXPECT_GT(lost[h], exact_lost_[h] / 2) << "query head " << h;
      EXPECT_LT(lost[h], exact_lost_[h] * 1.25) << "query head " << h;
    }
  }

  static constexpr double kTolerance = 1e-4;
  const KvGeometry geometry_ = SmallGeometry();
  std::array<std::unique_ptr<DaemonProcess>, 2> daemons_;
  std::atomic<int> num_lost_{0};
  std::unique_ptr<KvClient> client_;
  SequenceData data_;
  std::array<std::vector<uint16_t>, 2> k_;  // [layers] of [heads][T, D], as an engine holds them
  std::array<std::vector<uint16_t>, 2> v_;
  std::vector<EngineKv> layers_;
  std::vector<PageKey> keys_;
  std::vector<int> owners_;
  int victim_ = 0;
  int64_t token_ = 0;
  // [query heads] of the layer run last: mass on the pages it was to do without
  std::vector<double> exact_lost_;
};

TEST_P(LostDaemonTest, RecomputeReportsThePagesAndRepairsExactlyWhatWasPutAgain) {
  auto sequence = Open(LossPolicy::kRecompute);
  ASSERT_NE(sequence, nullptr);
  ASSERT_NO_FATAL_FAILURE(KillInTheMiddle(*sequence));
  double worst = 0;
  const absl::Status lost = RunToken(*sequence, Unattended(), &worst);
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable) << lost;
  EXPECT_LT(worst, kTolerance);  // valid over the rest
  ExpectLostMass(*sequence);
  const std::vector<int> missing = sequence->MissingPages();
  EXPECT_EQ(missing, VictimsPages());
  EXPECT_EQ(sequence->result().num_missing_pages, static_cast<int>(missing.size()));

  // Only the pages before `cut` are put again: the rest must be reported, not claimed.
  const size_t half = missing.size() / 2;
  const int cut = missing[half];
  EXPECT_EQ(Put(cut).num_failed, 0);
  const auto partial = sequence->Repair(missing);
  ASSERT_TRUE(partial.ok()) << partial.status();
  EXPECT_EQ(partial->num_repaired, static_cast<int>(half));
  EXPECT_EQ(partial->still_missing,
            std::vector<int>(missing.begin() + static_cast<int>(half), missing.end()));
  EXPECT_EQ(sequence->MissingPages(), partial->still_missing);

  EXPECT_EQ(Put(kPages).num_failed, 0);
  const auto whole = sequence->Repair(sequence->MissingPages());
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_TRUE(whole->still_missing.empty());
  worst = 0;
  const absl::Status healed = RunToken(*sequence, {}, &worst);
  EXPECT_TRUE(healed.ok()) << healed;
  EXPECT_LT(worst, kTolerance);
}

TEST_P(LostDaemonTest, GoOnSucceedsOverTheRestAndReportsTheLostMass) {
  auto sequence = Open(LossPolicy::kGoOn);
  ASSERT_NE(sequence, nullptr);
  ASSERT_NO_FATAL_FAILURE(KillInTheMiddle(*sequence));
  for (int t = 0; t < 3; ++t) {
    double worst = 0;
    const absl::Status status = RunToken(*sequence, Unattended(), &worst);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_LT(worst, kTolerance);
    ExpectLostMass(*sequence);
  }
  EXPECT_EQ(sequence->MissingPages(), VictimsPages());
}

TEST_P(LostDaemonTest, FailAbortsTheSequenceAndTheWorkerOpensAnother) {
  auto sequence = Open(LossPolicy::kFail);
  ASSERT_NE(sequence, nullptr);
  ASSERT_NO_FATAL_FAILURE(KillInTheMiddle(*sequence));
  double worst = 0;
  const absl::Status status = RunLayer(*sequence, 0, {}, &worst);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  sequence.reset();

  EXPECT_EQ(Put(kPages).num_failed, 0);
  auto another = Open(LossPolicy::kFail);
  ASSERT_NE(another, nullptr);
  EXPECT_EQ(another->num_open_pages(), kPages);
  worst = 0;
  const absl::Status healed = RunToken(*another, {}, &worst);
  EXPECT_TRUE(healed.ok()) << healed;
  EXPECT_LT(worst, kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Paths, LostDaemonTest,
                         ::testing::Values(PathKind::kShared, PathKind::kUcx), PathParameterName);

}  // namespace
}  // namespace kvd::testing
