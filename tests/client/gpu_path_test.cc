// Goal: a worker with a GPU takes the best path that works, proved by its bytes, and says why it
// takes no better one.
// Method: a daemon's descriptors over a real socket, of an arena in GPU or host memory. Needs a
// GPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "client/path.h"
#include "proto/fd_channel.h"
#include "tests/client/gpu_arena.h"
#include "tests/support/gpu.h"

namespace kvd {
namespace {

using kvd::testing::kGpu;
using kvd::testing::SmallShape;
using kvd::testing::TestArena;
using ::testing::HasSubstr;

class GpuPathTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = kvd::testing::WhyNoGpu(); !reason.empty())
      GTEST_SKIP() << reason;
    char name[] = "/tmp/kvd_peer_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    incarnation_.fill(0x31);
    token_.fill(0x42);
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  // A daemon's offer of `arena`, with the canary in slot 0.
  void Serve(const MemoryPlace& place) {
    arena_ = std::make_unique<TestArena>(place);
    std::vector<uint64_t> canary(SmallShape().slot.slot_bytes() / 8);
    for (size_t i = 0; i < canary.size(); ++i) canary[i] = CanaryWord(incarnation_, i);
    arena_->Put(arena_->memory().slot_base(0), canary.data(), canary.size() * 8);
    auto listener = DescriptorListener::Make(
        folder_ + "/s",
        [this](const DescriptorRequest& request) -> absl::StatusOr<std::vector<int>> {
          if (!TokensEqual(request.session, token_)) return absl::AbortedError("unknown session");
          std::vector<int> numbers;
          for (const UniqueFd& fd : arena_->memory().descriptors()) numbers.push_back(fd.get());
          return numbers;
        });
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    std::string host;
    std::ifstream boot_id("/proc/sys/kernel/random/boot_id");
    std::getline(boot_id, host);
    offer_.mutable_session()->set_incarnation(incarnation_.data(), incarnation_.size());
    offer_.mutable_session()->set_token(token_.data(), token_.size());
    if (place.on_gpu()) {
      offer_.mutable_peer()->set_socket_path(folder_ + "/s");
      offer_.mutable_peer()->set_host_id(host);
    } else {
      offer_.mutable_shared()->set_socket_path(folder_ + "/s");
      offer_.mutable_shared()->set_host_id(host);
    }
  }
  absl::StatusOr<ChosenPath> Choose(std::optional<PathKind> required = {}) {
    PathOptions options;
    options.required = required;
    options.gpu = kGpu;
    return ChoosePath(offer_, SmallShape(), nullptr, options);
  }

  std::string folder_;
  Incarnation incarnation_;
  SessionToken token_;
  std::unique_ptr<TestArena> arena_;
  std::unique_ptr<DescriptorListener> listener_;
  locks_kvd::v1::AttachReply offer_;
};

TEST_F(GpuPathTest, ThePeerPathIsTakenAndProved) {
  Serve(OnGpu(kGpu));
  const auto chosen = Choose(PathKind::kPeer);
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->report.path, PathKind::kPeer);
  EXPECT_NE(chosen->fetcher->peer(), nullptr);
  EXPECT_TRUE(chosen->report.rejected.empty());
  EXPECT_GT(chosen->report.canary_bytes_per_second, 0);
  std::printf("canary: %.0f MB/s, %.0f us\n", chosen->report.canary_bytes_per_second / 1e6,
              chosen->report.canary_seconds * 1e6);
}

TEST_F(GpuPathTest, AHostArenaIsReachedThroughStagingMemory) {
  Serve({});
  const auto chosen = Choose();
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->report.path, PathKind::kShared);
  EXPECT_EQ(chosen->fetcher->destination_space(), MemorySpace::kGpu);
  EXPECT_EQ(chosen->report.refusals[0].second, PathRefusal::kHostMemory);
  EXPECT_EQ(Choose(PathKind::kPeer).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(GpuPathTest, AWrongCanaryIsDataLoss) {
  Serve(OnGpu(kGpu));
  const uint64_t word = CanaryWord(incarnation_, 1);
  arena_->Put(arena_->memory().slot_base(0), &word, sizeof(word));
  EXPECT_EQ(Choose().status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(GpuPathTest, DescriptorsThatAreNotAGpusOrOfAnotherSessionAreRefusedWithTheReason) {
  Serve({});  // memfds, offered as GPU memory
  *offer_.mutable_peer() = {};
  offer_.mutable_peer()->set_socket_path(offer_.shared().socket_path());
  offer_.mutable_peer()->set_host_id(offer_.shared().host_id());
  const absl::Status refused = Choose(PathKind::kPeer).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("peer: "));
  std::printf("%s\n", refused.ToString().c_str());
  const auto fallen_back = Choose();
  ASSERT_TRUE(fallen_back.ok()) << fallen_back.status();
  EXPECT_EQ(fallen_back->report.refusals[0], std::make_pair(PathKind::kPeer, PathRefusal::kFailed));
  token_[0] ^= 1;
  EXPECT_EQ(Choose().status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kvd
