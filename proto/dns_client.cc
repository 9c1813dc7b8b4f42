#include "proto/dns_client.h"

#include <arpa/nameser.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <resolv.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/clock.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr int kRounds = 2;  // over all servers
constexpr absl::Duration kUdpWait = absl::Seconds(1);
constexpr absl::Duration kTcpWait = absl::Seconds(2);

using Bytes = std::vector<uint8_t>;

// Deadlines are times of the steady clock: a jump of the wall clock neither ends nor lengthens a
// wait.
absl::Duration Now() { return SteadyClock().Now(); }

// What /etc/resolv.conf says, and the state that res_nmkquery wants.
class ResolverState {
 public:
  ResolverState() { ok_ = res_ninit(&state_) == 0; }
  ~ResolverState() {
    if (ok_) res_nclose(&state_);
  }
  ResolverState(const ResolverState&) = delete;
  ResolverState& operator=(const ResolverState&) = delete;
  bool ok() const { return ok_; }

  std::vector<sockaddr_storage> Servers() const {
    std::vector<sockaddr_storage> servers;
    for (int i = 0; i < std::min(state_.nscount, MAXNS); ++i) {
      sockaddr_storage server = {};
      // The list holds IPv4; an entry without a family stands for an IPv6 server beside it.
      const sockaddr_in6* v6 = state_._u._ext.nsaddrs[i];
      if (state_.nsaddr_list[i].sin_family == AF_INET) {
        std::memcpy(&server, &state_.nsaddr_list[i], sizeof(sockaddr_in));
      } else if (v6 != nullptr && v6->sin6_family == AF_INET6) {
        std::memcpy(&server, v6, sizeof(*v6));
      } else {
        continue;
      }
      servers.push_back(server);
    }
    return servers;
  }

  // The names to ask for, in order: enough dots mean that the name itself comes first.
  std::vector<std::string> Completions(const std::string& name) const {
    if (name.ends_with('.')) return {name};
    std::vector<std::string> names;
    for (char* const* domain = state_.dnsrch; *domain != nullptr; ++domain) {
      names.push_back(absl::StrCat(name, ".", *domain));
    }
    const bool itself_first =
        static_cast<unsigned>(std::count(name.begin(), name.end(), '.')) >= state_.ndots;
    names.insert(itself_first ? names.begin() : names.end(), name);
    return names;
  }

  absl::StatusOr<Bytes> MakeQuery(const std::string& name, DnsType type) {
    Bytes query(NS_PACKETSZ);
    const int size =
        res_nmkquery(&state_, ns_o_query, name.c_str(), ns_c_in, static_cast<int>(type), nullptr, 0,
                     nullptr, query.data(), static_cast<int>(query.size()));
    if (size < 0) return absl::InvalidArgumentError(absl::StrCat("'", name, "' is no DNS name"));
    query.resize(static_cast<size_t>(size));
    return query;
  }

 private:
  struct __res_state state_ = {};
  bool ok_ = false;
};

absl::Status Unreachable(const char* what) {
  return absl::UnavailableError(absl::StrCat("DNS server: ", what, ": ", std::strerror(errno)));
}

// One question to one server. Sockets do not wait by themselves: every wait has a deadline and ends
// when `wake` is readable.
class Exchange {
 public:
  Exchange(const sockaddr_storage& server, int wake, const Bytes& query)
      : server_(server), wake_(wake), query_(query) {}

  absl::StatusOr<Bytes> OverUdp(absl::Duration deadline) {
    KVD_RETURN_IF_ERROR(Connect(SOCK_DGRAM, deadline));
    if (send(socket_.get(), query_.data(), query_.size(), MSG_NOSIGNAL) < 0)
      return Unreachable("send");
    Bytes answer(kMaxDnsMessageBytes);
    while (true) {
      KVD_RETURN_IF_ERROR(Wait(POLLIN, deadline));
      const ssize_t got = recv(socket_.get(), answer.data(), answer.size(), 0);
      if (got < 0 && errno == EAGAIN) continue;
      if (got < 0) return Unreachable("receive");
      const std::span<const uint8_t> message(answer.data(), static_cast<size_t>(got));
      if (IsAnswerTo(query_, message)) return Bytes(message.begin(), message.end());
    }
  }

  absl::StatusOr<Bytes> OverTcp(absl::Duration deadline) {
    KVD_RETURN_IF_ERROR(Connect(SOCK_STREAM, deadline));
    Bytes framed = {static_cast<uint8_t>(query_.size() >> 8), static_cast<uint8_t>(query_.size())};
    framed.insert(framed.end(), query_.begin(), query_.end());
    for (size_t sent = 0; sent < framed.size();) {
      KVD_RETURN_IF_ERROR(Wait(POLLOUT, deadline));
      const ssize_t some =
          send(socket_.get(), framed.data() + sent, framed.size() - sent, MSG_NOSIGNAL);
      if (some < 0 && errno == EAGAIN) continue;
      if (some < 0) return Unreachable("send");
      sent += static_cast<size_t>(some);
    }
    std::array<uint8_t, 2> size = {};
    KVD_RETURN_IF_ERROR(ReadAll(size, deadline));
    Bytes answer(static_cast<size_t>(size[0] << 8 | size[1]));
    KVD_RETURN_IF_ERROR(ReadAll(answer, deadline));
    if (!IsAnswerTo(query_, answer))
      return absl::InvalidArgumentError("DNS server: answers another question");
    return answer;
  }

