// An arena in GPU memory as another process of the host maps it: the right bytes, never a write,
// and nothing lost with the exporter's life.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/arena_io.h"
#include "kernels/gather.h"
#include "proto/fd_channel.h"
#include "tests/service/gpu_arena_fixture.h"

namespace kvd {
namespace {

using testing::ContentOf;
using testing::GpuOptions;
using ::testing::HasSubstr;
using testing::PagePutter;

constexpr SessionId kWriter{1};
constexpr uint32_t kSlots = 3;
constexpr char kRoleFlag[] = "--role";

ArenaShape Shape() {
  const KvGeometry g = testing::TinyGeometry();
  return CarveArena(g, testing::BytesForSlots(g, kSlots));
}

// A process of this program in one of the roles below; its standard output is read here.
class Role {
 public:
  Role(const std::string& role, const std::string& argument) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(ends[1], STDOUT_FILENO);
      execl("/proc/self/exe", "gpu_arena_test", kRoleFlag, role.c_str(), argument.c_str(), nullptr);
      _exit(127);
    }
    close(ends[1]);
    output_ = fdopen(ends[0], "r");
  }
  ~Role() {
    Kill();
    if (output_ != nullptr) fclose(output_);
  }
  std::string Line() {
    char line[512] = "";
    if (fgets(line, sizeof(line), output_) == nullptr) return "";
    return line;
  }
  // Its exit code, or -1 if it was killed.
  int Wait() {
    int status = 0;
    EXPECT_EQ(waitpid(std::exchange(pid_, -1), &status, 0) > 0, true);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void Kill() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    (void)Wait();
  }

 private:
  pid_t pid_ = -1;
  FILE* output_ = nullptr;
};

std::unique_ptr<DescriptorListener> Serve(const std::string& path, const Arena& arena) {
  auto listener = DescriptorListener::Make(
      path, [&arena](const DescriptorRequest&) -> absl::StatusOr<std::vector<int>> {
        std::vector<int> descriptors;
        for (const UniqueFd& fd : arena.memory().descriptors()) descriptors.push_back(fd.get());
        return descriptors;
      });
  EXPECT_TRUE(listener.ok()) << listener.status();
  return *std::move(listener);
}

absl::StatusOr<std::unique_ptr<ArenaMemory>> Map(const std::string& path) {
  auto descriptors = ReceiveDescriptors(path, {}, absl::Seconds(5));
  if (!descriptors.ok()) return descriptors.status();
  return ArenaMemory::MapGpu(Shape(), *std::move(descriptors), 0);
}

struct Counts {
  int valid = 0, refused = 0, wrong = 0;
};

// Reads every slot once, as the generation in its header says, and judges what the guard passed.
Counts ReadAll(const ArenaMemory& memory) {
  const SlotLayout slot = memory.shape().slot;
  std::vector<GatherUnit> units;
  std::vector<PageLocation> pages;
  testing::DeviceArray<uint8_t> out(kSlots * slot.slot_bytes()), valid(kSlots * slot.num_units());
  for (uint32_t s = 1; s <= kSlots; ++s) {
    uint64_t generation = 0;
    KVD_CUDA_OK(
        cudaMemcpy(&generation, memory.header(s), sizeof(generation), cudaMemcpyDeviceToHost));
    for (size_t u = 0; u < slot.num_units(); ++u) {
      units.push_back({memory.slot_base(s) + u * slot.unit_bytes, memory.header(s),
                       generation & ~uint64_t{1}, out.data() + units.size() * slot.unit_bytes});
      pages.push_back({s, generation & ~uint64_t{1}});
    }
  }
  testing::DeviceArray<GatherUnit> d_units(units);
  KVD_CUDA_OK(LaunchGatherUnits(d_units.data(), static_cast<int64_t>(units.size()), slot.unit_bytes,
                                valid.data(), nullptr));
  const std::vector<uint8_t> flags = valid.Download(), bytes = out.Download();
  Counts counts;
  for (size_t i = 0; i < units.size(); ++i) {
    const auto unit = static_cast<int>(i % slot.num_units());
    const std::vector<uint8_t> want =
        ContentOf(slot, pages[i], unit / slot.shard_heads, unit % slot.shard_heads);
    (flags[i] != 0 ? counts.valid : counts.refused) += 1;
    const bool same =
        std::memcmp(bytes.data() + i * slot.unit_bytes, want.data(), want.size()) == 0;
    counts.wrong += flags[i] != 0 && !same ? 1 : 0;
  }
  return counts;
}

