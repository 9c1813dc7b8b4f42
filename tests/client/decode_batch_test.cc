// Goal: the step on a GPU gives what the step on the host gives, layer by layer, for batches whose
// sequences join, leave, grow and lose pages; captured in a graph and host-driven. Method: the same
// data, options and queries through both; the host's step is itself tested against dense attention
// in double precision (decode_step_test.cc).

#include "client/decode_batch.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "client/decode_step.h"
#include "tests/client/gpu_pool.h"
#include "tests/support/gpu.h"

namespace kvd::testing {
namespace {

constexpr double kTolerance = 2e-4;

// One sequence on both sides.
struct Pair {
  std::unique_ptr<FakeSequence> host;
  std::unique_ptr<DecodeStep> step;
  std::unique_ptr<GpuSequence> gpu;
  uint32_t first_slot = 0;
  int row = -1;
  std::vector<uint16_t> q, k, v;  // of the layer that is run
  std::vector<float> o, lse;      // of the host
  double unread = 0, lost = 0;    // of the host's last step, the mean over layers and query heads
};

class DecodeBatchTest : public ::testing::TestWithParam<BatchMode> {
 protected:
  void SetUp() override {
    if (const std::string reason = WhyNoGpu(); !reason.empty()) GTEST_SKIP() << reason;
    stream_.emplace();
    geometry_ = SmallGeometry();
    geometry_.num_layers = 3;
  }

  void Plan(const StepOptions& options, int max_sequences, int max_pages) {
    WorkerShape shape = *WorkerShape::Make(geometry_, {});
    shape.place = OnGpu(0);
    options_ = options;
    options_.scan = options.scan == ScanMode::kAuto ? ScanMode::kFull : options.scan;
    batch_ = OrDie(DecodeBatch::Plan(
        shape,
        {.max_sequences = max_sequences,
         .max_tokens = int64_t{max_pages + FakeSequence::kSpareCapacity} * geometry_.page_tokens,
         .mode = GetParam(),
         .step = options_}));
    arena_ = std::make_unique<GpuArena>(geometry_, 600);
    source_ = arena_->Attach();
    const auto n = static_cast<size_t>(max_sequences);
    const auto q_values = n * static_cast<size_t>(geometry_.num_q_heads * geometry_.head_dim);
    const auto kv_values = n * static_cast<size_t>(geometry_.num_kv_heads * geometry_.head_dim);
    for (int layer = 0; layer < geometry_.num_layers; ++layer) {
      q_.emplace_back(q_values);
      k_.emplace_back(kv_values);
      v_.emplace_back(kv_values);
      o_.emplace_back(q_values);
      lse_.emplace_back(n * static_cast<size_t>(geometry_.num_q_heads));
      for (auto* array : {&q_.back(), &k_.back(), &v_.back()})
        array->Poison(0xFF);  // padding may hold NaN
      o_.back().Poison();
    }
  }

  Pair& Open(int num_pages, uint64_t seed) {
    const int64_t tokens =
        int64_t{num_pages + FakeSequence::kSpareCapacity} * geometry_.page_tokens;
    auto pair = std::make_unique<Pair>();
    pair->host = std::make_unique<FakeSequence>(SequenceData::Random(geometry_, tokens, seed),
                                                num_pages, options_, 1);
    StepOptions host_options = options_;
    host_options.loss = LossPolicy::kGoOn;
    pair->step = OrDie(DecodeStep::Plan(pair->host->pages.get(), host_options, &kNoModel));
    pair->first_slot = next_slot_;
    pair->gpu = std::make_unique<GpuSequence>(pair->host->data, num_pages, options_, arena_.get(),
                                              next_slot_, source_);
    next_slot_ += static_cast<uint32_t>(num_pages);
    pair->row = OrDie(batch_->Join(pair->gpu->pages.get(), nullptr));
    pairs_.push_back(std::move(pair));
    return *pairs_.back();
  }

