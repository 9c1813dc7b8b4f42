#include "client/locksctl_tool.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/arena_memory.h"

extern char** environ;

namespace kvd {
namespace {

// Files in memory instead of pipes: nothing to read and write at the same time.
absl::StatusOr<UniqueFd> MemoryFile(const std::string& content) {
  UniqueFd fd(memfd_create("locksctl", MFD_CLOEXEC));
  const bool written = fd.get() >= 0 && write(fd.get(), content.data(), content.size()) ==
                                            static_cast<ssize_t>(content.size());
  if (!written || lseek(fd.get(), 0, SEEK_SET) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a file in memory could not be made: ", std::strerror(errno)));
  }
  return fd;
}

std::string ReadAll(const UniqueFd& fd) {
  std::string text;
  char bytes[4096];
  lseek(fd.get(), 0, SEEK_SET);
  for (ssize_t n; (n = read(fd.get(), bytes, sizeof(bytes))) > 0;) {
    text.append(bytes, static_cast<size_t>(n));
  }
  return text;
}

std::string LastLine(absl::string_view text) {
  const std::vector<std::string> lines = absl::StrSplit(absl::StripSuffix(text, "\n"), '\n');
  return lines.back();
}

}  // namespace

absl::StatusOr<std::string> RunTool(const std::vector<std::string>& arguments,
                                    const std::string& input) {
  absl::StatusOr<UniqueFd> in = MemoryFile(input);
  absl::StatusOr<UniqueFd> out = MemoryFile("");
  absl::StatusOr<UniqueFd> err = MemoryFile("");
  for (const auto* file : {&in, &out, &err}) {
    if (!file->ok()) return file->status();
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in->get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out->get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err->get(), STDERR_FILENO);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error == ENOENT) {
    return absl::NotFoundError(
        absl::StrCat(arguments[0], ": there is no such program in PATH: install it"));
  }
  if (error != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(arguments[0], ": could not be started: ", std::strerror(error)));
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return ReadAll(*out);
  return absl::FailedPreconditionError(
      absl::StrCat(arguments[0], " failed: ", LastLine(ReadAll(*err))));
}

}  // namespace kvd
