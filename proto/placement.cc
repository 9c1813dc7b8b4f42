#include "proto/placement.h"

#include <bit>
#include <cstring>

#include "kernels/check.h"
#include "kernels/checksum.h"

namespace kvd {
namespace {

uint64_t KeyWord(const PageKey& key) {
  uint64_t words[2];
  std::memcpy(words, key.data(), sizeof(words));
  return words[0] ^ std::rotl(words[1], 32);
}

std::vector<uint64_t> NameHashes(std::span<const std::string> members) {
  std::vector<uint64_t> hashes;
  hashes.reserve(members.size());
  for (const std::string& name : members) hashes.push_back(Checksum64(name.data(), name.size()));
  return hashes;
}

// The winner does not depend on the order of the list, so views that list members differently agree.
int Winner(uint64_t key_word, std::span<const uint64_t> name_hashes,
           std::span<const std::string> members) {
  size_t best = 0;
  uint64_t best_weight = Mix64(name_hashes[0] ^ key_word);
  for (size_t m = 1; m < members.size(); ++m) {
    const uint64_t weight = Mix64(name_hashes[m] ^ key_word);
    if (weight > best_weight || (weight == best_weight && members[m] < members[best])) {
      best = m;
      best_weight = weight;
    }
  }
  return static_cast<int>(best);
}

}  // namespace

int OwnerOf(const PageKey& key, std::span<const std::string> members) {
  KVD_CHECK(!members.empty());
  return Winner(KeyWord(key), NameHashes(members), members);
}

std::vector<int> PlacePages(std::span<const PageKey> keys, std::span<const std::string> members) {
  KVD_CHECK(!members.empty());
  const std::vector<uint64_t> hashes = NameHashes(members);
  std::vector<int> owners(keys.size());
  for (size_t page = 0; page < keys.size(); ++page) {
    owners[page] = page % kStripePages == 0 ? Winner(KeyWord(keys[page]), hashes, members)
                                            : owners[page - 1];
  }
  return owners;
}

}  // namespace kvd
