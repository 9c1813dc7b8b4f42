#include "proto/fd_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "proto/status.h"

namespace kvd {
namespace {

using Time = std::chrono::steady_clock::time_point;

constexpr auto kHandshakeLimit = std::chrono::seconds(5);
// A gibibyte each: no arena that fits a host has more.
constexpr uint32_t kMaxDescriptors = 65536;
constexpr size_t kMaxPending = 128;
constexpr auto kReplyLimit = std::chrono::milliseconds(500);
constexpr mode_t kSocketMode = 0660;

absl::Status SystemError(absl::StatusCode code, absl::string_view what, absl::string_view object) {
  return absl::Status(code, absl::StrCat(what, " '", object, "': ", std::strerror(errno)));
}

absl::Status Late() {
  return absl::DeadlineExceededError("descriptor handshake: the peer did not answer in time");
}

// Waits until `fd` can do `events` or `deadline` passes.
absl::Status Await(int fd, int16_t events, Time deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return Late();
    pollfd poll_fd = {fd, events, 0};
    const int ready =
        poll(&poll_fd, 1, static_cast<int>(std::min<int64_t>(left.count() + 1, 1 << 20)));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) {
      return SystemError(absl::StatusCode::kUnavailable, "cannot wait for", "descriptor socket");
    }
  }
}

// Sends all of `bytes`, with `fds` beside its first byte.
absl::Status SendAll(int socket, std::span<const uint8_t> bytes, std::span<const int> fds,
                     Time deadline) {
  alignas(cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * kMaxDescriptorsPerMessage)] = {};
  while (!bytes.empty()) {
    KVD_RETURN_IF_ERROR(Await(socket, POLLOUT, deadline));
    iovec piece = {const_cast<uint8_t*>(bytes.data()), bytes.size()};
    msghdr message = {};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    if (!fds.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(fds.size_bytes());
      cmsghdr* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size_bytes());
      std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
    }
    const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return SystemError(absl::StatusCode::kUnavailable, "cannot send to", "descriptor socket");
    }
    bytes = bytes.subspan(static_cast<size_t>(sent));
    fds = {};
  }
  return absl::OkStatus();
}

// Takes every descriptor out of a received message, so that none leaks whatever else is wrong with
// it.
void TakeDescriptors(msghdr* message, std::vector<UniqueFd>& fds) {
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(fd));
      fds.emplace_back(fd);
    }
  }
}

// Receives exactly bytes.size() bytes; descriptors that come with them are added to `fds`.
absl::Status ReceiveAll(int socket, std::span<uint8_t> bytes, std::vector<UniqueFd>& fds,
                        Time deadline) {
  alignas(cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * kMaxDescriptorsPerMessage)];
  while (!bytes.empty()) {
    KVD_RETURN_IF_ERROR(Await(socket, POLLIN, deadline));
    iovec piece = {bytes.data(), bytes.size()};
    msghdr message = {};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return SystemError(absl::StatusCode::kUnavailable, "cannot receive from",
                         "descriptor socket");
    }
    TakeDescriptors(&message, fds);
    if ((message.msg_flags & MSG_CTRUNC) != 0) {
      return absl::ResourceExhaustedError(
          "descriptor handshake: descriptors were lost: raise this process's limit of open files");
    }
    if (got == 0)
      return absl::UnavailableError("descriptor handshake: the peer closed the connection");
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
  return absl::OkStatus();
}

template <typename T>
std::span<uint8_t> BytesOf(T& value) {
  return {reinterpret_cast<uint8_t*>(&value), sizeof(value)};
}

absl::StatusOr<sockaddr_un> MakeAddress(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path '", path, "': expected 1 to ",
                                                   sizeof(address.sun_path) - 1, " bytes, got ",
                                                   path.size()));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

absl::StatusOr<UniqueFd> ConnectTo(const std::string& path) {
  KVD_ASSIGN_OR_RETURN(const sockaddr_un address, MakeAddress(path));
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.get() < 0)
    return SystemError(absl::StatusCode::kUnavailable, "cannot make a socket for", path);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return SystemError(absl::StatusCode::kUnavailable, "cannot connect to", path);
  }
  return socket;
}

