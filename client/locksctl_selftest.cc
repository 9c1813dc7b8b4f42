// locksctl selftest: what is put comes back bit by bit, at many lengths, on every path that works
// from here.
//
// Pages hold a PRF of (run, length, layer, head, word), so that a wrong byte cannot pass by chance
// and two runs share no page.

#include <algorithm>
#include <cstring>
#include <iostream>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/kv_client.h"
#include "client/locksctl_daemon.h"
#include "client/locksctl_output.h"
#include "client/locksctl_verbs.h"
#include "kernels/checksum.h"
#include "proto/status.h"

namespace kvd {
namespace {

// Four finite 16-bit values: with bit 14 clear no exponent is all ones, in bf16 and in fp16.
constexpr uint64_t kFiniteMask = 0xBFFFBFFFBFFFBFFFull;

// One length's engine cache, [L][heads][T, D], K and V.
class TestCache {
 public:
  TestCache(const WorkerShape& shape, int64_t num_tokens, uint64_t seed) {
    const KvGeometry& g = shape.geometry;
    const size_t row_bytes = static_cast<size_t>(g.head_dim) * 2;
    head_bytes_ = static_cast<size_t>(num_tokens) * row_bytes;
    const size_t layer_bytes = head_bytes_ * static_cast<size_t>(shape.num_heads());
    bytes_.resize(2 * layer_bytes * static_cast<size_t>(shape.num_layers()));
    for (size_t i = 0; i + 8 <= bytes_.size(); i += 8) {
      const uint64_t word = Mix64(seed + (i + 1) * kGolden64) & kFiniteMask;
      std::memcpy(bytes_.data() + i, &word, sizeof(word));
    }
    for (int layer = 0; layer < shape.num_layers(); ++layer) {
      const uint8_t* k = bytes_.data() + 2 * layer_bytes * static_cast<size_t>(layer);
      layers_.push_back(
          {k, k + layer_bytes, static_cast<int64_t>(head_bytes_), static_cast<int64_t>(row_bytes)});
    }
  }
  const std::vector<EngineKv>& layers() const { return layers_; }

  // Units of `fetched` that differ from this cache.
  int64_t CountWrong(const WorkerShape& shape, const FetchedPages& fetched) const {
    const KvGeometry& g = shape.geometry;
    std::vector<uint8_t> expected(shape.unit_bytes());
    const uint8_t* got = fetched.units.data();
    int64_t wrong = 0;
    for (int page = 0; page < fetched.num_pages; ++page) {
      for (int layer = 0; layer < shape.num_layers(); ++layer) {
        for (int head = 0; head < shape.num_heads(); ++head, got += shape.unit_bytes()) {
          ref::PackUnit(layers_[static_cast<size_t>(layer)], head, int64_t{page} * g.page_tokens,
                        g.head_dim, g.page_tokens, expected.data());
          wrong += std::memcmp(got, expected.data(), expected.size()) == 0 ? 0 : 1;
        }
      }
    }
    return wrong;
  }

 private:
  size_t head_bytes_ = 0;
  std::vector<uint8_t> bytes_;
  std::vector<EngineKv> layers_;
};

std::vector<int> Lengths(int64_t max_pages) {
  std::vector<int> lengths;
  for (const int pages : {1, 2, 3, 7, 31, 32, 33, 64, 65}) {
    if (pages < max_pages) lengths.push_back(pages);
  }
  lengths.push_back(static_cast<int>(max_pages));
  return lengths;
}

struct Outcome {
  int64_t units = 0;
  int64_t wrong = 0;
  std::string problem;
};

Outcome TestLength(KvClient& client, int num_pages, uint64_t seed) {
  const WorkerShape& shape = client.shape();
  const int64_t num_tokens = int64_t{num_pages} * shape.geometry.page_tokens;
  std::vector<uint32_t> tokens;
  for (int64_t t = 0; t < num_tokens; ++t) {
    tokens.push_back(static_cast<uint32_t>(Mix64(seed + static_cast<uint64_t>(t))));
  }
  const std::vector<PageKey> keys =
      client.PageKeys(tokens, absl::StrCat("locksctl selftest ", seed));
  const TestCache cache(shape, num_tokens, seed);
  const absl::StatusOr<PutReport> put =
      client.Put({.keys = keys, .first_page = 0, .num_pages = num_pages, .layers = cache.layers()});
  if (!put.ok()) return {.problem = put.status().ToString()};
  if (put->num_new != num_pages) {
    return {.problem = absl::StrCat(put->num_new, " of ", num_pages,
                                    " pages were put: ", put->first_failure.ToString())};
  }
  const absl::StatusOr<FetchedPages> fetched = client.FetchPages(keys);
  if (!fetched.ok()) return {.problem = fetched.status().ToString()};
  if (fetched->num_pages != num_pages) {
    return {.problem = absl::StrCat(fetched->num_pages, " of ", num_pages, " pages are resident")};
  }
  Outcome outcome;
  outcome.units = static_cast<int64_t>(shape.units_per_page()) * num_pages;
  outcome.wrong = cache.CountWrong(shape, *fetched);
  return outcome;
}

}  // namespace

ExitCode RunSelftest(const LocksctlOptions& options) {
  absl::StatusOr<ClientOptions> client_options = AttachOptions(options);
  if (!client_options.ok()) return Complain(client_options.status());
  std::random_device random;
  uint64_t seed = (uint64_t{random()} << 32) | random();
  Table table = {{"path", "pages", "units", "wrong", "result"}, {}};
  ExitCode code = ExitCode::kOk;
  for (const PathKind path : {PathKind::kShared, PathKind::kUcx}) {
    const absl::string_view view = PathName(path);
    const std::string name(view.data(), view.size());
    client_options->required_path = path;
    client_options->best_path = path;
    const auto client = KvClient::Make(*client_options);
    if (!client.ok()) {
      // A path that is not offered here is a finding, not a wrong byte; without any path we fail
      // below.
      table.rows.push_back({name, int64_t{0}, int64_t{0}, int64_t{0}, client.status().ToString()});
      continue;
    }
    for (const int num_pages : Lengths(options.max_pages)) {
      const Outcome outcome = TestLength(**client, num_pages, ++seed);
      const bool ok = outcome.problem.empty() && outcome.wrong == 0;
      if (!ok) code = ExitCode::kCheckFailed;
      table.rows.push_back({name, int64_t{num_pages}, outcome.units, outcome.wrong,
                            ok                        ? "ok"
                            : outcome.problem.empty() ? "WRONG BYTES"
                                                      : outcome.problem});
    }
  }
  std::cout << Render(table, options.output);
  const bool any = std::any_of(table.rows.begin(), table.rows.end(),
                               [](const auto& row) { return row[2].text != "0"; });
  if (!any) code = ExitCode::kCheckFailed;
  return code;
}

}  // namespace kvd
