// Asks DNS servers one question at a time: UDP, then TCP for an answer that was cut. IPv4 and IPv6.
//
// Why not getaddrinfo or res_nsend: neither has a deadline that holds (a server that accepts a TCP
// connection and says nothing keeps them for ever), neither can be interrupted, and the first knows
// no SRV. Thread safety: one thread asks; Cancel from any.

#ifndef LOCKS_KVD_PROTO_DNS_CLIENT_H_
#define LOCKS_KVD_PROTO_DNS_CLIENT_H_

#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/address.h"
#include "proto/arena_memory.h"
#include "proto/dns_answer.h"

namespace kvd {

inline constexpr int kMaxDnsServers = 3;

class DnsClient {
 public:
  // `servers`: address:port, at most kMaxDnsServers; none: those of /etc/resolv.conf, read at each
  // question. Errors: kInvalidArgument.
  static absl::StatusOr<std::unique_ptr<DnsClient>> Make(const std::vector<std::string>& servers);
  DnsClient(const DnsClient&) = delete;
  DnsClient& operator=(const DnsClient&) = delete;

  // The records of `name`, as ParseDnsAnswer has them. A relative name is completed with the search
  // list of /etc/resolv.conf, as the C library does; the first completion that has records counts.
  // Blocking: up to `timeout`. Errors: as ParseDnsAnswer; kUnavailable, no server answered;
  // kCancelled; kInvalidArgument, not a name.
  absl::StatusOr<std::vector<Address>> Ask(const std::string& name, DnsType type, uint16_t port,
                                           absl::Duration timeout);

  // Ends the question in flight and all later ones.
  void Cancel();

 private:
  DnsClient(std::vector<sockaddr_storage> servers, UniqueFd wake)
      : servers_(std::move(servers)), wake_(std::move(wake)) {}

  const std::vector<sockaddr_storage> servers_;  // AF_INET or AF_INET6
  const UniqueFd wake_;                          // eventfd; readable once cancelled
};

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_DNS_CLIENT_H_
