// What a configuration must be: every check of ConfigProblems, one function a section.

#include <cmath>
#include <initializer_list>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/address.h"
#include "proto/arena_memory.h"
#include "proto/geometry.h"
#include "proto/gpu_memory.h"
#include "proto/membership_source.h"
#include "service/config.h"

namespace kvd {
namespace {

using locks_kvd::v1::ArenaConfig;
using locks_kvd::v1::DaemonConfig;
using locks_kvd::v1::Geometry;

// Collects problems as "<field>: expected <what>, got <value>: <what to do>".
class Problems {
 public:
  void Add(absl::string_view field, absl::string_view expected, absl::string_view got,
           absl::string_view todo) {
    lines_.push_back(absl::StrFormat("%s: expected %s, got %s: %s", field, expected, got, todo));
  }
  void Range(absl::string_view field, uint64_t value, uint64_t low, uint64_t high,
             absl::string_view todo) {
    if (value >= low && value <= high) return;
    Add(field, absl::StrFormat("%d to %d", low, high), absl::StrCat(value), todo);
  }
  void OneOf(absl::string_view field, uint64_t value, std::initializer_list<uint64_t> allowed,
             absl::string_view todo) {
    for (const uint64_t each : allowed) {
      if (value == each) return;
    }
    std::vector<uint64_t> list(allowed);
    std::string last = absl::StrCat(list.back());
    list.pop_back();
    Add(field, absl::StrCat(absl::StrJoin(list, ", "), " or ", last), absl::StrCat(value), todo);
  }
  void AddLine(std::string line) { lines_.push_back(std::move(line)); }
  std::vector<std::string> Take() { return std::move(lines_); }

 private:
  std::vector<std::string> lines_;
};

bool IsName(absl::string_view text, absl::string_view extra) {
  if (text.empty() || text.size() > 128) return false;
  for (const char c : text) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && !absl::StrContains(extra, c))
      return false;
  }
  return true;
}

void CheckAddress(absl::string_view field, const std::string& text, Problems* problems) {
  if (const auto address = Address::Parse(text); !address.ok()) {
    problems->Add(field, "host:port or [v6]:port", absl::StrCat("\"", text, "\""),
                  address.status().message());
  }
}

void CheckControl(const DaemonConfig& config, Problems* problems) {
  const auto& control = config.control();
  CheckAddress("control.address", control.address(), problems);
  if (!config.health_address().empty())
    CheckAddress("health_address", config.health_address(), problems);
  if (!config.metrics_address().empty())
    CheckAddress("metrics_address", config.metrics_address(), problems);
  if (control.has_tls()) {
    const auto& tls = control.tls();
    const std::pair<const char*, const std::string&> files[] = {
        {"control.tls.certificate_file", tls.certificate_file()},
        {"control.tls.key_file", tls.key_file()},
        {"control.tls.ca_file", tls.ca_file()}};
    for (const auto& [field, file] : files) {
      if (file.empty()) problems->Add(field, "a PEM file", "nothing", "mTLS needs all three files");
    }
    return;
  }
  const auto address = Address::Parse(control.address());
  if (address.ok() && !address->IsLoopback() && !control.insecure_allow()) {
    problems->Add("control.tls",
                  absl::StrCat("certificates, because ", control.address(),
                               " can be reached from other hosts"),
                  "none",
                  "give control.tls, listen on 127.0.0.1, or set control.insecure_allow "
                  "(--insecure-allow) if everyone who reaches the port may read every page");
  }
}

