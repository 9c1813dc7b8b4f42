// A control plane on loopback over one small arena, for tests of its calls.

#ifndef LOCKS_KVD_TESTS_SERVICE_POOL_FIXTURE_H_
#define LOCKS_KVD_TESTS_SERVICE_POOL_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "service/admin_service.h"
#include "service/pool_service.h"
#include "tests/service/arena_fixture.h"

namespace kvd::testing {

namespace v1 = locks_kvd::v1;

class PoolFixture : public ::testing::Test {
 protected:
  explicit PoolFixture(std::shared_ptr<grpc::ServerCredentials> credentials = nullptr) {
    incarnation_.fill(7);
    ArenaOptions acme = TinyOptions(6, &clock_);
    acme.model_fingerprint.fill(3);
    arena_ = MakeArena(acme);
    ArenaOptions rival = TinyOptions(2, &clock_);
    rival.tenant = "rival";
    rival_arena_ = MakeArena(rival);
    sessions_ = std::make_unique<SessionTable>(SessionTable::Options{.incarnation = incarnation_,
                                                                     .ttl = absl::Seconds(5),
                                                                     .sessions_per_tenant = 3,
                                                                     .clock = &clock_});
    PoolOptions options;
    options.sessions = sessions_.get();
    options.sealer = &sealer_;
    options.metrics = &metrics_;
    options.clock = &clock_;
    arenas_ = {arena_, rival_arena_};
    options.arenas = arenas_;
    options.tls = credentials != nullptr;
    options.version = "test";
    pool_ = std::make_unique<PoolService>(std::move(options));
    AdminOptions admin;
    admin.tls = credentials != nullptr;
    admin.metrics = &metrics_;
    admin.slowlog = &slowlog_;
    admin.arenas = &arenas_;
    admin.config = [] { return "the configuration"; };
    admin.drain = [this](absl::Duration limit, bool exit) -> absl::StatusOr<DrainOutcome> {
      drained_for_ms_ = absl::ToInt64Milliseconds(limit);
      exit_asked_ = exit;
      return DrainOutcome{true, 4};
    };
    admin_ = std::make_unique<AdminService>(std::move(admin));
    grpc::ServerBuilder builder;
    builder.AddListeningPort(
        "127.0.0.1:0", credentials != nullptr ? credentials : grpc::InsecureServerCredentials(),
        &port_);
    builder.RegisterService(pool_.get());
    builder.RegisterService(admin_.get());
    server_ = builder.BuildAndStart();
    if (credentials == nullptr) {
      UseChannel(grpc::CreateChannel("127.0.0.1:" + std::to_string(port_),
                                     grpc::InsecureChannelCredentials()));
    }
    PathOffers offers;
    offers.report = {"shared: no: a test"};
    pool_->Open(offers);
  }
  ~PoolFixture() override {
    pool_->EndStreams();
    server_->Shutdown();
  }

  void UseChannel(const std::shared_ptr<grpc::Channel>& channel) {
    stub_ = v1::Pool::NewStub(channel);
    admin_stub_ = v1::Admin::NewStub(channel);
  }

  v1::AttachRequest AttachRequest() const {
    v1::AttachRequest request;
    request.set_protocol_min(1);
    request.set_protocol_max(1);
    request.set_tenant("acme");
    request.set_model("tiny");
    request.set_layout_fingerprint(LayoutFingerprint(TinyGeometry()));
    request.set_model_fingerprint(std::string(32, 3));
    request.set_client_name("test");
    return request;
  }

  // One unary call; the status is returned, the reply kept.
  template <typename Request, typename Reply>
  grpc::Status Call(grpc::Status (v1::Pool::Stub::*method)(grpc::ClientContext*, const Request&,
                                                           Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return ((*stub_).*method)(&context, request, reply);
  }
  grpc::Status Attach(const v1::AttachRequest& request, v1::AttachReply* reply) {
    return Call(&v1::Pool::Stub::Attach, request, reply);
  }
  v1::SessionRef Attached() {
    v1::AttachReply reply;
    const grpc::Status status = Attach(AttachRequest(), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply.session();
  }

  static v1::PageList Pages(std::initializer_list<int> pages) {
    v1::PageList list;
    for (const int page : pages) {
      const PageKey key = KeyOf(page);
      list.mutable_keys()->append(reinterpret_cast<const char*>(key.data()), key.size());
      list.add_page_idx(static_cast<uint32_t>(page));
    }
    return list;
  }
  SessionId IdOf(const v1::SessionRef& session) const {
    SessionToken token;
    std::memcpy(token.data(), session.token().data(), token.size());
    return sessions_->Find(token, incarnation_)->id;
  }

  TestClock clock_;
  Incarnation incarnation_;
  Metrics metrics_;
  Slowlog slowlog_;
  Sealer sealer_{2};
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Arena> rival_arena_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::unique_ptr<SessionTable> sessions_;
  std::unique_ptr<PoolService> pool_;
  std::unique_ptr<AdminService> admin_;
  std::atomic<int64_t> drained_for_ms_{0};
  std::atomic<bool> exit_asked_{false};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Pool::Stub> stub_;
  std::unique_ptr<v1::Admin::Stub> admin_stub_;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SERVICE_POOL_FIXTURE_H_
