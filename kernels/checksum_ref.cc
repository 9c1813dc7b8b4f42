#include <bit>
#include <cstring>

#include "kernels/checksum.h"

namespace kvd {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they stand in memory");

// Words are taken sixteen bytes at a time: four terms that do not depend on each other keep the
// multiplier busy, which is what bounds this loop.
constexpr size_t kStepBytes = 16;

uint64_t Term(uint64_t word, uint64_t offset) { return Mix64(word + offset); }

}  // namespace

uint64_t Checksum64(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint64_t sums[4] = {};
  uint64_t offset = kGolden64;  // (i + 1) * golden of the step's first word
  size_t left = bytes;
  for (; left >= kStepBytes; left -= kStepBytes, p += kStepBytes) {
    uint64_t pair[2];
    std::memcpy(pair, p, kStepBytes);
    sums[0] += Term(pair[0] & 0xFFFFFFFFu, offset);
    sums[1] += Term(pair[0] >> 32, offset + kGolden64);
    sums[2] += Term(pair[1] & 0xFFFFFFFFu, offset + 2 * kGolden64);
    sums[3] += Term(pair[1] >> 32, offset + 3 * kGolden64);
    offset += 4 * kGolden64;
  }
  uint64_t sum = sums[0] + sums[1] + sums[2] + sums[3];
  while (left > 0) {
    const size_t take = left < 4 ? left : 4;
    uint32_t word = 0;  // the bytes past the end count as zeros
    std::memcpy(&word, p, take);
    sum += Term(word, offset);
    offset += kGolden64;
    p += take;
    left -= take;
  }
  return sum;
}

}  // namespace kvd
