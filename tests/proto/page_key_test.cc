#include "proto/page_key.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "absl/strings/escaping.h"

namespace kvd {
namespace {

template <size_t N>
std::string Hex(const std::array<uint8_t, N>& bytes) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(bytes.data()), N));
}

Fingerprint CountingFingerprint() {
  Fingerprint fingerprint;
  std::iota(fingerprint.begin(), fingerprint.end(), uint8_t{0});
  return fingerprint;
}

KvGeometry Llama() {
  KvGeometry g;
  g.num_layers = 32;
  g.num_q_heads = 32;
  g.num_kv_heads = 8;
  g.head_dim = 128;
  g.softmax_scale = 0.125f;
  return g;
}

// Constants computed apart from this code:
//   python3 -c "import hashlib,struct; u=lambda *x: struct.pack('<%dI'%len(x),*x); h=hashlib.sha256
//   r=h(b'locks-kvd/root/1'+bytes(range(32))+u(4)+b'salt'+u(6)+b'lora-7').digest()[:16]
//   a=h(b'locks-kvd/page/1'+r+u(*range(16))).digest()[:16]
//   b=h(b'locks-kvd/page/1'+a+u(*range(16,32))).digest()[:16]; print(r.hex(),a.hex(),b.hex())"
TEST(PageKeyTest, KeysAreTheSha256ChainOfTheSpecification) {
  const PageKey root = RootKey(CountingFingerprint(), "salt", "lora-7");
  EXPECT_EQ(Hex(root), "a8f45eda6ccca4b6b3b81e031d2ab74c");
  std::vector<uint32_t> tokens(40);
  std::iota(tokens.begin(), tokens.end(), 0u);
  const std::vector<PageKey> keys = PageKeys(root, tokens, 16);
  ASSERT_EQ(keys.size(), 2u);  // the third page is not complete
  EXPECT_EQ(Hex(keys[0]), "53dff5ac3526fea08e89d4358718089a");
  EXPECT_EQ(Hex(keys[1]), "125140f30b54ffc57b6666972deeb41c");
  EXPECT_EQ(keys[1], NextPageKey(keys[0], std::span<const uint32_t>(tokens).subspan(16, 16)));
}

// python3: h(b'locks-kvd/model/1'+u(1,32,32,8,1,128,16,8,1,1,0x3e000000,0)
//            +u(7)+b'weights'+u(12)+b'theta=500000')
TEST(PageKeyTest, ModelFingerprintIsTheSha256OfEveryField) {
  EXPECT_EQ(Hex(ModelFingerprint(Llama(), "weights", "theta=500000")),
            "541ebc6d4318b9d9d7db3f507aa4189f5010257aca870f3f9b4833b39555bafa");
}

TEST(PageKeyTest, EveryFieldOfTheModelChangesItsFingerprint) {
  std::set<Fingerprint> seen = {ModelFingerprint(Llama(), "w", "r")};
  KvGeometry changed[11];
  for (KvGeometry& g : changed) g = Llama();
  changed[0].num_layers = 31;
  changed[1].num_q_heads = 64;
  changed[2].num_kv_heads = 4;
  changed[3].num_shards = 2;
  changed[4].head_dim = 64;
  changed[5].page_tokens = 32;
  changed[6].rank = 4;
  changed[7].dtype = KvDtype::kFp16;
  changed[8].rotated = false;
  changed[9].softmax_scale = 0.25f;
  changed[10].logit_softcap = 30;
  for (const KvGeometry& g : changed)
    EXPECT_TRUE(seen.insert(ModelFingerprint(g, "w", "r")).second);
  EXPECT_TRUE(seen.insert(ModelFingerprint(Llama(), "v", "r")).second);
  EXPECT_TRUE(seen.insert(ModelFingerprint(Llama(), "w", "s")).second);
  EXPECT_TRUE(seen.insert(ModelFingerprint(Llama(), "wr", "")).second);  // lengths are part of it
}

TEST(PageKeyTest, SaltAndExtraDoNotRunIntoEachOther) {
  const Fingerprint f = CountingFingerprint();
  EXPECT_NE(RootKey(f, "ab", "c"), RootKey(f, "a", "bc"));
  EXPECT_NE(RootKey(f, "", "a"), RootKey(f, "a", ""));
}

TEST(PageKeyTest, AKeyDependsOnEveryTokenBeforeIt) {
  const PageKey root = RootKey(CountingFingerprint(), "", "");
  std::vector<uint32_t> tokens(64, 7);
  const std::vector<PageKey> before = PageKeys(root, tokens, 16);
  tokens[17] = 8;  // in the second page
  const std::vector<PageKey> after = PageKeys(root, tokens, 16);
  EXPECT_EQ(before[0], after[0]);
  for (const size_t page : {1u, 2u, 3u}) EXPECT_NE(before[page], after[page]);
  EXPECT_NE(before[0], before[1]);  // equal tokens, other place
}

}  // namespace
}  // namespace kvd
