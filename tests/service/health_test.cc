#include "service/health.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <string>

namespace kvd {
namespace {

// grpc.health.v1.Health/Check by hand: the request is field 1 (name), the reply field 1 (1 =
// SERVING). The message classes do not come with gRPC's package.
struct Check {
  grpc::Status status;
  bool serving = false;
};

Check Ask(uint16_t port, const std::string& service,
          const char* method = "/grpc.health.v1.Health/Check") {
  const auto channel =
      grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials());
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  std::string request;
  if (!service.empty()) request = std::string("\x0A") + static_cast<char>(service.size()) + service;
  const grpc::Slice slice(request);
  grpc::ByteBuffer message(&slice, 1);
  grpc::CompletionQueue queue;
  auto call = stub.PrepareUnaryCall(&context, method, message, &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  Check check;
  call->Finish(&reply, &check.status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> slices;
  if (check.status.ok() && reply.Dump(&slices).ok()) {
    std::string bytes;
    for (const grpc::Slice& each : slices)
      bytes.append(reinterpret_cast<const char*>(each.begin()), each.size());
    check.serving = bytes == std::string("\x08\x01");
  }
  return check;
}

TEST(HealthTest, NamedServicesAnswerWhatWasSet) {
  auto health = HealthServer::Make("127.0.0.1:0");
  ASSERT_TRUE(health.ok()) << health.status();
  const uint16_t port = (*health)->port();
  for (const char* name : {"startup", "live", "ready", ""}) {
    const Check check = Ask(port, name);
    EXPECT_TRUE(check.status.ok()) << name << ": " << check.status.error_message();
    EXPECT_FALSE(check.serving) << name;
  }
  (*health)->SetStarted(true);
  (*health)->SetLive(true);
  EXPECT_TRUE(Ask(port, "startup").serving);
  EXPECT_TRUE(Ask(port, "live").serving);
  EXPECT_FALSE(Ask(port, "ready").serving);
  (*health)->SetReady(true);
  EXPECT_TRUE(Ask(port, "ready").serving);
  EXPECT_TRUE(Ask(port, "").serving);
  (*health)->SetReady(false);
  EXPECT_FALSE(Ask(port, "ready").serving);
  EXPECT_TRUE(Ask(port, "live").serving);
}

TEST(HealthTest, NothingElseIsServedThere) {
  auto health = HealthServer::Make("127.0.0.1:0");
  ASSERT_TRUE(health.ok());
  EXPECT_EQ(Ask((*health)->port(), "unknown").status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Ask((*health)->port(), "", "/locks_kvd.v1.Pool/Stats").status.error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST(HealthTest, TakenPortIsReported) {
  auto health = HealthServer::Make("127.0.0.1:0");
  ASSERT_TRUE(health.ok());
  const auto second = HealthServer::Make("127.0.0.1:" + std::to_string((*health)->port()));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kvd
