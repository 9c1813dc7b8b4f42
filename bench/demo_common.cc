#include "bench/demo_common.h"

#include <google/protobuf/text_format.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/config.pb.h"
#include "proto/geometry.h"

namespace kvd::bench {
namespace {

constexpr char kTenant[] = "demo";
constexpr uint64_t kArenaBytes = uint64_t{256} << 20;

std::string Rope(const KvTrace& trace) { return absl::StrCat("theta=", trace.rope_theta); }

}  // namespace

std::string DemoDaemonConfig(const KvTrace& trace, const std::string& metric_path,
                             const std::string& socket_dir, const std::string& ready_file) {
  locks_kvd::v1::DaemonConfig config;
  config.mutable_control()->set_address("127.0.0.1:0");
  config.set_health_address("127.0.0.1:0");
  config.set_metrics_address("127.0.0.1:0");
  config.mutable_data()->set_socket_dir(socket_dir);
  config.mutable_data()->set_ucx(true);
  config.set_ready_file(ready_file);
  auto* arena = config.add_arenas();
  arena->set_tenant(kTenant);
  arena->set_model(trace.model);
  *arena->mutable_geometry() = ToProto(trace.geometry(kDemoPageTokens, kDemoRank));
  arena->mutable_identity()->set_weights_id(trace.model);
  arena->mutable_identity()->set_rope(Rope(trace));
  arena->set_bytes(kArenaBytes);
  arena->set_query_metric_file(metric_path);
  std::string text;
  google::protobuf::TextFormat::PrintToString(config, &text);
  return text;
}

ClientOptions DemoClientOptions(const KvTrace& trace, const std::string& daemons,
                                const std::string& name) {
  ClientOptions options;
  options.daemons = absl::StrSplit(daemons, ',', absl::SkipEmpty());
  options.tenant = kTenant;
  options.model = trace.model;
  options.geometry = trace.geometry(kDemoPageTokens, kDemoRank);
  options.weights_id = trace.model;
  options.rope = Rope(trace);
  options.client_name = name;
  return options;
}

std::vector<EngineKv> DemoLayers(const KvTrace& trace) {
  const int64_t row_bytes = static_cast<int64_t>(trace.head_dim) * 2;
  std::vector<EngineKv> layers;
  for (const KvTrace::Layer& layer : trace.layers) {
    layers.push_back({reinterpret_cast<const uint8_t*>(layer.k.data()),
                      reinterpret_cast<const uint8_t*>(layer.v.data()), row_bytes,
                      row_bytes * trace.num_kv_heads});
  }
  return layers;
}

}  // namespace kvd::bench
