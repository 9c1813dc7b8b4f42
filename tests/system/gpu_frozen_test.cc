// G1, G2 and G4 on the peer path: a frozen GPU worker keeps its leases until its session's TTL is
// over, and its mapping for ever. Its slots are sealed again with other pages meanwhile; what it
// replays when it wakes attends none of them.

#include <gtest/gtest.h>

#include <sstream>

#include "tests/support/line_process.h"
#include "tests/system/gpu_worker.h"
#include "tests/system/system_worker.h"

namespace kvd::testing {
namespace {

constexpr int kOldPages = 40;
constexpr int kNewPages = 50;
constexpr int kSlots = 56;  // what is new needs most of the old ones' slots

class GpuFrozenTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_TRUE(HaveDaemonBinary()) << "build locks-kvd first";
    DaemonSpec spec = GpuDaemonSpec();
    const ArenaShape one = CarveArena(spec.geometry, uint64_t{64} << 20);
    spec.arena_bytes = (one.slot.slot_bytes() + one.summary_stride() + sizeof(PageHeader)) * kSlots;
    spec.quarantine_ms = 500;
    auto daemon = StartGpuDaemon(spec);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    auto writer = KvClient::Make(GpuOptions(daemon_->address(), PathKind::kPeer));
    ASSERT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
  }
  // The report's leases hold the pages.
  PutReport Put(const Prompt& prompt) {
    const std::vector<PageKey> keys = writer_->PageKeys(prompt.tokens);
    auto report = writer_->Put({.keys = keys,
                                .first_page = 0,
                                .num_pages = prompt.num_pages,
                                .layers = prompt.cache.layers(),
                                .first_token = 0});
    EXPECT_TRUE(report.ok()) << report.status();
    return *std::move(report);
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<KvClient> writer_;
};

struct Stepped {
  std::string code;
  int wrong = -1, misses = 0, failed = 0, missing = 0;
};
Stepped Parse(const std::string& answer) {
  std::istringstream words(answer);
  std::string verb;
  Stepped stepped;
  words >> verb >> stepped.code >> stepped.wrong >> stepped.misses >> stepped.failed >>
      stepped.missing;
  return stepped;
}

TEST_F(GpuFrozenTest, ItsLeasesEndAndItsReplaysAttendNoResealedPage) {
  const Prompt old_prompt = MarkedPrompt(7, kOldPages, 3, 0);
  const Prompt new_prompt = MarkedPrompt(8, kNewPages, 0, 0, 100);
  PutReport old_report = Put(old_prompt);
  ASSERT_EQ(old_report.num_new, kOldPages) << old_report.first_failure;
  LineProcess worker({ProgramBeside("gpu_worker_process", KVD_GPU_WORKER_PROCESS),
                      daemon_->address(), "7", std::to_string(kOldPages)});
  ASSERT_EQ(worker.Hear(), "joined");
  old_report = {};  // from here on, only the worker leases the old pages
  const std::string first = worker.Ask("step 8");
  const Stepped before = Parse(first);
  ASSERT_EQ(before.code, "OK") << first;
  ASSERT_EQ(before.wrong, 0) << first;
  ASSERT_GT(before.misses, 0) << first;

  worker.Freeze();
  EXPECT_GT(Put(new_prompt).num_failed, 0)
      << "G2: the old pages are leased while the worker's session lives";
  PutReport held;
  ASSERT_TRUE(WaitFor([&] {
    held = Put(new_prompt);
    return held.num_failed == 0;
  })) << held.first_failure;
  worker.Thaw();
  const std::string answer = worker.Ask("step 60");
  const Stepped after = Parse(answer);
  EXPECT_EQ(after.wrong, 0) << answer;
  EXPECT_EQ(after.code, "UNAVAILABLE") << answer;
  EXPECT_GE(after.missing, kOldPages + kNewPages - kSlots) << answer;
}

}  // namespace
}  // namespace kvd::testing
