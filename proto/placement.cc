#include "proto/placement.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/check.h"
#include "kernels/checksum.h"

namespace kvd {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr int kLogBits = 48;
constexpr int kTableBits = 8;
constexpr int kTableSize = 1 << kTableBits;

// floor(2^48 log2(1 + i / 256)): squaring x doubles its logarithm, and each square that reaches 2
// is one more binary digit. What the squares lose is below 2^-14 of the last digit.
constexpr uint64_t TableEntry(int i) {
  if (i == kTableSize) return uint64_t{1} << kLogBits;
  uint64_t x = (uint64_t{1} << 63) +
               (static_cast<uint64_t>(i) << (63 - kTableBits));  // in [1, 2), 63 digits
  uint64_t log = 0;
  for (int bit = 0; bit < kLogBits; ++bit) {
    const Wide square = static_cast<Wide>(x) * x;  // in [1, 4), 126 digits
    const bool carry = (square >> 127) != 0;
    log = (log << 1) | (carry ? 1 : 0);
    x = static_cast<uint64_t>(square >> (carry ? 64 : 63));
  }
  return log;
}

constexpr auto kLogTable = [] {
  std::array<uint64_t, kTableSize + 1> table = {};
  for (int i = 0; i <= kTableSize; ++i) table[static_cast<size_t>(i)] = TableEntry(i);
  return table;
}();

constexpr uint64_t TableSum() {
  uint64_t sum = 0;
  for (const uint64_t entry : kLogTable) sum += entry;
  return sum;
}
// As 60 decimal digits give it: `bench/pool_model.py check`.
static_assert(TableSum() == 0x008F2B7A49C3C753);

// L of the header: 2^48 (64 - log2 h), in [1, 2^54].
uint64_t MinusLog(uint64_t hash) {
  const uint64_t x = std::max<uint64_t>(hash, 1);
  const int exponent = 63 - std::countl_zero(x);
  const uint64_t fraction = exponent == 0 ? 0 : x << (64 - exponent);
  const size_t i = fraction >> (64 - kTableBits);
  const uint64_t rest = (fraction << kTableBits) >> (64 - kLogBits);
  const uint64_t step = kLogTable[i + 1] - kLogTable[i];
  const uint64_t log = (static_cast<uint64_t>(exponent) << kLogBits) + kLogTable[i] +
                       static_cast<uint64_t>((static_cast<Wide>(step) * rest) >> kLogBits);
  return (uint64_t{64} << kLogBits) - log;
}

uint64_t FixedWeight(double weight) {
  KVD_CHECK(weight > 0 && weight <= kMaxMemberWeight);
  const double scaled = std::floor(weight * 1048576.0 + 0.5);
  return std::max<uint64_t>(static_cast<uint64_t>(scaled), 1);
}

std::vector<PlacedMember> EqualMembers(std::span<const std::string> names) {
  std::vector<PlacedMember> members;
  members.reserve(names.size());
  for (const std::string& name : names) members.push_back({name, 1});
  return members;
}

}  // namespace

struct Placement::Score {
  uint64_t weight;
  uint64_t minus_log;  // 0 while no weight differs: then the hash alone decides
  uint64_t hash;
  int name_rank;

  bool Beats(const Score& other) const {
    const Wide ours = static_cast<Wide>(weight) * other.minus_log;
    const Wide theirs = static_cast<Wide>(other.weight) * minus_log;
    if (ours != theirs) return ours > theirs;
    return hash != other.hash ? hash > other.hash : name_rank < other.name_rank;
  }
};

uint64_t PlacementWord(const PageKey& stripe_key) {
  uint64_t words[2];
  std::memcpy(words, stripe_key.data(), sizeof(words));
  return words[0] ^ std::rotl(words[1], 32);
}

Placement::Placement(std::span<const PlacedMember> members) {
  std::vector<size_t> by_name(members.size());
  std::iota(by_name.begin(), by_name.end(), size_t{0});
  std::sort(by_name.begin(), by_name.end(),
            [&](size_t a, size_t b) { return members[a].name < members[b].name; });
  members_.resize(members.size());
  for (size_t rank = 0; rank < by_name.size(); ++rank) {
    const PlacedMember& member = members[by_name[rank]];
    members_[by_name[rank]] = {Checksum64(member.name.data(), member.name.size()),
                               FixedWeight(member.weight), static_cast<int>(rank)};
  }
  for (const Hashed& member : members_) {
    equal_weights_ = equal_weights_ && member.weight == members_[0].weight;
  }
}

Placement::Score Placement::ScoreOf(const Hashed& member, uint64_t word) const {
  const uint64_t hash = Mix64(member.name_hash ^ word);
  return {member.weight, equal_weights_ ? 0 : MinusLog(hash), hash, member.name_rank};
}

int Placement::Owner(uint64_t word) const {
  KVD_CHECK(!members_.empty());
  size_t best = 0;
  Score best_score = ScoreOf(members_[0], word);
  for (size_t m = 1; m < members_.size(); ++m) {
    const Score score = ScoreOf(members_[m], word);
    if (score.Beats(best_score)) {
      best = m;
      best_score = score;
    }
  }
  return static_cast<int>(best);
}

void Placement::Owners(uint64_t word, int count, std::vector<int>* out) const {
  out->clear();
  const size_t wanted = std::min(members_.size(), static_cast<size_t>(std::max(count, 0)));
  std::vector<Score> best;  // of *out, best first
  best.reserve(wanted + 1);
  out->reserve(wanted + 1);
  for (size_t m = 0; m < members_.size(); ++m) {
    const Score score = ScoreOf(members_[m], word);
    if (best.size() == wanted && (wanted == 0 || !score.Beats(best.back()))) continue;
    const auto at = std::find_if(best.begin(), best.end(),
                                 [&](const Score& other) { return score.Beats(other); });
    out->insert(out->begin() + (at - best.begin()), static_cast<int>(m));
    best.insert(at, score);
    if (best.size() > wanted) {
      best.pop_back();
      out->pop_back();
    }
  }
}

std::vector<int> PlacePages(std::span<const PageKey> keys, const Placement& placement, int rank) {
  std::vector<int> owners(keys.size());
  std::vector<int> ranked;
  for (size_t page = 0; page < keys.size(); ++page) {
    if (page % kStripePages != 0) {
      owners[page] = owners[page - 1];
      continue;
    }
    placement.Owners(PlacementWord(keys[page]), rank + 1, &ranked);
    owners[page] = static_cast<int>(ranked.size()) > rank ? ranked[static_cast<size_t>(rank)] : -1;
  }
  return owners;
}

int OwnerOf(const PageKey& key, std::span<const std::string> members) {
  return Placement(EqualMembers(members)).Owner(PlacementWord(key));
}

std::vector<int> PlacePages(std::span<const PageKey> keys, std::span<const std::string> members) {
  KVD_CHECK(!members.empty());
  return PlacePages(keys, Placement(EqualMembers(members)));
}

}  // namespace kvd
