// What can be seen of NCCL itself: where it is missing, on a machine with one GPU, and between two.
// Skipped, with the reason, where there is no GPU or no library.

#include "service/nccl_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <thread>

#include "absl/time/clock.h"
#include "proto/gpu_memory.h"
#include "service/move_link.h"
#if KVD_CUDA
#include "tests/support/eventually.h"
#include "tests/support/gpu.h"
#endif

namespace kvd {
namespace {

using ::testing::HasSubstr;

TEST(NcclTest, WhereThereIsNoneItSaysWhy) {
  const auto library = LoadNccl("libnccl-that-is-not-there.so");
  ASSERT_FALSE(library.ok());
  EXPECT_EQ(library.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(library.status().message()),
              ::testing::AnyOf(HasSubstr("built without NCCL"), HasSubstr("no GPU"),
                               HasSubstr("libnccl-that-is-not-there.so")));
}

#if KVD_CUDA

using testing::Eventually;

constexpr absl::Duration kLimit = absl::Seconds(30);

absl::Status Always() { return absl::OkStatus(); }

class GpuNcclTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = testing::WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    const auto library = LoadNccl("libnccl.so.2");
    if (!library.ok()) GTEST_SKIP() << library.status();
    library_ = *library;
    std::printf("%s\n", library_->version().c_str());
  }
  std::unique_ptr<MoveLink> Link(const std::string& id, MoveEnd end, int gpu,
                                 absl::Duration watchdog = kLimit) {
    return std::make_unique<MoveLink>(MoveLink::Options{.library = library_,
                                                        .id = id,
                                                        .end = end,
                                                        .place = OnGpu(gpu),
                                                        .watchdog = watchdog,
                                                        .memory = {}});
  }
  std::shared_ptr<const CommunicatorLibrary> library_;
};

TEST_F(GpuNcclTest, OneEndAloneJoinsWithoutWaitingAndFinishes) {
  for (int i = 0; i < 2; ++i) {
    const absl::Status proved = ProveAlone(library_, OnGpu(0), kLimit);
    EXPECT_TRUE(proved.ok()) << proved;
  }
}

