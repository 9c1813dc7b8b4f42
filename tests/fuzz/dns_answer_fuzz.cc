// Fuzz target: a DNS message. The first byte chooses the type that is asked for. What comes out
// must be addresses that can be written and read again.

#include <span>
#include <vector>

#include "kernels/check.h"
#include "proto/dns_answer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using kvd::DnsType;
  if (size == 0) return 0;
  constexpr DnsType kTypes[] = {DnsType::kA, DnsType::kAaaa, DnsType::kSrv};
  const std::vector<uint8_t> message(data + 1, data + size);
  const auto found = kvd::ParseDnsAnswer(message, kTypes[data[0] % 3], 7411);
  if (found.ok()) {
    for (const kvd::Address& address : *found)
      KVD_CHECK(kvd::Address::Parse(address.ToString()).value() == address);
  }
  // Its first half as a query, and itself.
  const std::span<const uint8_t> all(message);
  const bool is_answer = kvd::IsAnswerTo(all.first(all.size() / 2), all);
  KVD_CHECK(!is_answer || (all.size() > 24 && all[0] == message[0]));
  return 0;
}