void CheckData(const DaemonConfig& config, Problems* problems) {
  const auto& data = config.data();
  // sun_path holds 108 bytes; the file's own name needs some of them.
  if (data.socket_dir().size() > 72) {
    problems->Add("data.socket_dir", "at most 72 characters",
                  absl::StrCat(data.socket_dir().size()),
                  "unix socket paths are short: choose a directory nearer to the root");
  }
  if (!data.socket_dir().empty() && data.socket_dir()[0] != '/') {
    problems->Add("data.socket_dir", "an absolute path", data.socket_dir(),
                  "workers of other directories use it");
  }
  const std::string& range = data.ucx_port_range();
  if (range.empty()) return;
  const std::vector<std::string> ends = absl::StrSplit(range, '-');
  uint32_t first = 0;
  uint32_t last = 0;
  const bool good = ends.size() == 2 && absl::SimpleAtoi(ends[0], &first) &&
                    absl::SimpleAtoi(ends[1], &last) && first >= 1 && first <= last &&
                    last <= 65535;
  if (!good) {
    problems->Add("data.ucx_port_range", "\"first-last\" within 1 to 65535",
                  absl::StrCat("\"", range, "\""), "write for example 18515-18614");
  }
}

void CheckGeometry(const std::string& at, const Geometry& g, Problems* problems) {
  const char* todo = "use what the model's configuration says";
  problems->Range(at + ".num_layers", g.num_layers(), 1, 1024,
                  "count the layers that attend globally");
  problems->Range(at + ".num_kv_heads", g.num_kv_heads(), 1, 256, todo);
  const uint64_t group = g.num_kv_heads() == 0 ? 0 : g.num_q_heads() / g.num_kv_heads();
  const bool divides = g.num_kv_heads() != 0 && g.num_q_heads() % g.num_kv_heads() == 0;
  if (g.num_kv_heads() != 0 && (!divides || group < 1 || group > 16)) {
    problems->Add(at + ".num_q_heads",
                  absl::StrFormat("1 to 16 times num_kv_heads (%d)", g.num_kv_heads()),
                  absl::StrCat(g.num_q_heads()), todo);
  }
  if (g.num_kv_heads() != 0 && (g.num_shards() == 0 || g.num_kv_heads() % g.num_shards() != 0)) {
    problems->Add(
        at + ".num_shards", absl::StrFormat("a divisor of num_kv_heads (%d)", g.num_kv_heads()),
        absl::StrCat(g.num_shards()), "use the largest tensor-parallel degree that divides it");
  }
  problems->OneOf(at + ".head_dim", g.head_dim(), {64, 96, 128, 256}, todo);
  problems->OneOf(at + ".page_tokens", g.page_tokens(), {16, 32}, "16 is the default");
  problems->OneOf(at + ".rank", g.rank(), {4, 8}, "8 is the default and the published method's");
  if (g.dtype() != locks_kvd::v1::DTYPE_BF16 && g.dtype() != locks_kvd::v1::DTYPE_FP16) {
    problems->Add(at + ".dtype", "DTYPE_BF16 or DTYPE_FP16",
                  absl::StrCat(static_cast<int>(g.dtype())), todo);
  }
  if (!std::isfinite(g.softmax_scale()) || g.softmax_scale() <= 0) {
    problems->Add(at + ".softmax_scale", "a finite value above 0", absl::StrCat(g.softmax_scale()),
                  "set the model's own, often 1/sqrt(head_dim)");
  }
  if (!std::isfinite(g.logit_softcap()) || g.logit_softcap() < 0) {
    problems->Add(at + ".logit_softcap", "0 (none) or a finite value above 0",
                  absl::StrCat(g.logit_softcap()), todo);
  }
}

void CheckArenaBytes(const std::string& at, const ArenaConfig& arena, Problems* problems) {
  const auto geometry = FromProto(arena.geometry());
  if (!geometry.ok()) {
    problems->Add(at + ".geometry", "a supported geometry", "another", geometry.status().message());
    return;
  }
  if (CarveArena(*geometry, arena.bytes()).num_slots >= 2) return;
  const SlotLayout slot = MakeSlotLayout(*geometry);
  const uint64_t needed = 2 * (slot.slot_bytes() + slot.summary_bytes() + 128);
  problems->Add(at + ".bytes",
                absl::StrFormat("at least %d (two slots with their records)", needed),
                absl::StrCat(arena.bytes()), "one slot is the canary's, so two are the least");
}

