#include "service/admin_service.h"

#include <gmock/gmock.h>

#include "tests/service/pool_fixture.h"
#include "tests/service/test_certificates.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;
using testing::PoolFixture;
namespace v1 = locks_kvd::v1;
using Stub = v1::Admin::Stub;

class AdminServiceTest : public PoolFixture {
 protected:
  explicit AdminServiceTest(std::shared_ptr<grpc::ServerCredentials> credentials = nullptr)
      : PoolFixture(std::move(credentials)) {}

  template <typename Request, typename Reply>
  grpc::Status Ask(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                   const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return ((*admin_stub_).*method)(&context, request, reply);
  }
  static std::string Keys(std::initializer_list<int> pages) { return Pages(pages).keys(); }
};

TEST_F(AdminServiceTest, PagesTellsStateSlotAndLeasesOfEachShard) {
  const SessionId session = IdOf(Attached());
  const PageLocation sealed = testing::PutPage(arena_.get(), session, 1, /*shard=*/1);
  testing::ReserveOne(arena_.get(), session, 2);
  v1::PagesRequest request;
  request.set_tenant("acme");
  request.set_model("tiny");
  request.set_keys(Keys({1, 2, 3}));
  v1::PagesReply reply;
  ASSERT_TRUE(Ask(&Stub::Pages, request, &reply).ok());
  ASSERT_EQ(reply.pages_size(), 6) << "three pages of two shards";
  EXPECT_EQ(reply.num_shards(), 2u);
  EXPECT_EQ(reply.pages(0).state(), v1::PagesReply::STATE_MISSING);
  EXPECT_EQ(reply.pages(1).state(), v1::PagesReply::STATE_SEALED);
  EXPECT_EQ(reply.pages(1).slot(), sealed.slot);
  EXPECT_EQ(reply.pages(1).generation(), sealed.generation);
  EXPECT_EQ(reply.pages(1).leases(), 1u);
  EXPECT_EQ(reply.pages(2).state(), v1::PagesReply::STATE_RESERVED);
  EXPECT_EQ(reply.pages(4).state(), v1::PagesReply::STATE_MISSING);
  request.set_tenant("rival");
  ASSERT_TRUE(Ask(&Stub::Pages, request, &reply).ok());
  EXPECT_EQ(reply.pages(1).state(), v1::PagesReply::STATE_MISSING) << "another tenant's arena";
}

