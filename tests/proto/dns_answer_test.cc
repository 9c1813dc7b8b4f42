#include "proto/dns_answer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/support/dns_server.h"

namespace kvd {
namespace {

using kvd::testing::ARecord;
using kvd::testing::DnsAnswerTo;
using kvd::testing::DnsBytes;
using kvd::testing::DnsQueryFor;
using kvd::testing::DnsRecord;
using kvd::testing::SrvRecord;
using kvd::testing::SrvRecordPointing;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

const std::string kService = "_control._tcp.kv.ns.svc";

DnsBytes Query() { return DnsQueryFor(kService, DnsType::kSrv, 77); }

// The code of the message with an SRV answer of `records`.
absl::StatusCode CodeOf(const std::vector<DnsRecord>& records) {
  return ParseDnsAnswer(DnsAnswerTo(Query(), records), DnsType::kSrv, 0).status().code();
}

TEST(DnsAnswerTest, RecordsOfTheAskedTypeInTheirOrder) {
  const DnsBytes query = DnsQueryFor("kv.ns.svc", DnsType::kA, 1);
  const DnsBytes answer =
      DnsAnswerTo(query, {ARecord("10.0.0.2"), ARecord("2001:db8::7"), ARecord("10.0.0.1")});
  const auto v4 = ParseDnsAnswer(answer, DnsType::kA, 7411);
  ASSERT_TRUE(v4.ok()) << v4.status();
  EXPECT_THAT(*v4, ElementsAre(Address{"10.0.0.2", 7411}, Address{"10.0.0.1", 7411}));
  const auto v6 = ParseDnsAnswer(answer, DnsType::kAaaa, 7411);
  ASSERT_TRUE(v6.ok());
  EXPECT_THAT(*v6, ElementsAre(Address{"2001:db8::7", 7411}));
  EXPECT_EQ(v6->front().ToString(), "[2001:db8::7]:7411");
  const auto none = ParseDnsAnswer(answer, DnsType::kSrv, 7411);
  ASSERT_TRUE(none.ok());
  EXPECT_THAT(*none, IsEmpty());
}

TEST(DnsAnswerTest, TargetsAreExpandedAndLowered) {
  // "kv.ns.svc" of the question begins after its 12 + 9 + 5 first bytes.
  const auto found = ParseDnsAnswer(
      DnsAnswerTo(Query(), {SrvRecord("KV-0.kv.ns.svc", 7411), SrvRecordPointing("kv-1", 26, 7412),
                            SrvRecord("", 7413)}),
      DnsType::kSrv, 0);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(*found,
              ElementsAre(Address{"kv-0.kv.ns.svc", 7411}, Address{"kv-1.kv.ns.svc", 7412}));
}

TEST(DnsAnswerTest, CodesOfTheServerAreTyped) {
  EXPECT_TRUE(
      absl::IsNotFound(ParseDnsAnswer(DnsAnswerTo(Query(), {}, 3), DnsType::kSrv, 0).status()));
  for (const int code : {1, 2, 4, 5}) {
    EXPECT_TRUE(absl::IsUnavailable(
        ParseDnsAnswer(DnsAnswerTo(Query(), {}, code), DnsType::kSrv, 0).status()))
        << code;
  }
  const DnsBytes cut = DnsAnswerTo(Query(), {SrvRecord("kv-0.kv", 1)}, 0, true);
  EXPECT_TRUE(IsCut(cut));
  EXPECT_TRUE(absl::IsInvalidArgument(ParseDnsAnswer(cut, DnsType::kSrv, 0).status()));
}

TEST(DnsAnswerTest, MalformedRecordsAreRefused) {
  EXPECT_EQ(CodeOf({SrvRecord("kv-0.kv", 1)}), absl::StatusCode::kOk);
  const auto refused = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(CodeOf({{DnsType::kSrv, {}}}), refused);
  EXPECT_EQ(CodeOf({{DnsType::kSrv, {0, 0, 0, 0, 28, 243}}}), refused);
  // The target goes on beyond its record, into the next one.
  EXPECT_EQ(CodeOf({{DnsType::kSrv, {0, 0, 0, 0, 28, 243, 5, 'k'}}, SrvRecord("kv-1.kv", 1)}),
            refused);
  // It ends before its record does.
  EXPECT_EQ(CodeOf({{DnsType::kSrv, {0, 0, 0, 0, 28, 243, 1, 'k', 0, 9, 9}}}), refused);
  // Pointers out of the message, to themselves, and in a circle. The record's data begins after the
  // question, the 12 bytes before it and the SRV's 6.
  EXPECT_EQ(CodeOf({SrvRecordPointing("kv-0", 0x3FFF, 1)}), refused);
  const auto self = static_cast<uint16_t>(Query().size() + 12 + 6);
  EXPECT_EQ(CodeOf({SrvRecordPointing("", self, 1)}), refused);
  EXPECT_EQ(CodeOf({SrvRecordPointing("a", self, 1)}), refused);
  // A label with its two high bits neither 00 nor 11.
  EXPECT_EQ(CodeOf({{DnsType::kSrv, {0, 0, 0, 0, 28, 243, 0x81, 'k', 0}}}), refused);
  // A host that is none.
  EXPECT_EQ(CodeOf({SrvRecord("kv 0.kv", 1)}), refused);
  EXPECT_EQ(CodeOf({SrvRecord("a:1", 1)}), refused);
  EXPECT_EQ(CodeOf({{DnsType::kSrv, {0, 0, 0, 0, 28, 243, 2, 'k', 0, 0}}}), refused);
  const DnsBytes query = DnsQueryFor("kv", DnsType::kA, 1);
  for (const size_t bytes : {0u, 3u, 5u, 16u}) {
    const DnsBytes answer = DnsAnswerTo(query, {{DnsType::kA, DnsBytes(bytes)}});
    EXPECT_TRUE(absl::IsInvalidArgument(ParseDnsAnswer(answer, DnsType::kA, 1).status())) << bytes;
  }
}

TEST(DnsAnswerTest, MoreRecordsPromisedThanSentIsRefused) {
  DnsBytes answer = DnsAnswerTo(Query(), {SrvRecord("kv-0.kv", 1)});
  answer[6] = answer[7] = 0xFF;
  EXPECT_TRUE(absl::IsInvalidArgument(ParseDnsAnswer(answer, DnsType::kSrv, 0).status()));
}

TEST(DnsAnswerTest, EveryPrefixIsRefused) {
  const DnsBytes answer =
      DnsAnswerTo(Query(), {SrvRecord("kv-0.kv", 1), SrvRecordPointing("kv-1", 26, 2)});
  for (size_t size = 0; size < answer.size(); ++size) {
    const DnsBytes prefix(
        answer.begin(), answer.begin() + static_cast<ptrdiff_t>(size));  // its own memory, for ASan
    EXPECT_FALSE(ParseDnsAnswer(prefix, DnsType::kSrv, 0).ok()) << size;
  }
}

TEST(DnsAnswerTest, FlippedBytesNeverGiveWhatIsNoAddress) {
  const DnsBytes answer =
      DnsAnswerTo(Query(), {SrvRecord("kv-0.kv", 1), SrvRecordPointing("kv-1", 26, 2)});
  std::mt19937 random(5);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    DnsBytes damaged = answer;
    for (int flips = 0; flips < 3; ++flips)
      damaged[random() % damaged.size()] = static_cast<uint8_t>(random());
    const auto found = ParseDnsAnswer(damaged, DnsType::kSrv, 0);
    if (!found.ok()) continue;
    ++accepted;
    for (const Address& address : *found)
      EXPECT_TRUE(Address::Parse(address.ToString()).ok()) << address.host;
  }
  EXPECT_GT(accepted, 100);
}

TEST(DnsAnswerTest, OnlyTheAnswerToTheQueryIsOne) {
  const DnsBytes query = Query();
  const DnsBytes answer = DnsAnswerTo(query, {SrvRecord("kv-0.kv", 1)});
  EXPECT_TRUE(IsAnswerTo(query, answer));
  EXPECT_FALSE(IsCut(answer));
  DnsBytes upper = answer;
  upper[13] = '_';
  upper[14] = 'C';  // letters' case may come back changed
  EXPECT_TRUE(IsAnswerTo(query, upper));
  upper[14] = 'D';
  EXPECT_FALSE(IsAnswerTo(query, upper));
  EXPECT_FALSE(IsAnswerTo(query, query));  // an echo is no response
  EXPECT_FALSE(IsAnswerTo(query, DnsAnswerTo(DnsQueryFor(kService, DnsType::kSrv, 78), {})));
  EXPECT_FALSE(IsAnswerTo(query, DnsAnswerTo(DnsQueryFor(kService, DnsType::kA, 77), {})));
  EXPECT_FALSE(IsAnswerTo(query, DnsAnswerTo(DnsQueryFor(kService + "x", DnsType::kSrv, 77), {})));
  for (size_t size = 0; size < query.size(); ++size) {
    EXPECT_FALSE(IsAnswerTo(query, std::span<const uint8_t>(answer).first(size)));
  }
}

}  // namespace
}  // namespace kvd
