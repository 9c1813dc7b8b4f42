// G3: a daemon restarted at the same address is a stranger. Nothing of the old process (leases,
// generations, session, mapped memory) is accepted by the new one or by the client.

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <chrono>

#include "proto/pool.grpc.pb.h"
#include "tests/support/path_parameter.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

constexpr uint64_t kPages = 16;

class IncarnationTest : public ::testing::TestWithParam<PathKind> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    DaemonSpec spec;
    spec.geometry = SmallGeometry();
    auto daemon = DaemonProcess::Start(spec);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    ClientOptions options = OptionsFor({daemon_->address()}, GetParam());
    options.on_event = [this](const ClientEvent& event) {
      if (event.kind == ClientEvent::Kind::kDaemonBack) ++num_back_;
    };
    auto worker = SystemWorker::Make(std::move(options));
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::atomic<int> num_back_{0};
  std::unique_ptr<SystemWorker> worker_;
};

TEST_P(IncarnationTest, NothingOfTheKilledProcessIsAcceptedAfterTheRestart) {
  const auto old_versions = VersionsOf(0, kPages, 1);
  const PutReport old_report = worker_->Put(old_versions);
  const auto old_pages = NewPages(old_versions, old_report);
  ASSERT_EQ(old_pages.size(), kPages) << old_report.first_failure;
  const std::shared_ptr<Attachment> old = worker_->attachment();
  const auto units = static_cast<int64_t>(kPages * worker_->shape().units_per_page());
  ASSERT_EQ(worker_->Fetch(*old->fetcher, old_pages, absl::Seconds(10)).num_exact, units);

  daemon_->Kill();
  ASSERT_TRUE(daemon_->Restart().ok());
  ASSERT_TRUE(WaitFor([&] { return num_back_ == 1; }));
  const std::shared_ptr<Attachment> fresh = worker_->attachment();
  ASSERT_NE(fresh, nullptr);
  ASSERT_EQ(fresh->address, old->address);
  EXPECT_NE(fresh->session().incarnation(), old->session().incarnation());

  // The same keys with other bytes: they land in the same slots, of the same generations.
  const auto new_versions = VersionsOf(0, kPages, 2);
  const PutReport new_report = worker_->Put(new_versions);
  const auto new_pages = NewPages(new_versions, new_report);
  ASSERT_EQ(new_pages.size(), kPages) << new_report.first_failure;
  const Fetched now = worker_->Fetch(*fresh->fetcher, new_pages, absl::Seconds(10));
  EXPECT_EQ(now.num_exact, units);

  // Fetches of the old attachment, whose mapping still holds the old bytes.
  const Fetched stale = worker_->Fetch(*old->fetcher, old_pages, absl::Seconds(10));
  EXPECT_EQ(stale.code, absl::StatusCode::kAborted);
  EXPECT_EQ(stale.num_missing, units);
}

TEST_P(IncarnationTest, ControlCallsInTheOldSessionAreAborted) {
  const auto versions = VersionsOf(0, kPages, 1);
  const PutReport report = worker_->Put(versions);
  const auto pages = NewPages(versions, report);
  ASSERT_EQ(pages.size(), kPages) << report.first_failure;
  const std::shared_ptr<Attachment> old = worker_->attachment();
  daemon_->Kill();
  ASSERT_TRUE(daemon_->Restart().ok());
  ASSERT_TRUE(WaitFor([&] { return num_back_ == 1; }));
  const std::shared_ptr<Attachment> fresh = worker_->attachment();
  ASSERT_NE(fresh, nullptr);

  auto stub = locks_kvd::v1::Pool::NewStub(
      grpc::CreateChannel(daemon_->address(), grpc::InsecureChannelCredentials()));
  const auto lease = [&](const locks_kvd::v1::SessionRef& session) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    locks_kvd::v1::LeaseRequest request;
    *request.mutable_session() = session;
    for (const SealedVersion& page : pages) {
      request.add_slots(page.ref.slot);
      request.add_generations(page.ref.generation);
    }
    locks_kvd::v1::LeaseReply reply;
    const grpc::Status status = stub->Lease(&context, request, &reply);
    if (status.ok()) {
      for (const bool leased : reply.leased()) EXPECT_FALSE(leased);
    }
    return status.error_code();
  };
  EXPECT_EQ(lease(old->session()), grpc::StatusCode::ABORTED);
  EXPECT_EQ(lease(fresh->session()), grpc::StatusCode::OK);
  locks_kvd::v1::SessionRef mixed = fresh->session();
  mixed.set_incarnation(old->session().incarnation());
  EXPECT_EQ(lease(mixed), grpc::StatusCode::ABORTED);
  mixed = fresh->session();
  mixed.set_token(old->session().token());
  EXPECT_EQ(lease(mixed), grpc::StatusCode::ABORTED);
}

INSTANTIATE_TEST_SUITE_P(Paths, IncarnationTest,
                         ::testing::Values(PathKind::kShared, PathKind::kUcx), PathParameterName);

}  // namespace
}  // namespace kvd::testing
