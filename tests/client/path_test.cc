// The path of a session: the best one that works, proved by its bytes, with the reason why no
// better one is used; and a refusal, never a silent downgrade, when that is not what the caller
// requires.

#include "client/path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_join.h"
#include "tests/support/data_plane.h"

namespace kvd {
namespace {

using ::testing::HasSubstr;

class PathTest : public testing::Test {
 protected:
  void SetUp() override {
    daemon_ = std::make_unique<TestDaemon>(TestDaemon::Options{});
    offer_ = daemon_->Attach();
    UcxOptions options;
    options.devices = "lo";
    auto worker = UcxWorker::Make(options);
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }
  absl::StatusOr<ChosenPath> Choose(const PathOptions& options = {}) {
    return ChoosePath(offer_, ShapeOf(offer_), worker_.get(), options);
  }
  static PathOptions Require(PathKind path) {
    PathOptions options;
    options.required = path;
    return options;
  }
  // Changes one word of the canary that every path delivers.
  void DamageCanary() { daemon_->arena->memory().unit(0, 0, 0)[4000] ^= 1; }

  std::unique_ptr<TestDaemon> daemon_;
  locks_kvd::v1::AttachReply offer_;
  std::unique_ptr<UcxWorker> worker_;
};

TEST_F(PathTest, TheSharedPathIsTakenOnOneHostAndProved) {
  const auto chosen = Choose();
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->report.path, PathKind::kShared);
  EXPECT_EQ(chosen->fetcher->path(), PathKind::kShared);
  EXPECT_GT(chosen->report.canary_bytes_per_second, 0);
  EXPECT_GT(chosen->report.canary_seconds, 0);
  EXPECT_THAT(absl::StrJoin(chosen->report.rejected, ";"), HasSubstr("peer: "));
}

TEST_F(PathTest, AnotherHostFallsBackToUcxAndSaysWhy) {
  offer_.mutable_shared()->set_host_id("another boot");
  const auto chosen = Choose();
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->report.path, PathKind::kUcx);
  EXPECT_EQ(chosen->fetcher->path(), PathKind::kUcx);
  EXPECT_THAT(absl::StrJoin(chosen->report.rejected, ";"),
              HasSubstr("shared: the daemon is on another host"));
}

// What a daemon with an arena on a GPU offers; nobody listens at its socket.
void OfferPeer(locks_kvd::v1::AttachReply& offer) {
  offer.mutable_peer()->set_socket_path("/tmp/no-such-kvd.sock");
  offer.mutable_peer()->set_host_id(offer.shared().host_id());
  offer.mutable_peer()->set_gpu_uuid("00112233445566778899aabbccddeeff");
  offer.clear_shared();
}

PathRefusal RefusalOf(const PathReport& report, PathKind path) {
  for (const auto& [refused, reason] : report.refusals) {
    if (refused == path) return reason;
  }
  ADD_FAILURE() << PathName(path) << " was not refused";
  return PathRefusal::kFailed;
}

TEST_F(PathTest, AnArenaInHostMemoryHasNoPeerPath) {
  const auto chosen = Choose();
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(RefusalOf(chosen->report, PathKind::kPeer), PathRefusal::kHostMemory);
  offer_.clear_shared();
  const auto without = Choose();
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ(RefusalOf(without->report, PathKind::kPeer), PathRefusal::kNotOffered);
}

TEST_F(PathTest, AWorkerWithoutAGpuReachesAGpuArenaByUcxAndSaysWhy) {
  OfferPeer(offer_);
  const auto chosen = Choose();
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->report.path, PathKind::kUcx);
  EXPECT_EQ(RefusalOf(chosen->report, PathKind::kPeer), PathRefusal::kNoGpu);
  EXPECT_EQ(RefusalOf(chosen->report, PathKind::kShared), PathRefusal::kNotOffered);
  EXPECT_THAT(absl::StrJoin(chosen->report.rejected, ";"),
              HasSubstr("peer: this worker has no GPU"));
  EXPECT_THAT(absl::StrJoin(chosen->report.rejected, ";"),
              HasSubstr("shared: the arena is on a GPU"));
  const absl::Status refused = Choose(Require(PathKind::kPeer)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("this worker has no GPU"));
}

