// Highway compiles this file, and the .inc files that it includes, once for each target; HWY_EXPORT
// and HWY_DYNAMIC_DISPATCH choose at run time.
#include "kernels/simd.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/check.h"
#include "kernels/dtype.h"
#include "kernels/simd_bf16.h"
#include "kernels/simd_prefetch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvd::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = HWY_FULL(float);
using DI = hn::Rebind<int32_t, DF>;
using DU = hn::Rebind<uint32_t, DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VU = hn::Vec<DU>;
constexpr DF df;
constexpr DI di;
constexpr DU du;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(df));
static_assert(kLanes <= kMaxLanes);

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// In this order: the others use simd_math.inc.
// clang-format off
#include "kernels/simd_math.inc"
#include "kernels/simd_score.inc"
#include "kernels/simd_attend.inc"
#include "kernels/simd_rows.inc"
// clang-format on

int NumLanesImpl() { return kLanes; }
const char* TargetNameImpl() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace kvd::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvd::simd {

HWY_EXPORT(NumLanesImpl);
HWY_EXPORT(TargetNameImpl);
HWY_EXPORT(TransposeImpl);
HWY_EXPORT(CoarseDotsImpl);
HWY_EXPORT(ModeDotsImpl);
HWY_EXPORT(CentroidDotsImpl);
HWY_EXPORT(FoldScalesImpl);
HWY_EXPORT(FoldCentroidImpl);
HWY_EXPORT(PageLseImpl);
HWY_EXPORT(KeyLogitsImpl);
HWY_EXPORT(AddValuesImpl);
HWY_EXPORT(ExpInPlaceImpl);
HWY_EXPORT(MaskedMaxImpl);
HWY_EXPORT(MaskedSumExpImpl);
HWY_EXPORT(ScoreKeysImpl);

namespace {

// The best target, where the CPU has it, is Highway's best with the dot products of simd_bf16.cc.
bool& UsesBf16() {
  static bool uses = bf16::Supported();
  return uses;
}
bool UsesBf16(const LaneQuery& query) { return query.has_pairs && UsesBf16(); }

// Two components as bf16. Exact: they were bf16, and a power of two was taken out.
uint32_t PairOf(float low, float high) {
  return std::bit_cast<uint32_t>(low) >> 16 | (std::bit_cast<uint32_t>(high) & 0xFFFF0000u);
}

}  // namespace

int NumTargets() {
  return static_cast<int>(hwy::SupportedAndGeneratedTargets().size()) + (bf16::Supported() ? 1 : 0);
}
void UseTarget(int idx) {
  UsesBf16() = bf16::Supported() && idx == 0;
  if (bf16::Supported() && idx > 0) --idx;
  hwy::SetSupportedTargetsForTest(0);
  const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  KVD_CHECK(idx >= 0 && idx < static_cast<int>(targets.size()));
  hwy::SetSupportedTargetsForTest(targets[static_cast<size_t>(idx)]);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}
int NumLanes() { return HWY_DYNAMIC_DISPATCH(NumLanesImpl)(); }
const char* TargetName() {
  return UsesBf16() ? "AVX3_BF16" : HWY_DYNAMIC_DISPATCH(TargetNameImpl)();
}

void PrepareQuery(const uint16_t* query, int group, int head_dim, KvDtype dtype,
                  float softmax_scale, LaneQuery* out) {
  out->group = group;
  out->head_dim = head_dim;
  out->has_pairs = dtype == KvDtype::kBf16;
  for (int g = 0; g < group; ++g) {
    const uint16_t* q = query + g * head_dim;
    float largest = 0;
    for (int d = 0; d < head_dim; ++d) largest = std::max(largest, std::fabs(FromKv(dtype, q[d])));
    const int exponent = largest > 0 && std::isfinite(largest) ? std::ilogb(largest) : 0;
    const double unit = std::ldexp(1.0, -exponent);  // in double: no power of two is out of range
    constexpr double kWeights[4] = {1, 1.0 / 16, 1.0 / 256, 1.0 / 4096};
    double sum = 0, norm = 0;
    float scaled[kMaxHeadDim];
    for (int d = 0; d < head_dim; ++d) {
      const double x = static_cast<double>(FromKv(dtype, q[d])) * unit;
      scaled[d] = static_cast<float>(x);
      out->weighted[d * group + g] = static_cast<float>(x * kWeights[d % 4]);
      sum += x;
      norm += x * x;
    }
    for (int i = 0; out->has_pairs && i < head_dim / 2; ++i) {
      const int low = i / 4 * 8 + i % 4;
      out->pairs[i * group + g] = PairOf(scaled[low], scaled[low + 4]);
    }
    const double scale = std::ldexp(static_cast<double>(softmax_scale), exponent);
    constexpr double kLargest = std::numeric_limits<float>::max();
    out->sum[g] = static_cast<float>(sum);
    out->multiplier[g] = static_cast<float>(std::min(scale * 1.4426950408889634, kLargest));
    out->half_norm[g] = static_cast<float>(std::min(.5 * scale * scale * norm, kLargest));
  }
}

void Transpose(const uint8_t* const* rows, size_t bytes, int32_t* words) {
  HWY_DYNAMIC_DISPATCH(TransposeImpl)(rows, bytes, words);
}
void CoarseDots(const int32_t* const* rows, const LaneQuery& query, const Prefetch& ahead,
                float* z) {
  if (UsesBf16(query)) return bf16::CoarseDots(rows, query, ahead, z);
  HWY_DYNAMIC_DISPATCH(CoarseDotsImpl)(rows, query, ahead, z);
}
void ModeDots(const int32_t* const* rows, int num_rows, const LaneQuery& query,
              const Prefetch& ahead, float* z) {
  if (UsesBf16(query)) return bf16::ModeDots(rows, num_rows, query, ahead, z);
  HWY_DYNAMIC_DISPATCH(ModeDotsImpl)(rows, num_rows, query, ahead, z);
}
void CentroidDots(const int32_t* high, const int32_t* low, const LaneQuery& query,
                  const Prefetch& ahead, float* z) {
  if (UsesBf16(query)) return bf16::CentroidDots(high, low, query, ahead, z);
  HWY_DYNAMIC_DISPATCH(CentroidDotsImpl)(high, low, query, ahead, z);
}
void FoldScales(const int32_t* scales, int first, int count, const float* z, const LaneQuery& query,
                LaneModes* modes) {
  HWY_DYNAMIC_DISPATCH(FoldScalesImpl)(scales, first, count, z, query, modes);
}
void FoldCentroid(const int32_t* scale_tau, const float* z, CentroidCodes codes,
                  const LaneQuery& query, LaneModes* modes) {
  HWY_DYNAMIC_DISPATCH(FoldCentroidImpl)(scale_tau, z, codes, query, modes);
}
void PageLse(const LaneModes& modes, float softcap, const int32_t* scale_tau,
             const LaneQuery& query, float* lse) {
  HWY_DYNAMIC_DISPATCH(PageLseImpl)(modes, softcap, scale_tau, query, lse);
}

void KeyLogits(const float* query, int group, const uint16_t* keys, int num_tokens, int head_dim,
               KvDtype dtype, float scale, float softcap, float* logits) {
  HWY_DYNAMIC_DISPATCH(KeyLogitsImpl)
  (query, group, keys, num_tokens, head_dim, dtype, scale, softcap, logits);
}
void AddValues(const float* p, int group, const uint16_t* values, int num_tokens, int head_dim,
               KvDtype dtype, const float* decay, float* o) {
  HWY_DYNAMIC_DISPATCH(AddValuesImpl)(p, group, values, num_tokens, head_dim, dtype, decay, o);
}
float ExpInPlace(float* x, int count, float shift) {
  return HWY_DYNAMIC_DISPATCH(ExpInPlaceImpl)(x, count, shift);
}
MaxResult MaskedMax(const float* x, int64_t count, const uint64_t* include) {
  return HWY_DYNAMIC_DISPATCH(MaskedMaxImpl)(x, count, include);
}
float MaskedSumExp(const float* x, int64_t count, const uint64_t* include, float shift) {
  return HWY_DYNAMIC_DISPATCH(MaskedSumExpImpl)(x, count, include, shift);
}
void ScoreKeys(const float* lse, int64_t lse_stride, int group, const float* norm,
               int64_t num_pages, const uint64_t* allowed, uint32_t* keys, uint32_t* best) {
  HWY_DYNAMIC_DISPATCH(ScoreKeysImpl)(lse, lse_stride, group, norm, num_pages, allowed, keys, best);
}

float FromOrderedKey(uint32_t key) {
  return std::bit_cast<float>(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

}  // namespace kvd::simd
#endif  // HWY_ONCE