  // The inputs of one layer of every sequence, in their rows.
  void SetInputs(int layer) {
    const auto l = static_cast<size_t>(layer);
    for (auto& pair : pairs_) {
      const SequenceData& data = pair->host->data;
      const int64_t token = pair->host->pages->num_tokens();
      pair->q =
          RandomKv(int64_t{geometry_.num_q_heads} * geometry_.head_dim, geometry_.dtype, 2.0f,
                   static_cast<uint64_t>(1000 + token * 10 + layer) + 7777 * pair->first_slot);
      pair->k = data.Rows(data.keys, layer, token);
      pair->v = data.Rows(data.values, layer, token);
      const auto upload = [&](DeviceArray<uint16_t>& to, const std::vector<uint16_t>& from) {
        KVD_CUDA_OK(cudaMemcpy(to.data() + static_cast<size_t>(pair->row) * from.size(),
                               from.data(), from.size() * 2, cudaMemcpyHostToDevice));
      };
      upload(q_[l], pair->q);
      upload(k_[l], pair->k);
      upload(v_[l], pair->v);
    }
  }

  absl::Status RunLayers(cudaStream_t stream) {
    for (size_t l = 0; l < q_.size(); ++l) {
      const absl::Status run =
          batch_->Run(static_cast<int>(l), {q_[l].data(), k_[l].data(), v_[l].data()},
                      {o_[l].data(), lse_[l].data()}, stream);
      if (!run.ok()) return run;
    }
    return absl::OkStatus();
  }

  // One token of every sequence on both sides. Returns EndStep's status.
  absl::Status Step() {
    std::vector<std::vector<std::vector<float>>> want_o, want_lse;  // [L][pair]
    const auto layers = static_cast<int>(q_.size());
    if (!std::exchange(begun_, false)) CheckOk(batch_->BeginStep(stream_->get()));
    for (auto& pair : pairs_) pair->unread = pair->lost = 0;
    for (int layer = 0; layer < layers; ++layer) {
      SetInputs(layer);
      want_o.emplace_back();
      want_lse.emplace_back();
      for (auto& pair : pairs_) {
        pair->o.resize(pair->q.size());
        pair->lse.resize(static_cast<size_t>(geometry_.num_q_heads));
        CheckOk(pair->step->Run(layer, {pair->q.data(), pair->k.data(), pair->v.data()},
                                {pair->o.data(), pair->lse.data()}));
        AddMass(*pair);
        want_o.back().push_back(pair->o);
        want_lse.back().push_back(pair->lse);
      }
    }
    if (GetParam() == BatchMode::kCaptured) {
      if (graph_ == nullptr) Capture();
      KVD_CUDA_OK(cudaGraphLaunch(graph_.get(), stream_->get()));
    } else {
      CheckOk(RunLayers(stream_->get()));
    }
    const absl::Status ended = batch_->EndStep(stream_->get());
    for (int layer = 0; layer < layers; ++layer)
      Compare(layer, want_o[static_cast<size_t>(layer)], want_lse[static_cast<size_t>(layer)]);
    return ended;
  }

  void AddMass(Pair& pair) const {
    const double parts = geometry_.num_q_heads * geometry_.num_layers;
    for (const float unread : pair.step->result().unread_mass) pair.unread += unread / parts;
    for (const float lost : pair.step->result().lost_mass) pair.lost += lost / parts;
  }

  // The report of the last step. The next one is begun.
  const BatchReport& TakeReport() {
    KVD_CUDA_OK(cudaDeviceSynchronize());
    CheckOk(batch_->BeginStep(stream_->get()));
    begun_ = true;
    return batch_->report();
  }
  void ExpectMassOfHost() {
    const BatchReport& report = TakeReport();
    ASSERT_EQ(report.mass.size(), static_cast<size_t>(batch_->options().max_sequences));
    for (const auto& pair : pairs_) {
      const RowMass& mass = report.mass[static_cast<size_t>(pair->row)];
      EXPECT_NEAR(mass.unread, pair->unread, kTolerance) << "row " << pair->row;
      EXPECT_NEAR(mass.lost, pair->lost, kTolerance) << "row " << pair->row;
    }
  }
  void LosePages(Pair& pair, const std::vector<int>& pages) {
    for (const int page : pages) {
      const uint32_t slot = pair.first_slot + static_cast<uint32_t>(page);
      arena_->SetHeader(slot, 3 + 2 * uint64_t{slot});
      pair.host->fetchers[0]->missing_slots.insert(static_cast<uint32_t>(page));
    }
  }

