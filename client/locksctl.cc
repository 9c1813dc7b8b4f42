// locksctl: looks at and steers locks-kvd daemons from the command line.

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "client/locksctl_options.h"
#include "client/locksctl_verbs.h"

namespace {

kvd::ExitCode Run(const std::vector<std::string>& args) {
  using kvd::ExitCode;
  const auto options = kvd::ParseLocksctl(args, std::getenv("LOCKSCTL_DAEMONS"));
  if (!options.ok()) {
    std::cerr << "locksctl: " << options.status().message() << "\n";
    return ExitCode::kUsage;
  }
  if (options->help) {
    std::cout << kvd::LocksctlHelp(options->verb);
    return ExitCode::kOk;
  }
  if (options->verb == "status") return kvd::RunStatus(*options);
  if (options->verb == "paths") return kvd::RunPaths(*options);
  if (options->verb == "stat") return kvd::RunStat(*options);
  if (options->verb == "selftest") return kvd::RunSelftest(*options);
  return kvd::RunDrain(*options);
}

}  // namespace

int main(int argc, char** argv) {
  return static_cast<int>(Run(std::vector<std::string>(argv + 1, argv + argc)));
}
