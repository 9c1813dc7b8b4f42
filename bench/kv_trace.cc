#include "bench/kv_trace.h"

#include <cstring>
#include <fstream>
#include <span>

#include "absl/strings/str_cat.h"
#include "kernels/checksum.h"
#include "proto/status.h"

namespace kvd::bench {
namespace {

constexpr char kMagic[] = "KVDTRACE";
constexpr uint32_t kVersion = 1;
constexpr size_t kHeaderBytes = 256;
constexpr size_t kNameBytes = 64;

// The fixed header, field by field at its offset.
struct TraceHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint32_t num_layers;
  uint32_t num_q_heads;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  uint32_t num_prompt_tokens;
  uint32_t num_steps;
  uint32_t dtype;
  float softmax_scale;
  float logit_softcap;
  float rope_theta;
  uint32_t model_layers;
  char model[kNameBytes];
  char text[kNameBytes];
};
static_assert(sizeof(TraceHeader) == 60 + 2 * kNameBytes && sizeof(TraceHeader) <= kHeaderBytes);

// Walks the 64-byte aligned sections after the header.
class SectionReader {
 public:
  SectionReader(std::span<const uint8_t> bytes, absl::string_view path)
      : bytes_(bytes), path_(path) {}

  template <class T>
  absl::StatusOr<std::vector<T>> Next(size_t count, absl::string_view what) {
    at_ = (at_ + 63) / 64 * 64;
    if (at_ > bytes_.size() || count > (bytes_.size() - at_) / sizeof(T)) {
      return absl::DataLossError(absl::StrCat(path_, ": ", what, ": expected ", count * sizeof(T),
                                              " bytes at ", at_, ", the file has ", bytes_.size(),
                                              ": dump the trace again"));
    }
    std::vector<T> values(count);
    if (count > 0) std::memcpy(values.data(), bytes_.data() + at_, count * sizeof(T));
    at_ += count * sizeof(T);
    return values;
  }
  size_t at() const { return (at_ + 63) / 64 * 64; }

 private:
  std::span<const uint8_t> bytes_;
  std::string path_;
  size_t at_ = kHeaderBytes;
};

absl::Status CheckHeader(const TraceHeader& header, const std::string& path) {
  if (std::memcmp(header.magic, kMagic, sizeof(header.magic)) != 0)
    return absl::DataLossError(
        absl::StrCat(path, ": not a KV trace (expected magic ", kMagic, ")"));
  if (header.version != kVersion || header.header_bytes != kHeaderBytes)
    return absl::DataLossError(
        absl::StrCat(path, ": expected version ", kVersion, " with a header of ", kHeaderBytes,
                     " bytes, got version ", header.version, " and ", header.header_bytes));
  if (header.num_layers < 1 || header.num_layers > 1024 || header.num_kv_heads < 1 ||
      header.num_kv_heads > 256 || header.num_q_heads % header.num_kv_heads != 0 ||
      header.head_dim < 1 || header.head_dim > 256 || header.dtype < 1 || header.dtype > 2)
    return absl::DataLossError(absl::StrCat(
        path, ": impossible shape in the header: L ", header.num_layers, ", H ", header.num_q_heads,
        ", Hk ", header.num_kv_heads, ", D ", header.head_dim, ", dtype ", header.dtype));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint8_t>> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  std::vector<uint8_t> bytes(static_cast<size_t>(in.tellg()));
  in.seekg(0);
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!in) return absl::DataLossError(absl::StrCat(path, ": cannot be read whole"));
  return bytes;
}

absl::StatusOr<KvTrace::Layer> ReadPrompt(SectionReader& reader, const KvTrace& trace) {
  const auto kv = static_cast<size_t>(trace.num_tokens) *
                  static_cast<size_t>(trace.num_kv_heads * trace.head_dim);
  KvTrace::Layer layer;
  KVD_ASSIGN_OR_RETURN(layer.k, reader.Next<uint16_t>(kv, "prompt keys"));
  KVD_ASSIGN_OR_RETURN(layer.v, reader.Next<uint16_t>(kv, "prompt values"));
  return layer;
}

