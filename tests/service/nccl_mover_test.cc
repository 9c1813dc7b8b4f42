// Goal: however a bulk move fails, every page is still where it was, nothing wrong is ever served,
// the data path goes on, and the pages then arrive by UCX. Method: two daemons in this process, or
// one in a child that is killed, with a stand-in for NCCL whose faults are switched on for one end.

#include "service/nccl_mover.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <iostream>
#include <numeric>

#include "client/ucx_fetcher.h"
#include "proto/membership.h"
#include "service/log_setup.h"
#include "service/migrator.h"
#include "service/peer_session.h"
#include "tests/service/fetch_unit.h"
#include "tests/service/move_fixture.h"
#include "tests/support/line_process.h"

namespace kvd {
namespace {

namespace v1 = locks_kvd::v1;
using ::testing::Each;
using testing::Eventually;
using ::testing::HasSubstr;
using testing::MoveDaemon;
using testing::StandInFaults;
using testing::StandInLibrary;

constexpr char kDestinationFlag[] = "--serve-as-destination-that-hangs";
constexpr int kPages = 12;
constexpr absl::Duration kNever = absl::Minutes(2);  // longer than any test

std::vector<int> FirstPages(int count) {
  std::vector<int> pages(static_cast<size_t>(count));
  std::iota(pages.begin(), pages.end(), 0);
  return pages;
}

class NcclMoverTest : public ::testing::Test {
 protected:
  void Start(absl::Duration watchdog, uint64_t destination_bytes = uint64_t{4} << 20) {
    watchdog_ = watchdog;
    source_ = std::make_unique<MoveDaemon>(from_, watchdog);
    destination_ = std::make_unique<MoveDaemon>(to_library_, watchdog, destination_bytes);
    source_->Put(0, kPages);
    UcxOptions ucx;
    ucx.devices = "lo";
    auto worker = UcxWorker::Make(ucx);
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }
  // A session from the source to `address`, and what became of its wish for NCCL.
  absl::Status Open(const std::string& address) {
    auto session =
        PeerSession::Open(address, {}, source_->data.arena, worker_.get(), absl::Seconds(20));
    EXPECT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    return session_->UseNccl(from_, watchdog_, [this] { return go_on_.load(); });
  }
  absl::Status Copy(size_t first, size_t count) {
    const std::vector<SealedCopy> sealed = source_->data.arena->SealedPages();
    outcomes_.assign(count, CopyOutcome::kPending);
    return session_->Copy(std::span(sealed).subspan(first, count), outcomes_, &bytes_);
  }
  uint64_t PageBytes() const {
    const SlotLayout& slot = source_->data.arena->memory().shape().slot;
    return slot.slot_bytes() + slot.summary_bytes();
  }
  // Nothing has left the source, and nothing is at the destination or in the way there.
  void ExpectNothingMoved() {
    EXPECT_EQ(source_->IntactPages(), FirstPages(kPages));
    session_.reset();
    EXPECT_TRUE(Eventually([&] { return destination_->Stats().slots_reserved == 0; }));
    EXPECT_EQ(destination_->Stats().slots_sealed, 0u);
  }

