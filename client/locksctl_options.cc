#include "client/locksctl_options.h"

#include <array>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/address.h"
#include "proto/status.h"

namespace kvd {
namespace {

struct Verb {
  const char* name;
  const char* summary;
  const char* details;
};

constexpr std::array<Verb, 5> kVerbs = {{
    {"status", "health, incarnation, arenas and security of each daemon",
     "  Exit code 3 if a daemon does not answer.\n"},
    {"paths", "how each daemon is reached from here, and why not better",
     "  --tenant T --model M --weights-id W --rope R   as in the daemon's configuration\n"
     "  Attaches, fetches the canary on the best path and says why a better one is not used.\n"
     "  Exit code 1 if a daemon cannot be attached to.\n"},
    {"stat", "pages, leases and sessions, once or at an interval",
     "  --interval D   repeat every D (for example 1s)\n"
     "  --count N      stop after N rounds; 0: never\n"},
    {"selftest", "puts random pages, fetches them on every path, compares bit by bit",
     "  --tenant T --model M --weights-id W --rope R   as in the daemon's configuration\n"
     "  --max-pages N   longest sequence; 70 (three stripes) by default\n"
     "  Uses free pages of the arena and evicts unleased ones like any writer. Exit code 1 if a "
     "byte is\n"
     "  wrong or a path does not work.\n"},
    {"drain", "makes a daemon refuse new work and wait for its leases",
     "  --yes              really do it\n"
     "  --exit             end the process afterwards\n"
     "  --drain-timeout D  limit of the wait; the daemon's own by default\n"
     "  Needs the admin role. Exit code 1 if leases were cut off.\n"},
}};

absl::Status Bad(const std::string& flag, const std::string& got, const char* expected) {
  return absl::InvalidArgumentError(
      absl::StrCat(flag, ": expected ", expected, ", got '", got, "'"));
}

// Takes "--flag value" and "--flag=value" apart, one after the other.
class Arguments {
 public:
  explicit Arguments(const std::vector<std::string>& args) : args_(args) {}
  bool Next() {
    if (at_ >= args_.size()) return false;
    name_ = args_[at_++];
    value_.reset();
    const size_t equals = name_.find('=');
    if (name_.rfind("-", 0) == 0 && equals != std::string::npos) {
      value_ = name_.substr(equals + 1);
      name_.resize(equals);
    }
    return true;
  }
  const std::string& name() const { return name_; }
  absl::StatusOr<std::string> Value() {
    if (value_.has_value()) return *value_;
    if (at_ >= args_.size())
      return absl::InvalidArgumentError(absl::StrCat(name_, ": needs a value"));
    return args_[at_++];
  }
  absl::StatusOr<absl::Duration> DurationValue() {
    KVD_ASSIGN_OR_RETURN(const std::string text, Value());
    absl::Duration duration;
    if (!absl::ParseDuration(text, &duration) || duration <= absl::ZeroDuration()) {
      return Bad(name_, text, "a duration above 0, for example 5s");
    }
    return duration;
  }
  absl::StatusOr<int64_t> Number(int64_t low, int64_t high) {
    KVD_ASSIGN_OR_RETURN(const std::string text, Value());
    int64_t number = 0;
    if (!absl::SimpleAtoi(text, &number) || number < low || number > high) {
      return Bad(name_, text, absl::StrCat("a number from ", low, " to ", high).c_str());
    }
    return number;
  }

