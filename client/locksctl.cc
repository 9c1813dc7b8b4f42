// locksctl: looks at and steers locks-kvd daemons from the command line.

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "client/locksctl_daemon.h"
#include "client/locksctl_options.h"
#include "client/locksctl_table.h"
#include "client/locksctl_verbs.h"

namespace {

kvd::LocksctlEnvironment ReadEnvironment() {
  kvd::LocksctlEnvironment environment;
  environment.daemons = std::getenv("LOCKSCTL_DAEMONS");
  const char* home = std::getenv("HOME");
  if (home != nullptr) {
    environment.context_file = std::string(home) + "/.config/locks-kvd/context.textproto";
  }
  return environment;
}

kvd::ExitCode Run(const std::vector<std::string>& args) {
  using kvd::ExitCode;
  const auto options = kvd::ParseLocksctl(args, ReadEnvironment());
  if (!options.ok()) {
    std::cerr << "locksctl: " << options.status().message() << "\n";
    return ExitCode::kUsage;
  }
  if (options->help) {
    std::cout << kvd::LocksctlHelp(options->verb);
    return ExitCode::kOk;
  }
  const kvd::Verb& verb = *kvd::FindVerb(options->verb);
  const bool repeats = options->watch || options->interval > absl::ZeroDuration();
  if (!repeats || verb.run == kvd::RunTop) return verb.run(*options);
  ExitCode code = ExitCode::kOk;
  for (kvd::Rounds rounds(*options, repeats); rounds.Next();) {
    code = kvd::Worse(code, verb.run(*options));
  }
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  return static_cast<int>(Run(std::vector<std::string>(argv + 1, argv + argc)));
}
