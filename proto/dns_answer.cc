#include "proto/dns_answer.h"

#include <arpa/inet.h>
#include <arpa/nameser.h>

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "proto/status.h"

namespace kvd {
namespace {

constexpr size_t kHeaderBytes = 12;
constexpr size_t kSrvFixedBytes = 6;  // priority, weight, port; then the target

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("DNS answer: ", what));
}

absl::StatusOr<Address> AddressOf(const ns_rr& record, int family, size_t bytes, uint16_t port) {
  if (ns_rr_rdlen(record) != bytes) {
    return Malformed(
        absl::StrCat("address record of ", ns_rr_rdlen(record), " bytes, expected ", bytes));
  }
  char text[INET6_ADDRSTRLEN];
  if (inet_ntop(family, ns_rr_rdata(record), text, sizeof(text)) == nullptr) {
    return Malformed("address record that cannot be written");
  }
  return Address{text, port};
}

// An address with an empty host for the target ".".
absl::StatusOr<Address> ServiceOf(const ns_msg& message, const ns_rr& record) {
  const size_t bytes = ns_rr_rdlen(record);
  if (bytes <= kSrvFixedBytes) return Malformed(absl::StrCat("SRV record of ", bytes, " bytes"));
  const uint8_t* target = ns_rr_rdata(record) + kSrvFixedBytes;
  char name[NS_MAXDNAME];
  const int used =
      ns_name_uncompress(ns_msg_base(message), ns_msg_end(message), target, name, sizeof(name));
  if (used < 0) return Malformed("SRV target that is no name");
  if (static_cast<size_t>(used) != bytes - kSrvFixedBytes) {
    return Malformed(absl::StrCat("SRV target of ", used, " bytes in ", bytes - kSrvFixedBytes));
  }
  std::string host = absl::AsciiStrToLower(name);
  if (host.empty() || host == ".") return Address{};
  const uint16_t port = static_cast<uint16_t>((target[-2] << 8) | target[-1]);
  // What a host name may hold is Address's to say.
  KVD_ASSIGN_OR_RETURN(Address address, Address::Parse(absl::StrCat(host, ":", port)));
  return address;
}

absl::Status StatusOfCode(int code) {
  switch (code) {
    case ns_r_noerror:
      return absl::OkStatus();
    case ns_r_nxdomain:
      return absl::NotFoundError("DNS: no such name");
    default:
      return absl::UnavailableError(absl::StrCat("DNS: the server answers with code ", code));
  }
}

}  // namespace

bool IsAnswerTo(std::span<const uint8_t> query, std::span<const uint8_t> answer) {
  if (query.size() <= kHeaderBytes || answer.size() < query.size()) return false;
  const bool is_response = (answer[2] & 0x80) != 0 && ((answer[2] >> 3) & 15) == ns_o_query;
  const bool one_question = answer[4] == 0 && answer[5] == 1;
  if (!is_response || !one_question || answer[0] != query[0] || answer[1] != query[1]) return false;
  // Lengths of labels are below 64 and no letters, so lower case changes none.
  return std::equal(
      query.begin() + kHeaderBytes, query.end(), answer.begin() + kHeaderBytes,
      [](uint8_t a, uint8_t b) { return absl::ascii_tolower(a) == absl::ascii_tolower(b); });
}

bool IsCut(std::span<const uint8_t> answer) { return (answer[2] & 0x02) != 0; }

absl::StatusOr<std::vector<Address>> ParseDnsAnswer(std::span<const uint8_t> answer, DnsType type,
                                                    uint16_t port) {
  if (answer.size() < kHeaderBytes || answer.size() > kMaxDnsMessageBytes) {
    return Malformed(absl::StrCat(answer.size(), " bytes, expected 12 to ", kMaxDnsMessageBytes));
  }
  KVD_RETURN_IF_ERROR(StatusOfCode(answer[3] & 15));
  if (IsCut(answer)) return Malformed("cut short");
  ns_msg message;
  if (ns_initparse(answer.data(), static_cast<int>(answer.size()), &message) != 0) {
    return Malformed("its records do not fill it");
  }
  std::vector<Address> found;
  for (int i = 0; i < ns_msg_count(message, ns_s_an); ++i) {
    ns_rr record;
    if (ns_parserr(&message, ns_s_an, i, &record) != 0)
      return Malformed(absl::StrCat("record ", i));
    if (ns_rr_class(record) != ns_c_in || ns_rr_type(record) != static_cast<uint16_t>(type))
      continue;
    Address address;
    switch (type) {
      case DnsType::kA: {
        KVD_ASSIGN_OR_RETURN(address, AddressOf(record, AF_INET, NS_INADDRSZ, port));
        break;
      }
      case DnsType::kAaaa: {
        KVD_ASSIGN_OR_RETURN(address, AddressOf(record, AF_INET6, NS_IN6ADDRSZ, port));
        break;
      }
      case DnsType::kSrv: {
        KVD_ASSIGN_OR_RETURN(address, ServiceOf(message, record));
        break;
      }
    }
    if (!address.host.empty()) found.push_back(std::move(address));
  }
  return found;
}

}  // namespace kvd
