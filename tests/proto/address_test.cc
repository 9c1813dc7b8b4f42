#include "proto/address.h"

#include <gtest/gtest.h>

namespace kvd {
namespace {

TEST(AddressTest, ReadsNamesV4AndBracketedV6AndWritesThemBack) {
  const struct {
    const char* text;
    const char* host;
    uint16_t port;
  } cases[] = {{"127.0.0.1:7411", "127.0.0.1", 7411},
               {"[::1]:7411", "::1", 7411},
               {"[2001:db8::17]:0", "2001:db8::17", 0},
               {"[fe80::1%eth0]:65535", "fe80::1%eth0", 65535},
               {"kv-0.kv.svc:7411", "kv-0.kv.svc", 7411}};
  for (const auto& c : cases) {
    const auto address = Address::Parse(c.text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->host, c.host);
    EXPECT_EQ(address->port, c.port);
    EXPECT_EQ(address->ToString(), c.text);
  }
}

TEST(AddressTest, RefusesEverythingElse) {
  for (const char* text : {"",
                           "host",
                           "host:",
                           ":7411",
                           "[]:7411",
                           "[::1]",
                           "[::1]7411",
                           "[::1:7411",
                           "::1:7411",
                           "2001:db8::17",
                           "[127.0.0.1]:7411",
                           "host:65536",
                           "host:-1",
                           "host:+1",
                           "host: 1",
                           "host:1 ",
                           "ho st:1",
                           "host:7411x",
                           "http://host:7411",
                           "[fe80::1%]:1",
                           "[::g]:1",
                           "host:99999999999999999999"}) {
    EXPECT_EQ(Address::Parse(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(AddressTest, AnUnbracketedV6HostIsToldHowToWriteIt) {
  EXPECT_NE(Address::Parse("::1:7411").status().message().find("brackets"),
            absl::string_view::npos);
}

TEST(AddressTest, KnowsLoopback) {
  for (const char* text : {"127.0.0.1:1", "127.9.8.7:1", "[::1]:1", "localhost:1", "LocalHost:1"}) {
    EXPECT_TRUE(Address::Parse(text)->IsLoopback()) << text;
  }
  for (const char* text :
       {"0.0.0.0:1", "128.0.0.1:1", "[::]:1", "[::2]:1", "localhost.example.com:1"}) {
    EXPECT_FALSE(Address::Parse(text)->IsLoopback()) << text;
  }
}

}  // namespace
}  // namespace kvd
