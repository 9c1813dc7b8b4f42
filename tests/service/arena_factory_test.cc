#include "service/arena_factory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/gpu_memory.h"
#include "tests/service/server_fixture.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;

TEST(ArenaFactoryTest, ArenasAreWhatTheConfigurationSays) {
  testing::ScratchDirectory directory;
  auto config = testing::TinyConfig(directory.path(), 3);
  auto* second = config.add_arenas();
  *second = config.arenas(0);
  second->set_tenant("rival");
  second->mutable_identity()->set_weights_id("w2");
  config.mutable_limits()->set_leases_per_session(9);
  TestClock clock;
  Incarnation incarnation;
  incarnation.fill(5);
  const auto arenas = MakeArenas(config, incarnation, &clock);
  ASSERT_TRUE(arenas.ok()) << arenas.status();
  ASSERT_EQ(arenas->size(), 2u);
  const Arena& arena = *(*arenas)[0];
  EXPECT_EQ(arena.tenant(), "acme");
  EXPECT_EQ(arena.geometry(), testing::TinyGeometry());
  EXPECT_EQ(arena.memory().shape().num_slots, 4u);
  EXPECT_EQ(arena.options().leases_per_session, 9u);
  EXPECT_EQ(arena.options().quarantine, absl::Milliseconds(500));
  EXPECT_EQ(arena.options().model_fingerprint, ModelFingerprint(testing::TinyGeometry(), "w", ""));
  EXPECT_NE(arena.options().model_fingerprint, (*arenas)[1]->options().model_fingerprint);
}

TEST(ArenaFactoryTest, MissingQueryMetricNamesTheField) {
  testing::ScratchDirectory directory;
  auto config = testing::TinyConfig(directory.path());
  config.mutable_arenas(0)->set_encoder("E1S");
  config.mutable_arenas(0)->set_query_metric_file("/nowhere/metric");
  TestClock clock;
  const auto arenas = MakeArenas(config, {}, &clock);
  EXPECT_EQ(arenas.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(arenas.status().message(), HasSubstr("arenas[0].query_metric_file: "));
}

TEST(ArenaFactoryTest, GpuThatIsNotThereNamesTheField) {
  testing::ScratchDirectory directory;
  auto config = testing::TinyConfig(directory.path());
  config.mutable_arenas(0)->set_gpu(NumGpus());
  TestClock clock;
  const auto arenas = MakeArenas(config, {}, &clock);
  EXPECT_EQ(arenas.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(arenas.status().message(), HasSubstr("arenas[0].gpu: "));
  config.mutable_arenas(0)->clear_gpu();
  EXPECT_TRUE(MakeArenas(config, {}, &clock).ok());
}

}  // namespace
}  // namespace kvd