TEST_F(AdminServiceTest, PagesRefusesWhatItCannotAnswer) {
  v1::PagesRequest request;
  v1::PagesReply reply;
  request.set_tenant("acme");
  request.set_model("huge");
  EXPECT_EQ(Ask(&Stub::Pages, request, &reply).error_code(), grpc::StatusCode::NOT_FOUND);
  request.set_model("tiny");
  request.set_keys(std::string(17, 'x'));
  EXPECT_EQ(Ask(&Stub::Pages, request, &reply).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.set_keys(std::string(16 * (AdminService::kMaxPages + 1), 'x'));
  EXPECT_EQ(Ask(&Stub::Pages, request, &reply).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(AdminServiceTest, VerifyCountsWhatItCheckedAndWhatIsWrong) {
  const SessionId session = IdOf(Attached());
  testing::PutPage(arena_.get(), session, 1);
  const PageLocation page = testing::PutPage(arena_.get(), session, 2);
  v1::VerifyRequest request;
  request.set_tenant("acme");
  request.set_model("tiny");
  v1::VerifyReply reply;
  ASSERT_TRUE(Ask(&Stub::Verify, request, &reply).ok());
  EXPECT_TRUE(reply.done());
  EXPECT_EQ(reply.pages(), 2u);
  EXPECT_EQ(reply.failures_size(), 0);
  EXPECT_EQ(metrics_.verify_checks.value(), 6u) << "four units and the records of two pages";
  EXPECT_EQ(metrics_.verify_failures.value(), 0u);
  arena_->memory().unit(page.slot, 0, 0)[5] ^= 1;
  request.set_first_slot(page.slot);
  request.set_max_slots(1);
  ASSERT_TRUE(Ask(&Stub::Verify, request, &reply).ok());
  EXPECT_EQ(reply.next_slot(), page.slot + 1);
  ASSERT_EQ(reply.failures_size(), 1);
  EXPECT_EQ(reply.failures(0).slot(), page.slot);
  EXPECT_THAT(reply.failures(0).what(), HasSubstr("layer 0, head 0"));
  EXPECT_EQ(metrics_.verify_failures.value(), 1u);
}

TEST_F(AdminServiceTest, SlowlogTellsStagesNewestFirst) {
  FetchEvent event;
  event.session = SessionId{5};
  event.units = 10;
  event.missing_units = 3;
  event.bytes = 4096;
  event.queued = absl::Milliseconds(4);
  event.total = absl::Milliseconds(30);
  slowlog_.Note(event);
  event.status = WireStatus::kLate;
  slowlog_.Note(event);
  v1::SlowlogReply reply;
  ASSERT_TRUE(Ask(&Stub::Slowlog, v1::SlowlogRequest(), &reply).ok());
  ASSERT_EQ(reply.fetches_size(), 2);
  EXPECT_EQ(reply.fetches(0).code(), static_cast<uint32_t>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(reply.fetches(1).code(), 0u);
  EXPECT_EQ(reply.fetches(1).session_id(), 5u);
  EXPECT_EQ(reply.fetches(1).queue_us(), 4000u);
  EXPECT_EQ(reply.fetches(1).move_us(), 26000u);
  EXPECT_EQ(reply.threshold_us(), 10000u);
  v1::SlowlogRequest one;
  one.set_max_entries(1);
  ASSERT_TRUE(Ask(&Stub::Slowlog, one, &reply).ok());
  EXPECT_EQ(reply.fetches_size(), 1);
  EXPECT_EQ(reply.num_seen(), 2u);
}

TEST_F(AdminServiceTest, LogLevelIsReadAndChangedButNeverToNonsense) {
  v1::LogLevelRequest request;
  v1::LogLevelReply reply;
  request.set_level("warn");
  ASSERT_TRUE(Ask(&Stub::LogLevel, request, &reply).ok());
  EXPECT_EQ(reply.level(), "warn");
  const std::string before = reply.before();
  request.set_level("off");
  EXPECT_EQ(Ask(&Stub::LogLevel, request, &reply).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ASSERT_TRUE(Ask(&Stub::LogLevel, v1::LogLevelRequest(), &reply).ok());
  EXPECT_EQ(reply.level(), "warn") << "as it was before the refused call";
  request.set_level(before);
  ASSERT_TRUE(Ask(&Stub::LogLevel, request, &reply).ok());
  EXPECT_EQ(reply.level(), before);
}

class AdminServiceTlsTest : public testing::TestCertificates, public AdminServiceTest {
 protected:
  AdminServiceTlsTest() : AdminServiceTest(MakeTlsCredentials(Server())) {
    Issue("acme", "ca", "URI:locks-kvd://client/acme");
    Issue("admin", "ca", "URI:locks-kvd://admin");
  }
};

TEST_F(AdminServiceTlsTest, EveryCallNeedsTheAdminRoleAndFetchesOfAllAreForIt) {
  const auto codes = [this](const std::string& name) {
    UseChannel(Channel(port_, name));
    v1::PagesReply pages;
    v1::VerifyReply verify;
    v1::SlowlogReply slowlog;
    v1::LogLevelReply level;
    v1::VerifyRequest arena;
    arena.set_tenant("acme");
    arena.set_model("tiny");
    v1::PagesRequest keys;
    keys.set_tenant("acme");
    keys.set_model("tiny");
    return std::vector<int>{Ask(&Stub::Pages, keys, &pages).error_code(),
                            Ask(&Stub::Verify, arena, &verify).error_code(),
                            Ask(&Stub::Slowlog, v1::SlowlogRequest(), &slowlog).error_code(),
                            Ask(&Stub::LogLevel, v1::LogLevelRequest(), &level).error_code()};
  };
  EXPECT_THAT(codes("acme"), ::testing::Each(grpc::StatusCode::PERMISSION_DENIED));
  EXPECT_EQ(metrics_.auth_failures[kAuthRole].value(), 4u);
  v1::StatsReply stats;
  ASSERT_TRUE(Call(&v1::Pool::Stub::Stats, v1::StatsRequest(), &stats).ok());
  EXPECT_FALSE(stats.has_fetch()) << "not for one tenant";
  EXPECT_GT(stats.unix_ms(), 0u);
  EXPECT_THAT(codes("admin"), ::testing::Each(grpc::StatusCode::OK));
  ASSERT_TRUE(Call(&v1::Pool::Stub::Stats, v1::StatsRequest(), &stats).ok());
  EXPECT_TRUE(stats.has_fetch());
}

}  // namespace
}  // namespace kvd
