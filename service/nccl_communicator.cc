#include "service/nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/gpu_memory.h"
#include "proto/status.h"
#include "service/move_link.h"

#if KVD_NCCL
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>
#endif

namespace kvd {

#if KVD_NCCL
namespace {

constexpr int kMinVersion = NCCL_VERSION(2, 18, 0);  // non-blocking abort and finalize, CTA limits
constexpr int kMinCtas = 1;
constexpr int kMaxCtas = 16;  // more bring nothing between two H200s (bench/README.md)

// What is used of libnccl.
struct Functions {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) comm_init;
  decltype(&ncclCommGetAsyncError) comm_get_async_error;
  decltype(&ncclCommFinalize) comm_finalize;
  decltype(&ncclCommDestroy) comm_destroy;
  decltype(&ncclCommAbort) comm_abort;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclGetErrorString) error_string;
  decltype(&ncclGetLastError) last_error;
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

bool FindAll(void* library, Functions* f) {
  return Find(library, "ncclGetVersion", &f->get_version) &&
         Find(library, "ncclGetUniqueId", &f->get_unique_id) &&
         Find(library, "ncclCommInitRankConfig", &f->comm_init) &&
         Find(library, "ncclCommGetAsyncError", &f->comm_get_async_error) &&
         Find(library, "ncclCommFinalize", &f->comm_finalize) &&
         Find(library, "ncclCommDestroy", &f->comm_destroy) &&
         Find(library, "ncclCommAbort", &f->comm_abort) &&
         Find(library, "ncclGroupStart", &f->group_start) &&
         Find(library, "ncclGroupEnd", &f->group_end) && Find(library, "ncclSend", &f->send) &&
         Find(library, "ncclRecv", &f->receive) &&
         Find(library, "ncclGetErrorString", &f->error_string) &&
         Find(library, "ncclGetLastError", &f->last_error);
}

absl::Status CudaError(const char* what, cudaError_t error) {
  return absl::UnavailableError(absl::StrCat("nccl: ", what, ": ", cudaGetErrorString(error)));
}

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(const Functions& nccl) : nccl_(nccl) {}
  // A stream that is not idle has been waited for: MoveLink.
  ~NcclCommunicator() override {
    if (comm_ != nullptr)
      (void)(phase_ == Phase::kFinishing ? nccl_.comm_destroy(comm_) : nccl_.comm_abort(comm_));
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  absl::Status Join(const std::string& id, MoveEnd end, int gpu) {
    ncclUniqueId name;
    if (id.size() != sizeof(name.internal)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "communicator_id: expected ", sizeof(name.internal), " bytes, got ", id.size()));
    }
    std::memcpy(name.internal, id.data(), id.size());
    if (const cudaError_t set = cudaSetDevice(gpu); set != cudaSuccess)
      return CudaError("cudaSetDevice", set);
    int least = 0;
    int greatest = 0;
    (void)cudaDeviceGetStreamPriorityRange(&least, &greatest);
    const cudaError_t made = cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, least);
    if (made != cudaSuccess) return CudaError("a stream", made);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.minCTAs = kMinCtas;
    config.maxCTAs = kMaxCtas;
    const int ends = end == MoveEnd::kAlone ? 1 : 2;
    return Begun(nccl_.comm_init(&comm_, ends, name, end == MoveEnd::kDestination ? 1 : 0, &config),
                 Phase::kJoining);
  }

  absl::StatusOr<Progress> Poll() override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = nccl_.comm_get_async_error(comm_, &state);
    if (asked != ncclSuccess) return Error(asked);
    if (state == ncclInProgress) return Progress::kBusy;
    if (state != ncclSuccess) return Error(state);
    if (phase_ != Phase::kMoving) return Progress::kDone;
    const cudaError_t on_stream = cudaStreamQuery(stream_);
    if (on_stream == cudaErrorNotReady) return Progress::kBusy;
    if (on_stream != cudaSuccess) return CudaError("moving pages", on_stream);
    return Progress::kDone;
  }

  absl::Status Send(std::span<const MovePiece> pieces) override {
    return Move(pieces, [this](const MovePiece& piece) {
      return nccl_.send(piece.data, piece.bytes, ncclUint8, /*peer=*/1, comm_, stream_);
    });
  }
  absl::Status Receive(std::span<const MovePiece> pieces) override {
    return Move(pieces, [this](const MovePiece& piece) {
      return nccl_.receive(piece.data, piece.bytes, ncclUint8, /*peer=*/0, comm_, stream_);
    });
  }
  absl::Status Finish() override { return Begun(nccl_.comm_finalize(comm_), Phase::kFinishing); }

  void Abort() override {
    if (comm_ != nullptr) (void)nccl_.comm_abort(std::exchange(comm_, nullptr));
  }
  bool IsQuiet() override {
    return stream_ == nullptr || cudaStreamQuery(stream_) != cudaErrorNotReady;
  }

 private:
  enum class Phase { kJoining, kMoving, kFinishing };

  // In one group, so that all are one launch.
  template <typename One>
  absl::Status Move(std::span<const MovePiece> pieces, const One& one) {
    ncclResult_t result = nccl_.group_start();
    for (size_t i = 0; i < pieces.size() && (result == ncclSuccess || result == ncclInProgress);
         ++i) {
      result = one(pieces[i]);
    }
    const ncclResult_t ended = nccl_.group_end();
    const bool good = result == ncclSuccess || result == ncclInProgress;
    return Begun(good ? ended : result, Phase::kMoving);
  }

  absl::Status Begun(ncclResult_t result, Phase phase) {
    phase_ = phase;
    return result == ncclSuccess || result == ncclInProgress ? absl::OkStatus() : Error(result);
  }
  absl::Status Error(ncclResult_t result) const {
    return absl::UnavailableError(
        absl::StrCat("nccl: ", nccl_.error_string(result), ": ", nccl_.last_error(nullptr)));
  }

  const Functions& nccl_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Phase phase_ = Phase::kJoining;
};