absl::Status ReadSteps(SectionReader& reader, const KvTrace& trace, KvTrace::Layer* layer) {
  const auto steps = static_cast<size_t>(trace.num_steps);
  const size_t q = steps * static_cast<size_t>(trace.num_q_heads * trace.head_dim);
  const size_t kv = steps * static_cast<size_t>(trace.num_kv_heads * trace.head_dim);
  KVD_ASSIGN_OR_RETURN(layer->step_q, reader.Next<uint16_t>(q, "step queries"));
  KVD_ASSIGN_OR_RETURN(layer->step_k, reader.Next<uint16_t>(kv, "step keys"));
  KVD_ASSIGN_OR_RETURN(layer->step_v, reader.Next<uint16_t>(kv, "step values"));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<KvTrace> KvTrace::Load(const std::string& path) {
  KVD_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, ReadFile(path));
  if (bytes.size() < kHeaderBytes)
    return absl::DataLossError(absl::StrCat(path, ": shorter than a header"));
  TraceHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  KVD_RETURN_IF_ERROR(CheckHeader(header, path));

  KvTrace trace;
  trace.num_layers = static_cast<int>(header.num_layers);
  trace.num_q_heads = static_cast<int>(header.num_q_heads);
  trace.num_kv_heads = static_cast<int>(header.num_kv_heads);
  trace.head_dim = static_cast<int>(header.head_dim);
  trace.num_tokens = header.num_prompt_tokens;
  trace.num_steps = static_cast<int>(header.num_steps);
  trace.dtype = static_cast<KvDtype>(header.dtype);
  trace.softmax_scale = header.softmax_scale;
  trace.logit_softcap = header.logit_softcap;
  trace.rope_theta = header.rope_theta;
  trace.model.assign(header.model, strnlen(header.model, kNameBytes));
  trace.text.assign(header.text, strnlen(header.text, kNameBytes));

  SectionReader reader(bytes, path);
  KVD_ASSIGN_OR_RETURN(trace.layer_ids, reader.Next<uint32_t>(header.num_layers, "layer ids"));
  KVD_ASSIGN_OR_RETURN(trace.prompt_tokens,
                       reader.Next<uint32_t>(header.num_prompt_tokens, "prompt tokens"));
  KVD_ASSIGN_OR_RETURN(trace.step_tokens, reader.Next<uint32_t>(header.num_steps, "step tokens"));
  for (int l = 0; l < trace.num_layers; ++l) {
    KVD_ASSIGN_OR_RETURN(Layer layer, ReadPrompt(reader, trace));
    trace.layers.push_back(std::move(layer));
  }
  for (Layer& layer : trace.layers) KVD_RETURN_IF_ERROR(ReadSteps(reader, trace, &layer));
  const size_t covered = reader.at();
  KVD_ASSIGN_OR_RETURN(const std::vector<uint64_t> checksum, reader.Next<uint64_t>(1, "checksum"));
  if (Checksum64(bytes.data(), covered) != checksum[0])
    return absl::DataLossError(
        absl::StrCat(path, ": checksum does not match: the file is damaged, dump it again"));
  return trace;
}

KvGeometry KvTrace::geometry(int page_tokens, int rank) const {
  KvGeometry geometry;
  geometry.num_layers = num_layers;
  geometry.num_q_heads = num_q_heads;
  geometry.num_kv_heads = num_kv_heads;
  geometry.head_dim = head_dim;
  geometry.page_tokens = page_tokens;
  geometry.rank = rank;
  geometry.dtype = dtype;
  geometry.softmax_scale = softmax_scale;
  geometry.logit_softcap = logit_softcap;
  return geometry;
}

}  // namespace kvd::bench
