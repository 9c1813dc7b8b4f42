#include "proto/geometry.h"

#include <gtest/gtest.h>

#include "proto/pool.pb.h"

namespace kvd {
namespace {

locks_kvd::v1::Geometry Minimal() {
  locks_kvd::v1::Geometry proto;
  proto.set_num_layers(32);
  proto.set_num_q_heads(32);
  proto.set_num_kv_heads(8);
  proto.set_head_dim(128);
  proto.set_softmax_scale(0.088388f);
  return proto;
}

TEST(GeometryTest, UnsetFieldsGetTheirDefaults) {
  const auto geometry = FromProto(Minimal());
  ASSERT_TRUE(geometry.ok()) << geometry.status();
  EXPECT_EQ(geometry->num_shards, 1);
  EXPECT_EQ(geometry->page_tokens, 16);
  EXPECT_EQ(geometry->rank, 8);
  EXPECT_EQ(geometry->dtype, KvDtype::kBf16);
  EXPECT_TRUE(geometry->rotated);
}

TEST(GeometryTest, EveryFieldSurvivesTheRoundTrip) {
  KvGeometry geometry;
  geometry.num_layers = 26;
  geometry.num_q_heads = 24;
  geometry.num_kv_heads = 8;
  geometry.num_shards = 4;
  geometry.head_dim = 96;
  geometry.page_tokens = 32;
  geometry.rank = 4;
  geometry.dtype = KvDtype::kFp16;
  geometry.rotated = false;
  geometry.softmax_scale = 0.1f;
  geometry.logit_softcap = 50;
  const auto back = FromProto(ToProto(geometry));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, geometry);
}

TEST(GeometryTest, AnUnsupportedFieldIsNamed) {
  const struct {
    const char* name;
    void (*set)(locks_kvd::v1::Geometry*);
  } cases[] = {
      {"num_layers", [](auto* g) { g->set_num_layers(0); }},
      {"num_layers", [](auto* g) { g->set_num_layers(4000000000u); }},
      {"num_q_heads", [](auto* g) { g->set_num_q_heads(33); }},
      {"num_kv_heads", [](auto* g) { g->set_num_kv_heads(0); }},
      {"num_shards", [](auto* g) { g->set_num_shards(3); }},
      {"head_dim", [](auto* g) { g->set_head_dim(100); }},
      {"page_tokens", [](auto* g) { g->set_page_tokens(17); }},
      {"rank", [](auto* g) { g->set_rank(5); }},
      {"dtype", [](auto* g) { g->set_dtype(static_cast<locks_kvd::v1::Dtype>(9)); }},
      {"softmax_scale", [](auto* g) { g->set_softmax_scale(0); }},
      {"logit_softcap", [](auto* g) { g->set_logit_softcap(-1); }},
  };
  for (const auto& c : cases) {
    auto proto = Minimal();
    c.set(&proto);
    const absl::Status status = FromProto(proto).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.name;
    EXPECT_NE(status.message().find(c.name), absl::string_view::npos) << status;
  }
}

}  // namespace
}  // namespace kvd
