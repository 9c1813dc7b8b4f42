// Every verb of locksctl: its help, what it takes, and the function that does it.
//
// Thread safety: constants and pure functions.

#ifndef LOCKS_KVD_CLIENT_LOCKSCTL_TABLE_H_
#define LOCKS_KVD_CLIENT_LOCKSCTL_TABLE_H_

#include <cstddef>
#include <span>
#include <string>

#include "client/locksctl_options.h"

namespace kvd {

struct Verb {
  const char* name;
  const char* usage;    // behind "locksctl"
  const char* summary;  // one line
  const char* details;  // flags of its own and what its exit code means
  ExitCode (*run)(const LocksctlOptions& options);
  const char* second_word = "";  // words of which one must follow, "a|b"
  size_t min_arguments = 0;      // behind the second word
  size_t max_arguments = 0;
  bool takes_sequence = false;  // --token-file stands for the arguments
  bool needs_arena = false;     // --model
  bool destructive = false;     // --yes
  bool repeats = false;         // --watch, --interval
};

std::span<const Verb> Verbs();
// Null for an unknown name.
const Verb* FindVerb(const std::string& name);

// Help of one verb, or of the program for "".
std::string LocksctlHelp(const std::string& verb);

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_LOCKSCTL_TABLE_H_