absl::Status FromWire(WireStatus status) {
  switch (status) {
    case WireStatus::kOk:
      return absl::OkStatus();
    case WireStatus::kAborted:
      return absl::AbortedError(
          "descriptor handshake: the daemon does not know the session: attach again");
    case WireStatus::kExhausted:
      return absl::ResourceExhaustedError(
          "descriptor handshake: refused, over a limit of the daemon");
    case WireStatus::kUnavailable:
      return absl::UnavailableError("descriptor handshake: the daemon is draining");
    case WireStatus::kLate:
      return Late();
    case WireStatus::kInvalid:
      break;
  }
  return absl::InvalidArgumentError(
      "descriptor handshake: the daemon refused the request as malformed");
}

WireStatus ToWire(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return WireStatus::kOk;
    case absl::StatusCode::kInvalidArgument:
      return WireStatus::kInvalid;
    case absl::StatusCode::kResourceExhausted:
      return WireStatus::kExhausted;
    case absl::StatusCode::kUnavailable:
      return WireStatus::kUnavailable;
    default:
      return WireStatus::kAborted;
  }
}

}  // namespace

absl::StatusOr<std::vector<UniqueFd>> ReceiveDescriptors(const std::string& socket_path,
                                                         const DescriptorRequest& request,
                                                         absl::Duration timeout) {
  const Time deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
  KVD_ASSIGN_OR_RETURN(const UniqueFd socket, ConnectTo(socket_path));
  DescriptorRequest sent = request;
  KVD_RETURN_IF_ERROR(SendAll(socket.get(), BytesOf(sent), {}, deadline));

  DescriptorReply reply;
  std::vector<UniqueFd> fds;
  KVD_RETURN_IF_ERROR(ReceiveAll(socket.get(), BytesOf(reply), fds, deadline));
  if (reply.magic != kDescriptorMagic || reply.version != request.version ||
      reply.num_descriptors > kMaxDescriptors || !fds.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("descriptor handshake: '", socket_path,
                     "' speaks another protocol: is it a locks-kvd of "
                     "this version?"));
  }
  KVD_RETURN_IF_ERROR(FromWire(reply.status));
  while (fds.size() < reply.num_descriptors) {
    // One byte a message: the kernel never merges two messages that carry descriptors.
    const size_t before = fds.size();
    uint8_t mark = 0;
    KVD_RETURN_IF_ERROR(ReceiveAll(socket.get(), BytesOf(mark), fds, deadline));
    if (fds.size() == before || fds.size() > reply.num_descriptors) {
      return absl::InvalidArgumentError(
          absl::StrCat("descriptor handshake: expected ", reply.num_descriptors,
                       " descriptors, got ", fds.size(), " and a message that does not fit"));
    }
  }
  return fds;
}

// Serves all handshakes on one thread: requests are collected as they trickle in, so a slow peer
// delays nobody. A reply is a few bytes and descriptors, which fit the socket's buffer: sending
// does not wait.
struct DescriptorListener::Impl {
  struct Pending {
    UniqueFd socket;
    Time deadline;
    size_t received = 0;
    DescriptorRequest request;
  };

  std::string path;
  Lookup lookup;
  UniqueFd socket;
  UniqueFd stop;  // eventfd
  std::atomic<uint64_t> malformed{0};
  std::vector<Pending> pending;  // of the thread
  std::thread thread;

  void Run();
  void Accept();
  bool Advance(Pending& peer);
  void Answer(Pending& peer);
  void CountMalformed() { malformed.fetch_add(1, std::memory_order_relaxed); }
};

void DescriptorListener::Impl::Run() {
  std::vector<pollfd> waits;
  while (true) {
    waits.assign({{socket.get(), POLLIN, 0}, {stop.get(), POLLIN, 0}});
    for (const Pending& peer : pending) waits.push_back({peer.socket.get(), POLLIN, 0});
    // Deadlines are looked at once in 100 ms while somebody is slow.
    if (poll(waits.data(), waits.size(), pending.empty() ? -1 : 100) < 0 && errno != EINTR) return;
    if ((waits[1].revents & POLLIN) != 0) return;
    const Time now = std::chrono::steady_clock::now();
    for (size_t i = pending.size(); i-- > 0;) {
      const bool late = now > pending[i].deadline;
      if (late) CountMalformed();
      const bool ready = waits[i + 2].revents != 0;
      if (late || (ready && Advance(pending[i])))
        pending.erase(pending.begin() + static_cast<ptrdiff_t>(i));
    }
    if ((waits[0].revents & POLLIN) != 0) Accept();
  }
}

