#include "proto/arena_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr uint64_t kMaxSlabBytes = uint64_t{1} << 30;
// Nobody can resize the memory or write through a new mapping, and the seals themselves are final.
// The daemon's own mapping is made before kFutureWrite, so it stays writable.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

size_t PageRounded(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// Bytes of part `i`, which has a descriptor: the slabs, then the headers.
size_t PartBytes(const ArenaShape& shape, size_t i) {
  return i < shape.num_slabs() ? shape.slab_bytes() : shape.header_bytes();
}
size_t DescriptorBytes(const ArenaShape& shape, size_t i) {
  return PageRounded(PartBytes(shape, i));
}

// Of an arena that is to be made.
absl::Status CheckShape(const ArenaShape& shape) {
  if (shape.num_slots > 0 && shape.slots_per_slab > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "arena memory: the shape has no slots: give the arena more bytes");
}

// Of an arena that another process made.
absl::Status CheckOffer(const ArenaShape& shape, size_t num_descriptors) {
  if (shape.num_slots == 0 || shape.slots_per_slab == 0) {
    return absl::FailedPreconditionError("arena memory: the daemon's shape has no slots");
  }
  if (num_descriptors == size_t{shape.num_slabs()} + 1) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("arena memory: expected %d descriptors, got %d: the daemon has another shape",
                      shape.num_slabs() + 1, num_descriptors));
}

absl::StatusOr<UniqueFd> MakeMemory(const char* name, size_t bytes) {
  UniqueFd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0 || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "arena memory: the kernel refused %d bytes of %s: %s: lower the arena's bytes or raise the "
        "memory limit",
        bytes, name, std::strerror(errno)));
  }
  return fd;
}

absl::Status CheckDescriptor(int fd, size_t i, size_t expected_bytes) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "arena descriptor %d: expected seals %#x, got %#x: the daemon must seal its memory", i,
        kSeals, seals < 0 ? 0 : seals));
  }
  struct stat info;
  if (fstat(fd, &info) != 0 || static_cast<uint64_t>(info.st_size) != expected_bytes) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "arena descriptor %d: expected %d bytes, got %d: the daemon has another shape", i,
        expected_bytes, static_cast<int64_t>(info.st_size)));
  }
  return absl::OkStatus();
}

}  // namespace

ArenaShape CarveArena(const KvGeometry& geometry, uint64_t bytes) {
  ArenaShape shape;
  shape.slot = MakeSlotLayout(geometry);
  const uint64_t in_slab = shape.slot.slot_bytes() + shape.summary_stride();
  const uint64_t slots = std::min<uint64_t>(bytes / (in_slab + sizeof(PageHeader)),
                                            std::numeric_limits<int32_t>::max());
  if (slots < 2) return shape;
  // A slot larger than a slab's limit gets a slab of its own. Slabs are made equal, so the last one
  // has at most num_slabs - 1 slots that are not used.
  const uint64_t most = std::max<uint64_t>(kMaxSlabBytes / in_slab, 1);
  const uint64_t slabs = (slots + most - 1) / most;
  shape.slots_per_slab = static_cast<uint32_t>(slots / slabs);
  shape.num_slots = static_cast<uint32_t>(shape.slots_per_slab * slabs);
  return shape;
}

absl::StatusOr<std::unique_ptr<ArenaMemory>> ArenaMemory::MakeShared(const ArenaShape& shape) {
  KVD_RETURN_IF_ERROR(CheckShape(shape));
  std::unique_ptr<ArenaMemory> memory(new ArenaMemory());
  memory->shape_ = shape;
  for (size_t i = 0; i <= shape.num_slabs(); ++i) {
    const char* name = i < shape.num_slabs() ? "locks-kvd-slab" : "locks-kvd-headers";
    KVD_ASSIGN_OR_RETURN(UniqueFd fd, MakeMemory(name, DescriptorBytes(shape, i)));
    memory->descriptors_.push_back(std::move(fd));
  }
  KVD_RETURN_IF_ERROR(memory->MapAll(PROT_READ | PROT_WRITE));
  for (const UniqueFd& fd : memory->descriptors_) {
    if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "arena memory: cannot seal it: %s: Linux 5.1 or later is needed", std::strerror(errno)));
    }
  }
  return memory;
}

