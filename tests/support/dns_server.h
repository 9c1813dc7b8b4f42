// A DNS server in a thread of the test, on loopback, over UDP and TCP; and the messages that it
// sends.
//
// Thread safety: safe. Its answers come from a function of the test, so that it can lie in any way.

#ifndef LOCKS_KVD_TESTS_SUPPORT_DNS_SERVER_H_
#define LOCKS_KVD_TESTS_SUPPORT_DNS_SERVER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "proto/arena_memory.h"
#include "proto/dns_answer.h"

namespace kvd::testing {

using DnsBytes = std::vector<uint8_t>;
using DnsMessages = std::vector<DnsBytes>;

struct DnsRecord {
  DnsType type;
  DnsBytes data;
};
DnsRecord ARecord(const std::string& address);  // IPv4 or IPv6
DnsRecord SrvRecord(const std::string& target, uint16_t port);
// The target as `labels` followed by a compression pointer to `offset` in the message.
DnsRecord SrvRecordPointing(const std::string& labels, uint16_t offset, uint16_t port);

// A query as resolvers write it.
DnsBytes DnsQueryFor(const std::string& name, DnsType type, uint16_t id);
// The answer to `query`: its id and question, `code`, and the records, each named by a pointer to
// the question.
DnsBytes DnsAnswerTo(const DnsBytes& query, const std::vector<DnsRecord>& records, int code = 0,
                     bool cut = false);
std::string DnsNameIn(const DnsBytes& query);
DnsType DnsTypeIn(const DnsBytes& query);

class DnsServer {
 public:
  enum class Over { kUdp, kTcp };
  // The messages to send for a query; none: silence.
  using Answer = std::function<DnsMessages(const DnsBytes& query, Over over)>;

  // `host`: "127.0.0.1" or "::1". KVD_CHECKs that it can listen.
  DnsServer(const std::string& host, Answer answer);
  ~DnsServer();
  const std::string& address() const { return address_; }  // host:port
  void Set(Answer answer);
  int num_queries() const { return num_queries_.load(); }

 private:
  void Serve();
  void ServeUdp();
  void ServeTcp();
  DnsMessages AnswersTo(const DnsBytes& query, Over over);

  UniqueFd udp_;
  UniqueFd tcp_;
  UniqueFd stop_;  // eventfd
  std::string address_;
  std::mutex mutex_;  // of answer_
  Answer answer_;
  std::atomic<int> num_queries_{0};
  std::vector<UniqueFd> silent_;  // TCP peers that are left waiting
  std::thread thread_;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SUPPORT_DNS_SERVER_H_
