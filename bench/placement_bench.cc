// How many owners placement finds a second.
//
// usage: placement_bench [--repetitions N] [--json FILE]
// Medians over repetitions on one core: owners of random stripes for pools of 5, 50 and 200
// members, with equal and with unequal weights, one owner and two ranks. The limit of a figure is
// what hashing alone would give: one Mix64 a member in the same run. Owners are compared with a
// plain search over the definition's order.

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "bench/report.h"
#include "kernels/checksum.h"
#include "proto/placement.h"

ABSL_FLAG(int, repetitions, 9, "how often each figure is taken; the median counts");
ABSL_FLAG(std::string, json, "", "write the figures to this file");

namespace kvd::bench {
namespace {

constexpr int kWords = 20000;

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::vector<PlacedMember> PoolOf(int count, bool weighted) {
  std::vector<PlacedMember> members;
  for (int i = 0; i < count; ++i) {
    members.push_back(
        {absl::StrCat("kv-", i, ".kv.ns.svc.cluster.local:7411"), weighted ? 1 + i % 4 : 1.0});
  }
  return members;
}

// Millions a second of `body`, which takes kWords words.
double Rate(const std::function<void()>& body) {
  std::vector<double> seconds;
  for (int r = 0; r < absl::GetFlag(FLAGS_repetitions); ++r) {
    const double start = CpuSeconds();
    body();
    seconds.push_back(CpuSeconds() - start);
  }
  return kWords / Median(seconds) * 1e-6;
}

// A pool without the owner of rank 0 must give the owner of rank 1: another way to the second
// owner.
bool SecondOwnerIsRight(const std::vector<PlacedMember>& members, uint64_t word) {
  std::vector<int> owners;
  Placement(members).Owners(word, 2, &owners);
  std::vector<PlacedMember> rest = members;
  rest.erase(rest.begin() + owners[0]);
  return rest[static_cast<size_t>(Placement(rest).Owner(word))].name ==
         members[static_cast<size_t>(owners[1])].name;
}

void BenchPool(int count, bool weighted, Report* report) {
  const std::vector<PlacedMember> members = PoolOf(count, weighted);
  const Placement placement(members);
  std::vector<uint64_t> hashes;
  for (const PlacedMember& member : members)
    hashes.push_back(Checksum64(member.name.data(), member.name.size()));
  std::vector<double> counts(members.size());
  std::vector<int> owners;
  uint64_t sum = 0;  // keeps the compiler from leaving work out
  const double hash_rate = Rate([&] {
    for (uint64_t i = 0; i < kWords; ++i) {
      uint64_t best = 0;
      for (const uint64_t hash : hashes) best = std::max(best, Mix64(hash ^ (i * kGolden64)));
      sum += best;
    }
  });
  const double owner_rate = Rate([&] {
    for (uint64_t i = 0; i < kWords; ++i)
      counts[static_cast<size_t>(placement.Owner(i * kGolden64))] += 1;
  });
  const double ranks_rate = Rate([&] {
    for (uint64_t i = 0; i < kWords; ++i) {
      placement.Owners(i * kGolden64, 2, &owners);
      sum += static_cast<uint64_t>(owners[1]);
    }
  });
  const std::string name = absl::StrCat("placement/", count, weighted ? "/weighted" : "/equal");
  report->Add({absl::StrCat(name, "/owner"), owner_rate, "M/s", hash_rate, owner_rate / hash_rate});
  report->Add(
      {absl::StrCat(name, "/two_ranks"), ranks_rate, "M/s", hash_rate, ranks_rate / hash_rate});

  bool right = sum != 0;
  for (uint64_t i = 0; i < 100; ++i) right = right && SecondOwnerIsRight(members, Mix64(i));
  double total_weight = 0;
  double total = 0;
  for (size_t m = 0; m < members.size(); ++m) {
    total_weight += members[m].weight;
    total += counts[m];
  }
  for (size_t m = 0; m < members.size(); ++m) {
    // 20,000 stripes: seven deviations of the smallest share.
    const double expected = kWords * members[m].weight / total_weight;
    const double got = counts[m] / total * kWords;
    right = right && (got - expected) * (got - expected) < 49 * expected;
  }
  report->Check(name, right, "an owner or a share is wrong");
}

int Main() {
  Report report("placement_bench (one core)");
  for (const bool weighted : {false, true}) {
    for (const int count : {5, 50, 200}) BenchPool(count, weighted, &report);
  }
  return report.Finish(absl::GetFlag(FLAGS_json));
}

}  // namespace
}  // namespace kvd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Owners found a second by placement hrw-v1.");
  absl::ParseCommandLine(argc, argv);
  return kvd::bench::Main();
}
