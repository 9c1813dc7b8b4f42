// Takes DNS messages apart (RFC 1035, RFC 2782): what a resolver answered to a question for A, AAAA
// or SRV records.
//
// Answers come over UDP from whoever is fast enough, so nothing in them is trusted: lengths are
// checked against the message, names are expanded by the C library's bounded routine, and what is
// malformed is a typed error. Thread safety: pure functions.

#ifndef LOCKS_KVD_PROTO_DNS_ANSWER_H_
#define LOCKS_KVD_PROTO_DNS_ANSWER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/address.h"

namespace kvd {

enum class DnsType : uint16_t { kA = 1, kAaaa = 28, kSrv = 33 };

inline constexpr size_t kMaxDnsMessageBytes = 65535;

// True if `answer` is a response with the id and, letters' case aside, the question of `query`, a
// message with one question and nothing after it. All else is somebody else's message.
bool IsAnswerTo(std::span<const uint8_t> query, std::span<const uint8_t> answer);

// True if the message says that it was cut: ask again over TCP. REQUIRES: IsAnswerTo.
bool IsCut(std::span<const uint8_t> answer);

// The records of `type` in the answer section, in their order: an A or AAAA record as its address
// with port `port`, an SRV record as its target in lower case, without the last dot, and its port.
// Aliases (CNAME) are passed over: the resolver followed them. An SRV target "." is no service and
// left out. Empty if the name has no such records. Errors: kNotFound, no such name; kUnavailable,
// the server failed or refused; kInvalidArgument, malformed or cut.
absl::StatusOr<std::vector<Address>> ParseDnsAnswer(std::span<const uint8_t> answer, DnsType type,
                                                    uint16_t port);

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_DNS_ANSWER_H_