// --- roles ---

// Reads what the socket hands out for a second and says what it saw.
int ReadRole(const std::string& path) {
  auto memory = Map(path);
  if (!memory.ok()) {
    std::printf("%s\n", std::string(memory.status().message()).c_str());
    return 2;
  }
  std::printf("mapped\n");
  std::fflush(stdout);
  Counts all;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  do {
    const Counts counts = ReadAll(**memory);
    all = {all.valid + counts.valid, all.refused + counts.refused, all.wrong + counts.wrong};
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%d %d %d\n", all.valid, all.refused, all.wrong);
  return 0;
}

// Exit code 0: a kernel's write to the mapping faulted, as it must, and the runtime refused one of
// its own.
int WriteRole(const std::string& path) {
  auto memory = Map(path);
  if (!memory.ok()) return 2;
  const cudaError_t by_runtime = cudaMemset((*memory)->unit(1, 0, 0), 0x55, 4096);
  (void)cudaGetLastError();
  const testing::DeviceArray<uint8_t> from(4096);
  const testing::DeviceArray<PieceCopy> copy(
      std::vector<PieceCopy>{{from.data(), (*memory)->unit(1, 0, 0)}});
  KVD_CUDA_OK(LaunchCopyPieces(copy.data(), 1, 4096, nullptr));
  const cudaError_t by_kernel = cudaDeviceSynchronize();
  std::printf("%s, %s\n", cudaGetErrorName(by_runtime), cudaGetErrorName(by_kernel));
  std::fflush(stdout);
  _exit(by_runtime == cudaSuccess || by_kernel == cudaSuccess
            ? 3
            : 0);  // after a fault nothing can be cleaned up
}

int ExportRole(const std::string& path) {
  SteadyClock clock;
  const auto arena = testing::MakeArena(GpuOptions(testing::TinyGeometry(), kSlots, &clock));
  arena->BeginSession(kWriter);
  PagePutter putter(arena.get(), kWriter);
  for (uint32_t i = 0; i < kSlots; ++i) (void)putter.Put();
  const auto listener = Serve(path, *arena);
  std::printf("ready\n");
  std::fflush(stdout);
  for (;;) pause();
}

int RunRole(const std::string& role, const std::string& argument) {
  if (role == "read") return ReadRole(argument);
  if (role == "write") return WriteRole(argument);
  if (role == "export") return ExportRole(argument);
  return 127;
}

class GpuArenaProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = testing::WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
    char name[] = "/tmp/kvd_gpu_arena_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    socket_ = folder_ + "/sock";
  }
  void TearDown() override {
    if (folder_.empty()) return;
    EXPECT_EQ(system(absl::StrCat("rm -rf ", folder_).c_str()), 0);
  }
  std::unique_ptr<Arena> Make() {
    auto arena = testing::MakeArena(GpuOptions(testing::TinyGeometry(), kSlots, &clock_));
    arena->BeginSession(kWriter);
    return arena;
  }
  SteadyClock clock_;
  std::string folder_, socket_;
};

TEST_F(GpuArenaProcessTest, AnotherProcessReadsTheRightBytesWhileSlotsAreResealed) {
  const auto arena = Make();
  const auto listener = Serve(socket_, *arena);
  PagePutter putter(arena.get(), kWriter);
  for (uint32_t i = 0; i < kSlots; ++i) putter.Release(putter.Put());
  Role reader("read", socket_);
  ASSERT_EQ(reader.Line(), "mapped\n");
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (int i = 0; i < 50000 && !stop; ++i) putter.Release(putter.Put());
  });
  const std::string line = reader.Line();
  stop = true;
  writer.join();
  std::printf("valid, refused, wrong: %s", line.c_str());
  Counts counts;
  ASSERT_EQ(std::sscanf(line.c_str(), "%d %d %d", &counts.valid, &counts.refused, &counts.wrong),
            3);
  EXPECT_GT(counts.valid, 0);
  EXPECT_GT(counts.refused, 0);
  EXPECT_EQ(counts.wrong, 0);
  EXPECT_EQ(reader.Wait(), 0);
}