 private:
  const std::vector<std::string>& args_;
  size_t at_ = 0;
  std::string name_;
  std::optional<std::string> value_;
};

absl::Status Apply(Arguments& arg, LocksctlOptions& o) {
  const std::string& name = arg.name();
  const std::pair<const char*, std::string*> texts[] = {
      {"--tenant", &o.tenant},   {"--model", &o.model},    {"--weights-id", &o.weights_id},
      {"--rope", &o.rope},       {"--ca", &o.tls.ca_file}, {"--cert", &o.tls.certificate_file},
      {"--key", &o.tls.key_file}};
  for (const auto& [flag, target] : texts) {
    if (name != flag) continue;
    KVD_ASSIGN_OR_RETURN(*target, arg.Value());
    return absl::OkStatus();
  }
  if (name == "--help" || name == "-h") {
    o.help = true;
  } else if (name == "--yes") {
    o.yes = true;
  } else if (name == "--exit") {
    o.exit = true;
  } else if (name == "--daemon") {
    KVD_ASSIGN_OR_RETURN(const std::string text, arg.Value());
    o.daemons.push_back(text);
  } else if (name == "-o" || name == "--output") {
    const absl::StatusOr<std::string> form = arg.Value();
    KVD_RETURN_IF_ERROR(form.status());
    if (*form != "table" && *form != "json") return Bad(name, *form, "table or json");
    o.output = *form == "json" ? OutputForm::kJson : OutputForm::kTable;
  } else if (name == "--timeout") {
    KVD_ASSIGN_OR_RETURN(o.timeout, arg.DurationValue());
  } else if (name == "--interval") {
    KVD_ASSIGN_OR_RETURN(o.interval, arg.DurationValue());
  } else if (name == "--drain-timeout") {
    KVD_ASSIGN_OR_RETURN(o.drain_timeout, arg.DurationValue());
  } else if (name == "--count") {
    KVD_ASSIGN_OR_RETURN(o.count, arg.Number(0, INT64_MAX));
  } else if (name == "--max-pages") {
    KVD_ASSIGN_OR_RETURN(o.max_pages, arg.Number(1, 65536));
  } else if (name.rfind("-", 0) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("unknown flag ", name, "; see locksctl --help"));
  } else if (o.verb.empty()) {
    o.verb = name;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("one verb only: '", o.verb, "' and '", name, "'"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LocksctlOptions> ParseLocksctl(const std::vector<std::string>& args,
                                              const char* env_daemons) {
  LocksctlOptions o;
  Arguments arg(args);
  while (arg.Next()) KVD_RETURN_IF_ERROR(Apply(arg, o));
  bool known = o.verb.empty();
  for (const Verb& verb : kVerbs) known = known || o.verb == verb.name;
  if (!known) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown verb '", o.verb, "'; see locksctl --help"));
  }
  if (o.help) return o;
  if (o.verb.empty()) return absl::InvalidArgumentError("give a verb; see locksctl --help");
  if (o.daemons.empty() && env_daemons != nullptr) {
    o.daemons = absl::StrSplit(env_daemons, absl::ByAnyChar(", "), absl::SkipEmpty());
  }
  if (o.daemons.empty()) o.daemons.push_back("127.0.0.1:7411");
  for (const std::string& daemon : o.daemons) {
    const absl::Status status = Address::Parse(daemon).status();
    if (!status.ok()) return Annotate(status, "--daemon");
  }
  const bool attaches = o.verb == "paths" || o.verb == "selftest";
  if (attaches && o.model.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(o.verb,
                                                   " needs --model (and, without certificates, "
                                                   "--tenant): see `locksctl status`"));
  }
  if (o.verb == "drain" && !o.yes) {
    return absl::InvalidArgumentError("drain stops a daemon's work: add --yes to really do it");
  }
  return o;
}

std::string LocksctlHelp(const std::string& verb) {
  std::string text;
  for (const Verb& v : kVerbs) {
    if (verb == v.name) {
      text = absl::StrCat("locksctl ", v.name, ": ", v.summary, "\n\n", v.details, "\n");
    }
  }
  if (text.empty()) {
    text = "locksctl <verb> [flags]: looks at and steers locks-kvd daemons\n\n";
    for (const Verb& v : kVerbs) absl::StrAppend(&text, "  ", v.name, ": ", v.summary, "\n");
    absl::StrAppend(&text, "\nlocksctl <verb> --help says more.\n\n");
  }
  absl::StrAppend(
      &text,
      "Flags of every verb:\n"
      "  --daemon HOST:PORT  repeat for several; else $LOCKSCTL_DAEMONS (comma separated);\n"
      "                      else 127.0.0.1:7411\n"
      "  -o table|json       form of the output; the JSON form is a contract\n"
      "  --timeout D         of each call; 5s by default\n"
      "  --ca F --cert F --key F   PEM files; none: no TLS\n"
      "Exit codes: 0 ok, 1 check failed, 2 usage, 3 unreachable.\n");
  return text;
}

}  // namespace kvd