// Whether such a GPU is there is seen when the daemon starts: a configuration can be checked
// elsewhere.
void CheckGpus(const DaemonConfig& config, Problems* problems) {
  int first = -1;
  for (int i = 0; i < config.arenas_size(); ++i) {
    const ArenaConfig& arena = config.arenas(i);
    if (!arena.has_gpu()) continue;
    const std::string field = absl::StrFormat("arenas[%d].gpu", i);
    if (!kBuiltWithCuda) {
      problems->Add(field, "no GPU, because this locks-kvd was built without CUDA",
                    absl::StrCat(arena.gpu()),
                    "leave it out for host memory, or use a build with CUDA");
    } else if (arena.gpu() < 0) {
      problems->Add(field, "0 or more", absl::StrCat(arena.gpu()), "leave it out for host memory");
    } else if (first >= 0 && arena.gpu() != config.arenas(first).gpu()) {
      problems->Add(field,
                    absl::StrFormat("%d, as arenas[%d] has", config.arenas(first).gpu(), first),
                    absl::StrCat(arena.gpu()), "run a daemon for each GPU");
    }
    if (first < 0) first = i;
  }
}

void CheckArena(const std::string& at, const ArenaConfig& arena, Problems* problems) {
  if (!IsName(arena.tenant(), "-_.")) {
    problems->Add(at + ".tenant", "1 to 128 letters, digits, '-', '_' or '.'",
                  absl::StrCat("\"", arena.tenant(), "\""),
                  "it is compared with the client's certificate");
  }
  if (!IsName(arena.model(), "-_./:@")) {
    problems->Add(at + ".model", "1 to 128 letters, digits or any of -_./:@",
                  absl::StrCat("\"", arena.model(), "\""), "clients attach by this name");
  }
  if (arena.identity().weights_id().empty()) {
    problems->Add(at + ".identity.weights_id", "the name or hash of the weights", "nothing",
                  "it keeps two models' pages apart: use the model's revision or a hash");
  }
  Problems geometry;
  CheckGeometry(at + ".geometry", arena.geometry(), &geometry);
  const std::vector<std::string> lines = geometry.Take();
  if (lines.empty()) CheckArenaBytes(at, arena, problems);
  for (const std::string& line : lines) problems->AddLine(line);
  const std::string& encoder = arena.encoder();
  if (encoder != "E0" && encoder != "E1" && encoder != "E1S") {
    problems->Add(at + ".encoder", "E0, E1 or E1S", absl::StrCat("\"", encoder, "\""),
                  "leave it empty for the best that the query metric allows");
  }
  if ((encoder == "E1S") != !arena.query_metric_file().empty()) {
    problems->Add(at + ".query_metric_file", "a file with encoder E1S and none with E0 and E1",
                  absl::StrFormat("encoder %s and \"%s\"", encoder, arena.query_metric_file()),
                  "leave the encoder empty: the file decides");
  }
}

void CheckTimesAndLimits(const DaemonConfig& config, Problems* problems) {
  const auto& times = config.times();
  problems->Range("times.heartbeat_ms", times.heartbeat_ms(), 10, 60000, "1000 is the default");
  problems->Range("times.session_ttl_ms", times.session_ttl_ms(),
                  2 * uint64_t{times.heartbeat_ms()}, 600000,
                  "a session must survive one lost ping");
  problems->Range("times.quarantine_ms", times.quarantine_ms(), 1, 600000,
                  "the session TTL is the default");
  problems->Range("times.drain_ms", times.drain_ms(), 1, 3600000, "60000 is the default");
  const auto& limits = config.limits();
  problems->Range("limits.sessions_per_tenant", limits.sessions_per_tenant(), 1, 65536,
                  "1024 is the default");
  problems->Range("limits.reservations_per_session", limits.reservations_per_session(), 1, 16777216,
                  "65536 is the default");
  problems->Range("limits.leases_per_session", limits.leases_per_session(), 1, 16777216,
                  "1048576 is the default");
  problems->Range("limits.units_per_fetch", limits.units_per_fetch(), 1, 1048576,
                  "65536 is the default");
  problems->Range("limits.fetch_bytes_in_flight_per_session",
                  limits.fetch_bytes_in_flight_per_session(), uint64_t{4} << 20, uint64_t{1} << 40,
                  "268435456 is the default");
}

