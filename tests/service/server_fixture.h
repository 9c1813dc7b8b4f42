// A whole daemon in the test's process, on ports of its own and with short times.

#ifndef LOCKS_KVD_TESTS_SERVICE_SERVER_FIXTURE_H_
#define LOCKS_KVD_TESTS_SERVICE_SERVER_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "proto/config.pb.h"
#include "proto/geometry.h"
#include "service/config.h"
#include "tests/service/arena_fixture.h"

namespace kvd::testing {

// A directory that goes with its test. Its path is short enough for unix sockets.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = "/tmp/kvd_test_XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~ScratchDirectory() { EXPECT_EQ(std::system(("rm -rf " + path_).c_str()), 0); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// One tiny arena of `slots` slots and every server but that of metrics, which takes 2 s to stop.
inline locks_kvd::v1::DaemonConfig TinyConfig(const std::string& directory, uint32_t slots = 4) {
  locks_kvd::v1::DaemonConfig config;
  config.mutable_control()->set_address("127.0.0.1:0");
  config.set_health_address("127.0.0.1:0");
  config.set_ready_file(directory + "/ready");
  config.mutable_data()->set_socket_dir(directory + "/sockets");
  config.mutable_times()->set_heartbeat_ms(50);
  config.mutable_times()->set_session_ttl_ms(500);
  config.mutable_times()->set_drain_ms(10000);
  auto* arena = config.add_arenas();
  arena->set_tenant("acme");
  arena->set_model("tiny");
  *arena->mutable_geometry() = ToProto(TinyGeometry());
  arena->mutable_identity()->set_weights_id("w");
  arena->set_bytes(BytesForSlots(TinyGeometry(), slots));
  arena->set_encoder("E0");
  FillDefaults(&config);
  const std::vector<std::string> problems = ConfigProblems(config);
  EXPECT_TRUE(problems.empty()) << problems[0];
  return config;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SERVICE_SERVER_FIXTURE_H_
