// Goal: questions get their answers whatever servers do, within the deadline. Method: servers of
// the test on loopback.

#include "proto/dns_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "tests/support/dns_server.h"

namespace kvd {
namespace {

using kvd::testing::ARecord;
using kvd::testing::DnsAnswerTo;
using kvd::testing::DnsBytes;
using kvd::testing::DnsMessages;
using kvd::testing::DnsNameIn;
using kvd::testing::DnsRecord;
using kvd::testing::DnsServer;
using kvd::testing::SrvRecord;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The C library's override of resolv.conf's search list. It reads it once: before any test asks.
const bool kSearchListIsSet = setenv("LOCALDOMAIN", "ns.svc cluster.local", 1) == 0 &&
                              setenv("RES_OPTIONS", "ndots:2", 1) == 0;

constexpr absl::Duration kTimeout = absl::Seconds(20);

std::unique_ptr<DnsClient> ClientOf(const std::vector<std::string>& servers) {
  auto client = DnsClient::Make(servers);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

DnsServer::Answer Always(const std::vector<DnsRecord>& records) {
  return [records](const DnsBytes& query, DnsServer::Over) {
    return DnsMessages{DnsAnswerTo(query, records)};
  };
}

TEST(DnsClientTest, AnswersOverUdpOfEitherFamily) {
  for (const std::string host : {"127.0.0.1", "::1"}) {
    DnsServer server(host, Always({ARecord("10.0.0.1"), ARecord("10.0.0.2")}));
    const auto found = ClientOf({server.address()})->Ask("kv.test.", DnsType::kA, 7411, kTimeout);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_THAT(*found, ElementsAre(Address{"10.0.0.1", 7411}, Address{"10.0.0.2", 7411}));
  }
}

TEST(DnsClientTest, ALongAnswerComesOverTcp) {
  std::vector<DnsRecord> records;
  for (uint16_t i = 0; i < 200; ++i)
    records.push_back(SrvRecord("kv-" + std::to_string(i) + ".kv.ns.svc.cluster.local", 7411));
  DnsServer server("127.0.0.1", [&](const DnsBytes& query, DnsServer::Over over) {
    const bool cut = over == DnsServer::Over::kUdp;
    return DnsMessages{DnsAnswerTo(query, cut ? std::vector<DnsRecord>() : records, 0, cut)};
  });
  const auto found =
      ClientOf({server.address()})->Ask("_c._tcp.kv.test.", DnsType::kSrv, 0, kTimeout);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->size(), 200u);
  EXPECT_EQ(found->back(), (Address{"kv-199.kv.ns.svc.cluster.local", 7411}));
}

TEST(DnsClientTest, OthersMessagesArePassedOver) {
  DnsServer server("127.0.0.1", [](const DnsBytes& query, DnsServer::Over) {
    DnsBytes other_id = DnsAnswerTo(query, {ARecord("6.6.6.6")});
    other_id[0] ^= 1;
    DnsBytes other_name = DnsAnswerTo(query, {ARecord("6.6.6.7")});
    other_name[13] ^= 1;
    return DnsMessages{DnsBytes{1, 2, 3}, other_id, other_name, query,
                       DnsAnswerTo(query, {ARecord("10.0.0.1")})};
  });
  const auto found = ClientOf({server.address()})->Ask("kv.test.", DnsType::kA, 1, kTimeout);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(*found, ElementsAre(Address{"10.0.0.1", 1}));
}

TEST(DnsClientTest, TheNextServerIsAskedWhenOneIsSilentOrFails) {
  DnsServer silent("127.0.0.1", [](const DnsBytes&, DnsServer::Over) { return DnsMessages(); });
  DnsServer failing("127.0.0.1", [](const DnsBytes& query, DnsServer::Over) {
    return DnsMessages{DnsAnswerTo(query, {}, 2)};
  });
  DnsServer good("::1", Always({ARecord("10.0.0.1")}));
  const auto found = ClientOf({silent.address(), failing.address(), good.address()})
                         ->Ask("kv.test.", DnsType::kA, 1, kTimeout);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(silent.num_queries(), 1);
  EXPECT_EQ(failing.num_queries(), 1);
  const auto failed = ClientOf({failing.address()})->Ask("kv.test.", DnsType::kA, 1, kTimeout);
  EXPECT_TRUE(absl::IsUnavailable(failed.status())) << failed.status();
}

TEST(DnsClientTest, ThereMayBeNoRecordsNoNameAndNoServer) {
  DnsServer server("127.0.0.1", Always({}));
  const auto none = ClientOf({server.address()})->Ask("kv.test.", DnsType::kA, 1, kTimeout);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_THAT(*none, IsEmpty());
  server.Set([](const DnsBytes& query, DnsServer::Over) {
    return DnsMessages{DnsAnswerTo(query, {}, 3)};
  });
  const auto no_name = ClientOf({server.address()})->Ask("kv.test.", DnsType::kA, 1, kTimeout);
  EXPECT_TRUE(absl::IsNotFound(no_name.status())) << no_name.status();
  EXPECT_THAT(no_name.status().message(), HasSubstr("kv.test."));
  std::string gone;
  {
    DnsServer ended("127.0.0.1", Always({}));
    gone = ended.address();
  }
  const auto no_server = ClientOf({gone})->Ask("kv.test.", DnsType::kA, 1, kTimeout);
  EXPECT_TRUE(absl::IsUnavailable(no_server.status())) << no_server.status();
}

// A server that cuts every answer, takes the TCP connection and says nothing.
TEST(DnsClientTest, ASilentTcpServerCannotHoldTheQuestion) {
  DnsServer server("127.0.0.1", [](const DnsBytes& query, DnsServer::Over over) {
    if (over == DnsServer::Over::kTcp) return DnsMessages();
    return DnsMessages{DnsAnswerTo(query, {}, 0, true)};
  });
  const auto found =
      ClientOf({server.address()})->Ask("kv.test.", DnsType::kA, 1, absl::Milliseconds(300));
  EXPECT_TRUE(absl::IsUnavailable(found.status())) << found.status();
  server.Set([](const DnsBytes& query, DnsServer::Over over) {
    const bool cut = over == DnsServer::Over::kUdp;
    return DnsMessages{cut ? DnsAnswerTo(query, {}, 0, true)
                           : DnsAnswerTo(query, {ARecord("10.0.0.1")}, 0, true)};
  });
  const auto cut_twice = ClientOf({server.address()})->Ask("kv.test.", DnsType::kA, 1, kTimeout);
  EXPECT_TRUE(absl::IsInvalidArgument(cut_twice.status())) << cut_twice.status();
}

TEST(DnsClientTest, CancelEndsTheQuestionInFlightAndLaterOnes) {
  DnsServer server("127.0.0.1", [](const DnsBytes&, DnsServer::Over) { return DnsMessages(); });
  const auto client = ClientOf({server.address()});
  absl::Status status;
  std::thread asking(
      [&] { status = client->Ask("kv.test.", DnsType::kA, 1, absl::Hours(1)).status(); });
  while (server.num_queries() == 0) absl::SleepFor(absl::Milliseconds(1));
  client->Cancel();
  asking.join();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_TRUE(absl::IsCancelled(client->Ask("kv.test.", DnsType::kA, 1, kTimeout).status()));
}

TEST(DnsClientTest, RelativeNamesAreCompleted) {
  ASSERT_TRUE(kSearchListIsSet);
  std::mutex mutex;
  std::vector<std::string> asked;
  DnsServer server("127.0.0.1", [&](const DnsBytes& query, DnsServer::Over) {
    const std::lock_guard<std::mutex> lock(mutex);
    asked.push_back(DnsNameIn(query));
    if (asked.back() == "kv.cluster.local")
      return DnsMessages{DnsAnswerTo(query, {ARecord("10.0.0.1")})};
    return DnsMessages{DnsAnswerTo(query, {}, 3)};
  });
  const auto client = ClientOf({server.address()});
  EXPECT_TRUE(client->Ask("kv", DnsType::kA, 1, kTimeout).ok());
  EXPECT_TRUE(absl::IsNotFound(client->Ask("a.b.c", DnsType::kA, 1, kTimeout).status()));
  const std::lock_guard<std::mutex> lock(mutex);
  EXPECT_THAT(asked, ElementsAre("kv.ns.svc", "kv.cluster.local", "a.b.c", "a.b.c.ns.svc",
                                 "a.b.c.cluster.local"));
}

TEST(DnsClientTest, BadServersAndNamesAreTyped) {
  EXPECT_TRUE(absl::IsInvalidArgument(DnsClient::Make({"dns.example:53"}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DnsClient::Make({"127.0.0.1"}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      DnsClient::Make(std::vector<std::string>(4, "127.0.0.1:53")).status()));
  DnsServer server("127.0.0.1", Always({}));
  const auto client = ClientOf({server.address()});
  for (const std::string& name :
       {std::string("a..b."), std::string(70, 'x') + ".", std::string(300, 'x')}) {
    EXPECT_TRUE(absl::IsInvalidArgument(client->Ask(name, DnsType::kA, 1, kTimeout).status()))
        << name;
  }
  EXPECT_EQ(server.num_queries(), 0);
}

}  // namespace
}  // namespace kvd
