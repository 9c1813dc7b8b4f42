#include "proto/address.h"

#include <arpa/inet.h>

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kvd {
namespace {

absl::Status Malformed(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("address '", text, "': ", why,
                                                 ": write host:port or [v6]:port, for example "
                                                 "127.0.0.1:7411 or [::1]:7411"));
}

bool IsHostName(absl::string_view host) {
  if (host.empty()) return false;
  for (const char c : host) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '-' && c != '_') {
      return false;
    }
  }
  return true;
}

// A zone ("fe80::1%eth0") is part of the host; what stands before it must be an IPv6 address.
bool IsV6(absl::string_view host) {
  const size_t zone = host.find('%');
  if (zone != absl::string_view::npos && zone + 1 == host.size()) return false;
  in6_addr parsed;
  return inet_pton(AF_INET6, std::string(host.substr(0, zone)).c_str(), &parsed) == 1;
}

}  // namespace

absl::StatusOr<Address> Address::Parse(absl::string_view text) {
  absl::string_view host;
  absl::string_view port;
  if (!text.empty() && text.front() == '[') {
    const size_t close = text.find(']');
    if (close == absl::string_view::npos) return Malformed(text, "'[' without ']'");
    host = text.substr(1, close - 1);
    if (close + 1 >= text.size() || text[close + 1] != ':') {
      return Malformed(text, "no ':port' after ']'");
    }
    port = text.substr(close + 2);
    if (!IsV6(host)) return Malformed(text, "not an IPv6 address between '[' and ']'");
  } else {
    const size_t colon = text.find(':');
    if (colon == absl::string_view::npos) return Malformed(text, "no port");
    if (text.find(':', colon + 1) != absl::string_view::npos) {
      return Malformed(text, "an IPv6 host needs brackets");
    }
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (!IsHostName(host)) return Malformed(text, "not a host name or IPv4 address");
  }
  // Digits only: SimpleAtoi alone would take a sign and spaces.
  uint32_t number = 0;
  for (const char c : port) {
    if (!absl::ascii_isdigit(static_cast<unsigned char>(c))) {
      return Malformed(text, "the port is not a number from 0 to 65535");
    }
  }
  if (!absl::SimpleAtoi(port, &number) || number > 65535) {
    return Malformed(text, "the port is not a number from 0 to 65535");
  }
  return Address{std::string(host), static_cast<uint16_t>(number)};
}

std::string Address::ToString() const {
  if (host.find(':') != std::string::npos) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

bool Address::IsLoopback() const {
  if (absl::EqualsIgnoreCase(host, "localhost")) return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) {
    return std::memcmp(&v6, &in6addr_loopback, sizeof(v6)) == 0;
  }
  return false;
}

}  // namespace kvd
