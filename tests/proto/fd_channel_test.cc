#include "proto/fd_channel.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/time/clock.h"

namespace kvd {
namespace {

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

// Both ends of a connection are of this process: the server's is closed a moment after the answer.
void ExpectOpenDescriptors(int expected) {
  for (int i = 0; i < 100 && OpenDescriptors() != expected; ++i)
    absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(OpenDescriptors(), expected);
}

class FdChannelTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/kvd_fd_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    path_ = folder_ + "/s";
    request_.session.fill(0x42);
    files_.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Listen(size_t num_descriptors) {
    for (size_t i = 0; i < num_descriptors; ++i) {
      files_.emplace_back(memfd_create(std::to_string(i).c_str(), MFD_CLOEXEC));
      ASSERT_EQ(ftruncate(files_.back().get(), static_cast<off_t>(i)), 0);
      passed_.push_back(files_.back().get());
    }
    auto listener = DescriptorListener::Make(
        path_, [this](const DescriptorRequest& request) -> absl::StatusOr<std::vector<int>> {
          if (!TokensEqual(request.session, request_.session)) return absl::AbortedError("unknown");
          return passed_;
        });
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }
  UniqueFd Connect() const {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return socket;
  }
  void ExpectServes() {
    const auto fds = ReceiveDescriptors(path_, request_, absl::Seconds(5));
    ASSERT_TRUE(fds.ok()) << fds.status();
    EXPECT_EQ(fds->size(), passed_.size());
  }
  // A listener's counters move on its own thread.
  void ExpectMalformed(uint64_t count) {
    for (int i = 0; i < 500 && listener_->num_malformed() < count; ++i)
      absl::SleepFor(absl::Milliseconds(10));
    EXPECT_EQ(listener_->num_malformed(), count);
  }

  std::string folder_;
  std::string path_;
  DescriptorRequest request_;
  std::vector<UniqueFd> files_;
  std::vector<int> passed_;
  std::unique_ptr<DescriptorListener> listener_;
};

TEST_F(FdChannelTest, PassesMoreDescriptorsThanOneMessageHoldsInOrder) {
  Listen(150);
  const auto fds = ReceiveDescriptors(path_, request_, absl::Seconds(5));
  ASSERT_TRUE(fds.ok()) << fds.status();
  ASSERT_EQ(fds->size(), 150u);
  for (size_t i = 0; i < fds->size(); ++i) {
    EXPECT_EQ(lseek((*fds)[i].get(), 0, SEEK_END), static_cast<off_t>(i));
    EXPECT_NE(fcntl((*fds)[i].get(), F_GETFD) & FD_CLOEXEC, 0);
  }
}

TEST_F(FdChannelTest, AWrongTokenGetsNothing) {
  Listen(2);
  DescriptorRequest wrong = request_;
  wrong.session[15] ^= 1;
  const int before = OpenDescriptors();
  EXPECT_EQ(ReceiveDescriptors(path_, wrong, absl::Seconds(5)).status().code(),
            absl::StatusCode::kAborted);
  ExpectOpenDescriptors(before);
  ExpectMalformed(1);
}

TEST_F(FdChannelTest, AnotherProtocolIsRefusedOnBothSides) {
  Listen(1);
  DescriptorRequest wrong = request_;
  wrong.magic ^= 1;
  EXPECT_EQ(ReceiveDescriptors(path_, wrong, absl::Seconds(5)).status().code(),
            absl::StatusCode::kInvalidArgument);
  wrong = request_;
  wrong.version = 2;
  EXPECT_EQ(ReceiveDescriptors(path_, wrong, absl::Seconds(5)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(FdChannelTest, TruncatedAndRandomRequestsHarmNobody) {
  Listen(1);
  uint64_t expected = 0;
  for (size_t bytes = 0; bytes < sizeof(DescriptorRequest); bytes += 7) {
    const UniqueFd socket = Connect();
    ASSERT_EQ(write(socket.get(), &request_, bytes), static_cast<ssize_t>(bytes));
    ++expected;
  }
  {
    const UniqueFd socket = Connect();
    const std::string noise(100000, 'x');
    EXPECT_GT(send(socket.get(), noise.data(), noise.size(), MSG_NOSIGNAL), 0);
    ++expected;
  }
  ExpectMalformed(expected);
  ExpectServes();
}

TEST_F(FdChannelTest, ASlowPeerDelaysNobody) {
  Listen(1);
  const UniqueFd slow = Connect();
  ASSERT_EQ(write(slow.get(), &request_, 1), 1);
  const absl::Time start = absl::Now();
  ExpectServes();
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));  // the slow one would be given 5 s
}

TEST_F(FdChannelTest, DescriptorsThatAPeerSendsAreNotKept) {
  Listen(1);
  const int before = OpenDescriptors();
  {
    const UniqueFd socket = Connect();
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    iovec piece = {&request_, sizeof(request_)};
    msghdr message = {};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = files_[0].get();
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
    ASSERT_EQ(sendmsg(socket.get(), &message, 0), static_cast<ssize_t>(sizeof(request_)));
    DescriptorReply reply;
    EXPECT_EQ(recv(socket.get(), &reply, sizeof(reply), MSG_WAITALL),
              static_cast<ssize_t>(sizeof(reply)));
  }
  ExpectOpenDescriptors(before);
}

TEST_F(FdChannelTest, NobodyListeningIsUnavailable) {
  EXPECT_EQ(ReceiveDescriptors(path_, request_, absl::Seconds(1)).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(FdChannelTest, AServerThatDoesNotAnswerMeetsTheDeadline) {
  const UniqueFd silent(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path_.data(), path_.size());
  ASSERT_EQ(bind(silent.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(silent.get(), 1), 0);
  EXPECT_EQ(ReceiveDescriptors(path_, request_, absl::Milliseconds(100)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(FdChannelTest, AServerThatPromisesMoreThanItSendsIsNotTrusted) {
  const UniqueFd server(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path_.data(), path_.size());
  ASSERT_EQ(bind(server.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(server.get(), 1), 0);
  std::thread liar([&] {
    const UniqueFd peer(accept(server.get(), nullptr, nullptr));
    DescriptorReply reply;
    reply.num_descriptors = 3;
    send(peer.get(), &reply, sizeof(reply), 0);
    const char mark = 1;  // without a descriptor
    send(peer.get(), &mark, 1, 0);
  });
  EXPECT_FALSE(ReceiveDescriptors(path_, request_, absl::Seconds(5)).ok());
  liar.join();
}

TEST_F(FdChannelTest, TheSocketIsPrivateToUserAndGroupAndReplacedOnlyIfNobodyListens) {
  Listen(1);
  struct stat info;
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0660u);
  const auto lookup = [](const DescriptorRequest&) -> absl::StatusOr<std::vector<int>> {
    return absl::AbortedError("");
  };
  EXPECT_EQ(DescriptorListener::Make(path_, lookup).status().code(),
            absl::StatusCode::kFailedPrecondition);
  listener_.reset();
  EXPECT_FALSE(std::filesystem::exists(path_));
  {
    // What a killed daemon leaves behind.
    const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    ASSERT_EQ(bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  EXPECT_TRUE(DescriptorListener::Make(path_, lookup).ok());
  std::ofstream(path_) << "a file";
  EXPECT_EQ(DescriptorListener::Make(path_, lookup).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(DescriptorListener::Make(std::string(200, 'x'), lookup).ok());
}

}  // namespace
}  // namespace kvd
