// What daemons tell everybody who may ask for their figures.

#include "client/locksctl_verbs.h"

#include <algorithm>
#include <iostream>
#include <map>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/locksctl_daemon.h"
#include "client/locksctl_output.h"

namespace kvd {
namespace {

using locks_kvd::v1::StatsReply;

std::string ShortIncarnation(const StatsReply& stats) {
  return absl::BytesToHexString(stats.incarnation()).substr(0, 12);
}

std::string DescribeGeometry(const locks_kvd::v1::Geometry& g) {
  return absl::StrCat("L", g.num_layers(), " H", g.num_q_heads(), "/", g.num_kv_heads(), " D",
                      g.head_dim(), " B", g.page_tokens(), " R", g.rank());
}

std::string State(const StatsReply& stats) { return stats.draining() ? "draining" : "serving"; }

int64_t UsedSlots(const StatsReply::ArenaStats& arena) {
  return int64_t{arena.slots_sealed()} + arena.slots_reserved() + arena.slots_quarantined();
}

int64_t AllSlots(const StatsReply::ArenaStats& arena) {
  return UsedSlots(arena) + arena.slots_free();
}

int64_t PageBytes(const StatsReply::ArenaStats& arena) {
  return static_cast<int64_t>(arena.slot_bytes() + arena.summary_bytes());
}

struct SessionRow {
  std::string daemon;
  StatsReply::SessionStats session;
  int64_t page_bytes = 0;
};

// Asks every daemon; calls `use` for each that answers, `lost` for each other.
template <typename Use, typename Lost>
ExitCode ForEachDaemon(const LocksctlOptions& options, Use use, Lost lost) {
  ExitCode code = ExitCode::kOk;
  for (const std::string& daemon : options.daemons) {
    const absl::StatusOr<StatsReply> stats = QueryStats(options, daemon);
    if (stats.ok()) {
      use(daemon, *stats);
    } else {
      code = Worse(code, Complain(stats.status()));
      lost(daemon);
    }
  }
  return code;
}

template <typename Use>
ExitCode ForEachDaemon(const LocksctlOptions& options, Use use) {
  return ForEachDaemon(options, use, [](const std::string&) {});
}

ExitCode ListSessions(const LocksctlOptions& options, std::vector<SessionRow>* rows) {
  return ForEachDaemon(options, [rows](const std::string& daemon, const StatsReply& stats) {
    for (const StatsReply::SessionStats& session : stats.sessions()) {
      SessionRow row = {daemon, session};
      for (const StatsReply::ArenaStats& arena : stats.arenas()) {
        if (arena.tenant() == session.tenant() && arena.model() == session.model()) {
          row.page_bytes = PageBytes(arena);
        }
      }
      rows->push_back(std::move(row));
    }
  });
}

}  // namespace

ExitCode RunStatus(const LocksctlOptions& options) {
  Table table = {{"daemon", "state", "incarnation", "version", "uptime_s", "security", "tenant",
                  "model", "geometry", "encoder", "pages_used", "pages_total", "paths"},
                 {}};
  const auto lost = [&](const std::string& daemon) {
    table.rows.push_back({daemon, "unreachable", "", "", int64_t{0}, "", "", "", "", "", int64_t{0},
                          int64_t{0}, ""});
  };
  const auto use = [&](const std::string& daemon, const StatsReply& stats) {
    for (const StatsReply::ArenaStats& arena : stats.arenas()) {
      table.rows.push_back({daemon, State(stats), ShortIncarnation(stats), stats.version(),
                            static_cast<int64_t>(stats.uptime_ms() / 1000),
                            stats.insecure() ? "insecure" : "mtls", arena.tenant(), arena.model(),
                            DescribeGeometry(arena.geometry()), arena.encoder(), UsedSlots(arena),
                            AllSlots(arena), absl::StrJoin(stats.paths(), "; ")});
    }
  };
  const ExitCode code = ForEachDaemon(options, use, lost);
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunMembers(const LocksctlOptions& options) {
  Table table = {{"member", "state", "incarnation", "version", "uptime_s", "sessions", "pages_used",
                  "pages_total"},
                 {}};
  const auto lost = [&](const std::string& daemon) {
    table.rows.push_back(
        {daemon, "unreachable", "", "", int64_t{0}, int64_t{0}, int64_t{0}, int64_t{0}});
  };
  const auto use = [&](const std::string& daemon, const StatsReply& stats) {
    int64_t used = 0;
    int64_t total = 0;
    for (const StatsReply::ArenaStats& arena : stats.arenas()) {
      used += UsedSlots(arena);
      total += AllSlots(arena);
    }
    table.rows.push_back({daemon, State(stats), ShortIncarnation(stats), stats.version(),
                          static_cast<int64_t>(stats.uptime_ms() / 1000),
                          int64_t{stats.sessions_size()}, used, total});
  };
  const ExitCode code = ForEachDaemon(options, use, lost);
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunStat(const LocksctlOptions& options) {
  Table table = {{"daemon", "tenant", "model", "free", "reserved", "sealed", "quarantined",
                  "leased", "evicted", "sessions"},
                 {}};
  const ExitCode code =
      ForEachDaemon(options, [&](const std::string& daemon, const StatsReply& stats) {
        for (const StatsReply::ArenaStats& arena : stats.arenas()) {
          const auto sessions = std::count_if(
              stats.sessions().begin(), stats.sessions().end(), [&](const auto& session) {
                return session.tenant() == arena.tenant() && session.model() == arena.model();
              });
          table.rows.push_back({daemon, arena.tenant(), arena.model(), int64_t{arena.slots_free()},
                                int64_t{arena.slots_reserved()}, int64_t{arena.slots_sealed()},
                                int64_t{arena.slots_quarantined()}, int64_t{arena.slots_leased()},
                                static_cast<int64_t>(arena.evicted_pages()), int64_t{sessions}});
        }
      });
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunSessions(const LocksctlOptions& options) {
  std::vector<SessionRow> sessions;
  const ExitCode code = ListSessions(options, &sessions);
  std::stable_sort(sessions.begin(), sessions.end(), [](const auto& a, const auto& b) {
    return a.session.age_ms() > b.session.age_ms();
  });
  Table table = {{"daemon", "session", "tenant", "model", "client", "age_s", "silent_ms",
                  "leased_pages", "reserved_pages"},
                 {}};
  for (const auto& [daemon, session, page_bytes] : sessions) {
    table.rows.push_back({daemon, static_cast<int64_t>(session.session_id()), session.tenant(),
                          session.model(), session.client_name(),
                          static_cast<int64_t>(session.age_ms() / 1000),
                          static_cast<int64_t>(session.silent_ms()),
                          int64_t{session.leased_pages()}, int64_t{session.reserved_pages()}});
  }
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunLeases(const LocksctlOptions& options) {
  std::vector<SessionRow> sessions;
  const ExitCode code = ListSessions(options, &sessions);
  std::stable_sort(sessions.begin(), sessions.end(), [](const auto& a, const auto& b) {
    return a.session.leased_pages() > b.session.leased_pages();
  });
  Table table = {{"daemon", "session", "tenant", "model", "client", "leased_pages", "leased_bytes",
                  "reserved_pages", "age_s"},
                 {}};
  for (const auto& [daemon, session, page_bytes] : sessions) {
    if (session.leased_pages() + session.reserved_pages() == 0) continue;
    table.rows.push_back({daemon, static_cast<int64_t>(session.session_id()), session.tenant(),
                          session.model(), session.client_name(), int64_t{session.leased_pages()},
                          session.leased_pages() * page_bytes, int64_t{session.reserved_pages()},
                          static_cast<int64_t>(session.age_ms() / 1000)});
  }
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunTenants(const LocksctlOptions& options) {
  struct Tenant {
    std::set<std::string> daemons;
    int64_t arenas = 0;
    int64_t sessions = 0;
    int64_t used_pages = 0;
    int64_t leased_pages = 0;
    int64_t used_bytes = 0;
    int64_t quota_bytes = 0;
  };
  std::map<std::string, Tenant> tenants;
  const ExitCode code =
      ForEachDaemon(options, [&](const std::string& daemon, const StatsReply& stats) {
        for (const StatsReply::ArenaStats& arena : stats.arenas()) {
          Tenant& tenant = tenants[arena.tenant()];
          tenant.daemons.insert(daemon);
          ++tenant.arenas;
          tenant.used_pages += UsedSlots(arena);
          tenant.leased_pages += arena.slots_leased();
          tenant.used_bytes += UsedSlots(arena) * PageBytes(arena);
          tenant.quota_bytes += AllSlots(arena) * PageBytes(arena);
        }
        for (const auto& session : stats.sessions()) ++tenants[session.tenant()].sessions;
      });
  Table table = {{"tenant", "daemons", "arenas", "sessions", "pages_used", "pages_leased",
                  "used_bytes", "quota_bytes"},
                 {}};
  for (const auto& [name, t] : tenants) {
    table.rows.push_back({name, static_cast<int64_t>(t.daemons.size()), t.arenas, t.sessions,
                          t.used_pages, t.leased_pages, t.used_bytes, t.quota_bytes});
  }
  std::cout << Render(table, options.output);
  return code;
}

}  // namespace kvd
