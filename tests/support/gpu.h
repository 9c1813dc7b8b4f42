// Device memory, graphs and streams for tests and benchmarks of the GPU kernels. Host code: needs
// the CUDA runtime's headers, not nvcc. Only built with KVD_CUDA.
//
// Thread safety: one thread a test. A failing CUDA call ends the process with the call's text: a
// test cannot go on after one.

#ifndef LOCKS_KVD_TESTS_SUPPORT_GPU_H_
#define LOCKS_KVD_TESTS_SUPPORT_GPU_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace kvd::testing {

#define KVD_CUDA_OK(call)                                                \
  do {                                                                   \
    const cudaError_t error = (call);                                    \
    if (error != cudaSuccess) {                                          \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   cudaGetErrorString(error));                           \
      std::abort();                                                      \
    }                                                                    \
  } while (false)

// Why no GPU can be used, or empty if one can: of compute capability 9.0, as the machine code is
// built for.
inline std::string WhyNoGpu() {
  int num_devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&num_devices); error != cudaSuccess)
    return std::string("no GPU: ") + cudaGetErrorString(error);
  if (num_devices == 0) return "no GPU: no device was found";
  cudaDeviceProp properties = {};
  KVD_CUDA_OK(cudaGetDeviceProperties(&properties, 0));
  if (properties.major < 9)
    return std::string("no usable GPU: expected compute capability 9.0 or later, got ") +
           std::to_string(properties.major) + "." + std::to_string(properties.minor);
  return "";
}

// An array in device memory.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) {
    KVD_CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(T) + 256));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    Upload(values);
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  DeviceArray& operator=(DeviceArray&&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  size_t size() const { return size_; }
  // Upload and Poison wait for the device: the default stream, where they happen, does not order
  // them before other streams.
  void Upload(const std::vector<T>& values) {
    KVD_CUDA_OK(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    KVD_CUDA_OK(cudaStreamSynchronize(nullptr));
  }
  // Sets every byte, so that a value nobody wrote stands out.
  void Poison(int byte = 0xA5) {
    KVD_CUDA_OK(cudaMemset(data_, byte, size_ * sizeof(T)));
    KVD_CUDA_OK(cudaStreamSynchronize(nullptr));
  }
  // Waits for the device.
  std::vector<T> Download() const {
    std::vector<T> values(size_);
    KVD_CUDA_OK(cudaDeviceSynchronize());
    KVD_CUDA_OK(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

class Stream {
 public:
  Stream() { KVD_CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  void Wait() const { KVD_CUDA_OK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `enqueue(stream)` enqueues, captured once and replayed as often as wanted.
class Graph {
 public:
  template <class Enqueue>
  explicit Graph(const Enqueue& enqueue) {
    cudaGraph_t graph = nullptr;
    KVD_CUDA_OK(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
    enqueue(stream_.get());
    KVD_CUDA_OK(cudaStreamEndCapture(stream_.get(), &graph));
    KVD_CUDA_OK(cudaGraphInstantiate(&executable_, graph, 0));
    KVD_CUDA_OK(cudaGraphDestroy(graph));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(executable_); }

  void Replay() const {
    KVD_CUDA_OK(cudaGraphLaunch(executable_, stream_.get()));
    stream_.Wait();
  }
  // Milliseconds on the device of one replay.
  float ReplayMs() const {
    cudaEvent_t start = nullptr, end = nullptr;
    KVD_CUDA_OK(cudaEventCreate(&start));
    KVD_CUDA_OK(cudaEventCreate(&end));
    KVD_CUDA_OK(cudaEventRecord(start, stream_.get()));
    KVD_CUDA_OK(cudaGraphLaunch(executable_, stream_.get()));
    KVD_CUDA_OK(cudaEventRecord(end, stream_.get()));
    KVD_CUDA_OK(cudaEventSynchronize(end));
    float ms = 0;
    KVD_CUDA_OK(cudaEventElapsedTime(&ms, start, end));
    KVD_CUDA_OK(cudaEventDestroy(start));
    KVD_CUDA_OK(cudaEventDestroy(end));
    return ms;
  }

 private:
  Stream stream_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_GPU_H_