 private:
  absl::Status Connect(int type, absl::Duration deadline) {
    socket_ = UniqueFd(socket(server_.ss_family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (socket_.get() < 0) return Unreachable("socket");
    const socklen_t size =
        server_.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (connect(socket_.get(), reinterpret_cast<const sockaddr*>(&server_), size) == 0)
      return absl::OkStatus();
    if (errno != EINPROGRESS) return Unreachable("connect");
    KVD_RETURN_IF_ERROR(Wait(POLLOUT, deadline));
    socklen_t error_size = sizeof(errno);
    if (getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &errno, &error_size) != 0 || errno != 0) {
      return Unreachable("connect");
    }
    return absl::OkStatus();
  }

  absl::Status ReadAll(std::span<uint8_t> into, absl::Duration deadline) {
    while (!into.empty()) {
      KVD_RETURN_IF_ERROR(Wait(POLLIN, deadline));
      const ssize_t some = recv(socket_.get(), into.data(), into.size(), 0);
      if (some < 0 && errno == EAGAIN) continue;
      if (some < 0) return Unreachable("receive");
      if (some == 0) return absl::UnavailableError("DNS server: closed within an answer");
      into = into.subspan(static_cast<size_t>(some));
    }
    return absl::OkStatus();
  }

  absl::Status Wait(short events, absl::Duration deadline) const {
    pollfd waits[2] = {{socket_.get(), events, 0}, {wake_, POLLIN, 0}};
    while (true) {
      const int64_t left =
          absl::ToInt64Milliseconds(absl::Ceil(deadline - Now(), absl::Milliseconds(1)));
      const int ready =
          left <= 0 ? 0 : poll(waits, 2, static_cast<int>(std::min<int64_t>(left, 60000)));
      if (ready < 0 && errno == EINTR) continue;
      if (ready < 0) return Unreachable("poll");
      if (waits[1].revents != 0) return absl::CancelledError("DNS question cancelled");
      if (ready > 0) return absl::OkStatus();
      if (left <= 0) return absl::UnavailableError("DNS server: no answer");
    }
  }

  const sockaddr_storage& server_;
  const int wake_;
  const Bytes& query_;
  UniqueFd socket_;
};

// A server that fails or refuses is passed over while another may know.
absl::StatusOr<Bytes> AskServers(std::span<const sockaddr_storage> servers, int wake,
                                 const Bytes& query, absl::Duration deadline) {
  absl::StatusOr<Bytes> last = absl::UnavailableError("DNS: no server is configured");
  for (int round = 0; round < kRounds; ++round) {
    for (const sockaddr_storage& server : servers) {
      if (Now() >= deadline) return last;
      Exchange exchange(server, wake, query);
      last = exchange.OverUdp(std::min(deadline, Now() + kUdpWait));
      if (last.ok() && IsCut(*last)) last = exchange.OverTcp(std::min(deadline, Now() + kTcpWait));
      if (absl::IsCancelled(last.status())) return last;
      if (!last.ok()) continue;
      const int code = (*last)[3] & 15;
      if (code == ns_r_noerror || code == ns_r_nxdomain) return last;
    }
  }
  return last;
}

absl::StatusOr<sockaddr_storage> ServerOf(const std::string& text) {
  KVD_ASSIGN_OR_RETURN(const Address address, Address::Parse(text));
  addrinfo hints = {};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(absl::StrCat("DNS server '", text, "': ", gai_strerror(error),
                                                   ": write its address, not a name"));
  }
  sockaddr_storage server = {};
  std::memcpy(&server, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return server;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DnsClient>> DnsClient::Make(
    const std::vector<std::string>& servers) {
  if (servers.size() > static_cast<size_t>(kMaxDnsServers)) {
    return absl::InvalidArgumentError(
        absl::StrCat(servers.size(), " DNS servers, expected at most ", kMaxDnsServers));
  }
  std::vector<sockaddr_storage> parsed;
  for (const std::string& text : servers) {
    KVD_ASSIGN_OR_RETURN(const sockaddr_storage server, ServerOf(text));
    parsed.push_back(server);
  }
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake.get() < 0)
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  return std::unique_ptr<DnsClient>(new DnsClient(std::move(parsed), std::move(wake)));
}

absl::StatusOr<std::vector<Address>> DnsClient::Ask(const std::string& name, DnsType type,
                                                    uint16_t port, absl::Duration timeout) {
  const absl::Duration deadline = Now() + timeout;
  ResolverState resolver;
  if (!resolver.ok()) return absl::UnavailableError("DNS: /etc/resolv.conf cannot be read");
  const std::vector<sockaddr_storage> servers = servers_.empty() ? resolver.Servers() : servers_;
  absl::StatusOr<std::vector<Address>> none =
      absl::NotFoundError(absl::StrCat("DNS: no such name: ", name));
  for (const std::string& completed : resolver.Completions(name)) {
    KVD_ASSIGN_OR_RETURN(const Bytes query, resolver.MakeQuery(completed, type));
    absl::StatusOr<Bytes> answer = AskServers(servers, wake_.get(), query, deadline);
    if (!answer.ok()) return Annotate(answer.status(), completed);
    absl::StatusOr<std::vector<Address>> found = ParseDnsAnswer(*answer, type, port);
    if (found.ok() && !found->empty()) return found;
    if (absl::IsNotFound(found.status())) continue;
    if (!found.ok()) return Annotate(found.status(), completed);
    none = std::move(found);
  }
  return none;
}

void DnsClient::Cancel() {
  const uint64_t one = 1;
  // An eventfd takes a write of 8 bytes; if it is full, it is readable already.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

}  // namespace kvd
