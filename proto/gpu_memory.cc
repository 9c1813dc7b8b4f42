#include "proto/gpu_memory.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/status.h"

#if KVD_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>
#endif

namespace kvd {

#if KVD_CUDA
namespace {

// The driver's functions that the runtime library has no form of.
struct Driver {
  decltype(&cuGetErrorName) error_name = nullptr;
  decltype(&cuCtxGetCurrent) current = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
  decltype(&cuMemGetAllocationPropertiesFromHandle) properties = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_addresses = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  std::string problem;  // why it cannot be used; empty: it can
};

template <typename Function>
void LookUp(const char* name, Function* function, Driver* driver) {
  constexpr unsigned kVersion = 12000;  // of the functions' signatures
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    driver->problem = absl::StrCat("the driver has no ", name);
    return;
  }
  *function = reinterpret_cast<Function>(found);
}

Driver LoadDriver() {
  Driver driver;
  int num_gpus = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&num_gpus);
      error != cudaSuccess || num_gpus == 0) {
    (void)cudaGetLastError();
    driver.problem = error != cudaSuccess ? cudaGetErrorString(error) : "the driver shows no GPU";
    return driver;
  }
  LookUp("cuGetErrorName", &driver.error_name, &driver);
  LookUp("cuCtxGetCurrent", &driver.current, &driver);
  LookUp("cuMemGetAllocationGranularity", &driver.granularity, &driver);
  LookUp("cuMemCreate", &driver.create, &driver);
  LookUp("cuMemRelease", &driver.release, &driver);
  LookUp("cuMemExportToShareableHandle", &driver.export_handle, &driver);
  LookUp("cuMemImportFromShareableHandle", &driver.import_handle, &driver);
  LookUp("cuMemGetAllocationPropertiesFromHandle", &driver.properties, &driver);
  LookUp("cuMemAddressReserve", &driver.reserve, &driver);
  LookUp("cuMemAddressFree", &driver.free_addresses, &driver);
  LookUp("cuMemMap", &driver.map, &driver);
  LookUp("cuMemUnmap", &driver.unmap, &driver);
  LookUp("cuMemSetAccess", &driver.set_access, &driver);
  return driver;
}

const Driver& TheDriver() {
  static const Driver* const driver = new Driver(LoadDriver());
  return *driver;
}

std::string NameOf(CUresult error) {
  const char* name = nullptr;
  if (TheDriver().error_name(error, &name) == CUDA_SUCCESS && name != nullptr) return name;
  return absl::StrCat("error ", static_cast<int>(error));
}

absl::Status Failed(const char* what, int gpu, CUresult error) {
  const std::string text = absl::StrFormat("GPU %d: %s: %s", gpu, what, NameOf(error));
  if (error == CUDA_ERROR_OUT_OF_MEMORY) {
    return absl::ResourceExhaustedError(
        absl::StrCat(text, ": the GPU has no room: lower the bytes, or end what else runs there"));
  }
  return absl::FailedPreconditionError(text);
}

absl::Status Failed(const char* what, int gpu, cudaError_t error) {
  (void)cudaGetLastError();
  return absl::FailedPreconditionError(
      absl::StrFormat("GPU %d: %s: %s", gpu, what, cudaGetErrorString(error)));
}

// Makes `gpu` current, its primary context with it, and then puts back what was. Only a thread that
// had a context gets its GPU back: making a context on a GPU that nobody asked for would take
// hundreds of MiB there.
class CurrentGpu {
 public:
  explicit CurrentGpu(int gpu) {
    CUcontext context = nullptr;
    had_one_ = TheDriver().current(&context) == CUDA_SUCCESS && context != nullptr &&
               cudaGetDevice(&before_) == cudaSuccess;
    error_ = cudaSetDevice(gpu);
  }
  ~CurrentGpu() {
    if (had_one_) (void)cudaSetDevice(before_);
  }
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;
  cudaError_t error() const { return error_; }

 private:
  bool had_one_ = false;
  int before_ = 0;
  cudaError_t error_ = cudaSuccess;
};

CUmemAllocationProp PropertiesOf(int gpu) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu};
  return properties;
}

