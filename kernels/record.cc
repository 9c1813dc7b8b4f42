#include <algorithm>
#include <cstring>

#include "kernels/dtype.h"
#include "kernels/quant.h"
#include "kernels/summarize.h"

namespace kvd {
namespace {

constexpr float kMaxFloat = 0x1.FFFFFEp127f;

float ScaleAt(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return FromBf16(bits);
}

// The product of a scale and a code may leave fp32 at the largest keys: it saturates, so that a
// zero query component never meets an infinity.
float Finite(float x) { return std::clamp(x, -kMaxFloat, kMaxFloat); }

}  // namespace

int64_t FirstNonFinite(const void* values, int64_t count, KvDtype dtype) {
  // NaN and Inf are the values whose exponent bits are all ones.
  const uint16_t exponent = dtype == KvDtype::kBf16 ? 0x7F80 : 0x7C00;
  constexpr int64_t kBatch = 512;
  const auto* bytes = static_cast<const uint8_t*>(values);
  uint16_t bits[kBatch];
  for (int64_t start = 0; start < count; start += kBatch) {
    const int64_t n = std::min(kBatch, count - start);
    std::memcpy(bits, bytes + 2 * start, static_cast<size_t>(2 * n));
    uint16_t found = 0;
    for (int64_t i = 0; i < n; ++i)
      found |= static_cast<uint16_t>((bits[i] & exponent) == exponent ? 1 : 0);
    if (found == 0) continue;
    for (int64_t i = 0;; ++i) {
      if ((bits[i] & exponent) == exponent) return start + i;
    }
  }
  return -1;
}

void DecodeRecord(const uint8_t* coarse, const uint8_t* fine, int head_dim, int page_tokens,
                  int rank, DecodedRecord* out) {
  const SummaryLayout layout = MakeSummaryLayout(head_dim, page_tokens, rank);
  *out = {};
  const float centroid_scale = ScaleAt(coarse + layout.coarse[kCentroidScale]);
  for (int d = 0; d < head_dim; ++d) {
    const uint8_t high = coarse[layout.coarse[kCentroidHigh] + static_cast<uint32_t>(d / 2)];
    const uint8_t low = fine[layout.fine[kCentroidLow] + static_cast<uint32_t>(d / 2)];
    const int code = d % 2 == 0 ? CentroidCode(LowNibble(high), LowNibble(low))
                                : CentroidCode(HighNibble(high), HighNibble(low));
    out->centroid[d] = Finite(centroid_scale * static_cast<float>(code));
  }
  for (int k = 0; k < rank; ++k) {
    const bool in_coarse = k < kCoarseModes;
    const int i = in_coarse ? k : k - kCoarseModes;
    const uint8_t* part = in_coarse ? coarse : fine;
    const uint32_t* fields = in_coarse ? layout.coarse + kCoarseBasis : layout.fine + kFineBasis;
    const uint8_t* basis = part + fields[0] + i * (head_dim / 2);
    const uint8_t* coefficients = part + fields[1] + i * page_tokens;
    const float g = ScaleAt(part + fields[2] + i * 2);
    for (int d = 0; d < head_dim; ++d) out->basis[k][d] = static_cast<float>(Int4At(basis, d));
    for (int t = 0; t < page_tokens; ++t)
      out->coefficients[k][t] =
          Finite(g * static_cast<float>(static_cast<int8_t>(coefficients[t])));
  }
  out->tau = ScaleAt(coarse + layout.coarse[kTau]);
  std::memcpy(&out->unit_checksum, coarse + layout.coarse[kUnitChecksum],
              sizeof(out->unit_checksum));
}

}  // namespace kvd
