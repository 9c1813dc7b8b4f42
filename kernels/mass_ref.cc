// Mass figures, in pieces of pages whose bitsets fit on the stack.
#include <algorithm>
#include <cmath>

#include "kernels/mass.h"
#include "kernels/simd.h"
#include "kernels/softmax.h"

namespace kvd::ref {
namespace {

constexpr int64_t kPieceWords = 64;
constexpr int64_t kPiecePages = 64 * kPieceWords;

// lse over the pages of one piece whose bit is set.
float PieceLse(const float* lse, int64_t num_pages, const uint64_t* include) {
  const float top = simd::MaskedMax(lse, num_pages, include).max;
  if (top == kEmptyLse) return kEmptyLse;
  return top + std::log(simd::MaskedSumExp(lse, num_pages, include, top));
}

// exp(part - whole) where whole >= part, 0 for an empty part.
float Share(float part, float whole) { return part == kEmptyLse ? 0 : std::exp(part - whole); }

}  // namespace

MassFigures EstimateMass(const MassArgs& args) {
  float unread = kEmptyLse, lost = kEmptyLse;
  for (int64_t first = 0; first < args.num_pages; first += kPiecePages) {
    const int64_t num_pages = std::min(kPiecePages, args.num_pages - first);
    const int64_t num_words = (num_pages + 63) / 64;
    uint64_t not_read[kPieceWords], not_there[kPieceWords];
    for (int64_t w = 0; w < num_words; ++w) {
      not_read[w] = ~args.attended[first / 64 + w];
      not_there[w] = args.missing == nullptr ? 0 : not_read[w] & args.missing[first / 64 + w];
    }
    unread = LogAddExp(unread, PieceLse(args.lse + first, num_pages, not_read));
    if (args.missing != nullptr) {
      lost = LogAddExp(lost, PieceLse(args.lse + first, num_pages, not_there));
    }
  }
  const float whole = LogAddExp(args.lse_attended, unread);
  return {Share(unread, whole), Share(lost, whole)};
}

}  // namespace kvd::ref