// Why `gpu` cannot read an allocation, as far as the allocation says; OK if it does not.
absl::Status CheckOwner(int gpu, CUmemGenericAllocationHandle handle) {
  CUmemAllocationProp properties = {};
  if (const CUresult error = TheDriver().properties(&properties, handle); error != CUDA_SUCCESS) {
    return Failed("what was handed over cannot be looked at", gpu, error);
  }
  if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return absl::FailedPreconditionError(
        absl::StrFormat("GPU %d: expected memory of a GPU, got memory of kind %d", gpu,
                        static_cast<int>(properties.location.type)));
  }
  const int owner = properties.location.id;
  int can_read = owner == gpu ? 1 : 0;
  if (owner != gpu && cudaDeviceCanAccessPeer(&can_read, gpu, owner) != cudaSuccess)
    (void)cudaGetLastError();
  if (can_read != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "no peer access: GPU %d cannot read memory of GPU %d: use a GPU that is linked to it, or "
      "another path",
      gpu, owner));
}

}  // namespace

int NumGpus() {
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) == cudaSuccess) return num_gpus;
  (void)cudaGetLastError();
  return 0;
}

absl::Status CheckGpu(int gpu) {
  const int num_gpus = NumGpus();
  if (num_gpus == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("expected a GPU, and none is visible: ", TheDriver().problem));
  }
  if (!TheDriver().problem.empty()) return absl::FailedPreconditionError(TheDriver().problem);
  if (gpu >= 0 && gpu < num_gpus) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "expected a GPU from 0 to %d, got %d: %d are visible", num_gpus - 1, gpu, num_gpus));
}

absl::StatusOr<std::string> GpuUuid(int gpu) {
  KVD_RETURN_IF_ERROR(CheckGpu(gpu));
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, gpu); error != cudaSuccess) {
    return Failed("its properties", gpu, error);
  }
  return absl::BytesToHexString(
      absl::string_view(properties.uuid.bytes, sizeof(properties.uuid.bytes)));
}

absl::Status MakeGpuCurrent(int gpu) {
  KVD_RETURN_IF_ERROR(CheckGpu(gpu));
  cudaError_t error = cudaSetDevice(gpu);
  if (error == cudaSuccess)
    error = cudaFree(nullptr);  // the context is made here, not by whoever needs it first
  if (error != cudaSuccess) return Failed("cannot be used", gpu, error);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<GpuMemory>> GpuMemory::Make(int gpu, size_t bytes) {
  KVD_RETURN_IF_ERROR(CheckGpu(gpu));
  const CurrentGpu current(gpu);
  if (current.error() != cudaSuccess) return Failed("cannot be used", gpu, current.error());
  const CUmemAllocationProp properties = PropertiesOf(gpu);
  size_t granule = 0;
  if (const CUresult error =
          TheDriver().granularity(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
      error != CUDA_SUCCESS || granule == 0 || kGpuGranule % granule != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "GPU %d: expected allocations of %d bytes that can be exported, got granules of %d (%s)",
        gpu, kGpuGranule, granule, NameOf(error)));
  }
  std::unique_ptr<GpuMemory> memory(new GpuMemory(gpu, bytes));
  CUmemGenericAllocationHandle handle = 0;
  if (const CUresult error = TheDriver().create(&handle, memory->bytes_, &properties, 0);
      error != CUDA_SUCCESS) {
    return Failed(absl::StrCat(memory->bytes_, " bytes").c_str(), gpu, error);
  }
  int descriptor = -1;
  const CUresult exported =
      TheDriver().export_handle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (exported == CUDA_SUCCESS) memory->descriptor_ = UniqueFd(descriptor);
  KVD_RETURN_IF_ERROR(memory->MapHandle(handle, /*writable=*/true));
  if (exported != CUDA_SUCCESS)
    return Failed("memory cannot be exported as a descriptor", gpu, exported);
  cudaError_t zeroed = cudaMemsetAsync(memory->data_, 0, memory->bytes_, cudaStreamPerThread);
  if (zeroed == cudaSuccess) zeroed = cudaStreamSynchronize(cudaStreamPerThread);
  if (zeroed != cudaSuccess) return Failed("new memory cannot be zeroed", gpu, zeroed);
  return memory;
}

