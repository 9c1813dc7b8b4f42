// Five daemons on five (seeming) hosts under load, and what happens to hosts: death, partitions,
// freezes, a link that flaps, and a pool that grows and shrinks. Run under tests/system/netns.sh.
// Whatever happens, no byte is wrong and no call outlives its deadlines.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>

#include "tests/system/pool_under_load.h"

namespace kvd::testing {
namespace {

constexpr int kHosts = 5;

void Shell(const std::string& command) { ASSERT_EQ(std::system(command.c_str()), 0) << command; }

class FaultsTest : public ::testing::Test, public PoolUnderLoad {
 protected:
  void SetUp() override {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    ASSERT_EQ(std::system("ip netns exec d4 true"), 0) << "run it by tests/system/netns.sh";
  }
  DaemonSpec SpecOf(size_t d) override {
    DaemonSpec spec;
    spec.host = absl::StrCat("10.77.0.1", d);
    spec.shared_path = false;
    return spec;
  }
  std::vector<std::string> PrefixOf(size_t d) override {
    return {"ip", "netns", "exec", absl::StrCat("d", d)};
  }
  void Adjust(locks_kvd::v1::DaemonConfig* config) override {
    config->mutable_control()->set_insecure_allow(true);
    config->mutable_data()->set_ucx_devices("eth0");
    config->mutable_times()->set_drain_ms(30000);
  }
  void Adjust(ClientOptions* options) override {
    options->ucx_devices = "br0";
    options->control_timeout = absl::Milliseconds(700);
    options->fetch_timeout = absl::Milliseconds(500);
    options->placement_grace = absl::Seconds(10);
  }
  void StartPool(int count, const std::vector<size_t>& members) {
    for (int d = 0; d < count; ++d) ASSERT_NO_FATAL_FAILURE(StartDaemon());
    WriteMembers(members);
    ASSERT_NO_FATAL_FAILURE(Connect());
    ASSERT_NO_FATAL_FAILURE(PutAll());
  }
  bool AllAttached() {
    for (const DaemonView& daemon : client_->Daemons()) {
      if (!daemon.attached) return false;
    }
    return true;
  }
  // Under load: harm, a while, repair; then until every daemon is attached and answers again.
  void Survive(const char* name, const std::function<void()>& harm, absl::Duration time,
               const std::function<void()>& repair) {
    StartPool(kHosts, {0, 1, 2, 3, 4});
    if (::testing::Test::HasFatalFailure()) return;
    Load load;
    StartLoad(&load);
    absl::SleepFor(absl::Milliseconds(300));
    harm();
    absl::SleepFor(time);
    repair();
    const absl::Time repaired = absl::Now();
    EXPECT_TRUE(WaitFor([&] { return AllAttached(); }));
    const absl::Duration recovery = absl::Now() - repaired;
    // What was lost is put again, and everything is there.
    for (const auto& keys : keys_) {
      ASSERT_TRUE(WaitFor([&] {
        const auto report =
            client_->Put({.keys = keys, .num_pages = kPages, .layers = engine_->layers()});
        return report.ok() && report->num_failed + report->num_pending == 0;
      }));
    }
    load.Stop();
    for (const auto& keys : keys_) {
      const auto fetched = client_->FetchPages(keys);
      ASSERT_TRUE(fetched.ok()) << fetched.status() << "\n" << daemons_[1]->LogTail();
      EXPECT_EQ(fetched->units, expected_);
    }
    EXPECT_EQ(load.num_wrong, 0);
    EXPECT_GT(load.num_fetched, 10);
    // Two tries of: three holders asked, lists of a fetch one after the other. A hang would be far
    // beyond.
    EXPECT_LT(load.longest_ms, 10000);
    std::printf(
        "%-24s recovery %5.2f s, calls %d, short %d, failed %d, longest %lld ms, wrong %d\n", name,
        absl::ToDoubleSeconds(recovery), load.num_fetched.load(), load.num_short.load(),
        load.num_failed.load(), static_cast<long long>(load.longest_ms.load()),
        load.num_wrong.load());
  }
};

TEST_F(FaultsTest, Killed) {
  Survive(
      "killed, restarted", [&] { daemons_[1]->Kill(); }, absl::Seconds(2),
      [&] { ASSERT_TRUE(daemons_[1]->Restart().ok()); });
}

TEST_F(FaultsTest, PartitionedBothWays) {
  Survive(
      "partition", [] { Shell("ip link set v1 down"); }, absl::Seconds(3),
      [] { Shell("ip link set v1 up"); });
}

TEST_F(FaultsTest, CannotSend) {
  Survive(
      "partition, daemon's way",
      [] {
        Shell(
            "ip netns exec d1 nft 'add table inet f; add chain inet f c { type filter hook output "
            "priority 0; policy drop; }'");
      },
      absl::Seconds(3), [] { Shell("ip netns exec d1 nft delete table inet f"); });
}

TEST_F(FaultsTest, CannotHear) {
  Survive(
      "partition, worker's way",
      [] {
        Shell(
            "ip netns exec d1 nft 'add table inet f; add chain inet f c { type filter hook input "
            "priority 0; policy drop; }'");
      },
      absl::Seconds(3), [] { Shell("ip netns exec d1 nft delete table inet f"); });
}

TEST_F(FaultsTest, Frozen) {
  Survive(
      "frozen", [&] { daemons_[1]->Freeze(); }, absl::Seconds(3), [&] { daemons_[1]->Thaw(); });
}

TEST_F(FaultsTest, Flapping) {
  Survive(
      "flapping link",
      [] {
        for (int i = 0; i < 10; ++i) {
          Shell("ip link set v1 down");
          absl::SleepFor(absl::Milliseconds(150));
          Shell("ip link set v1 up");
          absl::SleepFor(absl::Milliseconds(150));
        }
      },
      absl::ZeroDuration(), [] {});
}

TEST_F(FaultsTest, GrowsToFiveAndShrinksToTwoWithoutAMiss) {
  StartPool(3, {0, 1, 2});
  if (HasFatalFailure()) return;
  Load load;
  StartLoad(&load);
  StartDaemon();
  StartDaemon();
  WriteMembers({0, 1, 2, 3, 4});
  EXPECT_TRUE(WaitFor([&] { return PagesAt(3) > 0 && PagesAt(4) > 0; }));
  // The former owners let go of what has moved once nobody leases it; under this load that may be
  // never.
  for (const size_t leaving : {4u, 0u, 2u}) {
    const auto status = daemons_[leaving]->Stop(absl::Seconds(40));
    ASSERT_TRUE(status.ok()) << status.status();
    EXPECT_EQ(*status, 0);
  }
  absl::SleepFor(absl::Milliseconds(300));
  ExpectClean(load);
  EXPECT_TRUE(WaitFor([&] { return PagesAt(1) + PagesAt(3) >= kAll; }));
  std::printf("3 -> 5 -> 2               calls %d, longest %lld ms\n", load.num_fetched.load(),
              static_cast<long long>(load.longest_ms.load()));
}

}  // namespace
}  // namespace kvd::testing