TEST_F(GpuArenaProcessTest, AWriteThroughTheMappingFaultsAndChangesNothing) {
  const auto arena = Make();
  const auto listener = Serve(socket_, *arena);
  PagePutter putter(arena.get(), kWriter);
  for (uint32_t i = 0; i < kSlots; ++i) (void)putter.Put();
  Role writer("write", socket_);
  std::printf("the write: %s", writer.Line().c_str());
  EXPECT_EQ(writer.Wait(), 0);
  const Counts counts = ReadAll(arena->memory());
  EXPECT_EQ(counts.valid, static_cast<int>(kSlots * arena->memory().shape().slot.num_units()));
  EXPECT_EQ(counts.wrong, 0);
}

TEST_F(GpuArenaProcessTest, MappingOfAKilledExporterStaysReadable) {
  Role exporter("export", socket_);
  ASSERT_EQ(exporter.Line(), "ready\n");
  const auto memory = Map(socket_);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const int all = static_cast<int>(kSlots * Shape().slot.num_units());
  Counts counts = ReadAll(**memory);
  EXPECT_EQ(counts.valid, all);
  EXPECT_EQ(counts.wrong, 0);
  exporter.Kill();
  for (int i = 0; i < 20; ++i) counts = ReadAll(**memory);
  EXPECT_EQ(counts.valid, all);
  EXPECT_EQ(counts.wrong, 0);
}

TEST_F(GpuArenaProcessTest, DescriptorsThatAreNotTheArenasAreRefusedWithTheReason) {
  const auto arena = Make();
  const auto copies = [&] {
    std::vector<UniqueFd> descriptors;
    for (const UniqueFd& fd : arena->memory().descriptors())
      descriptors.emplace_back(dup(fd.get()));
    return descriptors;
  };
  const ArenaShape shape = Shape();
  EXPECT_TRUE(ArenaMemory::MapGpu(shape, copies(), 0).ok());
  auto one_less = copies();
  one_less.pop_back();
  EXPECT_THAT(ArenaMemory::MapGpu(shape, std::move(one_less), 0).status().message(),
              HasSubstr("expected 2 descriptors, got 1"));
  auto memfd = copies();
  memfd[0] = UniqueFd(memfd_create("not-a-gpu", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(memfd[0].get(), 2 << 20), 0);
  const auto of_host = ArenaMemory::MapGpu(shape, std::move(memfd), 0);
  EXPECT_EQ(of_host.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(of_host.status().message(), HasSubstr("arena descriptor 0: GPU 0"));
  ArenaShape larger = shape;
  larger.slots_per_slab = larger.num_slots = 1000;
  const auto too_small = ArenaMemory::MapGpu(larger, copies(), 0);
  EXPECT_EQ(too_small.status().code(), absl::StatusCode::kFailedPrecondition);
  std::printf("%s\n%s\n", std::string(of_host.status().message()).c_str(),
              std::string(too_small.status().message()).c_str());
  EXPECT_THAT(std::string(ArenaMemory::MapGpu(shape, copies(), NumGpus()).status().message()),
              HasSubstr(absl::StrCat("expected a GPU from 0 to ", NumGpus() - 1)));
}

TEST_F(GpuArenaProcessTest, NewMemoryIsZeroAndAnArenaThatIsTooLargeIsRefused) {
  const auto memory = GpuMemory::Make(0, 5 << 20);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ((*memory)->bytes(), size_t{6} << 20);
  std::vector<uint8_t> bytes((*memory)->bytes(), 1);
  KVD_CUDA_OK(cudaMemcpy(bytes.data(), (*memory)->data(), bytes.size(), cudaMemcpyDeviceToHost));
  EXPECT_EQ(bytes, std::vector<uint8_t>(bytes.size()));
  const auto huge = GpuMemory::Make(0, size_t{4} << 40);
  EXPECT_EQ(huge.status().code(), absl::StatusCode::kResourceExhausted) << huge.status();
}

}  // namespace
}  // namespace kvd

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], kvd::kRoleFlag) == 0) return kvd::RunRole(argv[2], argv[3]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
