// A child process that is spoken to by lines on its standard input and answers each with a line on
// its standard output; it can be frozen.
//
// Thread safety: compatible. The child is killed with the object, and with the process that started
// it.

#ifndef LOCKS_KVD_TESTS_SUPPORT_LINE_PROCESS_H_
#define LOCKS_KVD_TESTS_SUPPORT_LINE_PROCESS_H_

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/check.h"

namespace kvd::testing {

class LineProcess {
 public:
  explicit LineProcess(const std::vector<std::string>& words) {
    int in[2], out[2];
    KVD_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
    std::vector<char*> argv;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(in[0], STDIN_FILENO);
      dup2(out[1], STDOUT_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    KVD_CHECK(pid_ > 0);
    close(in[0]);
    close(out[1]);
    commands_ = in[1];
    answers_ = fdopen(out[0], "r");
  }
  ~LineProcess() {
    close(commands_);
    fclose(answers_);
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  LineProcess(const LineProcess&) = delete;
  LineProcess& operator=(const LineProcess&) = delete;

  void Say(const std::string& command) {
    const std::string line = command + "\n";
    KVD_CHECK(write(commands_, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
  }
  std::string Hear() {
    std::array<char, 256> line;
    if (fgets(line.data(), line.size(), answers_) == nullptr) return "the process ended";
    return std::string(line.data(), std::strcspn(line.data(), "\n"));
  }
  std::string Ask(const std::string& command) {
    Say(command);
    return Hear();
  }
  void Freeze() {
    int status = 0;
    KVD_CHECK(kill(pid_, SIGSTOP) == 0 && waitpid(pid_, &status, WUNTRACED) == pid_ &&
              WIFSTOPPED(status));
  }
  // Waits until the process is really gone.
  void Kill() {
    KVD_CHECK(kill(pid_, SIGKILL) == 0 &&
              waitid(P_PID, static_cast<id_t>(pid_), nullptr, WEXITED | WNOWAIT) == 0);
  }
  void Thaw() { KVD_CHECK(kill(pid_, SIGCONT) == 0); }

 private:
  pid_t pid_ = -1;
  int commands_ = -1;
  FILE* answers_ = nullptr;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_LINE_PROCESS_H_