void CheckCluster(const DaemonConfig& config, Problems* problems) {
  if (!config.has_cluster()) return;
  const auto& cluster = config.cluster();
  const int sources = (cluster.members().empty() ? 0 : 1) +
                      (cluster.members_file().empty() ? 0 : 1) +
                      (cluster.members_dns().empty() ? 0 : 1);
  if (sources != 1) {
    problems->Add("cluster", "one of members, members_file and members_dns", absl::StrCat(sources),
                  "say in one way who the members are");
  }
  problems->Range("cluster.replicas", cluster.replicas(), 1, 2,
                  "choose 1, or 2 for a copy of every page");
  problems->Range("cluster.poll_ms", cluster.poll_ms(), 100, 3600000, "choose seconds");
  problems->Range("cluster.moved_grace_ms", cluster.moved_grace_ms(), 1, 3600000,
                  "choose a minute or so");
  if (cluster.has_nccl()) {
    // Less than the time after which an idle reservation is given up.
    problems->Range("cluster.nccl.watchdog_ms", cluster.nccl().watchdog_ms(), 100, 30000,
                    "10000 is the default");
    problems->Range("cluster.nccl.min_bytes", cluster.nccl().min_bytes(), 1, uint64_t{1} << 40,
                    "67108864 is the default");
  }
  if (!config.data().ucx()) {
    problems->Add("cluster", "data.ucx true, because pages travel by it", "false",
                  "set data.ucx or leave cluster out");
  }
  if (cluster.members().empty()) return;
  std::vector<Member> members;
  for (const auto& entry : cluster.members()) members.push_back(MemberOf(entry));
  if (const auto checked = CheckMembers(std::move(members)); !checked.ok()) {
    problems->AddLine(absl::StrCat("cluster.members: ", checked.status().message()));
  }
}

void CheckLog(const DaemonConfig& config, Problems* problems) {
  static const std::set<std::string>* const levels =
      new std::set<std::string>{"trace", "debug", "info", "warn", "error"};
  if (!levels->contains(config.log().level())) {
    problems->Add("log.level", "trace, debug, info, warn or error",
                  absl::StrCat("\"", config.log().level(), "\""), "info is the default");
  }
  const std::string& format = config.log().format();
  if (!format.empty() && format != "json" && format != "text") {
    problems->Add("log.format", "json or text", absl::StrCat("\"", format, "\""),
                  "leave it empty for text on a terminal and json elsewhere");
  }
}

}  // namespace

std::vector<std::string> ConfigProblems(const DaemonConfig& config) {
  Problems problems;
  CheckControl(config, &problems);
  CheckData(config, &problems);
  CheckTimesAndLimits(config, &problems);
  CheckCluster(config, &problems);
  CheckLog(config, &problems);
  if (config.arenas().empty()) {
    problems.Add("arenas", "at least one", "none",
                 "a daemon without an arena holds no page: see --help");
  }
  CheckGpus(config, &problems);
  std::set<std::pair<std::string, std::string>> names;
  for (int i = 0; i < config.arenas_size(); ++i) {
    const ArenaConfig& arena = config.arenas(i);
    const std::string at = absl::StrFormat("arenas[%d]", i);
    CheckArena(at, arena, &problems);
    if (!names.emplace(arena.tenant(), arena.model()).second) {
      problems.Add(at, "another tenant or model than every arena before",
                   absl::StrCat(arena.tenant(), "/", arena.model(), " again"), "merge the two");
    }
  }
  return problems.Take();
}

}  // namespace kvd
