#include "service/data_plane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "tests/service/server_fixture.h"

namespace kvd {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

class DataPlaneTest : public ::testing::Test {
 protected:
  DataPlaneTest()
      : config_(testing::TinyConfig(directory_.path())),
        sessions_(SessionTable::Options{.incarnation = {}, .clock = &clock_}) {}
  absl::StatusOr<std::unique_ptr<DataPlane>> Make() {
    return DataPlane::Make(config_, 77, &sessions_, &metrics_, &slowlog_);
  }

  testing::ScratchDirectory directory_;
  locks_kvd::v1::DaemonConfig config_;
  TestClock clock_;
  SessionTable sessions_;
  Metrics metrics_;
  Slowlog slowlog_;
};

TEST_F(DataPlaneTest, OffersBothPathsAndTakesItsSocketAwayAtTheEnd) {
  auto plane = Make();
  ASSERT_TRUE(plane.ok()) << plane.status();
  const PathOffers offers = (*plane)->Offers();
  ASSERT_TRUE(offers.shared.has_value());
  EXPECT_EQ(offers.shared->socket_path(), directory_.path() + "/sockets/locks-kvd-77.sock");
  EXPECT_EQ(offers.shared->host_id().size(), 36u);
  ASSERT_TRUE(offers.ucx.has_value());
  EXPECT_FALSE(offers.ucx->worker_address().empty());
  EXPECT_EQ(offers.ucx->version(), UcxWorker::Version());
  struct stat info = {};
  ASSERT_EQ(stat(offers.shared->socket_path().c_str(), &info), 0);
  EXPECT_TRUE(S_ISSOCK(info.st_mode));
  ASSERT_EQ(stat((directory_.path() + "/sockets").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777u, 0750u) << "no stranger reaches the socket";
  plane->reset();
  EXPECT_NE(stat(offers.shared->socket_path().c_str(), &info), 0);
}

TEST_F(DataPlaneTest, PathThatIsOffSaysWhy) {
  config_.mutable_data()->set_ucx(false);
  config_.mutable_data()->clear_socket_dir();
  auto plane = Make();
  ASSERT_TRUE(plane.ok());
  const PathOffers offers = (*plane)->Offers();
  EXPECT_FALSE(offers.shared.has_value());
  EXPECT_FALSE(offers.ucx.has_value());
  EXPECT_THAT(offers.report, Contains("shared: no: data.socket_dir is empty"));
  EXPECT_THAT(offers.report, Contains("ucx: no: data.ucx is false"));
  EXPECT_EQ((*plane)->UcxDescription(), "none");
  EXPECT_EQ((*plane)->num_in_flight(), 0u);
}

TEST_F(DataPlaneTest, WhatWasAskedForAndIsNotThereIsAnError) {
  config_.mutable_data()->set_ucx_devices("no_such_device");
  EXPECT_THAT(Make().status().message(), HasSubstr("data.ucx"));
  config_.mutable_data()->clear_ucx_devices();
  std::ofstream(directory_.path() + "/file") << "x";
  config_.mutable_data()->set_socket_dir(directory_.path() + "/file");
  EXPECT_EQ(Make().status().code(), absl::StatusCode::kFailedPrecondition);
  config_.mutable_data()->set_socket_dir("/nowhere/deep");
  EXPECT_THAT(Make().status().message(),
              HasSubstr("data.socket_dir /nowhere/deep: cannot be made"));
}

}  // namespace
}  // namespace kvd
