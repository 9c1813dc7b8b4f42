// G4: a frozen client loses its leases after their TTL, and its slots are used again only after the
// quarantine. What it still reads or sends when it wakes is wrong for nobody.

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <chrono>

#include "proto/pool.grpc.pb.h"
#include "tests/support/line_process.h"
#include "tests/support/path_parameter.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

class FrozenClientTest : public ::testing::TestWithParam<PathKind> {
 protected:
  static constexpr uint64_t kSlots = 40;
  static constexpr absl::Duration kQuarantine = absl::Milliseconds(1500);

  void SetUp() override {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    spec.arena_bytes = MakeSlotLayout(spec.geometry).slot_bytes() * kSlots;
    spec.session_ttl_ms = 2000;
    spec.quarantine_ms = static_cast<uint32_t>(absl::ToInt64Milliseconds(kQuarantine));
    auto daemon = DaemonProcess::Start(spec);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    stub_ = locks_kvd::v1::Pool::NewStub(
        grpc::CreateChannel(daemon_->address(), grpc::InsecureChannelCredentials()));
    auto worker = SystemWorker::Make(OptionsFor({daemon_->address()}, GetParam()));
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    client_ = std::make_unique<LineProcess>(std::vector<std::string>{
        KVD_CLIENT_PROCESS, daemon_->address(), std::string(PathName(GetParam()))});
    ASSERT_EQ(client_->Hear(), "attached");
  }
  locks_kvd::v1::StatsReply Stats() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    locks_kvd::v1::StatsReply reply;
    EXPECT_TRUE(stub_->Stats(&context, {}, &reply).ok());
    return reply;
  }
  // Slots that pages can be put in: the canary has one of its own.
  uint64_t Capacity() {
    const auto arena = Stats().arenas(0);
    return uint64_t{arena.slots_free()} + arena.slots_sealed();
  }
  // Puts pages, none of them resident, and gives their leases up; the sealed ones.
  std::vector<SealedVersion> PutAndRelease(uint64_t first, uint64_t count) {
    const auto versions = VersionsOf(first, count, 1);
    return NewPages(versions, worker_->Put(versions));
  }
  Fetched FetchHere(std::span<const SealedVersion> pages) {
    const std::shared_ptr<Attachment> attachment = worker_->attachment();
    KVD_CHECK(attachment != nullptr);
    return worker_->Fetch(*attachment->fetcher, pages, absl::Seconds(10));
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<locks_kvd::v1::Pool::Stub> stub_;
  std::unique_ptr<SystemWorker> worker_;
  std::unique_ptr<LineProcess> client_;
};

TEST_P(FrozenClientTest, ItsLeasesEndItsSlotsWaitAndItsStaleReadsFindNothing) {
  const uint64_t capacity = Capacity();
  ASSERT_EQ(client_->Ask(absl::StrCat("put 0 ", capacity, " 1")),
            absl::StrCat("put ", capacity, " 0"));
  const uint64_t units = capacity * worker_->shape().units_per_page();
  ASSERT_EQ(client_->Ask("fetch"), absl::StrCat("fetched OK ", units, " 0 0"));
  // Everything is leased by the other process, as long as it lives.
  const PutReport refused = worker_->Put(VersionsOf(1000, 4, 1));
  EXPECT_EQ(refused.num_failed, 4);
  EXPECT_EQ(refused.first_failure.code(), absl::StatusCode::kResourceExhausted)
      << refused.first_failure;

  ASSERT_EQ(Stats().sessions_size(), 2);
  const absl::Time frozen = absl::Now();
  client_->Freeze();
  ASSERT_TRUE(WaitFor([&] { return Stats().sessions_size() == 1; }));
  ASSERT_TRUE(WaitFor([&] { return PutAndRelease(1000, 4).size() == 4; }));
  // Its session lived when it froze, so at least the quarantine has passed since.
  EXPECT_GE(absl::Now() - frozen, kQuarantine);
  for (uint64_t page = 1004; page < 1000 + 2 * capacity; page += 4) {  // every slot is used again
    ASSERT_EQ(PutAndRelease(page, 4).size(), 4u) << page;
  }

  client_->Thaw();
  const std::string stale = client_->Ask("fetch");
  EXPECT_NE(stale.find(absl::StrCat(" 0 ", units, " 0")), std::string::npos) << stale;
  // It is told, attaches again, and is a client like any other.
  EXPECT_TRUE(WaitFor([&] { return Stats().sessions_size() == 2; }));
  ASSERT_EQ(client_->Ask("forget"), "forgot");
  EXPECT_TRUE(WaitFor([&] { return client_->Ask("put 2000 4 1") == "put 4 0"; }));
}

TEST_P(FrozenClientTest, BytesThatItSendsWhenItWakesLandInNobodysPage) {
  ASSERT_EQ(client_->Ask("churn"), "churning");
  const auto sealed_so_far = [&] {
    const auto arena = Stats().arenas(0);
    return arena.slots_sealed() + arena.evicted_pages();
  };
  for (int round = 0; round < 2; ++round) {
    const auto before = sealed_so_far();
    ASSERT_TRUE(WaitFor([&] { return sealed_so_far() > before + 20; }));  // in full swing
    client_->Freeze();
    ASSERT_TRUE(WaitFor([&] { return Stats().sessions_size() == 1; }));
    ASSERT_TRUE(WaitFor([&] {
      const auto arena = Stats().arenas(0);
      return arena.slots_reserved() == 0 && arena.slots_quarantined() == 0;
    }));
    // All but a few slots now hold pages of this worker, leased; the few are for the churn to go
    // on.
    const uint64_t count = Capacity() - 16;
    const auto versions = VersionsOf(1000 + static_cast<uint64_t>(round) * 100, count, 1);
    PutReport held;
    ASSERT_TRUE(WaitFor([&] {  // what the frozen client leased waits out its quarantine
      held = worker_->Put(versions);
      return held.num_failed == 0;
    })) << held.first_failure;
    std::vector<SealedVersion> mine;
    for (size_t i = 0; i < versions.size(); ++i)
      mine.push_back({versions[i], held.pages[i].slots[0]});

    client_->Thaw();
    const auto units = static_cast<int64_t>(count * worker_->shape().units_per_page());
    ASSERT_TRUE(WaitFor([&] { return Stats().sessions_size() == 2; }));
    for (int i = 0; i < 20; ++i) {
      const Fetched fetched = FetchHere(mine);
      ASSERT_EQ(fetched.num_wrong, 0);
      ASSERT_EQ(fetched.num_exact, units);  // leased: still there
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, FrozenClientTest,
                         ::testing::Values(PathKind::kShared, PathKind::kUcx), PathParameterName);

}  // namespace
}  // namespace kvd::testing