  std::shared_ptr<StandInLibrary> from_ = std::make_shared<StandInLibrary>("gpu-a");
  std::shared_ptr<StandInLibrary> to_ = std::make_shared<StandInLibrary>("gpu-b");
  absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> to_library_ = to_;
  absl::Duration watchdog_;
  std::unique_ptr<MoveDaemon> source_;
  std::unique_ptr<MoveDaemon> destination_;
  std::unique_ptr<UcxWorker> worker_;
  std::unique_ptr<PeerSession> session_;
  std::atomic<bool> go_on_{true};
  std::vector<CopyOutcome> outcomes_;
  uint64_t bytes_ = 0;
};

TEST_F(NcclMoverTest, MovesBatchesOverOneCommunicatorAndNoByteByUcx) {
  Start(kNever);
  ASSERT_TRUE(Open(destination_->address).ok());
  EXPECT_EQ(session_->carrier(), Carrier::kNccl);
  for (size_t first = 0; first < kPages; first += 4) {
    const absl::Status copied = Copy(first, 4);
    ASSERT_TRUE(copied.ok()) << copied;
    EXPECT_THAT(outcomes_, Each(CopyOutcome::kCopied));
  }
  EXPECT_EQ(destination_->IntactPages(), FirstPages(kPages));
  EXPECT_EQ(bytes_, kPages * PageBytes());
  EXPECT_EQ(to_->counts.bytes, kPages * PageBytes());
  EXPECT_EQ(destination_->data.ingests->num_bytes(), 0u);
  EXPECT_EQ(to_->counts.joined, 1);
  session_.reset();
  EXPECT_TRUE(Eventually([&] { return from_->counts.finished == 1 && to_->counts.finished == 1; }));
  EXPECT_EQ(from_->counts.aborted + to_->counts.aborted, 0);
}

TEST_F(NcclMoverTest, ASlowEndIsWaitedFor) {
  from_->faults.slow_looks = 50;
  to_->faults.slow_looks = 200;
  Start(kNever);
  ASSERT_TRUE(Open(destination_->address).ok());
  const absl::Status copied = Copy(0, kPages);
  ASSERT_TRUE(copied.ok()) << copied;
  EXPECT_EQ(destination_->IntactPages(), FirstPages(kPages));
}

TEST_F(NcclMoverTest, DamagedBytesAreRefusedByTheSeal) {
  to_->faults.damages = true;  // of the last page's records
  Start(kNever);
  ASSERT_TRUE(Open(destination_->address).ok());
  const absl::Status copied = Copy(0, kPages);
  EXPECT_EQ(copied.code(), absl::StatusCode::kDataLoss) << copied;
  EXPECT_EQ(session_->carrier_problem().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(outcomes_.back(), CopyOutcome::kFailed);
  EXPECT_EQ(destination_->Stats().slots_sealed, kPages - 1u);
  EXPECT_EQ(destination_->IntactPages().size(), kPages - 1u);
  EXPECT_EQ(source_->IntactPages(), FirstPages(kPages));
}

// --- who cannot move by NCCL says so before anything is tried ---

TEST_F(NcclMoverTest, TwoArenasOnOneGpuAreRefused) {
  to_ = std::make_shared<StandInLibrary>("gpu-a");
  to_library_ = to_;
  Start(kNever);
  const absl::Status used = Open(destination_->address);
  EXPECT_EQ(used.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(used.message()), HasSubstr("both arenas are on GPU gpu-a"));
  EXPECT_EQ(session_->carrier(), Carrier::kUcx);
  ASSERT_TRUE(Copy(0, kPages).ok());
  EXPECT_EQ(destination_->IntactPages(), FirstPages(kPages));
  EXPECT_EQ(from_->counts.joined + to_->counts.joined, 0);
}

TEST_F(NcclMoverTest, ADaemonOfAVersionThatDoesNotKnowTheCallIsLeftToUcx) {
  Start(kNever);
  v1::Pool::Service old;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&old);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const auto stub = v1::Pool::NewStub(
      grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()));
  NcclMover::Options options;
  options.stub = stub.get();
  options.arena = source_->data.arena;
  options.library = from_;
  options.go_on = [] { return true; };
  EXPECT_EQ(NcclMover::Make(std::move(options)).status().code(), absl::StatusCode::kUnimplemented);
}

TEST_F(NcclMoverTest, AnotherVersionIsRefused) {
  to_library_ = std::make_shared<StandInLibrary>("gpu-b", "stand-in 2");
  Start(kNever);
  const absl::Status used = Open(destination_->address);
  EXPECT_EQ(used.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(used.message()), HasSubstr("the destination has stand-in 2"));
}

TEST_F(NcclMoverTest, ADestinationWithoutTheLibraryIsRefused) {
  to_library_ = absl::FailedPreconditionError("libnccl.so.2: cannot open");
  Start(kNever);
  const absl::Status used = Open(destination_->address);
  EXPECT_EQ(used.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(used.message()), HasSubstr("libnccl.so.2: cannot open"));
}

TEST_F(NcclMoverTest, ArenasInHostMemoryAreRefusedAtEitherEnd) {
  Start(kNever);
  for (StandInFaults* faults : {&from_->faults, &to_->faults}) {
    faults->host_memory = true;
    const absl::Status used = Open(destination_->address);
    EXPECT_EQ(used.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(used.message()), HasSubstr("host memory"));
    faults->host_memory = false;
  }
}

// --- faults in the middle ---

TEST_F(NcclMoverTest, FetchesGoOnAndNothingLeasedIsLostWhileAMoveHangs) {
  to_->faults.never_moves = true;
  Start(kNever);
  ASSERT_TRUE(Open(destination_->address).ok());
  absl::Status copied;
  std::thread moving([&] { copied = Copy(0, kPages); });
  ASSERT_TRUE(Eventually([&] { return destination_->Stats().slots_reserved == kPages; }));
  destination_->Put(500, 3);  // others write there meanwhile
  for (const MoveDaemon* daemon : {source_.get(), destination_.get()}) {
    const SlotLayout& slot = daemon->data.arena->memory().shape().slot;
    auto fetcher =
        UcxFetcher::Connect(worker_.get(), daemon->data.worker->address(), daemon->data.incarnation,
                            TokenOf(daemon->offer), slot, absl::Seconds(20));
    ASSERT_TRUE(fetcher.ok()) << fetcher.status();
    for (int round = 0; round < 20; ++round) {
      const TestPage& page = daemon->pages[static_cast<size_t>(round) % daemon->pages.size()];
      const FetchEntry entry = {page.slot, 3, 1, page.generation};
      const FetchedUnit unit = FetchUnit(**fetcher, slot.unit_bytes, entry, absl::Seconds(20));
      ASSERT_EQ(unit.code, absl::StatusCode::kOk);
      ASSERT_EQ(unit.valid, 1);
      ASSERT_EQ(unit.bytes, UnitBytes(slot, page.page, page.write, 3, 1));
    }
  }
  EXPECT_EQ(source_->Stats().slots_leased, static_cast<uint32_t>(kPages));
  EXPECT_EQ(to_->counts.aborted, 0);  // it still hangs
  go_on_ = false;
  moving.join();
  EXPECT_EQ(copied.code(), absl::StatusCode::kCancelled) << copied;
  EXPECT_TRUE(Eventually([&] { return from_->counts.aborted == 1 && to_->counts.aborted == 1; }));
  EXPECT_EQ(source_->IntactPages(), FirstPages(kPages));
  EXPECT_EQ(source_->Stats().leases, kPages);
}

TEST_F(NcclMoverTest, WhenOneEndFailsTheOtherIsToldAndAbortsToo) {
  for (const bool at_source : {true, false}) {
    from_ = std::make_shared<StandInLibrary>("gpu-a");
    to_ = std::make_shared<StandInLibrary>("gpu-b");
    to_library_ = to_;
    Start(kNever);
    // The other end would wait for ever: nothing but the stream of calls tells it.
    ASSERT_TRUE(Open(destination_->address).ok());
    (at_source ? to_ : from_)->faults.never_moves = true;
    (at_source ? from_ : to_)->faults.fails = true;
    const absl::Status copied = Copy(0, kPages);
    EXPECT_EQ(copied.code(), absl::StatusCode::kUnavailable) << copied;
    EXPECT_THAT(std::string(copied.message()), HasSubstr("remote error"));
    EXPECT_TRUE(Eventually([&] { return from_->counts.aborted == 1 && to_->counts.aborted == 1; }));
    ExpectNothingMoved();
  }
}

TEST_F(NcclMoverTest, ADeadDestinationEndsTheMoveLongBeforeTheWatchdog) {
  Start(kNever);
  testing::LineProcess child({"/proc/self/exe", kDestinationFlag});
  const std::string address = child.Hear();
  from_->faults.alone = true;
  from_->faults.never_moves = true;
  ASSERT_TRUE(Open(address).ok());
  absl::Status copied;
  std::thread moving([&] { copied = Copy(0, kPages); });
  ASSERT_EQ(child.Ask("tell me when it receives"), "it does");
  child.Kill();
  moving.join();
  EXPECT_EQ(copied.code(), absl::StatusCode::kUnavailable) << copied;
  EXPECT_TRUE(Eventually([&] { return from_->counts.aborted == 1 && from_->counts.alive == 0; }));
  EXPECT_EQ(source_->IntactPages(), FirstPages(kPages));
  EXPECT_EQ(source_->Stats().leases, kPages);
}

// The stand-in writes rubbish into the slots after its abort, for as long as it is not quiet.
TEST_F(NcclMoverTest, NobodyGetsASlotThatTheLibraryMayStillWriteTo) {
  to_->faults.never_moves = true;
  to_->faults.never_quiet = true;
  Start(absl::Seconds(1), /*destination_bytes=*/uint64_t{1} << 20);
  ASSERT_TRUE(Open(destination_->address).ok());
  EXPECT_EQ(Copy(0, kPages).code(), absl::StatusCode::kDeadlineExceeded);
  session_.reset();  // in order: without the library's hold its reservations would be free now
  ASSERT_TRUE(Eventually([&] { return to_->counts.aborted == 1; }));
  // As many pages as there is room for, several times over.
  const uint32_t room = destination_->Stats().slots_free;
  ASSERT_GT(room, 3u);
  EXPECT_EQ(destination_->Stats().slots_reserved, static_cast<uint32_t>(kPages));
  for (int page = 100; page < 100 + 3 * static_cast<int>(room); ++page) {
    destination_->Put(page, 1);
    destination_->data.Release(destination_->offer, destination_->pages.back());
    EXPECT_TRUE(destination_->data.arena->TakeEvictions({}).pages.empty());
  }
  EXPECT_EQ(destination_->IntactPages().size(), room);
  EXPECT_EQ(destination_->Stats().slots_reserved, static_cast<uint32_t>(kPages));
  to_->faults.never_quiet = false;
  EXPECT_TRUE(Eventually(
      [&] { return destination_->Stats().slots_free == static_cast<uint32_t>(kPages); }));
  EXPECT_EQ(destination_->IntactPages().size(), room);
}

// --- the migrator: whatever happens, the pages arrive ---

class NcclFallbackTest : public NcclMoverTest {
 protected:
  // Drains the source. True if the destination then has every page, and the source too.
  void ExpectAllArrive() {
    MembershipOptions members;
    members.static_members = {{.name = "from", .address = source_->address, .weight = 1},
                              {.name = "to", .address = destination_->address, .weight = 1}};
    auto membership = Membership::Make(members, {});
    ASSERT_TRUE(membership.ok()) << membership.status();
    MigratorOptions options;
    options.self = "from";
    options.rebalance = false;
    options.interval = absl::Hours(1);
    options.timeout = absl::Seconds(20);
    options.ucx.devices = "lo";
    options.nccl = from_;
    options.nccl_watchdog = watchdog_;
    options.nccl_min_bytes = min_bytes_;
    Migrator migrator(options, {source_->data.arena}, membership->get(), &counters_);
    const Migrator::DrainResult drained = migrator.Drain(absl::Seconds(60), [] { return true; });
    EXPECT_EQ(drained.left, 0u) << drained.problem;
    EXPECT_EQ(drained.moved, static_cast<uint64_t>(kPages));
    EXPECT_EQ(destination_->IntactPages(), FirstPages(kPages));
    EXPECT_EQ(source_->IntactPages(), FirstPages(kPages));
    EXPECT_EQ(source_->Stats().leases, static_cast<uint64_t>(kPages));
    EXPECT_TRUE(Eventually([&] { return destination_->Stats().slots_reserved == 0; }));
  }
  uint64_t Count(const std::array<MoveCounters::ByReason, kNumCarriers>& counter, Carrier carrier) {
    return counter[static_cast<size_t>(carrier)][static_cast<size_t>(MoveReason::kDrain)].value();
  }
  void ExpectCarriedBy(Carrier carrier, uint64_t nccl_aborted) {
    for (const Carrier each : {Carrier::kUcx, Carrier::kNccl}) {
      const uint64_t pages = each == carrier ? kPages : 0;
      EXPECT_EQ(Count(counters_.pages, each), pages);
      EXPECT_EQ(Count(counters_.bytes, each), pages * PageBytes());
    }
    EXPECT_EQ(Count(counters_.aborted, Carrier::kNccl), nccl_aborted);
    EXPECT_EQ(Count(counters_.aborted, Carrier::kUcx), 0u);
  }

