// Exact conversion of bf16 and fp16 to fp32 and rounding back, to nearest even.
//
// Thread safety: pure functions. 16-bit values travel as uint16_t bit patterns everywhere.

#ifndef LOCKS_KVD_KERNELS_DTYPE_H_
#define LOCKS_KVD_KERNELS_DTYPE_H_

#include <bit>
#include <cstdint>

#include "kernels/layout.h"

namespace kvd {

inline float FromBf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest even; NaN stays NaN.
inline uint16_t ToBf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

inline float RoundBf16(float x) { return FromBf16(ToBf16(x)); }

inline float FromFp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Rounds to nearest even; values beyond the largest finite fp16 become infinite.
inline uint16_t ToFp16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns the mantissa to 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float FromKv(KvDtype dtype, uint16_t bits) {
  return dtype == KvDtype::kBf16 ? FromBf16(bits) : FromFp16(bits);
}
inline uint16_t ToKv(KvDtype dtype, float x) {
  return dtype == KvDtype::kBf16 ? ToBf16(x) : ToFp16(x);
}

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_DTYPE_H_
