// Bulk moves between the GPU arenas of two real daemons that are both told to use NCCL: between two
// GPUs it carries the pages; on one GPU, or where the library is missing, UCX does, and the log
// says why. Skipped, with the reason, where there are not enough GPUs.

#include <gtest/gtest.h>

#include "absl/strings/numbers.h"
#include "proto/gpu_memory.h"
#include "tests/service/http_get.h"
#include "tests/support/gpu.h"
#include "tests/system/pool_under_load.h"

namespace kvd::testing {
namespace {

class GpuMovesTest : public ::testing::Test, public PoolUnderLoad {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    path_ = PathKind::kUcx;
  }
  DaemonSpec SpecOf(size_t daemon) override {
    DaemonSpec spec;
    spec.gpu = gpus_[daemon];
    return spec;
  }
  void Adjust(locks_kvd::v1::DaemonConfig* config) override {
    config->set_metrics_address("127.0.0.1:0");
    auto& nccl = *config->mutable_cluster()->mutable_nccl();
    nccl.set_min_bytes(1);
    nccl.set_watchdog_ms(20000);
  }
  // Why the daemon does not have the library, or empty.
  std::string WhyNoNccl(size_t daemon) const {
    const std::string log = daemons_[daemon]->LogTail();
    const size_t at = log.find("nccl: no: ");
    return at == std::string::npos ? "" : log.substr(at, log.find('\n', at) - at);
  }
  uint64_t Moved(size_t daemon, const std::string& carrier) const {
    const std::string address = daemons_[daemon]->ready().metrics_address();
    uint32_t port = 0;
    EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
    const std::string page = HttpGet(static_cast<uint16_t>(port), "/metrics");
    const std::string line = absl::StrCat(
        "locks_kvd_moved_pages_total{reason=\"rebalance\",carrier=\"", carrier, "\"} ");
    const size_t at = page.find(line);
    if (at == std::string::npos) return UINT64_MAX;
    return std::strtoull(page.c_str() + at + line.size(), nullptr, 10);
  }
  // Pages that belong to the second of two daemons.
  uint64_t ShareOfTheSecond() const {
    const std::vector<PlacedMember> members = {{"d0", 1}, {"d1", 1}};
    const Placement placement(members);
    uint64_t share = 0;
    for (const auto& keys : keys_) {
      for (const int owner : PlacePages(keys, placement)) share += owner == 1 ? 1 : 0;
    }
    return share;
  }
  // The second daemon joins and gets its share, then the first is drained, all under load.
  void MoveAll(const std::string& carrier) {
    StartDaemon();
    StartDaemon();
    if (carrier == "nccl" && !WhyNoNccl(0).empty()) GTEST_SKIP() << WhyNoNccl(0);
    WriteMembers({0});
    Connect();
    PutAll();
    Load load;
    StartLoad(&load);
    WriteMembers({0, 1});
    const uint64_t share = ShareOfTheSecond();
    EXPECT_TRUE(WaitFor([&] { return PagesAt(1) == share; })) << PagesAt(1) << " of " << share;
    EXPECT_TRUE(WaitFor([&] { return Moved(0, carrier) == share; })) << Moved(0, carrier);
    EXPECT_EQ(Moved(0, carrier == "nccl" ? "ucx" : "nccl"), 0u);
    log_ = daemons_[0]->LogTail();
    const auto status = daemons_[0]->Stop(absl::Seconds(60));
    ASSERT_TRUE(status.ok()) << status.status();
    EXPECT_EQ(*status, 0) << daemons_[0]->LogTail();
    absl::SleepFor(absl::Milliseconds(300));
    ExpectClean(load);
    EXPECT_EQ(PagesAt(1), kAll);
    for (const auto& keys : keys_) {
      const auto fetched = client_->FetchPages(keys);
      ASSERT_TRUE(fetched.ok()) << fetched.status();
      EXPECT_EQ(fetched->num_pages, kPages);
      EXPECT_EQ(fetched->units, expected_);
    }
  }

  std::vector<int> gpus_ = {0, 1};
  std::string log_;  // of the first daemon, before its drain
};

TEST_F(GpuMovesTest, BetweenTwoGpusPagesGoByNcclAndNoRequestUnderLoadFails) {
  if (NumGpus() < 2) GTEST_SKIP() << "one GPU: two are needed";
  MoveAll("nccl");
}

// The first daemon's pages stay where they are, whatever has become of the copies.
TEST_F(GpuMovesTest, ADestinationThatIsKilledInTheMiddleCostsNoPage) {
  if (NumGpus() < 2) GTEST_SKIP() << "one GPU: two are needed";
  StartDaemon();
  if (!WhyNoNccl(0).empty()) GTEST_SKIP() << WhyNoNccl(0);
  WriteMembers({0});
  Connect();
  PutAll();
  for (size_t victim = 1; victim <= 3; ++victim) {
    gpus_.push_back(1);
    StartDaemon();
    WriteMembers({0, victim});
    ASSERT_TRUE(WaitFor([&] { return PagesAt(victim) > 0; }));
    daemons_[victim]->Kill();
    WriteMembers({0});
    EXPECT_EQ(PagesAt(0), kAll);
    for (const auto& keys : keys_) {
      ASSERT_TRUE(WaitFor([&] {
        const auto fetched = client_->FetchPages(keys);
        return fetched.ok() && fetched->num_pages == kPages && fetched->units == expected_;
      }));
    }
  }
}

TEST_F(GpuMovesTest, OnOneGpuTheyGoByUcxAndTheLogSaysWhy) {
  gpus_ = {0, 0};
  MoveAll("ucx");
  if (const std::string why = WhyNoNccl(1); !why.empty()) {
    std::printf("%s\n", why.c_str());
    return;
  }
  EXPECT_NE(log_.find("both arenas are on GPU"), std::string::npos) << log_;
}

}  // namespace
}  // namespace kvd::testing