TEST_F(GpuNcclTest, HostMemoryIsRefused) {
  EXPECT_EQ(library_->DeviceOf({}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(library_->DeviceOf(OnGpu(0)).value(), GpuUuid(0).value());
}

// The real library's hang: the other end never comes. The watchdog's abort ends it, and a new
// communicator works.
TEST_F(GpuNcclTest, TheWatchdogEndsAJoinThatNobodyAnswers) {
  auto link = Link(library_->MakeId().value(), MoveEnd::kSource, 0, absl::Seconds(2));
  EXPECT_EQ(link->Wait(Always).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Eventually([&] { return link->ended(); }));
  link.reset();
  const absl::Status proved = ProveAlone(library_, OnGpu(0), kLimit);
  EXPECT_TRUE(proved.ok()) << proved;
}

TEST_F(GpuNcclTest, AnIdThatIsNoneIsRefused) {
  EXPECT_EQ(library_->Join("short", MoveEnd::kSource, OnGpu(0)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Why the two daemons compare their GPUs first.
TEST_F(GpuNcclTest, TwoEndsOnOneGpuFailAndEnd) {
  const std::string id = library_->MakeId().value();
  auto source = Link(id, MoveEnd::kSource, 0);
  auto destination = Link(id, MoveEnd::kDestination, 0);
  const absl::Status status = source->Wait(Always);
  EXPECT_FALSE(status.ok());
  std::printf("%s\n", status.ToString().c_str());
  EXPECT_FALSE(destination->Wait(Always).ok());
  EXPECT_TRUE(Eventually([&] { return source->ended() && destination->ended(); }));
}

// GB/s of a copy between the two GPUs by the driver.
double PeerCopyRate(size_t bytes) {
  uint8_t *from = nullptr, *to = nullptr;
  for (const int gpu : {0, 1}) {
    KVD_CUDA_OK(cudaSetDevice(gpu));
    (void)cudaDeviceEnablePeerAccess(1 - gpu, 0);
    KVD_CUDA_OK(cudaMalloc(reinterpret_cast<void**>(gpu == 0 ? &from : &to), bytes));
  }
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const absl::Time start = absl::Now();
    KVD_CUDA_OK(cudaMemcpyPeer(to, 1, from, 0, bytes));
    for (const int gpu : {0, 1}) {
      KVD_CUDA_OK(cudaSetDevice(gpu));
      KVD_CUDA_OK(cudaDeviceSynchronize());
    }
    best = std::max(best,
                    static_cast<double>(bytes) / 1e9 / absl::ToDoubleSeconds(absl::Now() - start));
  }
  KVD_CUDA_OK(cudaFree(from));
  KVD_CUDA_OK(cudaFree(to));
  return best;
}

// The memory is that of arenas: a VMM allocation with a descriptor. Prints the rate for
// bench/nvlink.sh.
TEST_F(GpuNcclTest, MovesBetweenTwoGpus) {
  if (NumGpus() < 2) GTEST_SKIP() << "one GPU: two are needed";
  constexpr size_t kBytes = size_t{256} << 20;
  const auto from = GpuMemory::Make(0, kBytes).value();
  const auto to = GpuMemory::Make(1, kBytes).value();
  std::vector<uint32_t> words(kBytes / sizeof(uint32_t));
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(i * 2654435761u);
  KVD_CUDA_OK(cudaSetDevice(0));
  KVD_CUDA_OK(cudaMemcpy(from->data(), words.data(), kBytes, cudaMemcpyHostToDevice));
  const std::string id = library_->MakeId().value();
  auto source = Link(id, MoveEnd::kSource, 0);
  auto destination = Link(id, MoveEnd::kDestination, 1);
  ASSERT_TRUE(source->Wait(Always).ok());
  ASSERT_TRUE(destination->Wait(Always).ok());
  // Pieces of odd sizes, like records.
  const std::vector<size_t> ends = {40960, 40960 + 2080, size_t{1} << 20, kBytes};
  std::vector<MovePiece> out, in;
  for (size_t i = 0, at = 0; i < ends.size(); at = ends[i++]) {
    out.push_back({from->data() + at, ends[i] - at});
    in.push_back({to->data() + at, ends[i] - at});
  }
  double rate = 0;
  for (int batch = 0; batch < 5; ++batch) {
    const absl::Time start = absl::Now();
    destination->Receive(in, nullptr);
    source->Send(out, nullptr);
    ASSERT_TRUE(source->Wait(Always).ok());
    ASSERT_TRUE(destination->Wait(Always).ok());
    rate = std::max(rate,
                    static_cast<double>(kBytes) / 1e9 / absl::ToDoubleSeconds(absl::Now() - start));
  }
  const double copy = PeerCopyRate(kBytes);
  std::printf("bulk move of 256 MiB by NCCL, GB/s, and over cudaMemcpyPeer: %.0f, %.2f\n", rate,
              rate / copy);
  std::vector<uint32_t> got(words.size());
  KVD_CUDA_OK(cudaSetDevice(1));
  KVD_CUDA_OK(cudaMemcpy(got.data(), to->data(), kBytes, cudaMemcpyDeviceToHost));
  EXPECT_EQ(got, words);
  source->Finish();
  destination->Finish();
  EXPECT_TRUE(source->Wait(Always).ok());
  EXPECT_TRUE(destination->Wait(Always).ok());
}

// One end dies in the middle, as far as the other can tell: only the watchdog ends a receive that
// nobody sends to.
TEST_F(GpuNcclTest, TheWatchdogEndsAReceiveBetweenTwoGpus) {
  if (NumGpus() < 2) GTEST_SKIP() << "one GPU: two are needed";
  const auto to = GpuMemory::Make(1, size_t{2} << 20).value();
  const std::string id = library_->MakeId().value();
  auto source = Link(id, MoveEnd::kSource, 0);
  auto destination = Link(id, MoveEnd::kDestination, 1, absl::Seconds(5));
  ASSERT_TRUE(source->Wait(Always).ok());
  ASSERT_TRUE(destination->Wait(Always).ok());
  destination->Receive({{to->data(), to->bytes()}}, nullptr);
  EXPECT_EQ(destination->Wait(Always).code(), absl::StatusCode::kDeadlineExceeded);
  source->Abort(absl::UnavailableError("the other end has aborted"));
  EXPECT_TRUE(Eventually([&] { return source->ended() && destination->ended(); }));
}

#endif  // KVD_CUDA

}  // namespace
}  // namespace kvd
