#include "proto/arena_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace kvd {
namespace {

KvGeometry Small() {
  KvGeometry g;
  g.num_layers = 2;
  g.num_q_heads = 2;
  g.num_kv_heads = 2;
  g.head_dim = 64;
  g.softmax_scale = 0.125f;
  return g;
}

std::vector<UniqueFd> Copies(const ArenaMemory& memory) {
  std::vector<UniqueFd> copies;
  for (const UniqueFd& fd : memory.descriptors())
    copies.emplace_back(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  return copies;
}

// Three slabs of four slots, whatever the limit of a slab is.
ArenaShape ThreeSlabs() {
  ArenaShape shape = CarveArena(Small(), 1 << 20);
  shape.num_slots = 12;
  shape.slots_per_slab = 4;
  return shape;
}

TEST(CarveArenaTest, UsesTheBytesAndNoMore) {
  const KvGeometry geometry = Small();
  for (const uint64_t bytes :
       {uint64_t{1} << 20, uint64_t{100} << 20, uint64_t{3} << 30, (uint64_t{5} << 30) + 12345}) {
    const ArenaShape shape = CarveArena(geometry, bytes);
    const uint64_t used = uint64_t{shape.num_slabs()} * shape.slab_bytes() + shape.header_bytes();
    EXPECT_LE(used, bytes);
    EXPECT_GT(used + uint64_t{shape.num_slabs() + 1} *
                         (shape.slot.slot_bytes() + 64 + shape.summary_stride()),
              bytes);
    EXPECT_LE(shape.slab_bytes(), uint64_t{1} << 30);
    EXPECT_EQ(shape.num_slots % shape.slots_per_slab, 0u);
  }
}

TEST(CarveArenaTest, FewerThanTwoSlotsAreNone) {
  const ArenaShape one = CarveArena(Small(), 1 << 20);
  const uint64_t slot = one.slot.slot_bytes() + one.summary_stride() + sizeof(PageHeader);
  EXPECT_EQ(CarveArena(Small(), 2 * slot - 1).num_slots, 0u);
  EXPECT_EQ(CarveArena(Small(), 2 * slot).num_slots, 2u);
  EXPECT_EQ(CarveArena(Small(), 0).num_slots, 0u);
}

TEST(ArenaMemoryTest, ReadersSeeWhatTheDaemonWritesInEverySlab) {
  auto daemon = ArenaMemory::MakeShared(ThreeSlabs());
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  EXPECT_EQ((*daemon)->unit(11, 1, 1)[5], 0);  // zeroed
  auto reader = ArenaMemory::MapShared(ThreeSlabs(), Copies(**daemon));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const SlotLayout& layout = ThreeSlabs().slot;
  for (uint32_t slot = 0; slot < 12; ++slot) {
    std::memset((*daemon)->slot_base(slot), static_cast<int>(slot + 1), layout.slot_bytes());
    std::memset((*daemon)->summary(slot), static_cast<int>(slot + 101), layout.summary_bytes());
    (*daemon)->header(slot)->generation.store(2 * slot + 2, std::memory_order_release);
  }
  for (uint32_t slot = 0; slot < 12; ++slot) {
    EXPECT_EQ((*reader)->unit(slot, 0, 0)[0], slot + 1);
    EXPECT_EQ((*reader)->unit(slot, 1, 1)[layout.unit_bytes - 1], slot + 1);
    EXPECT_EQ((*reader)->summary(slot)[0], slot + 101);
    EXPECT_EQ((*reader)->summary(slot)[layout.summary_bytes() - 1], slot + 101);
    EXPECT_EQ((*reader)->header(slot)->generation.load(std::memory_order_acquire), 2 * slot + 2);
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*reader)->summary(slot)) % 64, 0u);
  }
}

TEST(ArenaMemoryTest, AReaderCanNeitherWriteNorResizeWhateverItTries) {
  auto daemon = ArenaMemory::MakeShared(ThreeSlabs());
  ASSERT_TRUE(daemon.ok());
  for (const UniqueFd& fd : Copies(**daemon)) {
    const off_t size = lseek(fd.get(), 0, SEEK_END);
    const char byte = 1;
    EXPECT_LT(pwrite(fd.get(), &byte, 1, 0), 0);
    EXPECT_NE(ftruncate(fd.get(), 0), 0);
    EXPECT_NE(ftruncate(fd.get(), size + 4096), 0);
    EXPECT_NE(fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
    EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
    void* readable = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd.get(), 0);
    ASSERT_NE(readable, MAP_FAILED);
    EXPECT_NE(mprotect(readable, 4096, PROT_READ | PROT_WRITE), 0);
    munmap(readable, 4096);
    EXPECT_NE(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);  // the seals themselves are final
    // Opening it again by name gives a descriptor of the same, sealed memory.
    const UniqueFd again(
        open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDWR | O_CLOEXEC));
    EXPECT_TRUE(again.get() < 0 || pwrite(again.get(), &byte, 1, 0) < 0);
  }
  (*daemon)->unit(0, 0, 0)[0] = 7;  // the daemon still can
}

TEST(ArenaMemoryDeathTest, WritingThroughAReadersMappingFaults) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto daemon = ArenaMemory::MakeShared(ThreeSlabs());
  auto reader = ArenaMemory::MapShared(ThreeSlabs(), Copies(**daemon));
  ASSERT_TRUE(reader.ok());
  EXPECT_DEATH((*reader)->unit(0, 0, 0)[0] = 1, "");
}

TEST(ArenaMemoryTest, AnUnsealedDescriptorIsRefused) {
  auto daemon = ArenaMemory::MakeShared(ThreeSlabs());
  std::vector<UniqueFd> fds = Copies(**daemon);
  const off_t size = lseek(fds[1].get(), 0, SEEK_END);
  fds[1] = UniqueFd(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fds[1].get(), size), 0);
  EXPECT_EQ(ArenaMemory::MapShared(ThreeSlabs(), std::move(fds)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  // Sealed, but not against writing.
  fds = Copies(**daemon);
  fds[1] = UniqueFd(memfd_create("half", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fds[1].get(), size), 0);
  ASSERT_EQ(fcntl(fds[1].get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  EXPECT_EQ(ArenaMemory::MapShared(ThreeSlabs(), std::move(fds)).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(ArenaMemoryTest, WrongSizesCountsAndKindsAreRefused) {
  auto daemon = ArenaMemory::MakeShared(ThreeSlabs());
  ArenaShape larger = ThreeSlabs();
  larger.slots_per_slab = 6;
  larger.num_slots = 18;
  EXPECT_EQ(ArenaMemory::MapShared(larger, Copies(**daemon)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  std::vector<UniqueFd> few = Copies(**daemon);
  few.pop_back();
  EXPECT_EQ(ArenaMemory::MapShared(ThreeSlabs(), std::move(few)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  std::vector<UniqueFd> file = Copies(**daemon);
  file[0] = UniqueFd(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(ArenaMemory::MapShared(ThreeSlabs(), std::move(file)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(ArenaMemory::MapShared(ArenaShape{}, {}).ok());
  EXPECT_FALSE(ArenaMemory::MakeShared(ArenaShape{}).ok());
}

}  // namespace
}  // namespace kvd
