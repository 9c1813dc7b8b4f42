#include "service/server.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "proto/address.h"
#include "proto/ingest_channel.h"
#include "proto/pool.grpc.pb.h"
#include "tests/service/http_get.h"
#include "tests/service/server_fixture.h"
#include "tests/support/eventually.h"

namespace kvd {
namespace {

using testing::Eventually;
using ::testing::HasSubstr;
namespace v1 = locks_kvd::v1;

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

std::string ReadFile(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

struct Client {
  explicit Client(const std::string& address)
      : channel(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())),
        pool(v1::Pool::NewStub(channel)),
        admin(v1::Admin::NewStub(channel)) {}

  grpc::Status Attach(v1::AttachReply* reply) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::AttachRequest request;
    request.set_protocol_min(1);
    request.set_protocol_max(1);
    request.set_tenant("acme");
    request.set_model("tiny");
    request.set_layout_fingerprint(LayoutFingerprint(testing::TinyGeometry()));
    const Fingerprint model = ModelFingerprint(testing::TinyGeometry(), "w", "");
    request.set_model_fingerprint(model.data(), model.size());
    return pool->Attach(&context, request, reply);
  }
  grpc::Status Reserve(const v1::SessionRef& session, int page, v1::ReserveReply* reply) const {
    grpc::ClientContext context;
    v1::ReserveRequest request;
    *request.mutable_session() = session;
    const PageKey key = testing::KeyOf(page);
    request.mutable_pages()->set_keys(key.data(), key.size());
    request.mutable_pages()->add_page_idx(0);
    return pool->Reserve(&context, request, reply);
  }
  // Puts one page over UCX; leased to the session.
  v1::SealReply::Result Put(const v1::AttachReply& attached, int page) const {
    v1::ReserveReply reserved;
    EXPECT_TRUE(Reserve(attached.session(), page, &reserved).ok());
    const uint64_t ticket = reserved.results(0).ticket();
    UcxOptions options;
    options.devices = "lo";
    auto worker = UcxWorker::Make(options);
    EXPECT_TRUE(worker.ok()) << worker.status();
    Incarnation incarnation;
    SessionToken token;
    std::memcpy(incarnation.data(), attached.session().incarnation().data(), incarnation.size());
    std::memcpy(token.data(), attached.session().token().data(), token.size());
    const KvGeometry g = testing::TinyGeometry();
    const size_t unit_bytes = MakeSlotLayout(g).unit_bytes;
    auto ingest = IngestChannel::Connect(worker->get(), attached.ucx().worker_address(),
                                         incarnation, token, unit_bytes, absl::Seconds(10));
    EXPECT_TRUE(ingest.ok()) << ingest.status();
    for (uint16_t layer = 0; layer < g.num_layers; ++layer) {
      const std::vector<uint8_t> bytes = testing::UnitBytes(g, page, 0, layer, 0);
      const IngestUnit unit = {ticket, layer, 0, bytes.data()};
      EXPECT_TRUE((*ingest)->Send({&unit, 1}, absl::Seconds(10)).ok());
    }
    grpc::ClientContext context;
    v1::SealRequest request;
    *request.mutable_session() = attached.session();
    request.add_tickets(ticket);
    v1::SealReply reply;
    EXPECT_TRUE(pool->Seal(&context, request, &reply).ok());
    EXPECT_EQ(reply.results(0).code(), 0u) << reply.results(0).message();
    return reply.results(0);
  }
  v1::StatsReply Stats() const {
    grpc::ClientContext context;
    v1::StatsReply reply;
    const grpc::Status status = pool->Stats(&context, {}, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Pool::Stub> pool;
  std::unique_ptr<v1::Admin::Stub> admin;
};

class ServerTest : public ::testing::Test {
 protected:
  std::unique_ptr<Server> Start(const v1::DaemonConfig& config) {
    auto server = Server::Start(config);
    EXPECT_TRUE(server.ok()) << server.status();
    return server.ok() ? *std::move(server) : nullptr;
  }
  v1::DaemonConfig config() const { return testing::TinyConfig(directory_.path()); }

  testing::ScratchDirectory directory_;
};

TEST_F(ServerTest, ServesWhatItSaysInTheReadyFileAndCleansUp) {
  v1::DaemonConfig with_metrics = config();
  with_metrics.set_metrics_address("127.0.0.1:0");
  auto server = Start(with_metrics);
  v1::ReadyFile ready;
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(ReadFile(directory_.path() + "/ready"),
                                                            &ready));
  EXPECT_EQ(ready.pid(), static_cast<uint64_t>(getpid()));
  EXPECT_EQ(ready.SerializeAsString(), server->ready().SerializeAsString());
  v1::AttachReply attached;
  Client client(ready.control_address());
  const grpc::Status status = client.Attach(&attached);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(attached.shared().socket_path(), ready.socket_path());
  EXPECT_TRUE(attached.has_ucx());
  const std::string metrics =
      testing::HttpGet(Address::Parse(ready.metrics_address())->port, "/metrics");
  EXPECT_THAT(metrics, HasSubstr("locks_kvd_incarnation_info{incarnation=\"" + ready.incarnation() +
                                 "\"} 1"));
  EXPECT_THAT(metrics, HasSubstr("locks_kvd_sessions{role=\"client\"} 1"));
  EXPECT_EQ(metrics.find(attached.session().token()), std::string::npos);
  server.reset();
  EXPECT_FALSE(Exists(directory_.path() + "/ready"));
  EXPECT_FALSE(Exists(ready.socket_path()));
}

TEST_F(ServerTest, TwoStartsAreTwoIncarnations) {
  auto first = Start(config());
  const std::string incarnation = first->ready().incarnation();
  first.reset();
  auto second = Start(config());
  EXPECT_NE(second->ready().incarnation(), incarnation);
}

TEST_F(ServerTest, SilentSessionIsReapedAndItsSlotComesBackAfterTheQuarantine) {
  auto server = Start(config());
  Client client(server->ready().control_address());
  v1::AttachReply attached;
  ASSERT_TRUE(client.Attach(&attached).ok());
  v1::ReserveReply reserved;
  ASSERT_TRUE(client.Reserve(attached.session(), 1, &reserved).ok());
  EXPECT_TRUE(Eventually([&] { return client.Stats().sessions().empty(); }));
  EXPECT_EQ(client.Reserve(attached.session(), 2, &reserved).error_code(),
            grpc::StatusCode::ABORTED);
  EXPECT_TRUE(Eventually([&] { return client.Stats().arenas(0).slots_free() == 4; }));
}

TEST_F(ServerTest, DrainWithoutLeasesIsCleanAndEndsTheProcessIfAskedTo) {
  auto server = Start(config());
  Client client(server->ready().control_address());
  std::thread waiter([&] { server->WaitForExit(); });
  grpc::ClientContext context;
  v1::DrainRequest request;
  request.set_exit(true);
  v1::DrainReply reply;
  const grpc::Status status = client.admin->Drain(&context, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(reply.clean());
  waiter.join();
  EXPECT_TRUE(client.Stats().draining());
  v1::AttachReply attached;
  EXPECT_EQ(client.Attach(&attached).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServerTest, DrainWaitsForLeasesAndSaysHowManyItCutOff) {
  v1::DaemonConfig patient = config();
  patient.mutable_times()->set_session_ttl_ms(60000);
  auto server = Start(patient);
  Client client(server->ready().control_address());
  v1::AttachReply attached;
  ASSERT_TRUE(client.Attach(&attached).ok());
  const auto sealed = client.Put(attached, 1);
  const DrainResult cut_off = server->Drain(absl::Milliseconds(30), "test");
  EXPECT_FALSE(cut_off.clean);
  EXPECT_EQ(cut_off.leases_left, 1u);
  std::atomic<bool> ended{false};
  DrainResult result;
  std::thread drain([&] {
    result = server->Drain(absl::Seconds(30), "test");
    ended = true;
  });
  // a drain that does not wait has ended by now
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(ended);
  grpc::ClientContext context;
  v1::ReleaseRequest release;
  *release.mutable_session() = attached.session();
  release.add_slots(sealed.slot());
  release.add_generations(sealed.generation());
  v1::ReleaseReply released;
  EXPECT_TRUE(client.pool->Release(&context, release, &released).ok());
  drain.join();
  EXPECT_TRUE(result.clean);
}

TEST_F(ServerTest, ConfigurationIsShownToAdmins) {
  auto server = Start(config());
  Client client(server->ready().control_address());
  grpc::ClientContext context;
  v1::ConfigReply reply;
  ASSERT_TRUE(client.admin->Config(&context, {}, &reply).ok());
  EXPECT_THAT(reply.text(), HasSubstr("session_ttl_ms: 500"));
}

TEST_F(ServerTest, StartThatFailsSaysWhyAndLeavesNothingBehind) {
  auto server = Start(config());
  v1::DaemonConfig taken = config();
  taken.mutable_control()->set_address(server->ready().control_address());
  taken.set_ready_file(directory_.path() + "/other");
  EXPECT_THAT(Server::Start(taken).status().message(), HasSubstr("control.address"));
  EXPECT_FALSE(Exists(directory_.path() + "/other"));
  v1::DaemonConfig bad = config();
  bad.set_ready_file("/nowhere/ready");
  EXPECT_THAT(Server::Start(bad).status().message(), HasSubstr("ready_file /nowhere/ready"));
  bad = config();
  bad.mutable_control()->mutable_tls()->set_certificate_file("/nowhere/c.pem");
  EXPECT_EQ(Server::Start(bad).status().code(), absl::StatusCode::kFailedPrecondition);
}

// The program itself, told to stop by signals.
class DaemonProcessTest : public ServerTest {
 protected:
  void Launch() {
    const std::string file = directory_.path() + "/config.textproto";
    v1::DaemonConfig patient = config();
    patient.mutable_times()->set_session_ttl_ms(60000);
    std::ofstream(file) << PrintConfig(patient);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      execl(KVD_DAEMON, "locks-kvd", "--config", file.c_str(), "--log-level", "warn", nullptr);
      _exit(127);
    }
    ASSERT_TRUE(Eventually([&] { return Exists(directory_.path() + "/ready"); }));
    ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(
        ReadFile(directory_.path() + "/ready"), &ready_));
  }
  int Wait() const {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  pid_t pid_ = 0;
  v1::ReadyFile ready_;
};

TEST_F(DaemonProcessTest, SigtermDrainsAndExitsWithZero) {
  Launch();
  EXPECT_EQ(ready_.pid(), static_cast<uint64_t>(pid_));
  kill(pid_, SIGTERM);
  EXPECT_EQ(Wait(), 0);
  EXPECT_FALSE(Exists(directory_.path() + "/ready"));
  EXPECT_FALSE(Exists(ready_.socket_path()));
}

TEST_F(DaemonProcessTest, SecondSignalEndsADrainAtOnce) {
  Launch();
  Client client(ready_.control_address());
  v1::AttachReply attached;
  ASSERT_TRUE(client.Attach(&attached).ok());
  client.Put(attached, 1);  // leased: the drain has something to wait for
  grpc::ClientContext context;
  auto stream = client.pool->Session(&context);
  v1::SessionPing ping;
  *ping.mutable_session() = attached.session();
  ASSERT_TRUE(stream->Write(ping));
  v1::SessionEvent event;
  ASSERT_TRUE(stream->Read(&event));
  kill(pid_, SIGINT);
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.draining().reason(), "signal 2");
  kill(pid_, SIGINT);
  EXPECT_EQ(Wait(), 1);
}

TEST_F(DaemonProcessTest, KilledDaemonsSocketDoesNotKeepTheNextOneFromStarting) {
  Launch();
  kill(pid_, SIGKILL);
  EXPECT_EQ(Wait(), -SIGKILL);
  unlink((directory_.path() + "/ready").c_str());
  Launch();
  kill(pid_, SIGTERM);
  EXPECT_EQ(Wait(), 0);
}

}  // namespace
}  // namespace kvd
