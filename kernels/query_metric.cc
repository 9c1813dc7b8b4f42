#include "kernels/query_metric.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <utility>

#include "kernels/checksum.h"
#include "kernels/rotate.h"

namespace kvd {
namespace {

constexpr char kMagic[8] = {'K', 'V', 'D', 'Q', 'M', 'E', 'T', 'R'};
constexpr uint32_t kVersion = 1;
constexpr float kRidge = 0.01f;  // share of the mean diagonal that every direction gets
// |S_ij - S_ji| may differ by this share of sqrt(S_ii S_jj): the fitting tool sums in fp32.
constexpr float kAsymmetry = 1e-4f;
// The mean diagonal of a matrix that queries of a model can have: far inside what fp32 products
// hold.
constexpr float kMinMeanDiagonal = 0x1p-40f;
constexpr float kMaxMeanDiagonal = 0x1p40f;

struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint32_t num_layers;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  uint32_t num_tokens;
  char model[64];
  char text[64];
  uint8_t zeros[96];
};
static_assert(sizeof(FileHeader) == 256);

size_t AlignUp64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Where the parts of a file for these sizes stand.
struct FileLayout {
  size_t matrices_offset;
  size_t checksum_offset;
  size_t bytes;
};
FileLayout MakeFileLayout(size_t num_layers, size_t num_kv_heads, size_t head_dim) {
  FileLayout layout;
  layout.matrices_offset = AlignUp64(sizeof(FileHeader) + num_layers * sizeof(uint32_t));
  const size_t matrices_bytes = num_layers * num_kv_heads * head_dim * head_dim * sizeof(float);
  layout.checksum_offset = AlignUp64(layout.matrices_offset + matrices_bytes);
  layout.bytes = layout.checksum_offset + sizeof(uint64_t);
  return layout;
}

std::string Mismatch(const std::string& path, const char* field, uint64_t expected, uint64_t got,
                     const char* action) {
  return "query metric " + path + ": " + field + ": expected " + std::to_string(expected) +
         ", got " + std::to_string(got) + "; " + action;
}

// Returns an empty string if the header fits `geometry`.
std::string HeaderProblem(const std::string& path, const FileHeader& h,
                          const KvGeometry& geometry) {
  if (std::memcmp(h.magic, kMagic, sizeof(kMagic)) != 0)
    return "query metric " + path +
           ": magic: expected KVDQMETR, got something else; name a file made by the fitting tool";
  constexpr const char* kFit = "fit the metric again for this model";
  if (h.version != kVersion) return Mismatch(path, "version", kVersion, h.version, kFit);
  if (h.header_bytes != sizeof(FileHeader))
    return Mismatch(path, "header_bytes", sizeof(FileHeader), h.header_bytes, kFit);
  const auto layers = static_cast<uint32_t>(geometry.num_layers);
  const auto heads = static_cast<uint32_t>(geometry.num_kv_heads);
  const auto dim = static_cast<uint32_t>(geometry.head_dim);
  if (h.num_layers != layers) return Mismatch(path, "num_layers", layers, h.num_layers, kFit);
  if (h.num_kv_heads != heads) return Mismatch(path, "num_kv_heads", heads, h.num_kv_heads, kFit);
  if (h.head_dim != dim) return Mismatch(path, "head_dim", dim, h.head_dim, kFit);
  return "";
}

// Returns what is wrong with one stored matrix, or nullptr.
const char* MatrixProblem(const float* s, int dim) {
  for (int i = 0; i < dim * dim; ++i) {
    if (!std::isfinite(s[i])) return "holds NaN or Inf";
  }
  float trace = 0;
  for (int i = 0; i < dim; ++i) {
    if (s[i * dim + i] < 0) return "has a diagonal element below 0";
    trace += s[i * dim + i];
  }
  const float mean_diagonal = trace / static_cast<float>(dim);
  if (!(mean_diagonal >= kMinMeanDiagonal && mean_diagonal <= kMaxMeanDiagonal))
    return "has a mean diagonal outside 2^-40 .. 2^40";
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < i; ++j) {
      const float bound = std::sqrt(s[i * dim + i]) * std::sqrt(s[j * dim + j]);
      if (std::fabs(s[i * dim + j] - s[j * dim + i]) > kAsymmetry * bound)
        return "is not symmetric";
    }
  }
  return nullptr;
}

void Transpose(float* s, int dim) {
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < i; ++j) std::swap(s[i * dim + j], s[j * dim + i]);
  }
}

