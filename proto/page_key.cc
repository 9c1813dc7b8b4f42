#include "proto/page_key.h"

#include <openssl/evp.h>

#include <bit>
#include <cstring>

#include "kernels/check.h"

namespace kvd {
namespace {

constexpr absl::string_view kModelTag = "locks-kvd/model/1";
constexpr absl::string_view kRootTag = "locks-kvd/root/1";
constexpr absl::string_view kPageTag = "locks-kvd/page/1";

// One SHA-256 over several parts; Reset begins another.
class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    KVD_CHECK(context_ != nullptr);
    Reset();
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Reset() { KVD_CHECK(EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1); }
  void Add(const void* data, size_t bytes) {
    KVD_CHECK(EVP_DigestUpdate(context_, data, bytes) == 1);
  }
  void Add(absl::string_view text) { Add(text.data(), text.size()); }
  void AddU32(uint32_t value) { Add(&value, sizeof(value)); }  // little-endian: wire.h asserts it
  // With its length, so that ("ab", "c") and ("a", "bc") differ.
  void AddSized(absl::string_view text) {
    AddU32(static_cast<uint32_t>(text.size()));
    Add(text);
  }
  Fingerprint Finish() {
    Fingerprint out;
    unsigned int bytes = 0;
    KVD_CHECK(EVP_DigestFinal_ex(context_, out.data(), &bytes) == 1 && bytes == out.size());
    return out;
  }

 private:
  EVP_MD_CTX* context_;
};

PageKey Truncate(const Fingerprint& full) {
  PageKey key;
  std::memcpy(key.data(), full.data(), key.size());
  return key;
}

PageKey NextKey(Sha256& sha, const PageKey& parent, std::span<const uint32_t> tokens) {
  sha.Reset();
  sha.Add(kPageTag);
  sha.Add(parent.data(), parent.size());
  sha.Add(tokens.data(), tokens.size_bytes());
  return Truncate(sha.Finish());
}

}  // namespace

Fingerprint ModelFingerprint(const KvGeometry& geometry, absl::string_view weights_id,
                             absl::string_view rope) {
  const uint32_t numbers[] = {
      kLayoutVersion,
      static_cast<uint32_t>(geometry.num_layers),
      static_cast<uint32_t>(geometry.num_q_heads),
      static_cast<uint32_t>(geometry.num_kv_heads),
      static_cast<uint32_t>(geometry.num_shards),
      static_cast<uint32_t>(geometry.head_dim),
      static_cast<uint32_t>(geometry.page_tokens),
      static_cast<uint32_t>(geometry.rank),
      static_cast<uint32_t>(geometry.dtype),
      geometry.rotated ? 1u : 0u,
      std::bit_cast<uint32_t>(geometry.softmax_scale),
      std::bit_cast<uint32_t>(geometry.logit_softcap),
  };
  Sha256 sha;
  sha.Add(kModelTag);
  sha.Add(numbers, sizeof(numbers));
  sha.AddSized(weights_id);
  sha.AddSized(rope);
  return sha.Finish();
}

PageKey RootKey(const Fingerprint& fingerprint, absl::string_view salt, absl::string_view extra) {
  Sha256 sha;
  sha.Add(kRootTag);
  sha.Add(fingerprint.data(), fingerprint.size());
  sha.AddSized(salt);
  sha.AddSized(extra);
  return Truncate(sha.Finish());
}

PageKey NextPageKey(const PageKey& parent, std::span<const uint32_t> tokens) {
  Sha256 sha;
  return NextKey(sha, parent, tokens);
}

std::vector<PageKey> PageKeys(const PageKey& root, std::span<const uint32_t> tokens,
                              int page_tokens) {
  KVD_CHECK(page_tokens > 0);
  const auto page = static_cast<size_t>(page_tokens);
  std::vector<PageKey> keys;
  keys.reserve(tokens.size() / page);
  Sha256 sha;
  PageKey parent = root;
  for (size_t first = 0; first + page <= tokens.size(); first += page) {
    parent = NextKey(sha, parent, tokens.subspan(first, page));
    keys.push_back(parent);
  }
  return keys;
}

}  // namespace kvd
