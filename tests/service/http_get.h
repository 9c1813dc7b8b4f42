// The smallest HTTP client that a test of the metrics endpoint needs.

#ifndef LOCKS_KVD_TESTS_SERVICE_HTTP_GET_H_
#define LOCKS_KVD_TESTS_SERVICE_HTTP_GET_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <string>

namespace kvd::testing {

// The answer to GET `path` at 127.0.0.1:`port`, headers included; empty if nobody answers.
inline std::string HttpGet(uint16_t port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\nHost: x\r\n\r\n";
    char buffer[65536];
    ssize_t got = send(fd, request.data(), request.size(), 0);
    while (got > 0 && (got = recv(fd, buffer, sizeof(buffer), 0)) > 0) {
      answer.append(buffer, static_cast<size_t>(got));
    }
  }
  close(fd);
  return answer;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SERVICE_HTTP_GET_H_