void DescriptorListener::Impl::Accept() {
  UniqueFd peer(accept4(socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (peer.get() < 0) return;
  if (pending.size() >= kMaxPending) return CountMalformed();
  pending.push_back({std::move(peer), std::chrono::steady_clock::now() + kHandshakeLimit, 0, {}});
}

// Reads what has come; true if this connection is done with, one way or another.
bool DescriptorListener::Impl::Advance(Pending& peer) {
  // recv, not recvmsg: descriptors that a peer sends are dropped by the kernel.
  const std::span<uint8_t> rest = BytesOf(peer.request).subspan(peer.received);
  const ssize_t got = recv(peer.socket.get(), rest.data(), rest.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return false;
  if (got <= 0) {
    CountMalformed();
    return true;
  }
  peer.received += static_cast<size_t>(got);
  if (peer.received < sizeof(peer.request)) return false;
  Answer(peer);
  return true;
}

void DescriptorListener::Impl::Answer(Pending& peer) {
  DescriptorReply reply;
  std::vector<int> fds;
  if (peer.request.magic != kDescriptorMagic || peer.request.version != reply.version) {
    reply.status = WireStatus::kInvalid;
  } else if (absl::StatusOr<std::vector<int>> found = lookup(peer.request); found.ok()) {
    fds = *std::move(found);
  } else {
    reply.status = ToWire(found.status().code());
  }
  if (reply.status != WireStatus::kOk) CountMalformed();
  reply.num_descriptors = static_cast<uint32_t>(fds.size());
  const Time deadline = std::chrono::steady_clock::now() + kReplyLimit;
  absl::Status sent = SendAll(peer.socket.get(), BytesOf(reply), {}, deadline);
  for (size_t first = 0; sent.ok() && first < fds.size(); first += kMaxDescriptorsPerMessage) {
    uint8_t mark = 1;
    const size_t count = std::min(fds.size() - first, size_t{kMaxDescriptorsPerMessage});
    sent = SendAll(peer.socket.get(), BytesOf(mark),
                   std::span<const int>(fds).subspan(first, count), deadline);
  }
}

DescriptorListener::DescriptorListener(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<DescriptorListener>> DescriptorListener::Make(
    const std::string& socket_path, Lookup lookup) {
  KVD_ASSIGN_OR_RETURN(const sockaddr_un address, MakeAddress(socket_path));
  if (ConnectTo(socket_path).ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("socket path '", socket_path,
                     "': another process listens there: give each daemon its own"));
  }
  struct stat info;
  if (lstat(socket_path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat("socket path '", socket_path,
                       "': expected a socket or nothing, found another kind of file"));
    }
    unlink(socket_path.c_str());
  }
  auto impl = std::make_unique<Impl>();
  impl->path = socket_path;
  impl->lookup = std::move(lookup);
  impl->socket = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  impl->stop = UniqueFd(eventfd(0, EFD_CLOEXEC));
  // The mode is set before bind too, so that there is no moment with a wider one.
  if (impl->socket.get() < 0 || impl->stop.get() < 0 ||
      fchmod(impl->socket.get(), kSocketMode) != 0 ||
      bind(impl->socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(socket_path.c_str(), kSocketMode) != 0 ||
      listen(impl->socket.get(), kMaxPending) != 0) {
    return SystemError(absl::StatusCode::kFailedPrecondition, "cannot listen at", socket_path);
  }
  impl->thread = std::thread([raw = impl.get()] { raw->Run(); });
  return std::unique_ptr<DescriptorListener>(new DescriptorListener(std::move(impl)));
}

DescriptorListener::~DescriptorListener() {
  const uint64_t one = 1;
  KVD_CHECK(write(impl_->stop.get(), &one, sizeof(one)) == sizeof(one));
  impl_->thread.join();
  unlink(impl_->path.c_str());
}

uint64_t DescriptorListener::num_malformed() const {
  return impl_->malformed.load(std::memory_order_relaxed);
}

}  // namespace kvd
