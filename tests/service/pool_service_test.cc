#include "service/pool_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/service/pool_fixture.h"
#include "tests/service/test_certificates.h"

namespace kvd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::PoolFixture;
namespace v1 = locks_kvd::v1;
using Stub = v1::Pool::Stub;
constexpr auto kOk = grpc::StatusCode::OK;
constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
constexpr auto kPrecondition = grpc::StatusCode::FAILED_PRECONDITION;
constexpr auto kAborted = grpc::StatusCode::ABORTED;
constexpr auto kExhausted = grpc::StatusCode::RESOURCE_EXHAUSTED;

class PoolServiceTest : public PoolFixture {
 protected:
  // The status of a call that must fail.
  template <typename Request, typename Reply>
  grpc::Status Fail(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request) {
    Reply reply;
    return Call(method, request, &reply);
  }
  v1::MatchReply Match(const v1::MatchRequest& request) {
    v1::MatchReply reply;
    const grpc::Status status = Call(&Stub::Match, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }
};

TEST_F(PoolServiceTest, AttachDescribesTheArenaAndOpensASession) {
  v1::AttachReply reply;
  ASSERT_EQ(Attach(AttachRequest(), &reply).error_code(), kOk);
  EXPECT_EQ(reply.protocol(), kProtocolVersion);
  EXPECT_EQ(reply.session().token().size(), 16u);
  EXPECT_EQ(reply.session().incarnation(), std::string(16, 7));
  EXPECT_EQ(reply.arena().num_slots(), arena_->memory().shape().num_slots);
  EXPECT_EQ(reply.arena().slots_per_slab(), arena_->memory().shape().slots_per_slab);
  EXPECT_EQ(reply.arena().geometry().head_dim(), 64u);
  EXPECT_EQ(reply.arena().encoder(), "E0");
  EXPECT_EQ(reply.heartbeat_ms(), 1000u);
  EXPECT_EQ(reply.session_ttl_ms(), 5000u);
  EXPECT_FALSE(reply.has_ucx());
  EXPECT_EQ(sessions_->size(), 1u);
}

TEST_F(PoolServiceTest, AttachRefusesWhatDoesNotFitAndSaysWhichSideToFix) {
  const auto refuse = [this](auto&& spoil) {
    v1::AttachRequest request = AttachRequest();
    spoil(request);
    return Fail(&Stub::Attach, request);
  };
  grpc::Status status = refuse([](auto& r) { r.set_protocol_min(2), r.set_protocol_max(3); });
  EXPECT_EQ(status.error_code(), kPrecondition);
  EXPECT_THAT(status.error_message(), HasSubstr("the daemon (test) speaks 1, the client 2 to 3"));
  status = refuse([](auto& r) { r.set_model("huge"); });
  EXPECT_EQ(status.error_code(), kPrecondition);
  EXPECT_THAT(status.error_message(), HasSubstr("it has tiny"));
  status = refuse([](auto& r) { r.set_tenant("nobody"); });
  EXPECT_EQ(status.error_code(), kPrecondition);
  EXPECT_THAT(status.error_message(), HasSubstr("it has none"));
  status = refuse([](auto& r) { r.set_layout_fingerprint(r.layout_fingerprint() ^ 1); });
  EXPECT_EQ(status.error_code(), kPrecondition);
  EXPECT_THAT(status.error_message(),
              HasSubstr("compare the client's geometry with arenas.geometry"));
  status = refuse([](auto& r) { r.set_model_fingerprint(std::string(32, 4)); });
  EXPECT_EQ(status.error_code(), kPrecondition);
  EXPECT_THAT(status.error_message(), HasSubstr("weights or RoPE differ"));
  EXPECT_EQ(refuse([](auto& r) { r.set_model_fingerprint("short"); }).error_code(), kInvalid);
  EXPECT_EQ(refuse([](auto& r) { r.clear_tenant(); }).error_code(), kInvalid);
  EXPECT_EQ(refuse([](auto& r) { r.set_client_name(std::string(1000, 'x')); }).error_code(),
            kInvalid);
  EXPECT_EQ(sessions_->size(), 0u);
  for (int i = 0; i < 3; ++i) Attached();
  status = Fail(&Stub::Attach, AttachRequest());
  EXPECT_EQ(status.error_code(), kExhausted);
  EXPECT_THAT(status.error_message(), HasSubstr("limits.sessions_per_tenant"));
}

TEST_F(PoolServiceTest, EveryCallChecksSessionAndIncarnation) {
  const v1::SessionRef good = Attached();
  v1::SessionRef restarted = good;
  restarted.set_incarnation(std::string(16, 8));
  v1::SessionRef unknown = good;
  unknown.set_token(std::string(16, 'x'));
  v1::SessionRef short_token = good;
  short_token.set_token("x");
  const auto check = [&](auto method, auto request) {
    for (const auto& [session, code] :
         {std::pair{restarted, kAborted}, {unknown, kAborted}, {short_token, kInvalid}}) {
      *request.mutable_session() = session;
      EXPECT_EQ(Fail(method, request).error_code(), code) << request.GetTypeName();
    }
    request.clear_session();
    EXPECT_EQ(Fail(method, request).error_code(), kInvalid);
  };
  check(&Stub::Match, v1::MatchRequest());
  check(&Stub::Reserve, v1::ReserveRequest());
  check(&Stub::Seal, v1::SealRequest());
  check(&Stub::Lease, v1::LeaseRequest());
  check(&Stub::Release, v1::ReleaseRequest());
  check(&Stub::Detach, v1::DetachRequest());
  EXPECT_EQ(metrics_.stale_rejects[kStaleIncarnation].value(), 6u);
}

TEST_F(PoolServiceTest, PageListsAreCheckedBeforeUse) {
  v1::MatchRequest request;
  *request.mutable_session() = Attached();
  request.add_shards(0);
  const auto status_of = [&](const v1::PageList& pages) {
    *request.mutable_pages() = pages;
    v1::ReserveRequest reserve;
    *reserve.mutable_session() = request.session();
    *reserve.mutable_pages() = pages;
    const auto code = Fail(&Stub::Match, request).error_code();
    EXPECT_EQ(Fail(&Stub::Reserve, reserve).error_code(), code);
    return code;
  };
  v1::PageList pages = Pages({1, 2});
  pages.mutable_keys()->pop_back();
  EXPECT_EQ(status_of(pages), kInvalid);
  pages = Pages({1, 2});
  pages.add_page_idx(3);
  EXPECT_EQ(status_of(pages), kInvalid);
  pages = Pages({1});
  pages.set_page_idx(0, kMaxPages);
  EXPECT_EQ(status_of(pages), kInvalid);
  pages.set_keys(std::string(16 * (kMaxKeysPerCall + 1), 'k'));
  EXPECT_EQ(status_of(pages), kExhausted);
  *request.mutable_pages() = Pages({1});
  request.add_shards(2);
  EXPECT_EQ(Fail(&Stub::Match, request).error_code(), kInvalid) << "the model has two shards";
  request.set_shards(1, 0);
  EXPECT_EQ(Fail(&Stub::Match, request).error_code(), kInvalid) << "named twice";
  request.clear_shards();
  EXPECT_EQ(Fail(&Stub::Match, request).error_code(), kInvalid);
}

TEST_F(PoolServiceTest, PageIsReservedWrittenSealedMatchedAndReleased) {
  const v1::SessionRef session = Attached();
  v1::ReserveRequest reserve;
  *reserve.mutable_session() = session;
  *reserve.mutable_pages() = Pages({0, 1});
  reserve.set_shard(1);
  v1::ReserveReply reserved;
  ASSERT_EQ(Call(&Stub::Reserve, reserve, &reserved).error_code(), kOk);
  ASSERT_EQ(reserved.results_size(), 2);
  EXPECT_EQ(reserved.results(0).state(), v1::ReserveReply::STATE_NEW);
  testing::WritePage(arena_.get(), IdOf(session), static_cast<Ticket>(reserved.results(0).ticket()),
                     0);

  v1::SealRequest seal;
  *seal.mutable_session() = session;
  seal.add_tickets(reserved.results(0).ticket());
  seal.add_tickets(reserved.results(1).ticket());
  seal.add_tickets(12345);
  v1::SealReply sealed;
  ASSERT_EQ(Call(&Stub::Seal, seal, &sealed).error_code(), kOk);
  ASSERT_EQ(sealed.results_size(), 3);
  EXPECT_EQ(sealed.results(0).code(), 0u) << sealed.results(0).message();
  EXPECT_EQ(sealed.results(0).generation(), 2u);
  EXPECT_EQ(sealed.results(1).code(), static_cast<uint32_t>(kPrecondition));
  EXPECT_THAT(sealed.results(1).message(), HasSubstr("2 of 2 units are missing"));
  EXPECT_EQ(sealed.results(2).code(), static_cast<uint32_t>(grpc::StatusCode::NOT_FOUND));

  v1::MatchRequest match;
  *match.mutable_session() = Attached();
  match.set_request_id(1);
  *match.mutable_pages() = Pages({0, 1});
  match.add_shards(1);
  const v1::MatchReply matched = Match(match);
  EXPECT_EQ(matched.num_pages(), 1u);
  EXPECT_THAT(matched.slots(), ElementsAre(sealed.results(0).slot()));
  EXPECT_THAT(matched.generations(), ElementsAre(2));
  EXPECT_EQ(arena_->Stats().leases, 2u);

  v1::LeaseRequest lease;
  *lease.mutable_session() = match.session();
  lease.add_slots(matched.slots(0));
  lease.add_generations(2);
  lease.add_slots(matched.slots(0));
  lease.add_generations(4);
  v1::LeaseReply leased;
  ASSERT_EQ(Call(&Stub::Lease, lease, &leased).error_code(), kOk);
  EXPECT_THAT(leased.leased(), ElementsAre(true, false));

  v1::ReleaseRequest release;
  *release.mutable_session() = match.session();
  release.add_slots(matched.slots(0));
  release.add_generations(2);
  v1::ReleaseReply released;
  ASSERT_EQ(Call(&Stub::Release, release, &released).error_code(), kOk);
  EXPECT_EQ(arena_->Stats().leases, 1u);

  v1::DetachRequest detach;
  *detach.mutable_session() = session;
  v1::DetachReply detached;
  ASSERT_EQ(Call(&Stub::Detach, detach, &detached).error_code(), kOk);
  EXPECT_EQ(arena_->Stats().leases, 0u);
  EXPECT_EQ(Fail(&Stub::Detach, detach).error_code(), kAborted);
}

TEST_F(PoolServiceTest, LocationsAreCheckedBeforeUse) {
  v1::LeaseRequest request;
  *request.mutable_session() = Attached();
  request.add_slots(1);
  EXPECT_EQ(Fail(&Stub::Lease, request).error_code(), kInvalid) << "no generation";
  request.add_generations(3);
  EXPECT_EQ(Fail(&Stub::Lease, request).error_code(), kInvalid) << "odd";
  request.set_generations(0, 0);
  EXPECT_EQ(Fail(&Stub::Lease, request).error_code(), kInvalid);
  request.set_generations(0, 2);
  request.set_slots(0, 7);
  EXPECT_EQ(Fail(&Stub::Lease, request).error_code(), kInvalid) << "out of range";
  request.mutable_slots()->Resize(kMaxKeysPerCall + 1, 1);
  request.mutable_generations()->Resize(kMaxKeysPerCall + 1, 2);
  EXPECT_EQ(Fail(&Stub::Lease, request).error_code(), kExhausted);
}

TEST_F(PoolServiceTest, FullArenaSaysWhichLimit) {
  v1::ReserveRequest reserve;
  *reserve.mutable_session() = Attached();
  *reserve.mutable_pages() = Pages({0, 1, 2, 3, 4, 5, 6});
  v1::ReserveReply reply;
  ASSERT_EQ(Call(&Stub::Reserve, reserve, &reply).error_code(), kOk);
  EXPECT_EQ(reply.results(5).state(), v1::ReserveReply::STATE_NEW);
  EXPECT_EQ(reply.results(6).state(), v1::ReserveReply::STATE_FULL);
  EXPECT_THAT(reply.full_reason(), HasSubstr("arena acme/tiny is full"));
}

TEST_F(PoolServiceTest, DrainingRefusesNewWorkAndServesTheRest) {
  const v1::SessionRef session = Attached();
  pool_->StartDraining("test");
  EXPECT_EQ(Fail(&Stub::Attach, AttachRequest()).error_code(), grpc::StatusCode::UNAVAILABLE);
  v1::ReserveRequest reserve;
  *reserve.mutable_session() = session;
  EXPECT_EQ(Fail(&Stub::Reserve, reserve).error_code(), grpc::StatusCode::UNAVAILABLE);
  v1::MatchRequest match;
  *match.mutable_session() = session;
  *match.mutable_pages() = Pages({0});
  match.add_shards(0);
  EXPECT_EQ(Match(match).num_pages(), 0u);
}

TEST_F(PoolServiceTest, StatsShowArenasAndSessionsButNoTokens) {
  const v1::SessionRef session = Attached();
  testing::PutPage(arena_.get(), IdOf(session), 1);
  v1::StatsReply reply;
  ASSERT_EQ(Call(&Stub::Stats, v1::StatsRequest(), &reply).error_code(), kOk);
  ASSERT_EQ(reply.arenas_size(), 2);
  EXPECT_EQ(reply.arenas(0).slots_sealed(), 1u);
  EXPECT_EQ(reply.arenas(0).slots_leased(), 1u);
  EXPECT_EQ(reply.arenas(0).slots_free(), 5u);
  ASSERT_EQ(reply.sessions_size(), 1);
  EXPECT_EQ(reply.sessions(0).leased_pages(), 1u);
  EXPECT_EQ(reply.sessions(0).client_name(), "test");
  EXPECT_TRUE(reply.insecure());
  EXPECT_THAT(reply.paths(), ElementsAre("shared: no: a test"));
  EXPECT_EQ(reply.SerializeAsString().find(session.token()), std::string::npos);
}

TEST_F(PoolServiceTest, AdminOnLoopbackDrainsAndShowsTheConfiguration) {
  grpc::ClientContext drain_context;
  v1::DrainRequest drain;
  drain.set_timeout_ms(1234);
  drain.set_exit(true);
  v1::DrainReply drained;
  ASSERT_TRUE(admin_stub_->Drain(&drain_context, drain, &drained).ok());
  EXPECT_EQ(drained_for_ms_, 1234);
  EXPECT_TRUE(exit_asked_);
  EXPECT_EQ(drained.leases_left(), 4u);
  grpc::ClientContext config_context;
  v1::ConfigReply config;
  ASSERT_TRUE(admin_stub_->Config(&config_context, {}, &config).ok());
  EXPECT_EQ(config.text(), "the configuration");
}

TEST_F(PoolServiceTest, EveryCallIsCounted) {
  Attached();
  Fail(&Stub::Seal, v1::SealRequest());
  EXPECT_EQ(metrics_.rpc_requests[static_cast<size_t>(Rpc::kAttach)][0].value(), 1u);
  EXPECT_EQ(
      metrics_.rpc_requests[static_cast<size_t>(Rpc::kSeal)][static_cast<size_t>(kInvalid)].value(),
      1u);
  EXPECT_EQ(metrics_.malformed_calls.value(), 1u);
}

// With certificates: the fixture's server asks for them.
class PoolServiceTlsTest : public testing::TestCertificates, public PoolFixture {
 protected:
  PoolServiceTlsTest() : PoolFixture(MakeTlsCredentials(Server())) {
    Issue("acme", "ca", "URI:locks-kvd://client/acme");
    Issue("rival", "ca", "URI:locks-kvd://client/rival");
    Issue("admin", "ca", "URI:locks-kvd://admin");
    Issue("daemon", "ca", "URI:locks-kvd://daemon");
  }
  void Become(const std::string& name) { UseChannel(Channel(port_, name)); }
  grpc::Status Config() {
    grpc::ClientContext context;
    v1::ConfigReply reply;
    return admin_stub_->Config(&context, {}, &reply);
  }
};

TEST_F(PoolServiceTlsTest, TenantIsTheCertificatesAndAStolenTokenIsUseless) {
  Become("acme");
  v1::AttachRequest request = AttachRequest();
  request.clear_tenant();
  v1::AttachReply reply;
  const grpc::Status attached = Attach(request, &reply);
  ASSERT_TRUE(attached.ok()) << attached.error_message();
  EXPECT_EQ(sessions_->List()[0].arena->tenant(), "acme");
  request.set_tenant("rival");
  v1::AttachReply other;
  EXPECT_EQ(Attach(request, &other).error_code(), grpc::StatusCode::PERMISSION_DENIED);

  Become("rival");
  v1::MatchRequest match;
  *match.mutable_session() = reply.session();
  *match.mutable_pages() = Pages({0});
  match.add_shards(0);
  v1::MatchReply matched;
  EXPECT_EQ(Call(&Stub::Match, match, &matched).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  v1::DetachRequest detach;
  *detach.mutable_session() = reply.session();
  v1::DetachReply detached;
  EXPECT_EQ(Call(&Stub::Detach, detach, &detached).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(sessions_->size(), 1u);
  v1::StatsReply stats;
  ASSERT_TRUE(Call(&Stub::Stats, v1::StatsRequest(), &stats).ok());
  ASSERT_EQ(stats.arenas_size(), 1);
  EXPECT_EQ(stats.arenas(0).tenant(), "rival");
  EXPECT_EQ(stats.sessions_size(), 0);
}

TEST_F(PoolServiceTlsTest, AnotherTenantCannotKeepASessionAlive) {
  Become("acme");
  v1::AttachReply reply;
  ASSERT_TRUE(Attach(AttachRequest(), &reply).ok());
  Become("rival");
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  auto stream = stub_->Session(&context);
  v1::SessionPing ping;
  *ping.mutable_session() = reply.session();
  ASSERT_TRUE(stream->Write(ping));
  v1::SessionEvent event;
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(PoolServiceTlsTest, RolesMayDoWhatIsTheirsAndNoMore) {
  Become("admin");
  EXPECT_TRUE(Config().ok());
  v1::StatsReply stats;
  ASSERT_TRUE(Call(&Stub::Stats, v1::StatsRequest(), &stats).ok());
  EXPECT_EQ(stats.arenas_size(), 2);
  EXPECT_FALSE(stats.insecure());
  v1::AttachReply reply;
  EXPECT_EQ(Attach(AttachRequest(), &reply).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  for (const char* name : {"acme", "daemon"}) {
    Become(name);
    EXPECT_EQ(Config().error_code(), grpc::StatusCode::PERMISSION_DENIED) << name;
  }
  EXPECT_EQ(metrics_.auth_failures[kAuthRole].value(), 3u);
}

TEST_F(PoolServiceTlsTest, OnlyADaemonBringsCopiesAndOnlyWithTheirChecksums) {
  v1::AttachRequest request = AttachRequest();
  request.set_mover(true);
  v1::AttachReply reply;
  for (const char* other : {"acme", "admin"}) {
    Become(other);
    EXPECT_EQ(Attach(request, &reply).error_code(), grpc::StatusCode::PERMISSION_DENIED) << other;
  }
  Become("daemon");
  const grpc::Status attached = Attach(request, &reply);
  ASSERT_TRUE(attached.ok()) << attached.error_message();
  v1::ReserveRequest reserve;
  *reserve.mutable_session() = reply.session();
  *reserve.mutable_pages() = Pages({0});
  reserve.mutable_pages()->add_placement_words(1);
  reserve.mutable_pages()->add_placement_words(2);
  v1::ReserveReply reserved;
  EXPECT_EQ(Call(&Stub::Reserve, reserve, &reserved).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT)
      << "two words for one page";
  reserve.mutable_pages()->mutable_placement_words()->RemoveLast();
  ASSERT_TRUE(Call(&Stub::Reserve, reserve, &reserved).ok());
  v1::SealRequest seal;
  *seal.mutable_session() = reply.session();
  seal.add_tickets(reserved.results(0).ticket());
  v1::SealReply sealed;
  EXPECT_EQ(Call(&Stub::Seal, seal, &sealed).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  // A worker's token does not become a mover's by being presented with a daemon's certificate.
  Become("acme");
  v1::AttachReply worker;
  ASSERT_TRUE(Attach(AttachRequest(), &worker).ok());
  Become("daemon");
  *seal.mutable_session() = worker.session();
  EXPECT_EQ(Call(&Stub::Seal, seal, &sealed).error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(PoolServiceTest, MatchEachNamesThePagesThatAreThere) {
  const v1::SessionRef session = Attached();
  testing::PutPage(arena_.get(), IdOf(session), 0);
  testing::PutPage(arena_.get(), IdOf(session), 2);
  v1::MatchRequest match;
  *match.mutable_session() = session;
  *match.mutable_pages() = Pages({0, 1, 2});
  match.add_shards(0);
  match.set_each(true);
  v1::MatchReply matched;
  ASSERT_TRUE(Call(&Stub::Match, match, &matched).ok());
  EXPECT_EQ(matched.num_pages(), 2u);
  EXPECT_THAT(matched.pages(), ::testing::ElementsAre(0, 2));
  EXPECT_EQ(matched.slots_size(), 2);
}

TEST_F(PoolServiceTest, OnceItHasDrainedNothingIsLeasedAnyMore) {
  const v1::SessionRef session = Attached();
  testing::PutPage(arena_.get(), IdOf(session), 0);
  pool_->StartDraining("maintenance");
  v1::MatchRequest match;
  *match.mutable_session() = session;
  *match.mutable_pages() = Pages({0});
  match.add_shards(0);
  v1::MatchReply matched;
  EXPECT_TRUE(Call(&Stub::Match, match, &matched).ok()) << "while it drains its pages are served";
  pool_->StopLeasing();
  match.set_request_id(2);
  EXPECT_EQ(Call(&Stub::Match, match, &matched).error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace kvd
