// The demo's prefill worker: puts the pages of a trace's prompt into the pool.
//
// usage: demo_put --trace=FILE --daemons=HOST:PORT,...      puts, prints what became of the pages
//        demo_put --trace=FILE --print_config ...           prints a daemon's configuration for the
//                                                           trace

#include <cstdio>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/time/clock.h"
#include "bench/demo_common.h"
#include "bench/synthetic_trace.h"
#include "client/kv_client.h"

ABSL_FLAG(std::string, trace, "", "KV trace, or \"synthetic\"");
ABSL_FLAG(std::string, metric, "", "query metric file, for --print_config");
ABSL_FLAG(std::string, daemons, "", "comma-separated host:port of the daemons");
ABSL_FLAG(bool, print_config, false, "print a daemon's configuration and end");
ABSL_FLAG(std::string, socket_dir, "", "for --print_config: directory of the shared path's socket");
ABSL_FLAG(std::string, ready_file, "",
          "for --print_config: file that the daemon writes when it is ready");

namespace kvd::bench {
namespace {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "demo_put: %s\n", status.ToString().c_str());
  return 1;
}

int Main() {
  const auto trace = LoadTrace(absl::GetFlag(FLAGS_trace));
  if (!trace.ok()) return Fail(trace.status());
  if (absl::GetFlag(FLAGS_print_config)) {
    std::fputs(DemoDaemonConfig(*trace, absl::GetFlag(FLAGS_metric),
                                absl::GetFlag(FLAGS_socket_dir), absl::GetFlag(FLAGS_ready_file))
                   .c_str(),
               stdout);
    return 0;
  }
  auto client = KvClient::Make(DemoClientOptions(*trace, absl::GetFlag(FLAGS_daemons), "demo_put"));
  if (!client.ok()) return Fail(client.status());
  const std::vector<PageKey> keys = (*client)->PageKeys(trace->prompt_tokens);
  const std::vector<EngineKv> layers = DemoLayers(*trace);
  PutRequest request;
  request.keys = keys;
  request.num_pages = static_cast<int>(keys.size());
  request.layers = layers;
  const absl::Time start = absl::Now();
  const auto report = (*client)->Put(request);
  if (!report.ok()) return Fail(report.status());
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  std::printf(
      "put %zu pages of %s into %zu daemons: %lld new, %lld hits, %lld pending, %lld failed; %.1f "
      "MB in %.2f s\n",
      keys.size(), trace->model.c_str(), (*client)->Daemons().size(),
      static_cast<long long>(report->num_new), static_cast<long long>(report->num_hit),
      static_cast<long long>(report->num_pending), static_cast<long long>(report->num_failed),
      static_cast<double>(report->bytes_sent) / 1e6, seconds);
  return report->num_failed == 0 && report->num_pending == 0 ? 0 : Fail(report->first_failure);
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("demo_put --trace=FILE --daemons=HOST:PORT,... | --print_config");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
