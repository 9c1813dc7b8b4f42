// Without a GPU here; with one, tests/service/gpu_arena_process_test.cc.
#include "proto/gpu_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvd {
namespace {

using ::testing::HasSubstr;

TEST(GpuMemoryTest, SizesAreWholeGranules) {
  EXPECT_EQ(GpuRounded(1), kGpuGranule);
  EXPECT_EQ(GpuRounded(kGpuGranule), kGpuGranule);
  EXPECT_EQ(GpuRounded(kGpuGranule + 1), 2 * kGpuGranule);
}

TEST(GpuMemoryTest, AGpuThatIsNotThereIsRefusedByEveryCallWithTheReason) {
  const int gpu = NumGpus();  // one more than there are
  const absl::Status check = CheckGpu(gpu);
  EXPECT_EQ(check.code(), absl::StatusCode::kFailedPrecondition);
  if (!kBuiltWithCuda) {
    EXPECT_THAT(check.message(), HasSubstr("built without CUDA"));
  } else {
    EXPECT_THAT(check.message(), HasSubstr("expected a GPU"));
  }
  EXPECT_EQ(CheckGpu(-1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GpuUuid(gpu).status(), check);
  EXPECT_EQ(GpuMemory::Make(gpu, 1).status(), check);
  EXPECT_EQ(GpuMemory::MapReadOnly(gpu, 0, 1).status(), check);
}

}  // namespace
}  // namespace kvd
