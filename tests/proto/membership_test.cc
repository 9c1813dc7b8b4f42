// Goal: the view follows its provider and survives it. Method: real files and a DNS server of the
// test, polled fast.

#include "proto/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/dns_server.h"

namespace kvd {
namespace {

using kvd::testing::DnsAnswerTo;
using kvd::testing::DnsBytes;
using kvd::testing::DnsMessages;
using kvd::testing::DnsRecord;
using kvd::testing::DnsServer;
using kvd::testing::SrvRecord;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> NamesOf(const MembershipView& view) {
  std::vector<std::string> names;
  for (const Member& member : view.members) names.push_back(member.name);
  return names;
}

// What a Membership called back.
class Heard {
 public:
  MembershipCallbacks Callbacks() {
    return {[this](std::shared_ptr<const MembershipView> view) {
              const std::lock_guard<std::mutex> lock(mutex_);
              views_.push_back(std::move(view));
              changed_.notify_all();
            },
            [this](const absl::Status& problem) {
              const std::lock_guard<std::mutex> lock(mutex_);
              problems_.push_back(problem);
              changed_.notify_all();
            }};
  }
  std::shared_ptr<const MembershipView> WaitForView(size_t n) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(30), [&] { return views_.size() > n; });
    return views_.size() > n ? views_[n] : nullptr;
  }
  absl::Status WaitForProblem(size_t n) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(30), [&] { return problems_.size() > n; });
    return problems_.size() > n ? problems_[n] : absl::OkStatus();
  }
  size_t num_problems() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return problems_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<const MembershipView>> views_;
  std::vector<absl::Status> problems_;
};

class MembershipTest : public ::testing::Test {
 protected:
  MembershipTest() {
    char name[] = "/tmp/kvd_membership_XXXXXX";
    folder_ = mkdtemp(name);
    options_.poll = absl::Milliseconds(20);
    options_.min_interval = absl::ZeroDuration();
    options_.initial_wait = absl::ZeroDuration();
  }
  ~MembershipTest() override { std::filesystem::remove_all(folder_); }

  void WriteMembers(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names)
      text += "members { name: '" + name + "' address: '" + name + ".kv:7411' }\n";
    Write(text);
  }
  void Write(const std::string& text) {
    std::ofstream(folder_ + "/new") << text;
    std::filesystem::rename(folder_ + "/new", folder_ + "/members");
  }
  std::unique_ptr<Membership> Make() {
    auto made = Membership::Make(options_, heard_.Callbacks());
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }
  absl::Status MakeStatus() { return Membership::Make(options_, heard_.Callbacks()).status(); }
  void WaitForRefusals(const Membership& membership, uint64_t more) {
    const uint64_t goal = membership.Figures().refused + more;
    while (membership.Figures().refused < goal)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

  std::string folder_;
  MembershipOptions options_;
  Heard heard_;  // outlives every Membership of a test
};

TEST_F(MembershipTest, AStaticListIsOneSortedView) {
  options_.static_members = {
      {"kv-1", "kv-1.kv:7411", 1}, {"", "[::1]:7411", 2}, {"kv-0", "kv-0.kv:7411", .5}};
  const auto membership = Make();
  ASSERT_NE(membership, nullptr);
  EXPECT_EQ(membership->View()->version, 1u);
  EXPECT_THAT(membership->View()->members,
              ElementsAre(Member{"[::1]:7411", "[::1]:7411", 2}, Member{"kv-0", "kv-0.kv:7411", .5},
                          Member{"kv-1", "kv-1.kv:7411", 1}));
  EXPECT_EQ(membership->Figures().accepted, 1u);
  EXPECT_EQ(membership->Figures().age, absl::ZeroDuration());
}