absl::StatusOr<std::unique_ptr<ArenaMemory>> ArenaMemory::MapShared(
    const ArenaShape& shape, std::vector<UniqueFd> descriptors) {
  KVD_RETURN_IF_ERROR(CheckOffer(shape, descriptors.size()));
  for (size_t i = 0; i < descriptors.size(); ++i) {
    KVD_RETURN_IF_ERROR(CheckDescriptor(descriptors[i].get(), i, DescriptorBytes(shape, i)));
  }
  std::unique_ptr<ArenaMemory> memory(new ArenaMemory());
  memory->shape_ = shape;
  memory->descriptors_ = std::move(descriptors);
  KVD_RETURN_IF_ERROR(memory->MapAll(PROT_READ));
  return memory;
}

absl::StatusOr<std::unique_ptr<ArenaMemory>> ArenaMemory::MakeGpu(const ArenaShape& shape,
                                                                  int gpu) {
  KVD_RETURN_IF_ERROR(CheckShape(shape));
  std::unique_ptr<ArenaMemory> memory(new ArenaMemory());
  memory->shape_ = shape;
  memory->place_ = OnGpu(gpu);
  for (size_t i = 0; i <= shape.num_slabs(); ++i) {
    absl::StatusOr<std::unique_ptr<GpuMemory>> part = GpuMemory::Make(gpu, PartBytes(shape, i));
    if (!part.ok())
      return Annotate(part.status(),
                      absl::StrFormat("arena memory, part %d of %d", i + 1, shape.num_slabs() + 1));
    memory->descriptors_.push_back((*part)->TakeDescriptor());
    memory->AddGpuMemory(*std::move(part));
  }
  return memory;
}

absl::StatusOr<std::unique_ptr<ArenaMemory>> ArenaMemory::MapGpu(const ArenaShape& shape,
                                                                 std::vector<UniqueFd> descriptors,
                                                                 int gpu) {
  KVD_RETURN_IF_ERROR(CheckOffer(shape, descriptors.size()));
  std::unique_ptr<ArenaMemory> memory(new ArenaMemory());
  memory->shape_ = shape;
  memory->place_ = OnGpu(gpu);
  for (size_t i = 0; i < descriptors.size(); ++i) {
    absl::StatusOr<std::unique_ptr<GpuMemory>> part =
        GpuMemory::MapReadOnly(gpu, descriptors[i].get(), PartBytes(shape, i));
    if (!part.ok()) return Annotate(part.status(), absl::StrFormat("arena descriptor %d", i));
    memory->AddGpuMemory(*std::move(part));
  }
  return memory;
}

void ArenaMemory::AddGpuMemory(std::unique_ptr<GpuMemory> memory) {
  if (gpu_memory_.size() < shape_.num_slabs()) {
    slabs_.push_back(memory->data());
  } else {
    headers_ = reinterpret_cast<PageHeader*>(memory->data());
  }
  gpu_memory_.push_back(std::move(memory));
}

absl::Status ArenaMemory::MapAll(int protection) {
  for (size_t i = 0; i < descriptors_.size(); ++i) {
    const size_t bytes = DescriptorBytes(shape_, i);
    void* at = mmap(nullptr, bytes, protection, MAP_SHARED, descriptors_[i].get(), 0);
    if (at == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "arena memory: cannot map descriptor %d, %d bytes: %s", i, bytes, std::strerror(errno)));
    }
    if (i < shape_.num_slabs()) {
      slabs_.push_back(static_cast<uint8_t*>(at));
    } else {
      headers_ = static_cast<PageHeader*>(at);
    }
  }
  return absl::OkStatus();
}

ArenaMemory::~ArenaMemory() {
  if (place_.on_gpu()) return;
  for (size_t i = 0; i < slabs_.size(); ++i) munmap(slabs_[i], DescriptorBytes(shape_, i));
  if (headers_ != nullptr) munmap(headers_, DescriptorBytes(shape_, shape_.num_slabs()));
}

}  // namespace kvd
