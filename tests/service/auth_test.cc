#include "service/auth.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "proto/pool.grpc.pb.h"
#include "proto/status.h"
#include "tests/service/test_certificates.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;

TEST(AuthTest, IdentityUriNamesRoleAndTenantAndNothingElseIsAccepted) {
  EXPECT_EQ(ParseIdentityUri("locks-kvd://client/acme")->tenant, "acme");
  EXPECT_EQ(ParseIdentityUri("locks-kvd://client/acme")->role, Role::kClient);
  EXPECT_EQ(ParseIdentityUri("locks-kvd://admin")->role, Role::kAdmin);
  EXPECT_EQ(ParseIdentityUri("locks-kvd://daemon")->role, Role::kDaemon);
  for (const char* bad :
       {"", "locks-kvd://", "locks-kvd://client/", "locks-kvd://client", "locks-kvd://client/a/b",
        "locks-kvd://root", "locks-kvd://admin/x", "http://client/acme", "locks-kvd://ADMIN"}) {
    EXPECT_FALSE(ParseIdentityUri(bad).ok()) << bad;
  }
}

TEST(AuthTest, TenantComesFromTheCertificateAndFromTheRequestOnlyWithoutOne) {
  const PeerIdentity acme = *ParseIdentityUri("locks-kvd://client/acme");
  EXPECT_EQ(*ClientTenant(acme, ""), "acme");
  EXPECT_EQ(*ClientTenant(acme, "acme"), "acme");
  EXPECT_EQ(ClientTenant(acme, "rival").status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ClientTenant(*ParseIdentityUri("locks-kvd://admin"), "acme").status().code(),
            absl::StatusCode::kPermissionDenied);
  const PeerIdentity nobody = {.authenticated = false, .loopback = true, .tenant = ""};
  EXPECT_EQ(*ClientTenant(nobody, "acme"), "acme");
  EXPECT_EQ(ClientTenant(nobody, "").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(AuthTest, AdminNeedsItsRoleOrThisHostWithoutCertificates) {
  EXPECT_TRUE(CheckAdmin(*ParseIdentityUri("locks-kvd://admin")).ok());
  EXPECT_EQ(CheckAdmin(*ParseIdentityUri("locks-kvd://client/acme")).code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(CheckAdmin(*ParseIdentityUri("locks-kvd://daemon")).code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(CheckAdmin({.authenticated = false, .loopback = true, .tenant = ""}).ok());
  EXPECT_EQ(CheckAdmin({.authenticated = false, .loopback = false, .tenant = ""}).code(),
            absl::StatusCode::kPermissionDenied);
}

// Answers Stats with the identity that the daemon sees.
class WhoAmI final : public locks_kvd::v1::Pool::Service {
 public:
  grpc::Status Stats(grpc::ServerContext* context, const locks_kvd::v1::StatsRequest*,
                     locks_kvd::v1::StatsReply* reply) override {
    const auto peer = IdentifyPeer(*context, true);
    if (!peer.ok()) return ToGrpc(peer.status());
    reply->set_version(std::to_string(static_cast<int>(peer->role)) + ":" + peer->tenant);
    return grpc::Status::OK;
  }
};

class AuthTlsTest : public ::testing::Test {
 protected:
  AuthTlsTest() {
    certificates_.Issue("acme", "ca", "URI:locks-kvd://client/acme");
    certificates_.Issue("admin", "ca", "URI:locks-kvd://admin,DNS:ops.example");
    certificates_.Issue("two", "ca", "URI:locks-kvd://client/acme,URI:locks-kvd://admin");
    certificates_.Issue("none", "ca", "DNS:worker.example");
    certificates_.Issue("stranger", "other_ca", "URI:locks-kvd://client/acme");
    certificates_.Issue("expired", "ca", "URI:locks-kvd://client/acme", -1);
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", MakeTlsCredentials(certificates_.Server()), &port_);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
  }
  ~AuthTlsTest() override { server_->Shutdown(); }

  grpc::Status Ask(const std::string& certificate, std::string* seen = nullptr) {
    auto stub = locks_kvd::v1::Pool::NewStub(certificates_.Channel(port_, certificate));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    locks_kvd::v1::StatsReply reply;
    const grpc::Status status = stub->Stats(&context, {}, &reply);
    if (seen != nullptr) *seen = reply.version();
    return status;
  }

  testing::TestCertificates certificates_;
  WhoAmI service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(AuthTlsTest, CertificateOfOurCaIsIdentified) {
  std::string seen;
  grpc::Status status = Ask("acme", &seen);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(seen, "0:acme");
  EXPECT_TRUE(Ask("admin", &seen).ok());
  EXPECT_EQ(seen, "1:");
}

TEST_F(AuthTlsTest, NoneForeignExpiredAndAmbiguousCertificatesAreRefused) {
  EXPECT_EQ(Ask("").error_code(), grpc::StatusCode::UNAVAILABLE)
      << "no certificate: the handshake fails";
  EXPECT_EQ(Ask("stranger").error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Ask("expired").error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Ask("two").error_code(), grpc::StatusCode::UNAUTHENTICATED);
  const grpc::Status none = Ask("none");
  EXPECT_EQ(none.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(none.error_message(), HasSubstr("locks-kvd://client/<tenant>"));
}

TEST_F(AuthTlsTest, RotatedCaIsInForceWithoutARestart) {
  ASSERT_FALSE(Ask("stranger").ok());
  std::filesystem::copy_file(certificates_.Path("other_ca.pem"), certificates_.Path("new.pem"));
  std::filesystem::rename(certificates_.Path("new.pem"), certificates_.Path("ca.pem.next"));
  // Clients of the fixture trust ca.pem too: keep the old one in the file, as in a real rotation.
  std::ofstream(certificates_.Path("ca.pem.next"), std::ios::app)
      << testing::TestCertificates::Read(certificates_.Path("ca.pem"));
  std::filesystem::rename(certificates_.Path("ca.pem.next"), certificates_.Path("ca.pem"));
  grpc::Status status;
  for (int i = 0; i < 100 && !(status = Ask("stranger")).ok(); ++i)
    absl::SleepFor(absl::Milliseconds(200));
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(Ask("acme").ok());
}

TEST_F(AuthTlsTest, FilesAreCheckedBeforeTheDaemonServes) {
  const auto good = CheckTlsFiles(certificates_.Server(), absl::Now());
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_GT((*good)[0].second, absl::Now());
  const auto refused = [this](const char* field, const std::string& file,
                              absl::Time now = absl::Now()) {
    locks_kvd::v1::TlsConfig tls = certificates_.Server();
    tls.GetReflection()->SetString(&tls, tls.GetDescriptor()->FindFieldByName(field),
                                   certificates_.Path(file));
    const auto checked = CheckTlsFiles(tls, now);
    EXPECT_EQ(checked.status().code(), absl::StatusCode::kFailedPrecondition);
    return std::string(checked.status().message());
  };
  EXPECT_THAT(refused("certificate_file", "nowhere.pem"), HasSubstr("a readable file"));
  EXPECT_THAT(refused("certificate_file", "server.key"), HasSubstr("a PEM certificate"));
  EXPECT_THAT(refused("key_file", "acme.key"), HasSubstr("belongs to another certificate"));
  EXPECT_THAT(refused("key_file", "server.pem"), HasSubstr("a PEM private key"));
  EXPECT_THAT(refused("ca_file", "ca.pem", absl::Now() + absl::Hours(24 * 30)),
              HasSubstr("still valid"));
}

}  // namespace
}  // namespace kvd
