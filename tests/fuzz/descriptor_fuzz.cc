// Fuzz target: both ends of the descriptor handshake. The first byte chooses the end that is given
// the rest as its peer's words. A server gives descriptors for the one right request only; a client
// returns nothing that was not a whole, right answer.

#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "kernels/check.h"
#include "proto/fd_channel.h"

namespace kvd {
namespace {

DescriptorRequest RightRequest() {
  DescriptorRequest request;
  request.incarnation.fill(0x11);
  request.session.fill(0x22);
  return request;
}

std::string Folder() {
  static const std::string folder = [] {
    char name[] = "/tmp/kvd_fuzz_XXXXXX";
    KVD_CHECK(mkdtemp(name) != nullptr);
    return std::string(name);
  }();
  return folder;
}

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

void SendToServer(std::span<const uint8_t> words) {
  static const UniqueFd memory(open("/dev/null", O_RDONLY | O_CLOEXEC));
  static const std::string path = Folder() + "/server";
  static const std::unique_ptr<DescriptorListener> listener = [] {
    auto made = DescriptorListener::Make(
        path, [](const DescriptorRequest& request) -> absl::StatusOr<std::vector<int>> {
          const DescriptorRequest right = RightRequest();
          if (std::memcmp(&request, &right, sizeof(right)) != 0)
            return absl::AbortedError("unknown");
          return std::vector<int>{memory.get()};
        });
    KVD_CHECK(made.ok());
    return *std::move(made);
  }();
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = AddressOf(path);
  KVD_CHECK(connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) ==
            0);
  if (!words.empty()) send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL);
  shutdown(socket.get(), SHUT_WR);
  DescriptorReply reply;
  const ssize_t got = recv(socket.get(), &reply, sizeof(reply), MSG_WAITALL);
  const DescriptorRequest right = RightRequest();
  const bool is_right =
      words.size() >= sizeof(right) && std::memcmp(words.data(), &right, sizeof(right)) == 0;
  KVD_CHECK(!is_right || (got == sizeof(reply) && reply.status == WireStatus::kOk));
  KVD_CHECK(is_right || got != sizeof(reply) ||
            (reply.status != WireStatus::kOk && reply.num_descriptors == 0));
}

void AnswerClient(std::span<const uint8_t> words) {
  const std::string path = Folder() + "/client";
  unlink(path.c_str());
  const UniqueFd server(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = AddressOf(path);
  KVD_CHECK(bind(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  KVD_CHECK(listen(server.get(), 1) == 0);
  std::thread peer([&] {
    const UniqueFd socket(accept(server.get(), nullptr, nullptr));
    if (!words.empty()) send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL);
  });
  const auto descriptors = ReceiveDescriptors(path, RightRequest(), absl::Seconds(5));
  peer.join();
  // No descriptor travelled, so only an answer that promises none can be right.
  KVD_CHECK(!descriptors.ok() || descriptors->empty());
}

}  // namespace
}  // namespace kvd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const uint8_t> words(data + 1, size - 1);
  if (data[0] % 2 == 0) {
    kvd::SendToServer(words);
  } else {
    kvd::AnswerClient(words);
  }
  return 0;
}
