// Names of pages: 128-bit keys, chained over a sequence, that two models, salts or adapters never
// share.
//
// root = SHA256("locks-kvd/root/1" | fingerprint | len, salt | len, extra)[:16]
// key  = SHA256("locks-kvd/page/1" | parent | B token ids, u32 LE)[:16]
// Lengths are u32 LE. SHA-256 is OpenSSL's.
// Thread safety: pure functions.

#ifndef LOCKS_KVD_PROTO_PAGE_KEY_H_
#define LOCKS_KVD_PROTO_PAGE_KEY_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/layout.h"

namespace kvd {

using PageKey = std::array<uint8_t, 16>;
using Fingerprint = std::array<uint8_t, 32>;

// Covers kLayoutVersion, every geometry field, the weights id and the RoPE parameters.
Fingerprint ModelFingerprint(const KvGeometry& geometry, absl::string_view weights_id,
                             absl::string_view rope);

// Parent of a sequence's first page. `extra`: adapter or media hash; pages made by sparse decoding
// add a random nonce of their sequence.
PageKey RootKey(const Fingerprint& fingerprint, absl::string_view salt, absl::string_view extra);

// Key of the page of `tokens` (exactly B) that follows the page `parent`.
PageKey NextPageKey(const PageKey& parent, std::span<const uint32_t> tokens);

// Keys of every complete page of `tokens`.
std::vector<PageKey> PageKeys(const PageKey& root, std::span<const uint32_t> tokens,
                              int page_tokens);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_PAGE_KEY_H_
