// What changes by the second, and how fast daemons are from here.

#include <algorithm>
#include <iostream>
#include <map>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/kv_client.h"
#include "client/locksctl_daemon.h"
#include "client/locksctl_output.h"
#include "client/locksctl_verbs.h"

namespace kvd {
namespace {

using locks_kvd::v1::StatsReply;

constexpr int64_t kLatencyRounds = 5;

// One look at a daemon.
struct Sample {
  absl::Time when;
  StatsReply stats;
};

uint64_t Evicted(const StatsReply& stats) {
  uint64_t evicted = 0;
  for (const StatsReply::ArenaStats& arena : stats.arenas()) evicted += arena.evicted_pages();
  return evicted;
}

// Events a second between two looks; 0 for the first look, and across a restart.
int64_t Rate(uint64_t before, uint64_t now, absl::Duration time) {
  if (now < before || time <= absl::ZeroDuration()) return 0;
  return static_cast<int64_t>(static_cast<double>(now - before) / absl::ToDoubleSeconds(time));
}

std::vector<Cell> TopRow(const std::string& daemon, const Sample* before, const Sample& now) {
  int64_t used = 0;
  int64_t total = 0;
  int64_t leased = 0;
  for (const StatsReply::ArenaStats& arena : now.stats.arenas()) {
    const int64_t busy =
        int64_t{arena.slots_sealed()} + arena.slots_reserved() + arena.slots_quarantined();
    used += busy;
    total += busy + arena.slots_free();
    leased += arena.slots_leased();
  }
  const bool same = before != nullptr && before->stats.incarnation() == now.stats.incarnation();
  const StatsReply none;
  const StatsReply& old = same ? before->stats : none;
  const absl::Duration time = same ? now.when - before->when : absl::ZeroDuration();
  const auto rate = [&](uint64_t a, uint64_t b) { return Rate(a, b, time); };
  const auto& f = now.stats.fetch();
  const auto& g = old.fetch();
  return {daemon,
          now.stats.draining() ? "draining" : "serving",
          int64_t{now.stats.sessions_size()},
          used,
          total,
          leased,
          rate(g.requests(), f.requests()),
          rate(g.failed(), f.failed()),
          rate(g.units(), f.units()),
          rate(g.missing_units(), f.missing_units()),
          rate(g.bytes(), f.bytes()) / 1000000,
          rate(Evicted(old), Evicted(now.stats))};
}

std::string NameOf(PathKind path) {
  const absl::string_view name = PathName(path);
  return std::string(name.data(), name.size());
}

std::vector<Cell> LatencyRow(const std::string& daemon, const std::string& what,
                             std::vector<double> seconds, double bytes_per_second,
                             const std::string& problem) {
  std::sort(seconds.begin(), seconds.end());
  const auto micros = [&seconds](size_t i) { return seconds.empty() ? 0.0 : seconds[i] * 1e6; };
  const size_t last = seconds.empty() ? 0 : seconds.size() - 1;
  return {daemon,           what,         static_cast<int64_t>(seconds.size()),         micros(0),
          micros(last / 2), micros(last), static_cast<int64_t>(bytes_per_second / 1e6), problem};
}

// Attaches `rounds` times by `path` alone; each attach fetches the canary and times it.
std::vector<Cell> TimePath(ClientOptions client, PathKind path, int64_t rounds, bool* worked) {
  client.required_path = path;
  client.best_path = path;
  std::vector<double> seconds;
  double best_rate = 0;
  std::string problem;
  for (int64_t round = 0; round < rounds && problem.empty(); ++round) {
    const auto attached = KvClient::Make(client);
    if (!attached.ok()) {
      problem = attached.status().ToString();
      break;
    }
    const PathReport report = (*attached)->Daemons()[0].path;
    seconds.push_back(report.canary_seconds);
    best_rate = std::max(best_rate, report.canary_bytes_per_second);
  }
  *worked = *worked || problem.empty();
  return LatencyRow(client.daemons[0], NameOf(path), std::move(seconds), best_rate, problem);
}

}  // namespace

ExitCode RunTop(const LocksctlOptions& options) {
  LocksctlOptions repeated = options;
  repeated.watch = true;
  ExitCode code = ExitCode::kOk;
  std::map<std::string, Sample> before;
  for (Rounds rounds(repeated, /*repeats=*/true); rounds.Next();) {
    Table table = {{"daemon", "state", "sessions", "pages_used", "pages_total", "pages_leased",
                    "fetches_per_s", "failed_per_s", "units_per_s", "missing_per_s", "mb_per_s",
                    "evicted_per_s"},
                   {}};
    for (const std::string& daemon : options.daemons) {
      const absl::StatusOr<StatsReply> stats = QueryStats(options, daemon);
      if (!stats.ok()) {
        code = Worse(code, Complain(stats.status()));
        before.erase(daemon);
        continue;
      }
      const Sample now = {absl::Now(), *stats};
      const auto last = before.find(daemon);
      table.rows.push_back(TopRow(daemon, last == before.end() ? nullptr : &last->second, now));
      before[daemon] = now;
    }
    std::cout << Render(table, options.output);
  }
  return code;
}

ExitCode RunPaths(const LocksctlOptions& options) {
  absl::StatusOr<ClientOptions> client_options = AttachOptions(options);
  if (!client_options.ok()) return Complain(client_options.status());
  Table table = {{"daemon", "path", "canary_mb_per_s", "canary_us", "rejected"}, {}};
  ExitCode code = ExitCode::kOk;
  for (const std::string& daemon : options.daemons) {
    client_options->daemons = {daemon};
    const auto client = KvClient::Make(*client_options);
    if (!client.ok()) {
      code = Worse(code, Complain(client.status()));
      table.rows.push_back({daemon, "none", int64_t{0}, int64_t{0}, ""});
      continue;
    }
    const DaemonView view = (*client)->Daemons()[0];
    table.rows.push_back({daemon, NameOf(view.path.path),
                          static_cast<int64_t>(view.path.canary_bytes_per_second / 1e6),
                          static_cast<int64_t>(view.path.canary_seconds * 1e6),
                          absl::StrJoin(view.path.rejected, "; ")});
  }
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunLatency(const LocksctlOptions& options) {
  const int64_t rounds = options.count > 0 ? options.count : kLatencyRounds;
  absl::StatusOr<ClientOptions> client = AttachOptions(options);
  if (!client.ok()) return Complain(client.status());
  Table table = {
      {"daemon", "what", "rounds", "min_us", "median_us", "max_us", "mb_per_s", "problem"}, {}};
  ExitCode code = ExitCode::kOk;
  for (const std::string& daemon : options.daemons) {
    std::vector<double> seconds;
    std::string problem;
    for (int64_t round = 0; round < rounds && problem.empty(); ++round) {
      const absl::StatusOr<DaemonFigures> figures = QueryFigures(options, daemon);
      if (!figures.ok()) {
        code = Worse(code, Complain(figures.status()));
        problem = figures.status().ToString();
        break;
      }
      seconds.push_back(absl::ToDoubleSeconds(figures->took));
    }
    table.rows.push_back(LatencyRow(daemon, "control", std::move(seconds), 0, problem));
    if (!problem.empty()) continue;
    client->daemons = {daemon};
    bool worked = false;
    for (const PathKind path : {PathKind::kPeer, PathKind::kShared, PathKind::kUcx}) {
      table.rows.push_back(TimePath(*client, path, rounds, &worked));
    }
    if (!worked) code = Worse(code, ExitCode::kCheckFailed);
  }
  std::cout << Render(table, options.output);
  return code;
}

}  // namespace kvd