absl::StatusOr<std::unique_ptr<GpuMemory>> GpuMemory::MapReadOnly(int gpu, int descriptor,
                                                                  size_t bytes) {
  KVD_RETURN_IF_ERROR(CheckGpu(gpu));
  const CurrentGpu current(gpu);
  if (current.error() != cudaSuccess) return Failed("cannot be used", gpu, current.error());
  CUmemGenericAllocationHandle handle = 0;
  // The driver takes the descriptor's number in place of a pointer.
  auto* const number =
      reinterpret_cast<void*>(static_cast<uintptr_t>(static_cast<unsigned>(descriptor)));
  if (const CUresult error =
          TheDriver().import_handle(&handle, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
      error != CUDA_SUCCESS) {
    return absl::FailedPreconditionError(
        absl::StrFormat("GPU %d: the descriptor cannot be imported: %s: it is not memory of a GPU, "
                        "or of a GPU that this process cannot "
                        "see (check CUDA_VISIBLE_DEVICES and the container's devices)",
                        gpu, NameOf(error)));
  }
  if (absl::Status owner = CheckOwner(gpu, handle); !owner.ok()) {
    TheDriver().release(handle);
    return owner;
  }
  std::unique_ptr<GpuMemory> memory(new GpuMemory(gpu, bytes));
  KVD_RETURN_IF_ERROR(memory->MapHandle(handle, /*writable=*/false));
  return memory;
}

absl::Status GpuMemory::MapHandle(uint64_t handle, bool writable) {
  CUdeviceptr at = 0;
  CUresult error = TheDriver().reserve(&at, bytes_, kGpuGranule, 0, 0);
  if (error != CUDA_SUCCESS) {
    TheDriver().release(handle);
    return Failed("no addresses", gpu_, error);
  }
  data_ = reinterpret_cast<uint8_t*>(at);
  error = TheDriver().map(at, bytes_, 0, handle, 0);
  mapped_ = error == CUDA_SUCCESS;
  TheDriver().release(handle);
  if (!mapped_) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "GPU %d: %d bytes cannot be mapped: %s: the allocation is smaller than expected", gpu_,
        bytes_, NameOf(error)));
  }
  CUmemAccessDesc access = {};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu_};
  access.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
  error = TheDriver().set_access(at, bytes_, &access, 1);
  if (error != CUDA_SUCCESS) return Failed("memory cannot be made accessible", gpu_, error);
  return absl::OkStatus();
}

GpuMemory::~GpuMemory() {
  if (data_ == nullptr) return;
  // A failure of any of these means that the context is gone, and the mapping with it.
  const CurrentGpu current(gpu_);
  if (mapped_) {
    (void)cudaDeviceSynchronize();
    (void)TheDriver().unmap(reinterpret_cast<CUdeviceptr>(data_), bytes_);
  }
  (void)TheDriver().free_addresses(reinterpret_cast<CUdeviceptr>(data_), bytes_);
}

uint8_t* AllocatePinned(int gpu, size_t bytes) {
  if (!CheckGpu(gpu).ok()) return nullptr;
  const CurrentGpu current(gpu);
  void* data = nullptr;
  if (current.error() == cudaSuccess &&
      cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped) == cudaSuccess) {
    return static_cast<uint8_t*>(data);
  }
  (void)cudaGetLastError();
  return nullptr;
}

void FreePinned(int gpu, uint8_t* data) {
  if (data == nullptr) return;
  const CurrentGpu current(gpu);
  (void)cudaFreeHost(data);
}

uint8_t* AllocateExportable(int gpu, size_t bytes) {
  if (!CheckGpu(gpu).ok()) return nullptr;
  const CurrentGpu current(gpu);
  void* data = nullptr;
  if (current.error() == cudaSuccess && cudaMalloc(&data, GpuRounded(bytes)) == cudaSuccess) {
    return static_cast<uint8_t*>(data);
  }
  (void)cudaGetLastError();
  return nullptr;
}

void FreeExportable(int gpu, uint8_t* data) {
  if (data == nullptr) return;
  const CurrentGpu current(gpu);
  (void)cudaDeviceSynchronize();
  (void)cudaFree(data);
}

#else  // !KVD_CUDA

namespace {

absl::Status WithoutCuda() {
  return absl::FailedPreconditionError(
      "memory of a GPU is wanted, and this program was built without CUDA");
}

}  // namespace

int NumGpus() { return 0; }
absl::Status CheckGpu(int) { return WithoutCuda(); }
absl::StatusOr<std::string> GpuUuid(int) { return WithoutCuda(); }
absl::Status MakeGpuCurrent(int) { return WithoutCuda(); }
absl::StatusOr<std::unique_ptr<GpuMemory>> GpuMemory::Make(int, size_t) { return WithoutCuda(); }
absl::StatusOr<std::unique_ptr<GpuMemory>> GpuMemory::MapReadOnly(int, int, size_t) {
  return WithoutCuda();
}
absl::Status GpuMemory::MapHandle(uint64_t, bool) { return WithoutCuda(); }
GpuMemory::~GpuMemory() = default;
uint8_t* AllocatePinned(int, size_t) { return nullptr; }
void FreePinned(int, uint8_t*) {}
uint8_t* AllocateExportable(int, size_t) { return nullptr; }
void FreeExportable(int, uint8_t*) {}

#endif  // KVD_CUDA

}  // namespace kvd
