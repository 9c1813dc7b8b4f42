// A pool of daemon processes on this host: what more daemons bring, what a drain costs, what a
// flood takes from others.
//
// usage: pool_bench [--mib=128] [--repetitions=N] [--json=FILE]
//   fetch    whole sequences over ucx from 1, 2 and 4 daemons; every byte is compared. Beside it:
//            one daemon in the same run. On one host all processes share its cores, so this bounds
//            what the library adds, not what hosts bring.
//   drain    SIGTERM of one of two daemons until it has ended: its pages are then at the other,
//            every one compared
//   flood    one tenant's fetches (median and p99) alone and while another tenant keeps 4 clients
//            fetching

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/report.h"
#include "client/kv_client.h"
#include "kernels/check.h"
#include "kernels/checksum.h"
#include "tests/support/daemon_process.h"

ABSL_FLAG(int, mib, 128, "size of the sequence, MiB of K and V");
ABSL_FLAG(int, repetitions, 9, "how often each figure is taken; the median counts");
ABSL_FLAG(std::string, json, "", "write the figures to this file");

namespace kvd::bench {
namespace {

using testing::DaemonProcess;
using testing::DaemonSpec;

KvGeometry BenchGeometry() {
  KvGeometry geometry;
  geometry.num_layers = 8;
  geometry.num_q_heads = 32;
  geometry.num_kv_heads = 8;
  geometry.head_dim = 128;
  geometry.softmax_scale = 0.088388f;
  return geometry;
}

double SecondsSince(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

// Daemons with an arena for each of two tenants, and a sequence of each in them.
class BenchPool {
 public:
  explicit BenchPool(int num_daemons) {
    for (int d = 0; d < num_daemons; ++d) {
      DaemonSpec spec;
      spec.geometry = BenchGeometry();
      spec.tenant = "quiet";
      spec.arena_bytes = uint64_t{1} << 30;
      auto dir = std::make_unique<testing::TempDir>();
      auto config = MakeConfig(spec, dir->path());
      *config.add_arenas() = config.arenas(0);
      config.mutable_arenas(1)->set_tenant("flood");
      config.mutable_cluster()->set_members_file(members_.path() + "/members");
      config.mutable_cluster()->set_name(absl::StrCat("d", d));
      config.mutable_cluster()->set_poll_ms(100);
      auto daemon = DaemonProcess::Start(std::move(dir), config);
      KVD_CHECK(daemon.ok());
      daemons.push_back(*std::move(daemon));
    }
    std::string list;
    for (size_t d = 0; d < daemons.size(); ++d) {
      absl::StrAppend(&list, "members { name: \"d", d, "\" address: \"", daemons[d]->address(),
                      "\" }\n");
    }
    std::ofstream(members_.path() + "/members") << list;
    quiet = Connect("quiet");
    const KvGeometry g = BenchGeometry();
    const size_t page_bytes = quiet->shape().units_per_page() * quiet->shape().unit_bytes();
    num_pages =
        std::max(1, static_cast<int>((size_t(absl::GetFlag(FLAGS_mib)) << 20) / page_bytes));
    std::vector<uint32_t> tokens(static_cast<size_t>(num_pages * g.page_tokens));
    std::iota(tokens.begin(), tokens.end(), 0u);
    keys = quiet->PageKeys(tokens);
    Put(*quiet);
    auto fetched = quiet->FetchPages(keys);
    KVD_CHECK(fetched.ok() && fetched->num_pages == num_pages);
    expected = std::move(fetched->units);
  }

  std::unique_ptr<KvClient> Connect(const std::string& tenant) const {
    ClientOptions options;
    options.members_file = members_.path() + "/members";
    options.tenant = tenant;
    options.model = "model";
    options.geometry = BenchGeometry();
    options.weights_id = "weights";
    options.rope = "theta=10000";
    options.required_path = options.best_path = PathKind::kUcx;
    options.ucx_devices = "lo";
    options.fetch_timeout = absl::Seconds(20);
    auto client = KvClient::Make(options);
    KVD_CHECK(client.ok());
    return *std::move(client);
  }

  // Every layer of the engine's cache holds the same values: what counts is where they go.
  void Put(KvClient& client) const {
    const KvGeometry g = BenchGeometry();
    const size_t row = static_cast<size_t>(g.head_dim) * 2;
    const size_t tokens = static_cast<size_t>(num_pages * g.page_tokens);
    std::vector<uint16_t> cache(tokens * row / 2 * static_cast<size_t>(g.num_kv_heads));
    uint64_t seed = 1;
    for (uint16_t& value : cache) {
      seed = Mix64(seed + kGolden64);
      value = static_cast<uint16_t>(0x3F00u | (seed & 0x80FFu));
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(cache.data());
    const EngineKv layer = {bytes, bytes, static_cast<int64_t>(tokens * row),
                            static_cast<int64_t>(row)};
    const std::vector<EngineKv> layers(static_cast<size_t>(g.num_layers), layer);
    const auto report = client.Put({.keys = keys, .num_pages = num_pages, .layers = layers});
    KVD_CHECK(report.ok() && report->num_failed == 0);
  }

  // Seconds of one whole fetch; checks it.
  double Fetch(KvClient& client, Report* report) const {
    const absl::Time start = absl::Now();
    const auto fetched = client.FetchPages(keys);
    const double seconds = SecondsSince(start);
    report->Check("every byte", fetched.ok() && fetched->units == expected,
                  "a fetch failed or differs");
    return seconds;
  }

  testing::TempDir members_;
  std::vector<std::unique_ptr<DaemonProcess>> daemons;
  std::unique_ptr<KvClient> quiet;
  std::vector<PageKey> keys;
  std::vector<uint8_t> expected;
  int num_pages = 0;
};

double BenchFetch(int num_daemons, double of_one, Report* report) {
  const BenchPool pool(num_daemons);
  std::vector<double> seconds;
  for (int i = 0; i < absl::GetFlag(FLAGS_repetitions); ++i)
    seconds.push_back(pool.Fetch(*pool.quiet, report));
  const double rate = static_cast<double>(pool.expected.size()) / Median(seconds) * 1e-6;
  report->Add({absl::StrCat("pool/fetch/ucx/", num_daemons, "_daemons"), rate, "MB/s", of_one,
               of_one > 0 ? rate / of_one : 0});
  return rate;
}

void BenchDrain(Report* report) {
  BenchPool pool(2);
  absl::SleepFor(absl::Seconds(1));  // both know the members
  const absl::Time start = absl::Now();
  const auto status = pool.daemons[0]->Stop(absl::Seconds(60));
  const double seconds = SecondsSince(start);
  report->Check("drain", status.ok() && *status == 0, "the daemon did not end in order");
  (void)pool.Fetch(*pool.quiet, report);
  // About half of the sequence lay there; the figure counts what the log says.
  const std::string log = pool.daemons[0]->LogTail();
  const size_t at = log.find("\"event\":\"drain_moved\",\"pages\":\"");
  report->Check("drain_moved", at != std::string::npos, log);
  const double pages = at == std::string::npos ? 0 : std::atof(log.c_str() + at + 31);
  const SlotLayout slot = MakeSlotLayout(BenchGeometry());
  report->Add(
      {"pool/drain",
       pages * static_cast<double>(slot.slot_bytes() + slot.summary_bytes()) / seconds * 1e-6,
       "MB/s", 0, 0});
}

void BenchFlood(Report* report) {
  BenchPool pool(1);
  std::vector<std::unique_ptr<KvClient>> floods;
  for (int c = 0; c < 4; ++c) floods.push_back(pool.Connect("flood"));
  pool.Put(*floods[0]);
  // The quiet tenant asks for one page at a time, as a decode step's misses would.
  const std::vector<PageKey> one(pool.keys.begin(), pool.keys.begin() + 1);
  const auto sample = [&] {
    std::vector<double> us;
    for (int i = 0; i < 300; ++i) {
      const absl::Time start = absl::Now();
      const auto fetched = pool.quiet->FetchPages(one);
      us.push_back(SecondsSince(start) * 1e6);
      report->Check("quiet tenant", fetched.ok() && fetched->num_pages == 1, "its fetch failed");
    }
    std::sort(us.begin(), us.end());
    return std::pair(us[us.size() / 2], us[us.size() * 99 / 100]);
  };
  const auto [alone_p50, alone_p99] = sample();
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (auto& flood : floods) {
    threads.emplace_back([&, client = flood.get()] {
      while (!stop) (void)client->FetchPages(pool.keys);
    });
  }
  absl::SleepFor(absl::Milliseconds(300));
  const auto [flooded_p50, flooded_p99] = sample();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  report->Add({"pool/flood/p50", flooded_p50, "us", alone_p50, alone_p50 / flooded_p50});
  report->Add({"pool/flood/p99", flooded_p99, "us", alone_p99, alone_p99 / flooded_p99});
}

int Main() {
  Report report("pool_bench (all processes on one host)");
  const double one = BenchFetch(1, 0, &report);
  BenchFetch(2, one, &report);
  BenchFetch(4, one, &report);
  BenchDrain(&report);
  BenchFlood(&report);
  return report.Finish(absl::GetFlag(FLAGS_json));
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Daemons of a pool on this host: fetches, a drain, a flood.");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
