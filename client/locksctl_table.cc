#include "client/locksctl_table.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/locksctl_verbs.h"

namespace kvd {
namespace {

constexpr char kArenaFlags[] =
    "  --tenant T --model M --weights-id W --rope R   as in the daemon's configuration\n";
constexpr char kSequenceFlags[] =
    "  KEY is 32 hex digits. Instead of keys:\n"
    "  --token-file F   token ids, separated by blanks; with --weights-id, --rope, and --salt and\n"
    "                   --extra as the workers set them\n";

constexpr Verb kVerbs[] = {
    {.name = "status",
     .usage = "status",
     .summary = "health, incarnation, arenas and security of each daemon",
     .details = "  Exit code 3 if a daemon does not answer.\n",
     .run = RunStatus,
     .repeats = true},
    {.name = "members",
     .usage = "members",
     .summary = "each configured daemon and its state",
     .details = "  Exit code 3 if a daemon does not answer.\n",
     .run = RunMembers,
     .repeats = true},
    {.name = "top",
     .usage = "top [--interval D] [--count N]",
     .summary = "live table of load and fetch rates, redrawn each second",
     .details = "  Rates are of fetches over ucx: the daemon does not see the others.\n",
     .run = RunTop,
     .repeats = true},
    {.name = "stat",
     .usage = "stat [--interval D] [--count N]",
     .summary = "pages, leases and sessions of each arena",
     .details = "",
     .run = RunStat,
     .repeats = true},
    {.name = "sessions",
     .usage = "sessions",
     .summary = "who is attached, oldest first",
     .details = "",
     .run = RunSessions,
     .repeats = true},
    {.name = "leases",
     .usage = "leases",
     .summary = "sessions that lease or write pages, most leases first",
     .details = "",
     .run = RunLeases,
     .repeats = true},
    {.name = "tenants",
     .usage = "tenants",
     .summary = "use and quota of each tenant over all daemons",
     .details = "  The quota is the memory of its arenas, as configured.\n",
     .run = RunTenants,
     .repeats = true},
    {.name = "pages",
     .usage = "pages KEY... | pages --token-file F",
     .summary = "where pages are, and their state",
     .details = kSequenceFlags,
     .run = RunPages,
     .min_arguments = 1,
     .max_arguments = 4096,
     .takes_sequence = true,
     .needs_arena = true,
     .repeats = true},
    {.name = "paths",
     .usage = "paths",
     .summary = "how each daemon is reached from here, and why not better",
     .details =
         "  Attaches and fetches the canary on the best path. Exit code 1 if a daemon cannot be\n"
         "  attached to.\n",
     .run = RunPaths,
     .needs_arena = true,
     .repeats = true},
    {.name = "latency",
     .usage = "latency [--count N]",
     .summary = "time and rate of the canary on every path, and of a control call",
     .details = "  --count N   fetches of each path; 5 by default. Exit code 1 if no path works.\n",
     .run = RunLatency,
     .needs_arena = true},
    {.name = "verify",
     .usage = "verify",
     .summary = "compares every sealed page with its checksums, at the daemon",
     .details =
         "  --tenant T --model M   only these arenas\n"
         "  Needs the admin role. Reads the whole arena; pages stay in use. Exit code 1 if a\n"
         "  byte is wrong.\n",
     .run = RunVerify},
    {.name = "selftest",
     .usage = "selftest [--max-pages N]",
     .summary = "puts random pages, fetches them on every path, compares bit by bit",
     .details =
         "  --max-pages N   longest sequence; 70 (three stripes) by default\n"
         "  Uses free pages of the arena and evicts unleased ones like any writer. Exit code 1 if\n"
         "  a byte is wrong or no path works.\n",
     .run = RunSelftest,
     .needs_arena = true},
    {.name = "slowlog",
     .usage = "slowlog [--count N]",
     .summary = "the last slow or failed fetches over ucx, newest first",
     .details = "  --count N   newest entries; all that are kept (1,024) by default\n"
                "  Needs the admin role.\n",
     .run = RunSlowlog},
    {.name = "config",
     .usage = "config",
     .summary = "the configuration in force; it names secrets by file only",
     .details = "  Needs the admin role.\n",
     .run = RunConfig},
    {.name = "loglevel",
     .usage = "loglevel [trace|debug|info|warn|error]",
     .summary = "reads the level of the log, or changes it until the daemon ends",
     .details = "  Needs the admin role.\n",
     .run = RunLogLevel,
     .max_arguments = 1},
    {.name = "drain",
     .usage = "drain --yes [--exit] [--drain-timeout D]",
     .summary = "makes a daemon refuse new work and wait for its leases",
     .details = "  --yes              really do it: a drain cannot be taken back, only the process "
                "started\n"
                "                     again\n"
                "  --exit             end the process afterwards\n"
                "  --drain-timeout D  limit of the wait; the daemon's own by default\n"
                "  Needs the admin role. Exit code 1 if leases were cut off.\n",
     .run = RunDrain,
     .destructive = true},
    {.name = "placement",
     .usage = "placement explain KEY... | placement explain --token-file F",
     .summary = "which member owns a page, and who is next",
     .details = kSequenceFlags,
     .run = RunPlacement,
     .second_word = "explain",
     .min_arguments = 1,
     .max_arguments = 4096,
     .takes_sequence = true},
    {.name = "preflight",
     .usage = "preflight [--memlock BYTES] [--days N]",
     .summary = "looks for what would keep this host from working with the daemons",
     .details =
         "  --memlock BYTES  that a process must be able to lock; 64 MiB if RDMA is here\n"
         "  --days N         that certificates must still live; 7 by default\n"
         "  With --model it also attaches and fetches the canary. Each check says ok, failed or\n"
         "  skipped, and what to do. Exit code 1 if one failed.\n",
     .run = RunPreflight},
    {.name = "certs",
     .usage = "certs dev --out DIR [--tenant T] [--host H]... [--days N]",
     .summary = "makes a CA and certificates for development, with the openssl tool",
     .details = "  --out DIR   gets ca, server, client and admin (.pem, .key) and a context file\n"
                "  --host H    further name or address of the daemon; localhost is always in\n"
                "  --days N    life; 30 by default\n"
                "  --yes       replace what is there\n",
     .run = RunCerts,
     .second_word = "dev"},
    {.name = "support-bundle",
     .usage = "support-bundle --out FILE.tar.gz | support-bundle --out DIR",
     .summary = "collects what a report of a problem needs: no secrets, no keys of pages",
     .details =
         "  Needs the admin role for all of it; what cannot be had is listed in problems.txt.\n"
         "  Exit code 3 if a daemon does not answer.\n",
     .run = RunSupportBundle},
};

}  // namespace

std::span<const Verb> Verbs() { return kVerbs; }

const Verb* FindVerb(const std::string& name) {
  for (const Verb& verb : kVerbs) {
    if (name == verb.name) return &verb;
  }
  return nullptr;
}

std::string LocksctlHelp(const std::string& verb) {
  std::string text;
  if (const Verb* v = FindVerb(verb); v != nullptr) {
    text = absl::StrCat("locksctl ", v->usage, "\n\n", v->name, ": ", v->summary, "\n\n",
                        v->needs_arena ? kArenaFlags : "", v->details,
                        v->repeats ? "  --watch       repeat, redrawn on a terminal\n"
                                     "  --interval D  repeat every D, for example 1s\n"
                                     "  --count N     stop after N rounds\n"
                                   : "",
                        "\n");
  } else {
    text = "locksctl <verb> [flags]: looks at and steers locks-kvd daemons\n\n";
    for (const Verb& each : kVerbs) {
      absl::StrAppendFormat(&text, "  %-15s %s\n", each.name, each.summary);
    }
    absl::StrAppend(&text, "\nlocksctl <verb> --help says more.\n\n");
  }
  absl::StrAppend(&text,
                  "Flags of every verb:\n"
                  "  --daemon HOST:PORT  repeat for several; else $LOCKSCTL_DAEMONS (comma "
                  "separated), else the\n"
                  "                      context, else 127.0.0.1:7411\n"
                  "  -o table|json       form of the output; the JSON form is a contract\n"
                  "  --timeout D         of each call; 5s by default\n"
                  "  --ca F --cert F --key F   PEM files; none: no TLS\n"
                  "  --context F         daemons, certificates and arena as protobuf text "
                  "(LocksctlContext); by\n"
                  "                      default ~/.config/locks-kvd/context.textproto if it is "
                  "there; none: none\n"
                  "Exit codes: 0 ok, 1 check failed, 2 usage, 3 unreachable.\n");
  return text;
}

}  // namespace kvd