  // One bit of the last byte of each of the page's units.
  void FlipLastBits(const Pair& pair, int page) {
    for (int layer = 0; layer < geometry_.num_layers; ++layer) {
      for (int h = 0; h < geometry_.num_kv_heads; ++h) {
        uint8_t* last =
            arena_->memory().unit(pair.first_slot + static_cast<uint32_t>(page), layer, h) +
            pair.gpu->shape.unit_bytes() - 1;
        uint8_t byte = 0;
        CheckOk(CopyBytes(OnGpu(0), &byte, last, 1));
        byte ^= 4;
        CheckOk(CopyBytes(OnGpu(0), last, &byte, 1));
      }
    }
  }

  void Capture() {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    KVD_CUDA_OK(cudaStreamBeginCapture(stream_->get(), cudaStreamCaptureModeThreadLocal));
    CheckOk(RunLayers(stream_->get()));
    KVD_CUDA_OK(cudaStreamEndCapture(stream_->get(), &graph));
    KVD_CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
    KVD_CUDA_OK(cudaGraphDestroy(graph));
    graph_ = std::shared_ptr<CUgraphExec_st>(executable,
                                             [](cudaGraphExec_t e) { cudaGraphExecDestroy(e); });
  }

  void Compare(int layer, const std::vector<std::vector<float>>& want_o,
               const std::vector<std::vector<float>>& want_lse) {
    const auto l = static_cast<size_t>(layer);
    const std::vector<float> o = o_[l].Download(), lse = lse_[l].Download();
    for (size_t p = 0; p < pairs_.size(); ++p) {
      const size_t q_heads = want_lse[p].size(), values = want_o[p].size(),
                   row = static_cast<size_t>(pairs_[p]->row);
      double worst = 0;
      for (size_t i = 0; i < values; ++i)
        worst = std::max(worst, double{std::abs(o[row * values + i] - want_o[p][i])});
      for (size_t i = 0; i < q_heads; ++i)
        worst = std::max(worst, double{std::abs(lse[row * q_heads + i] - want_lse[p][i])});
      EXPECT_FALSE(std::isnan(o[row * values]));
      EXPECT_LT(worst, kTolerance) << "layer " << layer << " sequence " << p << " token "
                                   << pairs_[p]->host->pages->num_tokens();
      // The comparison can fail: another sequence's answer is far away.
      if (p > 0) {
        double other = 0;
        for (size_t i = 0; i < values; ++i)
          other = std::max(other, double{std::abs(o[row * values + i] - want_o[p - 1][i])});
        EXPECT_GT(other, 10 * kTolerance);
      }
    }
  }

