#include "client/locksctl_options.h"

#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/locksctl_context.h"
#include "client/locksctl_table.h"
#include "proto/address.h"
#include "proto/status.h"

namespace kvd {
namespace {

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

struct Parsed {
  LocksctlOptions options;
  std::optional<std::string> context_file;
};

// True if `arg` was a flag without a value and is set.
bool ApplySwitch(const std::string& name, LocksctlOptions& o) {
  const std::pair<const char*, bool*> switches[] = {{"--help", &o.help},
                                                    {"-h", &o.help},
                                                    {"--yes", &o.yes},
                                                    {"--exit", &o.exit},
                                                    {"--watch", &o.watch}};
  for (const auto& [flag, target] : switches) {
    if (name != flag) continue;
    *target = true;
    return true;
  }
  return false;
}

// The target of a flag whose value is text; null for any other argument.
std::string* TextTarget(const std::string& name, LocksctlOptions& o) {
  const std::pair<const char*, std::string*> texts[] = {{"--tenant", &o.tenant},
                                                        {"--model", &o.model},
                                                        {"--weights-id", &o.weights_id},
                                                        {"--rope", &o.rope},
                                                        {"--salt", &o.salt},
                                                        {"--extra", &o.extra},
                                                        {"--token-file", &o.token_file},
                                                        {"--out", &o.out},
                                                        {"--ca", &o.tls.ca_file},
                                                        {"--cert", &o.tls.certificate_file},
                                                        {"--key", &o.tls.key_file}};
  for (const auto& [flag, target] : texts) {
    if (name == flag) return target;
  }
  return nullptr;
}

absl::Status Apply(Arguments& arg, Parsed& parsed) {
  LocksctlOptions& o = parsed.options;
  const std::string& name = arg.name();
  if (ApplySwitch(name, o)) return absl::OkStatus();
  if (std::string* target = TextTarget(name, o); target != nullptr) {
    KVD_ASSIGN_OR_RETURN(*target, arg.Value());
  } else if (name == "--daemon" || name == "--host") {
    KVD_ASSIGN_OR_RETURN(std::string text, arg.Value());
    (name == "--daemon" ? o.daemons : o.hosts).push_back(std::move(text));
  } else if (name == "--context") {
    KVD_ASSIGN_OR_RETURN(parsed.context_file, arg.Value());
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
  } else if (name == "--days") {
    KVD_ASSIGN_OR_RETURN(o.days, arg.Number(1, 36500));
  } else if (name == "--memlock") {
    KVD_ASSIGN_OR_RETURN(o.memlock, arg.Number(1, INT64_MAX));
  } else if (name.rfind("-", 0) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("unknown flag ", name, "; see locksctl --help"));
  } else if (o.verb.empty()) {
    o.verb = name;
  } else {
    o.arguments.push_back(name);
  }
  return absl::OkStatus();
}

absl::Status CheckArguments(const Verb& verb, const LocksctlOptions& o) {
  const std::string usage = absl::StrCat("usage: locksctl ", verb.usage);
  const std::vector<std::string> words = absl::StrSplit(verb.second_word, '|', absl::SkipEmpty());
  size_t given = o.arguments.size();
  if (!words.empty()) {
    bool known = false;
    for (const std::string& word : words) known = known || (given > 0 && o.arguments[0] == word);
    if (!known) return absl::InvalidArgumentError(usage);
    --given;
  }
  const bool named_by_file = verb.takes_sequence && !o.token_file.empty();
  if (given > verb.max_arguments || (given < verb.min_arguments && !named_by_file)) {
    return absl::InvalidArgumentError(absl::StrCat(
        o.verb, ": unexpected number of arguments",
        given > verb.max_arguments ? absl::StrCat(" ('", o.arguments.back(), "')") : "", "; ",
        usage));
  }
  if (verb.needs_arena && o.model.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        o.verb, " needs --model (and, without certificates, --tenant): see `locksctl status`"));
  }
  if (verb.destructive && !o.yes) {
    return absl::InvalidArgumentError(
        absl::StrCat(o.verb, " changes what a daemon does: add --yes to really do it"));
  }
  if ((o.watch || o.interval > absl::ZeroDuration()) && !verb.repeats) {
    return absl::InvalidArgumentError(absl::StrCat(o.verb, " is not repeated: drop --watch"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LocksctlOptions> ParseLocksctl(const std::vector<std::string>& args,
                                              const LocksctlEnvironment& environment) {
  Parsed parsed;
  LocksctlOptions& o = parsed.options;
  Arguments arg(args);
  while (arg.Next()) KVD_RETURN_IF_ERROR(Apply(arg, parsed));
  const Verb* verb = FindVerb(o.verb);
  if (verb == nullptr && !o.verb.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown verb '", o.verb, "'; see locksctl --help"));
  }
  if (o.help) return o;
  if (verb == nullptr) return absl::InvalidArgumentError("give a verb; see locksctl --help");
  if (o.daemons.empty() && environment.daemons != nullptr) {
    o.daemons = absl::StrSplit(environment.daemons, absl::ByAnyChar(", "), absl::SkipEmpty());
  }
  if (parsed.context_file != "none") {
    const bool named = parsed.context_file.has_value();
    KVD_RETURN_IF_ERROR(ApplyContext(named ? *parsed.context_file : environment.context_file,
                                     /*must_exist=*/named, &o));
  }
  if (o.daemons.empty()) o.daemons.push_back("127.0.0.1:7411");
  for (const std::string& daemon : o.daemons) {
    const absl::Status status = Address::Parse(daemon).status();
    if (!status.ok()) return Annotate(status, "--daemon");
  }
  KVD_RETURN_IF_ERROR(CheckArguments(*verb, o));
  return o;
}

}  // namespace kvd