TEST_F(MembershipTest, BadListsAreRefusedWithWhatIsWrong) {
  struct Case {
    std::vector<Member> members;
    std::string says;
  };
  const Member good = {"kv-0", "kv-0.kv:7411", 1};
  const std::vector<Case> cases = {
      {{good, {"kv-0", "kv-1.kv:7411", 1}}, "name kv-0 stands there twice"},
      {{good, {"kv-1", "kv-0.kv:7411", 1}}, "address kv-0.kv:7411 stands there twice"},
      {{{"kv-0", "kv-0.kv", 1}}, "no port"},
      {{{"kv-0", "kv-0.kv:0", 1}}, "port 0"},
      {{{"kv-0", "::1:7411", 1}}, "brackets"},
      {{{"kv 0", "kv-0.kv:7411", 1}}, "printable"},
      {{{std::string(256, 'x'), "kv-0.kv:7411", 1}}, "printable"},
      {{{"kv-0", "kv-0.kv:7411", 0}}, "weight 0"},
      {{{"kv-0", "kv-0.kv:7411", -1}}, "weight -1"},
      {{{"kv-0", "kv-0.kv:7411", 1000001}}, "weight"},
      {{{"kv-0", "kv-0.kv:7411", std::nan("")}}, "weight nan"},
  };
  for (const Case& c : cases) {
    options_.static_members = c.members;
    const absl::Status status = MakeStatus();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << c.says;
    EXPECT_THAT(status.message(), HasSubstr(c.says));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(CheckMembers({}).status()));
  std::vector<Member> many;
  for (int i = 0; i <= kMaxMembers; ++i) many.push_back({"", "kv-" + std::to_string(i) + ":1", 1});
  EXPECT_TRUE(absl::IsInvalidArgument(CheckMembers(many).status()));
  many.pop_back();
  EXPECT_TRUE(CheckMembers(many).ok());
}

TEST_F(MembershipTest, ThereIsExactlyOneSource) {
  EXPECT_TRUE(absl::IsInvalidArgument(MakeStatus()));
  options_.file = folder_ + "/members";
  options_.dns_name = "_control._tcp.kv";
  EXPECT_TRUE(absl::IsInvalidArgument(MakeStatus()));
}

TEST_F(MembershipTest, AFileIsFollowedAndItsLossSurvived) {
  WriteMembers({"kv-0", "kv-1"});
  options_.file = folder_ + "/members";
  const auto membership = Make();
  ASSERT_NE(membership, nullptr);
  EXPECT_THAT(NamesOf(*membership->View()), ElementsAre("kv-0", "kv-1"));

  WriteMembers({"kv-2", "kv-0", "kv-1"});
  const auto second = heard_.WaitForView(0);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->version, 2u);
  EXPECT_THAT(NamesOf(*second), ElementsAre("kv-0", "kv-1", "kv-2"));
  EXPECT_EQ(membership->View(), second);

  std::filesystem::remove(folder_ + "/members");
  EXPECT_TRUE(absl::IsNotFound(heard_.WaitForProblem(0)));
  WaitForRefusals(*membership, 3);
  Write("");
  EXPECT_TRUE(absl::IsUnavailable(heard_.WaitForProblem(1)));
  WriteMembers({"kv-0", "kv-0"});
  EXPECT_TRUE(absl::IsInvalidArgument(heard_.WaitForProblem(2)));
  WaitForRefusals(*membership, 3);
  EXPECT_EQ(heard_.num_problems(), 3u);  // each once
  EXPECT_EQ(membership->View(), second);
  EXPECT_GT(membership->Figures().age, absl::Milliseconds(60));

  WriteMembers({"kv-9"});
  const auto third = heard_.WaitForView(1);
  ASSERT_NE(third, nullptr);
  EXPECT_EQ(third->version, 3u);
  EXPECT_EQ(membership->Figures().accepted, 3u);
}

TEST_F(MembershipTest, ANewSymbolicLinkIsANewFile) {
  // As Kubernetes replaces a mounted ConfigMap.
  std::filesystem::create_directory(folder_ + "/a");
  std::filesystem::create_directory(folder_ + "/b");
  std::ofstream(folder_ + "/a/members") << "members { address: 'a:1' }";
  std::ofstream(folder_ + "/b/members") << "members { address: 'b:1' }";
  std::filesystem::create_directory_symlink("a", folder_ + "/data");
  options_.file = folder_ + "/data/members";
  const auto membership = Make();
  ASSERT_NE(membership, nullptr);
  std::filesystem::create_directory_symlink("b", folder_ + "/next");
  std::filesystem::rename(folder_ + "/next", folder_ + "/data");
  const auto view = heard_.WaitForView(0);
  ASSERT_NE(view, nullptr);
  EXPECT_THAT(NamesOf(*view), ElementsAre("b:1"));
}

