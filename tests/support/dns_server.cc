#include "tests/support/dns_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <span>
#include <utility>

#include "kernels/check.h"
#include "proto/address.h"

namespace kvd::testing {
namespace {

constexpr size_t kHeaderBytes = 12;

void Put16(DnsBytes* out, size_t value) {
  out->push_back(static_cast<uint8_t>(value >> 8));
  out->push_back(static_cast<uint8_t>(value));
}

void PutLabels(DnsBytes* out, const std::string& name) {
  for (size_t at = 0; at < name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    out->push_back(static_cast<uint8_t>(end - at));
    out->insert(out->end(), name.begin() + static_cast<ptrdiff_t>(at),
                name.begin() + static_cast<ptrdiff_t>(end));
    at = end + 1;
  }
}

union AnyAddress {
  sockaddr plain;
  sockaddr_in v4;
  sockaddr_in6 v6;
};

UniqueFd Listen(int type, AnyAddress* address, socklen_t size) {
  UniqueFd socket(::socket(address->plain.sa_family, type | SOCK_CLOEXEC, 0));
  KVD_CHECK(socket.get() >= 0 && bind(socket.get(), &address->plain, size) == 0);
  if (type == SOCK_STREAM) KVD_CHECK(listen(socket.get(), 16) == 0);
  KVD_CHECK(getsockname(socket.get(), &address->plain, &size) == 0);
  return socket;
}

bool ReadAll(int socket, std::span<uint8_t> into) {
  return recv(socket, into.data(), into.size(), MSG_WAITALL) == static_cast<ssize_t>(into.size());
}

}  // namespace

DnsRecord ARecord(const std::string& address) {
  uint8_t bytes[16];
  if (inet_pton(AF_INET, address.c_str(), bytes) == 1)
    return {DnsType::kA, DnsBytes(bytes, bytes + 4)};
  KVD_CHECK(inet_pton(AF_INET6, address.c_str(), bytes) == 1);
  return {DnsType::kAaaa, DnsBytes(bytes, bytes + 16)};
}

DnsRecord SrvRecord(const std::string& target, uint16_t port) {
  DnsRecord record = {DnsType::kSrv, {0, 10, 0, 33}};  // priority 10, weight 33
  Put16(&record.data, port);
  PutLabels(&record.data, target);
  record.data.push_back(0);
  return record;
}

DnsRecord SrvRecordPointing(const std::string& labels, uint16_t offset, uint16_t port) {
  DnsRecord record = SrvRecord(labels, port);
  record.data.pop_back();
  Put16(&record.data, 0xC000u | offset);
  return record;
}

DnsBytes DnsQueryFor(const std::string& name, DnsType type, uint16_t id) {
  DnsBytes query;
  Put16(&query, id);
  for (const size_t word : {size_t{0x0100}, size_t{1}, size_t{0}, size_t{0}, size_t{0}})
    Put16(&query, word);  // recursion wanted; one question
  PutLabels(&query, name);
  query.push_back(0);
  Put16(&query, static_cast<size_t>(type));
  Put16(&query, 1);
  return query;
}

DnsBytes DnsAnswerTo(const DnsBytes& query, const std::vector<DnsRecord>& records, int code,
                     bool cut) {
  DnsBytes answer = query;
  answer[2] = static_cast<uint8_t>(0x81 | (cut ? 2 : 0));
  answer[3] = static_cast<uint8_t>(0x80 | code);
  answer[6] = static_cast<uint8_t>(records.size() >> 8);
  answer[7] = static_cast<uint8_t>(records.size());
  for (const DnsRecord& record : records) {
    Put16(&answer, 0xC000u | kHeaderBytes);
    Put16(&answer, static_cast<size_t>(record.type));
    Put16(&answer, 1);
    Put16(&answer, 0);  // TTL
    Put16(&answer, 5);
    Put16(&answer, record.data.size());
    answer.insert(answer.end(), record.data.begin(), record.data.end());
  }
  return answer;
}

std::string DnsNameIn(const DnsBytes& query) {
  std::string name;
  for (size_t at = kHeaderBytes; at < query.size() && query[at] != 0; at += query[at] + size_t{1}) {
    if (!name.empty()) name += '.';
    name.append(query.begin() + static_cast<ptrdiff_t>(at) + 1,
                query.begin() + static_cast<ptrdiff_t>(at) + 1 + query[at]);
  }
  return name;
}

DnsType DnsTypeIn(const DnsBytes& query) {
  return static_cast<DnsType>(query[query.size() - 4] << 8 | query[query.size() - 3]);
}

DnsServer::DnsServer(const std::string& host, Answer answer)
    : stop_(eventfd(0, EFD_CLOEXEC)), answer_(std::move(answer)) {
  AnyAddress address = {};
  const bool is_v6 = host.find(':') != std::string::npos;
  address.plain.sa_family = is_v6 ? AF_INET6 : AF_INET;
  KVD_CHECK(inet_pton(address.plain.sa_family, host.c_str(),
                      is_v6 ? static_cast<void*>(&address.v6.sin6_addr) : &address.v4.sin_addr) ==
            1);
  const socklen_t size = is_v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  // The kernel chooses the TCP port; the UDP port of that number is free unless another test holds
  // it.
  tcp_ = Listen(SOCK_STREAM, &address, size);
  udp_ = Listen(SOCK_DGRAM, &address, size);
  address_ = Address{host, ntohs(is_v6 ? address.v6.sin6_port : address.v4.sin_port)}.ToString();
  thread_ = std::thread([this] { Serve(); });
}

DnsServer::~DnsServer() {
  const uint64_t one = 1;
  KVD_CHECK(write(stop_.get(), &one, sizeof(one)) == sizeof(one));
  thread_.join();
}

void DnsServer::Set(Answer answer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  answer_ = std::move(answer);
}

DnsMessages DnsServer::AnswersTo(const DnsBytes& query, Over over) {
  ++num_queries_;
  Answer answer;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    answer = answer_;
  }
  return answer(query, over);
}