class NcclLibrary final : public CommunicatorLibrary {
 public:
  NcclLibrary(const Functions& functions, int version) : nccl_(functions), version_(version) {}

  std::string version() const override {
    return absl::StrFormat("nccl %d.%d.%d", version_ / 10000, version_ / 100 % 100, version_ % 100);
  }
  absl::StatusOr<std::string> DeviceOf(const MemoryPlace& place) const override {
    if (!place.on_gpu()) return absl::FailedPreconditionError("the arena is in host memory");
    return GpuUuid(place.gpu);
  }
  absl::StatusOr<std::string> MakeId() const override {
    ncclUniqueId id;
    if (const ncclResult_t made = nccl_.get_unique_id(&id); made != ncclSuccess) {
      return absl::UnavailableError(absl::StrCat("nccl: a unique id: ", nccl_.error_string(made),
                                                 ": ", nccl_.last_error(nullptr)));
    }
    return std::string(id.internal, sizeof(id.internal));
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Join(const std::string& id, MoveEnd end,
                                                     const MemoryPlace& place) const override {
    auto communicator = std::make_unique<NcclCommunicator>(nccl_);
    KVD_RETURN_IF_ERROR(communicator->Join(id, end, place.gpu));
    return std::unique_ptr<Communicator>(std::move(communicator));
  }

 private:
  const Functions nccl_;
  const int version_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> LoadNccl(const std::string& name) {
  if (NumGpus() == 0) return absl::FailedPreconditionError("no GPU");
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(dlerror(), ": install NCCL, or set LD_LIBRARY_PATH or cluster.nccl.library"));
  }
  Functions functions = {};
  int version = 0;
  if (!FindAll(library, &functions) || functions.get_version(&version) != ncclSuccess ||
      version < kMinVersion) {
    return absl::FailedPreconditionError(absl::StrCat(name, ": expected NCCL of version ",
                                                      kMinVersion, " or later, got ", version,
                                                      ": install a later one"));
  }
  return std::make_shared<const NcclLibrary>(functions, version);
}

#else

absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> LoadNccl(const std::string&) {
  return absl::FailedPreconditionError("this daemon was built without NCCL");
}

#endif

absl::Status ProveAlone(const std::shared_ptr<const CommunicatorLibrary>& library,
                        const MemoryPlace& place, absl::Duration limit) {
  KVD_RETURN_IF_ERROR(library->DeviceOf(place).status());
  KVD_ASSIGN_OR_RETURN(const std::string id, library->MakeId());
  MoveLink link({.library = library,
                 .id = id,
                 .end = MoveEnd::kAlone,
                 .place = place,
                 .watchdog = limit,
                 .memory = {}});
  const auto always = [] { return absl::OkStatus(); };
  KVD_RETURN_IF_ERROR(link.Wait(always));
  link.Finish();
  return link.Wait(always);
}

}  // namespace kvd