  static constexpr ScanModel kNoModel = {1e-6, 1e9, 1e9, 1e9};
  KvGeometry geometry_;
  StepOptions options_;
  std::unique_ptr<GpuArena> arena_;
  std::shared_ptr<PageSource> source_;
  uint32_t next_slot_ = 0;
  std::vector<std::unique_ptr<Pair>> pairs_;
  std::unique_ptr<DecodeBatch> batch_;
  std::vector<DeviceArray<uint16_t>> q_, k_, v_;
  std::vector<DeviceArray<float>> o_, lse_;
  std::optional<Stream> stream_;  // none where there is no GPU
  std::shared_ptr<CUgraphExec_st> graph_;
  bool begun_ = false;  // the next step
};

INSTANTIATE_TEST_SUITE_P(Modes, DecodeBatchTest,
                         ::testing::Values(BatchMode::kCaptured, BatchMode::kHostDriven),
                         [](const auto& mode) {
                           return mode.param == BatchMode::kCaptured ? "Captured" : "HostDriven";
                         });

TEST_P(DecodeBatchTest, ABatchOfDifferentLengthsEqualsTheHostsSteps) {
  Plan({.budget = 9, .cache_ratio = 1.5}, 4, 80);
  Open(40, 1);
  Open(7, 2);
  Open(80, 3);
  for (int t = 0; t < 40; ++t) ASSERT_TRUE(Step().ok()) << t;
  const BatchReport& report = TakeReport();
  EXPECT_GT(report.hits, 0u);
  EXPECT_EQ(report.failed, 0u);
  EXPECT_EQ(report.hits + report.misses, 3u * 2 * (9 + 9 + 5));  // 7 pages: 5 are not kept anyway
  EXPECT_TRUE(report.mass.empty());                              // nobody asked
}

TEST_P(DecodeBatchTest, SequencesJoinAndLeaveBetweenReplays) {
  Plan({.budget = 6}, 3, 30);
  Open(30, 1);
  for (int t = 0; t < 3; ++t) ASSERT_TRUE(Step().ok());
  Open(20, 2);
  Open(25, 3);
  for (int t = 0; t < 3; ++t) ASSERT_TRUE(Step().ok());
  EXPECT_EQ(batch_->Join(pairs_[0]->gpu->pages.get(), nullptr).status().code(),
            absl::StatusCode::kResourceExhausted);
  batch_->Leave(pairs_[1]->row);
  pairs_.erase(pairs_.begin() + 1);
  for (int t = 0; t < 3; ++t) ASSERT_TRUE(Step().ok());
  Open(11, 4);
  EXPECT_EQ(pairs_.back()->row, 1);
  for (int t = 0; t < 3; ++t) ASSERT_TRUE(Step().ok());
}

TEST_P(DecodeBatchTest, ProgressiveScanEqualsTheHosts) {
  Plan({.budget = 6, .scan = ScanMode::kProgressive, .num_candidates = 12}, 2, 60);
  EXPECT_EQ(batch_->scan(), ScanMode::kProgressive);
  Open(60, 1);
  Open(50, 2);
  for (int t = 0; t < 5; ++t) ASSERT_TRUE(Step().ok());
}

TEST_P(DecodeBatchTest, PagesThatAreGoneAreLeftOutAndMasked) {
  Plan({.budget = 30}, 2, 30);
  Pair& lost = Open(30, 1);
  Open(30, 2);
  LosePages(lost, {5, 17});
  (void)Step();
  KVD_CUDA_OK(cudaDeviceSynchronize());
  EXPECT_EQ(Step().code(),
            absl::StatusCode::kUnavailable);  // the figures of the first one have arrived
  EXPECT_FALSE(lost.gpu->pages->is_selectable(5));
  EXPECT_FALSE(lost.gpu->pages->is_selectable(17));
  EXPECT_EQ(lost.gpu->pages->num_missing(), 2);
  EXPECT_EQ(pairs_[1]->gpu->pages->num_missing(), 0);
  // Put again, elsewhere: selectable, and its new bytes are fetched.
  for (const int page : {5, 17}) {
    const uint32_t slot = next_slot_++;
    arena_->Seal(lost.gpu->data, lost.gpu->shape, page, slot);
    lost.gpu->pages->SetPage(page, 0, std::vector<SlotRef>{{slot, 2 + 2 * uint64_t{slot}}});
    lost.host->fetchers[0]->missing_slots.erase(static_cast<uint32_t>(page));
    lost.host->pages->SetPage(page, 0, std::vector<SlotRef>{FakeSlot(page)});
  }
  for (int t = 0; t < 3; ++t) EXPECT_TRUE(Step().ok());
}

TEST_P(DecodeBatchTest, ADamagedUnitIsFoundByItsChecksumAndLeftOut) {
  Plan({.budget = 30, .verify = VerifyPolicy::kChecksum, .loss = LossPolicy::kGoOn}, 2, 30);
  Pair& damaged = Open(30, 1);
  Open(30, 2);
  FlipLastBits(damaged, 11);
  damaged.host->fetchers[0]->corrupt_slots.insert(11);
  EXPECT_TRUE(Step().ok());            // and its result is that of the host, which finds it as well
  EXPECT_EQ(TakeReport().failed, 2u);  // both heads of the first layer; then nobody selects it
  EXPECT_FALSE(damaged.gpu->pages->is_selectable(11));
  EXPECT_EQ(damaged.gpu->pages->num_missing(), 1);
  EXPECT_EQ(pairs_[1]->gpu->pages->num_missing(), 0);
  EXPECT_TRUE(Step().ok());
}

TEST_P(DecodeBatchTest, UnreadMassEqualsTheHosts) {
  Plan({.budget = 9, .mass = MassReport::kAlways}, 3, 80);
  Open(40, 1);
  Open(7, 2);
  for (int t = 0; t < 20; ++t) ASSERT_TRUE(Step().ok());
  ExpectMassOfHost();
  EXPECT_GT(pairs_[0]->unread, .05);
  EXPECT_GT(std::abs(pairs_[0]->unread - pairs_[1]->unread),
            10 * kTolerance);  // it tells rows apart
  EXPECT_EQ(batch_->report().mass[0].lost, 0);
  EXPECT_EQ(batch_->report().mass[2].unread, 0);  // padding
}

TEST_P(DecodeBatchTest, AStepThatGoesOnSaysWhatMassIsLost) {
  Plan({.budget = 30, .loss = LossPolicy::kGoOn}, 2, 30);
  Pair& lost = Open(30, 1);
  Open(30, 2);
  ASSERT_TRUE(Step().ok());
  EXPECT_EQ(lost.lost, 0);
  // What the page cache holds stays valid; these are in it, so they are put elsewhere and are not
  // there.
  for (const int page : {5, 17, 20}) {
    lost.gpu->pages->SetPage(page, 0, std::vector<SlotRef>{{599, 12}});
    lost.host->pages->SetPage(page, 0, std::vector<SlotRef>{FakeSlot(page)});
    lost.host->fetchers[0]->missing_slots.insert(static_cast<uint32_t>(page));
  }
  for (int t = 0; t < 3; ++t) {
    EXPECT_TRUE(Step().ok());
    ExpectMassOfHost();
    EXPECT_GT(lost.lost, 10 * kTolerance);
    EXPECT_EQ(batch_->report().mass[1].lost, 0);
  }
  EXPECT_EQ(lost.gpu->pages->num_missing(), 3);
}

TEST_P(DecodeBatchTest, APagePutAgainWithOtherBytesIsNotServedFromTheCache) {
  Plan({.budget = 30, .cache_ratio = 1}, 1, 30);
  Pair& pair = Open(30, 1);
  for (int t = 0; t < 2; ++t) ASSERT_TRUE(Step().ok());
  // Page 9 becomes a copy of page 12's units, with page 9's records: attention must follow the
  // units.
  SequenceData& data = pair.host->data;
  const auto values = static_cast<size_t>(geometry_.page_tokens * geometry_.head_dim);
  for (auto* side : {&data.keys, &data.values}) {
    for (auto& rows : *side)
      std::copy_n(rows.begin() + 12 * static_cast<ptrdiff_t>(values), values,
                  rows.begin() + 9 * static_cast<ptrdiff_t>(values));
  }
  const uint32_t slot = next_slot_++;
  arena_->Seal(data, pair.gpu->shape, 9, slot);
  pair.gpu->pages->SetPage(9, 0, std::vector<SlotRef>{{slot, 2 + 2 * uint64_t{slot}}});
  pair.host->pages->SetPage(9, 0, std::vector<SlotRef>{FakeSlot(9)});
  for (int t = 0; t < 2; ++t) ASSERT_TRUE(Step().ok());
}

TEST_P(DecodeBatchTest, ALostDaemonsPagesAreMissingAndTheStepGoesOn) {
  Plan({.budget = 6}, 1, 30);
  Pair& pair = Open(30, 1);
  ASSERT_TRUE(Step().ok());
  source_->lost.store(true);
  source_->fetcher->Shutdown();
  pair.host->sources[0]->lost.store(true);
  source_.reset();
  EXPECT_EQ(Step().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pair.gpu->pages->num_missing(), 30);
  EXPECT_EQ(Step().code(), absl::StatusCode::kUnavailable);
}

TEST_P(DecodeBatchTest, WhatAGpuDoesNotDoIsRefusedByName) {
  WorkerShape shape = *WorkerShape::Make(geometry_, {});
  EXPECT_EQ(DecodeBatch::Plan(shape, {.max_tokens = 100}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  shape.place = OnGpu(0);
  const auto refused = [&](BatchOptions options) {
    const absl::Status status = DecodeBatch::Plan(shape, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_NE(refused({.max_sequences = 0, .max_tokens = 100}).find("max_sequences"),
            std::string::npos);
  EXPECT_NE(refused({.max_tokens = 0}).find("max_tokens"), std::string::npos);
  EXPECT_NE(refused({.max_tokens = 100, .step = {.dense_layers = {1}}}).find("dense_layers"),
            std::string::npos);
  EXPECT_NE(refused({.max_tokens = 100, .step = {.budget = 5000}}).find("budget"),
            std::string::npos);
}

}  // namespace
}  // namespace kvd::testing