TEST_F(MembershipTest, DnsIsFollowedAndItsLossSurvived) {
  const auto answer = [](std::vector<DnsRecord> records, int code = 0) {
    return [records = std::move(records), code](const DnsBytes& query, DnsServer::Over) {
      return DnsMessages{DnsAnswerTo(query, records, code)};
    };
  };
  const DnsRecord zero = SrvRecord("kv-0.kv", 7411);
  const DnsRecord one = SrvRecord("kv-1.kv", 7411);
  DnsServer server("127.0.0.1", answer({one, zero}));
  options_.dns_name = "_control._tcp.kv.";
  options_.dns_servers = {server.address()};
  const auto membership = Make();
  ASSERT_NE(membership, nullptr);
  EXPECT_THAT(NamesOf(*membership->View()), ElementsAre("kv-0.kv:7411", "kv-1.kv:7411"));

  server.Set(answer({zero}));
  ASSERT_NE(heard_.WaitForView(0), nullptr);
  EXPECT_THAT(NamesOf(*membership->View()), ElementsAre("kv-0.kv:7411"));

  server.Set(answer({}));  // a Service none of whose pods is ready
  EXPECT_TRUE(absl::IsUnavailable(heard_.WaitForProblem(0)));
  server.Set(answer({}, 3));
  EXPECT_TRUE(absl::IsNotFound(heard_.WaitForProblem(1)));
  server.Set(answer({zero, zero}));
  EXPECT_TRUE(absl::IsInvalidArgument(heard_.WaitForProblem(2)));
  WaitForRefusals(*membership, 2);
  EXPECT_EQ(membership->View()->version, 2u);

  server.Set(answer({zero, one}));
  ASSERT_NE(heard_.WaitForView(1), nullptr);
  EXPECT_EQ(membership->View()->version, 3u);
}

// The destructor's time is that of a join, not of a question's deadline: the test's own limit would
// pass.
TEST_F(MembershipTest, ItEndsWhileASilentServerIsAsked) {
  DnsServer server("127.0.0.1", [](const DnsBytes& query, DnsServer::Over) {
    return DnsMessages{DnsAnswerTo(query, {SrvRecord("kv-0.kv", 7411)})};
  });
  options_.dns_name = "_control._tcp.kv.";
  options_.dns_servers = {server.address()};
  auto membership = Make();
  ASSERT_NE(membership, nullptr);
  server.Set([](const DnsBytes&, DnsServer::Over) { return DnsMessages(); });
  const int before = server.num_queries();
  while (server.num_queries() < before + 1)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  membership.reset();
  EXPECT_EQ(heard_.num_problems(), 0u);  // its own end is no problem of the provider
}

TEST_F(MembershipTest, MakeWaitsForASourceThatComes) {
  options_.file = folder_ + "/members";
  EXPECT_TRUE(absl::IsNotFound(MakeStatus()));
  options_.initial_wait = absl::Seconds(20);
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    WriteMembers({"kv-0"});
  });
  EXPECT_NE(Make(), nullptr);
  late.join();
  Write("members {");
  EXPECT_TRUE(absl::IsInvalidArgument(MakeStatus()));  // no waiting mends a malformed file
}

TEST_F(MembershipTest, AFileThatFlipsIsDamped) {
  options_.min_interval = absl::Milliseconds(200);
  options_.file = folder_ + "/members";
  WriteMembers({"kv-0", "kv-1"});
  const auto membership = Make();
  ASSERT_NE(membership, nullptr);
  std::atomic<bool> stop{false};
  std::thread flipping([&] {
    for (int i = 0; !stop; ++i) {
      WriteMembers(i % 2 == 0 ? std::vector<std::string>{"kv-0"}
                              : std::vector<std::string>{"kv-0", "kv-1"});
      std::this_thread::sleep_for(std::chrono::milliseconds(150));
    }
  });
  EXPECT_TRUE(absl::IsResourceExhausted(heard_.WaitForProblem(0)));
  WaitForRefusals(*membership, 3);
  stop = true;
  flipping.join();
  EXPECT_EQ(heard_.num_problems(), 1u);
}

}  // namespace
}  // namespace kvd
