// A client's metrics against a real daemon: attaching, losing it, and finding another in its place.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "client/kv_client.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(ClientFiguresTest, ALostDaemonAndItsSuccessorAreSeen) {
  ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
  DaemonSpec spec;
  spec.geometry = SmallGeometry();
  auto daemon = DaemonProcess::Start(spec);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  ClientOptions options = OptionsFor({(*daemon)->address()}, PathKind::kUcx);
  auto client = KvClient::Make(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto text = [&] { return (*client)->MetricsText(); };
  const std::string name = (*daemon)->address();
  const auto changes = [&](int n) {
    return "daemon_incarnation_changes_total{daemon=\"" + name + "\"} " + std::to_string(n) + "\n";
  };
  EXPECT_THAT(text(), HasSubstr("path_info{daemon=\"" + name + "\",path=\"ucx\"} 1\n"));
  EXPECT_THAT(text(), HasSubstr("attach_total{result=\"OK\"} 1\n"));
  EXPECT_THAT(text(), HasSubstr("path_refused_total{path=\"shared\",reason=\"by_options\"} 1\n"));
  EXPECT_THAT(text(), HasSubstr("path_refused_total{path=\"shared\",reason=\"failed\"} 0\n"));
  EXPECT_THAT(text(), HasSubstr(changes(0)));

  // A fetch outside of steps, of pages that are there.
  const KvGeometry& g = spec.geometry;
  std::vector<uint32_t> tokens(static_cast<size_t>(3 * g.page_tokens));
  std::iota(tokens.begin(), tokens.end(), 7u);
  const std::vector<uint16_t> values(
      static_cast<size_t>(g.num_kv_heads * 3 * g.page_tokens * g.head_dim), uint16_t{0x3F80});
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  const std::vector<EngineKv> layers(
      static_cast<size_t>(g.num_layers),
      {bytes, bytes, 3 * g.page_tokens * g.head_dim * 2, int64_t{g.head_dim} * 2});
  const std::vector<PageKey> keys = (*client)->PageKeys(tokens);
  ASSERT_TRUE((*client)->Put({.keys = keys, .num_pages = 3, .layers = layers}).ok());
  ASSERT_EQ((*client)->FetchPages(keys)->num_pages, 3);
  const std::string units = std::to_string(3 * g.num_layers * g.num_kv_heads);
  EXPECT_THAT(text(), HasSubstr("fetched_units_total{path=\"ucx\",result=\"ok\"} " + units + "\n"));
  EXPECT_THAT(text(), HasSubstr("verified_units_total{path=\"ucx\"} " + units + "\n"));

  (*daemon)->Kill();
  EXPECT_TRUE(WaitFor([&] { return !(*client)->Daemons()[0].attached; }));
  EXPECT_THAT(text(), Not(HasSubstr("path_info{")));
  ASSERT_TRUE((*daemon)->Restart().ok());
  EXPECT_TRUE(WaitFor([&] { return (*client)->Daemons()[0].attached; }));
  EXPECT_TRUE(WaitFor([&] { return text().find(changes(1)) != std::string::npos; }));
  EXPECT_THAT(text(), HasSubstr("attach_total{result=\"OK\"} 2\n"));
  EXPECT_THAT(text(), HasSubstr("verified_units_total{path=\"ucx\"} " + units + "\n"));
}

}  // namespace
}  // namespace kvd::testing