  MoveCounters counters_;
  uint64_t min_bytes_ = 1;
};

TEST_F(NcclFallbackTest, ADrainGoesByNccl) {
  Start(kNever);
  ExpectAllArrive();
  ExpectCarriedBy(Carrier::kNccl, 0);
  EXPECT_EQ(destination_->data.ingests->num_bytes(), 0u);
}

TEST_F(NcclFallbackTest, AMoveTooSmallToJoinForGoesByUcx) {
  Start(kNever);
  min_bytes_ = kPages * PageBytes() + 1;
  ExpectAllArrive();
  ExpectCarriedBy(Carrier::kUcx, 0);
  EXPECT_EQ(from_->counts.joined, 0);
}

TEST_F(NcclFallbackTest, ADestinationWithoutNcclGetsThemByUcx) {
  to_library_ = absl::FailedPreconditionError("libnccl.so.2: cannot open");
  Start(kNever);
  ExpectAllArrive();
  ExpectCarriedBy(Carrier::kUcx, 0);
}

TEST_F(NcclFallbackTest, DamagedPagesArriveByUcx) {
  to_->faults.damages = true;
  Start(kNever);
  ExpectAllArrive();
  EXPECT_EQ(Count(counters_.pages, Carrier::kNccl), kPages - 1u);
  EXPECT_EQ(Count(counters_.pages, Carrier::kUcx), 1u);
  EXPECT_EQ(Count(counters_.aborted, Carrier::kNccl), 1u);
}

// A fault of one end.
struct Fault {
  const char* name;
  std::atomic<bool> StandInFaults::*fault;
};

class NcclFaultTest : public NcclFallbackTest,
                      public ::testing::WithParamInterface<std::tuple<Fault, bool>> {};

std::string FaultName(const ::testing::TestParamInfo<std::tuple<Fault, bool>>& fault) {
  return std::string(std::get<0>(fault.param).name) +
         (std::get<1>(fault.param) ? "_at_the_source" : "_at_the_destination");
}

TEST_P(NcclFaultTest, EveryPageArrivesByUcxInstead) {
  const auto& [fault, at_source] = GetParam();
  (at_source ? from_ : to_)->faults.*fault.fault = true;
  Start(absl::Seconds(1));
  std::thread thaw;
  if (fault.fault == &StandInFaults::stuck) {
    // Nobody waits for the call that is stuck; it must end before the test does.
    thaw = std::thread([this] {
      Eventually([&] { return destination_->Stats().slots_sealed == kPages; });
      from_->faults.stuck = false;
      to_->faults.stuck = false;
    });
  }
  ExpectAllArrive();
  if (thaw.joinable()) thaw.join();
  ExpectCarriedBy(Carrier::kUcx, 1);
  EXPECT_TRUE(Eventually([&] { return from_->counts.alive == 0 && to_->counts.alive == 0; }));
}

INSTANTIATE_TEST_SUITE_P(
    Faults, NcclFaultTest,
    ::testing::Combine(::testing::Values(Fault{"never_joins", &StandInFaults::never_joins},
                                         Fault{"fails", &StandInFaults::fails},
                                         Fault{"stuck", &StandInFaults::stuck},
                                         Fault{"never_moves", &StandInFaults::never_moves}),
                       ::testing::Bool()),
    FaultName);

}  // namespace

// Serves as the destination of ADeadDestination...: joins, then receives for ever.
int ServeAsDestinationThatHangs() {
  SetUpLogging({});  // to standard error
  const auto library = std::make_shared<testing::StandInLibrary>("gpu-b");
  library->faults.alone = true;
  library->faults.never_moves = true;
  const testing::MoveDaemon daemon(library, absl::Minutes(2));
  std::cout << daemon.address << std::endl;
  std::string question;
  std::getline(std::cin, question);
  testing::Eventually([&] { return library->counts.receiving > 0; });
  std::cout << "it does" << std::endl;
  std::getline(std::cin, question);
  return 0;
}

}  // namespace kvd

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == kvd::kDestinationFlag)
    return kvd::ServeAsDestinationThatHangs();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
