#include "client/locksctl_net.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr size_t kMaxBody = size_t{16} << 20;

// 0, or why not.
int ConnectOne(int fd, const addrinfo& address, absl::Duration timeout) {
  if (connect(fd, address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd poll_fd = {fd, POLLOUT, 0};
  const int ready = poll(&poll_fd, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout)));
  if (ready == 0) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof(error);
  if (ready < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
}

}  // namespace

absl::StatusOr<UniqueFd> ConnectTcp(const Address& address, absl::Duration timeout) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failed =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (failed != 0) {
    return absl::UnavailableError(absl::StrCat(address.ToString(), ": ", gai_strerror(failed)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> all(found, freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    UniqueFd fd(socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd.get() < 0) continue;
    error = ConnectOne(fd.get(), *each, timeout);
    if (error != 0) continue;
    fcntl(fd.get(), F_SETFL, 0);
    const timeval limit = absl::ToTimeval(timeout);
    setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    return fd;
  }
  return absl::UnavailableError(absl::StrCat(address.ToString(), ": ", std::strerror(error)));
}

absl::StatusOr<std::string> HttpGet(const Address& address, const std::string& path,
                                    absl::Duration timeout) {
  KVD_ASSIGN_OR_RETURN(const UniqueFd fd, ConnectTcp(address, timeout));
  const std::string request =
      absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: ", address.ToString(), "\r\n\r\n");
  std::string answer;
  char bytes[65536];
  ssize_t got = send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL);
  while (got > 0 && answer.size() <= kMaxBody &&
         (got = recv(fd.get(), bytes, sizeof(bytes), 0)) > 0) {
    answer.append(bytes, static_cast<size_t>(got));
  }
  const size_t body = answer.find("\r\n\r\n");
  const std::string status = answer.substr(0, answer.find('\r'));
  if (got != 0 || body == std::string::npos || !absl::StrContains(status, " 200")) {
    return absl::FailedPreconditionError(absl::StrCat(
        address.ToString(), path, ": expected HTTP 200 and a whole answer, got '", status, "'"));
  }
  return answer.substr(body + 4);
}

}  // namespace kvd