void DnsServer::Serve() {
  while (true) {
    pollfd waits[3] = {{stop_.get(), POLLIN, 0}, {udp_.get(), POLLIN, 0}, {tcp_.get(), POLLIN, 0}};
    KVD_CHECK(poll(waits, 3, -1) > 0);
    if (waits[0].revents != 0) return;
    if (waits[1].revents != 0) ServeUdp();
    if (waits[2].revents != 0) ServeTcp();
  }
}

void DnsServer::ServeUdp() {
  DnsBytes query(512);
  AnyAddress from = {};
  socklen_t size = sizeof(from);
  const ssize_t got = recvfrom(udp_.get(), query.data(), query.size(), 0, &from.plain, &size);
  if (got < static_cast<ssize_t>(kHeaderBytes)) return;
  query.resize(static_cast<size_t>(got));
  for (const DnsBytes& answer : AnswersTo(query, Over::kUdp)) {
    sendto(udp_.get(), answer.data(), answer.size(), 0, &from.plain, size);
  }
}

void DnsServer::ServeTcp() {
  UniqueFd peer(accept(tcp_.get(), nullptr, nullptr));
  uint8_t size[2];
  if (!ReadAll(peer.get(), size)) return;
  DnsBytes query(static_cast<size_t>(size[0] << 8 | size[1]));
  if (query.size() < kHeaderBytes || !ReadAll(peer.get(), query)) return;
  const DnsMessages answers = AnswersTo(query, Over::kTcp);
  for (const DnsBytes& answer : answers) {
    DnsBytes framed;
    Put16(&framed, answer.size());
    framed.insert(framed.end(), answer.begin(), answer.end());
    send(peer.get(), framed.data(), framed.size(), MSG_NOSIGNAL);
  }
  if (answers.empty()) silent_.push_back(std::move(peer));
}

}  // namespace kvd::testing