// S becomes R S R' (where rotated), exactly symmetric, plus the ridge.
void Prepare(float* s, int dim, bool rotated) {
  if (rotated) {
    Rotate(s, dim, dim);
    Transpose(s, dim);
    Rotate(s, dim, dim);
  }
  float trace = 0;
  for (int i = 0; i < dim; ++i) trace += s[i * dim + i];
  const float ridge = kRidge * trace / static_cast<float>(dim);
  for (int i = 0; i < dim; ++i) {
    s[i * dim + i] += ridge;
    for (int j = 0; j < i; ++j) {
      const float mean = 0.5f * (s[i * dim + j] + s[j * dim + i]);
      s[i * dim + j] = mean;
      s[j * dim + i] = mean;
    }
  }
}

// Whether Cholesky's factorisation of the prepared matrix succeeds. A mean of q q' with its ridge
// always passes; E1S would divide by noise for a matrix that does not.
bool IsPositiveDefinite(const float* s, int dim) {
  std::vector<float> factor(s, s + static_cast<size_t>(dim) * static_cast<size_t>(dim));
  for (int k = 0; k < dim; ++k) {  // right-looking: after step k the rest is the Schur complement
    float* pivot_row = factor.data() + k * dim;
    const float pivot = pivot_row[k];
    if (!(pivot > 0)) return false;
    for (int i = k + 1; i < dim; ++i) {
      float* row = factor.data() + i * dim;
      const float scale = pivot_row[i] / pivot;
      for (int j = i; j < dim; ++j) row[j] -= scale * pivot_row[j];
    }
  }
  return true;
}

// Reads at most `limit` bytes: enough to tell a longer file from the right one.
std::string ReadFile(const std::string& path, size_t limit, std::vector<uint8_t>* out) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return "query metric " + path + ": cannot be opened; check the path and its permissions";
  out->resize(limit);
  file.read(static_cast<char*>(static_cast<void*>(out->data())),
            static_cast<std::streamsize>(limit));
  if (file.bad()) return "query metric " + path + ": reading failed; check the disk";
  out->resize(static_cast<size_t>(file.gcount()));
  return "";
}

std::string MatrixName(size_t idx, size_t num_kv_heads) {
  return "layer " + std::to_string(idx / num_kv_heads) + ", head " +
         std::to_string(idx % num_kv_heads);
}

}  // namespace

std::string QueryMetric::Load(const std::string& path, const KvGeometry& geometry,
                              QueryMetric* out) {
  if (const char* problem = Problem(geometry))
    return "query metric " + path + ": geometry: " + problem;
  const auto layers = static_cast<size_t>(geometry.num_layers);
  const auto heads = static_cast<size_t>(geometry.num_kv_heads);
  const auto dim = static_cast<size_t>(geometry.head_dim);
  const FileLayout layout = MakeFileLayout(layers, heads, dim);

  std::vector<uint8_t> bytes;
  if (std::string problem = ReadFile(path, layout.bytes + 1, &bytes); !problem.empty())
    return problem;
  FileHeader header;
  if (bytes.size() < sizeof(header))
    return Mismatch(path, "bytes", layout.bytes, bytes.size(),
                    "the file is cut short: copy it again");
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::string problem = HeaderProblem(path, header, geometry); !problem.empty()) return problem;
  if (bytes.size() != layout.bytes)
    return Mismatch(path, bytes.size() > layout.bytes ? "bytes (or more)" : "bytes", layout.bytes,
                    bytes.size(), "the file is damaged: copy it again");
  uint64_t stored = 0;
  std::memcpy(&stored, bytes.data() + layout.checksum_offset, sizeof(stored));
  const uint64_t computed = Checksum64(bytes.data(), layout.checksum_offset);
  if (stored != computed)
    return Mismatch(path, "checksum", computed, stored, "the file is damaged: copy it again");

  QueryMetric metric;
  metric.num_kv_heads_ = geometry.num_kv_heads;
  metric.head_dim_ = geometry.head_dim;
  metric.file_checksum_ = stored;
  metric.matrices_.resize(layers * heads * dim * dim);
  std::memcpy(metric.matrices_.data(), bytes.data() + layout.matrices_offset,
              metric.matrices_.size() * sizeof(float));
  for (size_t i = 0; i < layers * heads; ++i) {
    float* s = metric.matrices_.data() + i * dim * dim;
    const char* problem = MatrixProblem(s, geometry.head_dim);
    if (problem == nullptr) {
      Prepare(s, geometry.head_dim, geometry.rotated);
      if (!IsPositiveDefinite(s, geometry.head_dim)) problem = "is not positive semidefinite";
    }
    if (problem != nullptr)
      return "query metric " + path + ": matrix of " + MatrixName(i, heads) + " " + problem +
             "; expected the mean of q q' over queries; fit it again";
  }
  *out = std::move(metric);
  return "";
}

}  // namespace kvd
