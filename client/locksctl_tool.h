// Runs a program of the system for locksctl: no shell, so nothing in an argument is interpreted.
//
// Thread safety: safe. Blocking: until the program ends.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_TOOL_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_TOOL_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvd {

// Standard output of `arguments[0]`, found in PATH, with `input` on its standard input.
// kNotFound: there is no such program. kFailedPrecondition: it failed; the message holds the last
// line that it wrote to standard error.
absl::StatusOr<std::string> RunTool(const std::vector<std::string>& arguments,
                                    const std::string& input = "");

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_TOOL_H_
