// Goal: what files and DNS names say comes out as members, and what they do not say as a typed
// error.

#include "proto/membership_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/dns_server.h"

namespace kvd {
namespace {

using kvd::testing::ARecord;
using kvd::testing::DnsAnswerTo;
using kvd::testing::DnsBytes;
using kvd::testing::DnsMessages;
using kvd::testing::DnsServer;
using kvd::testing::DnsTypeIn;
using kvd::testing::SrvRecord;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class MembershipSourceTest : public ::testing::Test {
 protected:
  MembershipSourceTest() {
    char name[] = "/tmp/kvd_members_XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~MembershipSourceTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& text) {
    const std::string path = folder_ + "/members";
    std::ofstream(path + ".new") << text;
    std::filesystem::rename(path + ".new", path);
    return path;
  }
  static absl::StatusOr<std::vector<Member>> LookAt(const std::string& path) {
    return (*MakeFileSource(path))->Look();
  }
  static absl::StatusOr<std::vector<Member>> LookUp(const std::string& name,
                                                    const DnsServer& server) {
    auto source = MakeDnsSource(name, {server.address()});
    EXPECT_TRUE(source.ok()) << source.status();
    return (*source)->Look();
  }

  std::string folder_;
};

TEST_F(MembershipSourceTest, AFileNamesMembers) {
  const auto members = LookAt(Write(R"(
      members { name: "kv-0" address: "kv-0.kv:7411" weight: 2.5 }
      members { address: "[2001:db8::1]:7411" }  # the address is its name
  )"));
  ASSERT_TRUE(members.ok()) << members.status();
  EXPECT_THAT(*members, ElementsAre(Member{"kv-0", "kv-0.kv:7411", 2.5},
                                    Member{"", "[2001:db8::1]:7411", 1}));
  const auto checked = CheckMembers(*members);
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_EQ(checked->front().name, "[2001:db8::1]:7411");
}

TEST_F(MembershipSourceTest, WhatCannotBeReadIsTyped) {
  EXPECT_TRUE(absl::IsNotFound(LookAt(folder_ + "/none").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(LookAt(folder_).status()));
  ASSERT_EQ(mkfifo((folder_ + "/fifo").c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(LookAt(folder_ + "/fifo").status()));
  const auto half = LookAt(Write("members { address: \"kv-0.kv:7411\" }\nmembers { addr"));
  EXPECT_TRUE(absl::IsInvalidArgument(half.status()));
  EXPECT_THAT(half.status().message(), HasSubstr("line 2"));
  const auto unknown = LookAt(Write("members { address: \"kv-0.kv:7411\" color: 3 }"));
  EXPECT_TRUE(absl::IsInvalidArgument(unknown.status()));
  EXPECT_TRUE(absl::IsInvalidArgument(LookAt(Write(std::string((4 << 20) + 1, ' '))).status()));
  const auto empty = LookAt(Write(""));
  ASSERT_TRUE(empty.ok());  // its emptiness is the filter's business
  EXPECT_THAT(*empty, IsEmpty());
}

TEST_F(MembershipSourceTest, AFileThatIsBeingWrittenIsNotTaken) {
  // One byte every few milliseconds, each state a good text.
  const std::string path = Write("members { address: \"kv-0.kv:7411\" }\n");
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    std::ofstream file(path, std::ios::app);
    while (!stop) {
      file << " " << std::flush;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  const auto source = *MakeFileSource(path);
  const auto during = source->Look();
  stop = true;
  writer.join();
  EXPECT_TRUE(absl::IsUnavailable(during.status())) << during.status();
  EXPECT_TRUE(source->Look().ok());
}

TEST_F(MembershipSourceTest, ServiceRecordsAreNamedByTheirTargets) {
  DnsServer server("127.0.0.1", [](const DnsBytes& query, DnsServer::Over) {
    return DnsMessages{
        DnsAnswerTo(query, {SrvRecord("kv-1.kv.ns.svc", 7411), SrvRecord("KV-0.kv.ns.svc", 7412)})};
  });
  const auto members = LookUp("_control._tcp.kv.ns.svc.", server);
  ASSERT_TRUE(members.ok()) << members.status();
  EXPECT_THAT(*members, ElementsAre(Member{"kv-1.kv.ns.svc:7411", "kv-1.kv.ns.svc:7411", 1},
                                    Member{"kv-0.kv.ns.svc:7412", "kv-0.kv.ns.svc:7412", 1}));
}

TEST_F(MembershipSourceTest, AddressRecordsOfBothFamiliesAreNamedByThemselves) {
  DnsServer server("::1", [](const DnsBytes& query, DnsServer::Over) {
    const bool v4 = DnsTypeIn(query) == DnsType::kA;
    return DnsMessages{DnsAnswerTo(query, {ARecord(v4 ? "10.0.0.1" : "2001:db8::1")})};
  });
  const auto members = LookUp("kv.test.:7411", server);
  ASSERT_TRUE(members.ok()) << members.status();
  EXPECT_THAT(*members, ElementsAre(Member{"10.0.0.1:7411", "10.0.0.1:7411", 1},
                                    Member{"[2001:db8::1]:7411", "[2001:db8::1]:7411", 1}));
  EXPECT_TRUE(CheckMembers(*members).ok());
}

TEST_F(MembershipSourceTest, HalfOfTheAddressesIsNoAnswer) {
  // The code for AAAA; A always has its record.
  std::atomic<int> code{0};
  DnsServer server("127.0.0.1", [&code](const DnsBytes& query, DnsServer::Over) {
    if (DnsTypeIn(query) == DnsType::kA)
      return DnsMessages{DnsAnswerTo(query, {ARecord("10.0.0.1")})};
    return DnsMessages{DnsAnswerTo(query, {}, code.load())};
  });
  EXPECT_TRUE(LookUp("kv.test.:7411", server).ok());  // the name has no IPv6: fine
  code = 3;
  EXPECT_TRUE(LookUp("kv.test.:7411", server).ok());  // some servers say so
  code = 2;
  EXPECT_TRUE(absl::IsUnavailable(LookUp("kv.test.:7411", server).status()));
  server.Set([](const DnsBytes& query, DnsServer::Over) {
    return DnsMessages{DnsAnswerTo(query, {}, 3)};
  });
  EXPECT_TRUE(absl::IsNotFound(LookUp("kv.test.:7411", server).status()));
}

TEST_F(MembershipSourceTest, BadNamesAreRefused) {
  for (const std::string name :
       {"kv.test", "kv.test:0", "10.0.0.1:7411", "[::1]:7411", "kv test:1", ":7411"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(MakeDnsSource(name, {}).status())) << name;
  }
}

}  // namespace
}  // namespace kvd
