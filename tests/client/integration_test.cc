// The library against real daemons, on the shared and the ucx path: what was put comes back bit by
// bit, decoding equals dense attention in double precision, tails are sealed, and a lost daemon
// costs pages, not the worker.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <numeric>

#include "absl/time/clock.h"
#include "client/kv_client.h"
#include "proto/placement.h"
#include "tests/client/engine_cache.h"
#include "tests/client/fake_pool.h"
#include "tests/support/daemon_process.h"
#include "tests/support/path_parameter.h"

namespace kvd::testing {
namespace {

class IntegrationTest : public ::testing::TestWithParam<PathKind> {
 protected:
  static constexpr int kPages = 70;    // three stripes
  static constexpr int kTail = 5;      // tokens of the prompt after its last page
  static constexpr int kDecoded = 60;  // tokens of the data that steps may append

  void SetUp() override { ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first"; }

  void StartDaemons(int count, uint64_t arena_bytes = uint64_t{64} << 20) {
    DaemonSpec spec;
    spec.geometry = geometry_;
    spec.arena_bytes = arena_bytes;
    for (int i = 0; i < count; ++i) {
      auto daemon = DaemonProcess::Start(spec);
      ASSERT_TRUE(daemon.ok()) << daemon.status();
      daemons_.push_back(*std::move(daemon));
    }
  }

  ClientOptions Options() {
    ClientOptions options;
    for (const auto& daemon : daemons_) options.daemons.push_back(daemon->address());
    options.tenant = "test";
    options.model = "model";
    options.geometry = geometry_;
    options.weights_id = "weights";
    options.rope = "theta=10000";
    options.required_path = GetParam();
    options.best_path = GetParam();
    options.on_event = [this](const ClientEvent& event) {
      std::lock_guard<std::mutex> lock(mutex_);
      events_.push_back(event.kind);
    };
    return options;
  }
  void Connect() {
    auto client = KvClient::Make(Options());
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }
  int CountEvents(ClientEvent::Kind kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(std::count(events_.begin(), events_.end(), kind));
  }
  static bool WaitFor(const std::function<bool()>& condition) {
    for (int i = 0; i < 1500; ++i) {
      if (condition()) return true;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }

  void MakeData(uint64_t seed = 1) {
    const int64_t tokens = int64_t{kPages} * geometry_.page_tokens + kTail + kDecoded;
    data_ = SequenceData::Random(geometry_, tokens, seed);
    engine_ = std::make_unique<EngineCache>(data_);
    tokens_.resize(static_cast<size_t>(kPages * geometry_.page_tokens));
    std::iota(tokens_.begin(), tokens_.end(), static_cast<uint32_t>(seed * 100000));
    keys_ = client_->PageKeys(tokens_);
  }
  // Data whose stripes both daemons own some of.
  void MakeSpreadData() {
    std::vector<std::string> names;
    for (const auto& daemon : daemons_) names.push_back(daemon->address());
    for (uint64_t seed = 1;; ++seed) {
      MakeData(seed);
      const std::vector<int> owners = PlacePages(keys_, names);
      if (std::count(owners.begin(), owners.end(), owners[0]) == kPages) continue;
      owner_of_first_ = owners[0];
      return;
    }
  }
  PutReport Put(int first = 0, int count = kPages) {
    auto report = client_->Put({.keys = keys_,
                                .first_page = first,
                                .num_pages = count,
                                .layers = engine_->layers(),
                                .first_token = int64_t{first} * geometry_.page_tokens});
    EXPECT_TRUE(report.ok()) << report.status();
    return *std::move(report);
  }
  std::unique_ptr<Sequence> Open(StepOptions step = {.budget = 200}) {
    auto sequence =
        client_->OpenSequence(keys_, {.max_tokens = data_.num_tokens + 100, .step = step});
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    if (!sequence.ok()) return nullptr;
    const int64_t from = int64_t{(*sequence)->num_open_pages()} * geometry_.page_tokens;
    if ((*sequence)->num_open_pages() == kPages) {
      EXPECT_TRUE((*sequence)->AppendTail(engine_->layers(), from, kTail).ok());
    }
    return *std::move(sequence);
  }

  absl::Status DecodeToken(Sequence& sequence, double* worst) {
    return testing::DecodeToken(sequence, data_, worst);
  }

  static constexpr double kTolerance = 1e-4;
  KvGeometry geometry_ = SmallGeometry();
  std::vector<std::unique_ptr<DaemonProcess>> daemons_;
  std::mutex mutex_;
  std::vector<ClientEvent::Kind> events_;
  std::unique_ptr<KvClient> client_;
  SequenceData data_;
  std::unique_ptr<EngineCache> engine_;
  std::vector<uint32_t> tokens_;
  std::vector<PageKey> keys_;
  int owner_of_first_ = 0;
};

TEST_P(IntegrationTest, WhatWasPutComesBackBitByBitAndASecondPutIsHits) {
  StartDaemons(2);
  Connect();
  MakeData();
  const PutReport first = Put();
  EXPECT_EQ(first.num_new, kPages) << first.first_failure;
  EXPECT_EQ(Put().num_hit, kPages);
  const auto fetched = client_->FetchPages(keys_);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  ASSERT_EQ(fetched->num_pages, kPages);
  const WorkerShape& shape = client_->shape();
  for (int page = 0; page < kPages; ++page) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        const auto unit = data_.Unit(layer, head, page);
        const size_t at =
            (static_cast<size_t>(page) * shape.units_per_page() + shape.unit_idx(layer, head)) *
            shape.unit_bytes();
        ASSERT_EQ(std::memcmp(unit.data(), fetched->units.data() + at, unit.size()), 0)
            << page << " " << layer << " " << head;
      }
    }
  }
  for (const DaemonView& view : client_->Daemons()) EXPECT_EQ(view.path.path, GetParam());
  // Another adapter's pages are other pages.
  EXPECT_EQ(client_->FetchPages(client_->PageKeys(tokens_, "adapter"))->num_pages, 0);
}

TEST_P(IntegrationTest, DecodingEqualsDenseAttentionAndTailPagesAreSealed) {
  StartDaemons(2);
  Connect();
  MakeData();
  ASSERT_EQ(Put().num_new, kPages);
  auto sequence = Open();
  ASSERT_NE(sequence, nullptr);
  ASSERT_EQ(sequence->num_open_pages(), kPages);
  double worst = 0;
  for (int t = 0; t < kDecoded; ++t) {
    const absl::Status status = DecodeToken(*sequence, &worst);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_LT(worst, kTolerance) << t;
  }
  EXPECT_GT(sequence->totals().hits.value(), sequence->totals().misses.value());
  // 5 + 60 tokens are four complete pages. An append of nothing adopts what the sealer has done.
  EXPECT_TRUE(WaitFor([&] {
    EXPECT_TRUE(sequence->AppendTail(engine_->layers(), 0, 0).ok());
    return sequence->num_unsealed_pages() == 0;
  }));
}

TEST_P(IntegrationTest, LostDaemonsPagesArePutAgainElsewhereAndRepaired) {
  StartDaemons(2);
  Connect();
  MakeSpreadData();
  ASSERT_EQ(Put().num_new, kPages);
  auto sequence = Open({.budget = 200, .fetch_timeout = absl::Milliseconds(500)});
  ASSERT_NE(sequence, nullptr);
  double worst = 0;
  ASSERT_TRUE(DecodeToken(*sequence, &worst).ok());
  ASSERT_LT(worst, kTolerance);

  daemons_[static_cast<size_t>(owner_of_first_)]->Kill();
  ASSERT_TRUE(WaitFor([&] { return CountEvents(ClientEvent::Kind::kDaemonLost) == 1; }));
  absl::Status status = DecodeToken(*sequence, &worst);
  const std::vector<int> missing = sequence->MissingPages();
  ASSERT_FALSE(missing.empty());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(sequence->result().num_missing_pages, static_cast<int>(missing.size()));

  auto before = sequence->Repair(missing);
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_EQ(before->num_repaired, 0);
  const PutReport again = Put();
  EXPECT_EQ(again.num_new + again.num_hit, kPages) << again.first_failure;
  const auto repaired = sequence->Repair(missing);
  ASSERT_TRUE(repaired.ok()) << repaired.status();
  EXPECT_EQ(repaired->num_repaired, static_cast<int>(missing.size()));
  worst = 0;
  status = DecodeToken(*sequence, &worst);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_LT(worst, kTolerance);
}

TEST_P(IntegrationTest, RestartedDaemonIsAStrangerWithoutOurPages) {
  StartDaemons(1);
  Connect();
  MakeData();
  ASSERT_EQ(Put().num_new, kPages);
  auto sequence = Open({.budget = 200, .loss = LossPolicy::kGoOn});
  ASSERT_NE(sequence, nullptr);
  daemons_[0]->Kill();
  ASSERT_TRUE(daemons_[0]->Restart().ok());
  ASSERT_TRUE(WaitFor([&] { return CountEvents(ClientEvent::Kind::kDaemonBack) == 1; }));
  double ignored = 0;
  EXPECT_TRUE(DecodeToken(*sequence, &ignored).ok());
  EXPECT_EQ(sequence->result().num_missing_pages, kPages);
  EXPECT_EQ(client_->FetchPages(keys_)->num_pages, 0);
  EXPECT_EQ(Put().num_new, kPages);
  EXPECT_EQ(sequence->Repair(sequence->MissingPages())->num_repaired, kPages);
}

TEST_P(IntegrationTest, FrozenDaemonIsLostWithinItsTtlAndStepsStayBounded) {
  StartDaemons(1);
  Connect();
  MakeData();
  ASSERT_EQ(Put().num_new, kPages);
  auto sequence =
      Open({.budget = 8, .loss = LossPolicy::kGoOn, .fetch_timeout = absl::Milliseconds(200)});
  ASSERT_NE(sequence, nullptr);
  daemons_[0]->Freeze();
  double ignored = 0;
  for (int t = 0; t < 3; ++t) EXPECT_TRUE(DecodeToken(*sequence, &ignored).ok());
  EXPECT_TRUE(WaitFor([&] { return CountEvents(ClientEvent::Kind::kDaemonLost) == 1; }));
  daemons_[0]->Thaw();
}

TEST_P(IntegrationTest, FullArenaRefusesTheRestOfAPut) {
  const size_t slot = MakeSlotLayout(geometry_).slot_bytes();
  StartDaemons(1, slot * 40);
  Connect();
  MakeData();
  const PutReport report = Put();
  EXPECT_GT(report.num_new, 10);
  EXPECT_GT(report.num_failed, 10);
  EXPECT_EQ(report.num_new + report.num_failed, kPages);
  EXPECT_EQ(report.first_failure.code(), absl::StatusCode::kResourceExhausted)
      << report.first_failure;
  auto sequence = Open();
  ASSERT_NE(sequence, nullptr);
  EXPECT_EQ(sequence->num_open_pages(), report.num_new);
}

TEST_P(IntegrationTest, ClosedSequenceReleasesItsLeasesOnlyWithTheLastHolder) {
  const size_t slot = MakeSlotLayout(geometry_).slot_bytes();
  StartDaemons(1, slot * 100);
  Connect();
  MakeData(1);
  {
    const PutReport report = Put();
    ASSERT_EQ(report.num_new, kPages);
  }
  auto one = Open();
  auto two = Open();
  one.reset();
  // The second sequence still holds the pages: another prompt finds no room for all of its own.
  MakeData(2);
  EXPECT_GT(Put().num_failed, 0);
  two.reset();
  EXPECT_EQ(Put().num_failed, 0);
}

TEST_P(IntegrationTest, WrongModelAndMissingDaemonAreTypedErrors) {
  StartDaemons(1);
  ClientOptions wrong = Options();
  wrong.weights_id = "others";
  EXPECT_EQ(KvClient::Make(wrong).status().code(), absl::StatusCode::kFailedPrecondition);
  ClientOptions unknown = Options();
  unknown.model = "unknown";
  EXPECT_EQ(KvClient::Make(unknown).status().code(), absl::StatusCode::kFailedPrecondition);
  ClientOptions partial = Options();
  partial.daemons.push_back("127.0.0.1:1");
  EXPECT_EQ(KvClient::Make(partial).status().code(), absl::StatusCode::kUnavailable);
  partial.allow_partial = true;
  EXPECT_TRUE(KvClient::Make(partial).ok());
  ClientOptions peer = Options();
  peer.best_path = std::nullopt;
  peer.required_path = PathKind::kPeer;
  EXPECT_EQ(KvClient::Make(peer).status().code(), absl::StatusCode::kFailedPrecondition);
}

INSTANTIATE_TEST_SUITE_P(Paths, IntegrationTest,
                         ::testing::Values(PathKind::kShared, PathKind::kUcx), PathParameterName);

}  // namespace
}  // namespace kvd::testing