TEST_F(PathTest, AGpuArenaOfAnotherHostAndALeftOutPeerPathAreNamed) {
  OfferPeer(offer_);
  PathOptions options;
  options.best = PathKind::kUcx;
  const auto chosen = Choose(options);
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(RefusalOf(chosen->report, PathKind::kPeer), PathRefusal::kByOptions);
#if KVD_CUDA
  // A worker with a GPU, which it need not really have: the offer is looked at first.
  offer_.mutable_peer()->set_host_id("another boot");
  options = Require(PathKind::kPeer);
  options.gpu = 0;
  EXPECT_THAT(std::string(Choose(options).status().message()),
              HasSubstr("peer: the daemon is on another host"));
  OfferPeer(offer_ = daemon_->Attach());
  EXPECT_THAT(std::string(Choose(options).status().message()), HasSubstr("no-such-kvd.sock"));
#endif
}

#if !KVD_CUDA
TEST_F(PathTest, WithoutCudaAWorkerCannotHaveAGpu) {
  PathOptions options;
  options.gpu = 0;
  const absl::Status refused = Choose(options).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("built without CUDA"));
}
#endif

TEST_F(PathTest, AMissingSocketFallsBackToUcxAndNamesIt) {
  daemon_->descriptors.reset();
  const auto chosen = Choose();
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->report.path, PathKind::kUcx);
  EXPECT_THAT(absl::StrJoin(chosen->report.rejected, ";"),
              HasSubstr(offer_.shared().socket_path()));
}

TEST_F(PathTest, ARequiredPathIsNeverReplacedByASlowerOne) {
  offer_.mutable_shared()->set_host_id("another boot");
  const absl::Status refused = Choose(Require(PathKind::kShared)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another host"));
  EXPECT_EQ(Choose(Require(PathKind::kPeer)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Choose(Require(PathKind::kUcx)).ok());
}

TEST_F(PathTest, ARequiredPathAllowsBetterOnes) {
  const auto chosen = Choose(Require(PathKind::kUcx));
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->report.path, PathKind::kShared);
}

TEST_F(PathTest, NothingFasterThanTheBestAllowedPathIsTried) {
  PathOptions options;
  options.best = PathKind::kUcx;
  const auto chosen = Choose(options);
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->report.path, PathKind::kUcx);
}

TEST_F(PathTest, WithoutAnyPathEveryReasonIsGiven) {
  offer_.clear_shared();
  offer_.mutable_ucx()->set_version("0.0.1");
  const absl::Status refused = Choose().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("shared: the daemon does not offer it"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("0.0.1"));
  worker_.reset();
  EXPECT_THAT(std::string(Choose().status().message()), HasSubstr("without UCX"));
}

TEST_F(PathTest, AWrongCanaryIsDataLossOnEitherPathAndNoFallback) {
  DamageCanary();
  EXPECT_EQ(Choose().status().code(), absl::StatusCode::kDataLoss);
  offer_.clear_shared();
  EXPECT_EQ(Choose().status().code(), absl::StatusCode::kDataLoss);
}

// The right bytes of another incarnation are wrong bytes here.
TEST_F(PathTest, AForeignDaemonsMappingIsNotTaken) {
  TestDaemon other(TestDaemon::Options{});
  const locks_kvd::v1::AttachReply foreign = other.Attach();
  *offer_.mutable_shared() = foreign.shared();
  offer_.clear_ucx();
  EXPECT_EQ(Choose().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(PathTest, AnotherShapeThanTheDaemonsIsRefusedOnTheSharedPath) {
  offer_.mutable_arena()->set_num_slots(offer_.arena().num_slots() + 64);
  offer_.clear_ucx();
  EXPECT_EQ(Choose().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(PathTest, AMalformedOfferIsRefused) {
  offer_.mutable_session()->set_token("short");
  EXPECT_EQ(Choose().status().code(), absl::StatusCode::kInvalidArgument);
  offer_ = daemon_->Attach();
  offer_.mutable_arena()->set_canary_slot(offer_.arena().num_slots());
  EXPECT_EQ(Choose().status().code(), absl::StatusCode::kInvalidArgument);
  offer_ = daemon_->Attach();
  offer_.clear_shared();
  // UCX itself would end the process on these.
  std::string flipped = offer_.ucx().worker_address();
  flipped[flipped.size() / 2] ^= 1;
  for (const std::string& address :
       {std::string(), std::string("not an address"), std::string(300, '\0'), flipped,
        offer_.ucx().worker_address().substr(0, 40)}) {
    offer_.mutable_ucx()->set_worker_address(address);
    EXPECT_EQ(Choose().status().code(), absl::StatusCode::kFailedPrecondition);
  }
}

}  // namespace
}  // namespace kvd
