// A worker below the client facade, for system tests: it puts pages whose bytes tell where they
// come from and fetches by slot and generation, stale ones included, which the facade never would.
//
// Thread safety: Put and Fetch are safe; the rest is compatible.

#ifndef LOCKS_KVD_TESTS_SYSTEM_SYSTEM_WORKER_H_
#define LOCKS_KVD_TESTS_SYSTEM_SYSTEM_WORKER_H_

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "client/device_buffer.h"
#include "client/page_writer.h"
#include "client/pool.h"
#include "kernels/check.h"
#include "proto/status.h"
#include "proto/ucx_worker.h"
#include "tests/client/fake_pool.h"
#include "tests/support/daemon_process.h"

namespace kvd::testing {

// Page `page` in its `write`-th version. The key names the page only: a page that was evicted can
// be put again with other bytes, which is what a reader must never take for the former ones.
struct PageVersion {
  uint64_t page = 0;
  uint64_t write = 0;
};

inline PageKey KeyOf(uint64_t page) {
  PageKey key = {};
  std::memcpy(key.data(), &page, sizeof(page));
  key[15] = 0x5a;
  return key;
}

// What a unit must hold: pseudo-random finite values (bf16 of magnitude .5 to 2) that no other
// unit, page or version has.
inline std::vector<uint8_t> UnitOf(const WorkerShape& shape, const PageVersion& version, int layer,
                                   int head) {
  std::vector<uint8_t> unit(shape.unit_bytes());
  uint64_t state = version.page * 0x9E3779B97F4A7C15u + version.write * 0xC2B2AE3D27D4EB4Fu +
                   static_cast<uint64_t>(layer * 64 + head + 1) * 0x165667B19E3779F9u;
  for (size_t i = 0; i < unit.size(); i += 2) {
    state += 0x9E3779B97F4A7C15u;
    uint64_t mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    const auto bits = static_cast<uint16_t>(((mixed >> 40) & 0x80FFu) | 0x3F00u);
    std::memcpy(unit.data() + i, &bits, sizeof(bits));
  }
  return unit;
}

// A version that was sealed, as fetches name it.
struct SealedVersion {
  PageVersion version;
  SlotRef ref;
};

// One list's outcome.
struct Fetched {
  absl::StatusCode code = absl::StatusCode::kOk;
  int64_t num_exact = 0;    // valid, and the sealed bytes
  int64_t num_missing = 0;  // not valid
  int64_t num_wrong = 0;    // valid with other bytes: G1 is broken

  void Add(const Fetched& other) {
    if (other.code != absl::StatusCode::kOk) code = other.code;
    num_exact += other.num_exact;
    num_missing += other.num_missing;
    num_wrong += other.num_wrong;
  }
};

class SystemWorker {
 public:
  // `transports`: of UCX; empty: its choice for this worker's memory.
  static absl::StatusOr<std::unique_ptr<SystemWorker>> Make(ClientOptions options,
                                                            const std::string& transports = "") {
    auto worker = std::unique_ptr<SystemWorker>(new SystemWorker());
    worker->options_ = std::move(options);
    KVD_ASSIGN_OR_RETURN(worker->shape_, WorkerShape::Make(worker->options_.geometry, {}));
    if (worker->options_.gpu >= 0) worker->shape_.place = OnGpu(worker->options_.gpu);
    UcxOptions ucx;
    ucx.devices = "lo";
    ucx.transports = transports;
    ucx.gpu = worker->options_.gpu;
    KVD_ASSIGN_OR_RETURN(worker->ucx_, UcxWorker::Make(ucx));
    KVD_ASSIGN_OR_RETURN(worker->pool_,
                         Pool::Make(&worker->options_, &worker->shape_, worker->ucx_.get()));
    worker->writer_ = std::make_unique<PageWriter>(worker->pool_.get(), &worker->shape_,
                                                   worker->options_.control_timeout);
    return worker;
  }

  // Puts versions on daemon 0; all have failed if it is not attached.
  PutReport Put(std::span<const PageVersion> versions) {
    const PoolView view = pool_->View();
    if (view.live.empty()) {
      PutReport lost;
      lost.pages.resize(versions.size());
      lost.num_failed = static_cast<int64_t>(versions.size());
      lost.first_failure = absl::UnavailableError("the daemon is not attached");
      return lost;
    }
    std::vector<PlacedPage> placed;
    for (const PageVersion& version : versions) {
      const PageKey key = KeyOf(version.page);
      placed.push_back({key, static_cast<uint32_t>(version.page % 1000), 0, PlacementWord(key)});
    }
    return writer_->Write(
        view, placed, [&](std::span<const size_t> wanted, int shard_pos, uint8_t* slots) {
          for (const size_t i : wanted) {
            for (int layer = 0; layer < shape_.num_layers(); ++layer) {
              for (int h = 0; h < shape_.slot.shard_heads; ++h) {
                const auto bytes =
                    UnitOf(shape_, versions[i], layer, shard_pos * shape_.slot.shard_heads + h);
                slots = std::copy(bytes.begin(), bytes.end(), slots);
              }
            }
          }
          return absl::OkStatus();
        });
  }

  // Fetches every unit of `pages` in one list to where the worker's units go, and compares.
  Fetched Fetch(Fetcher& fetcher, std::span<const SealedVersion> pages, absl::Duration deadline) {
    std::vector<FetchEntry> entries;
    for (const SealedVersion& page : pages) {
      for (int layer = 0; layer < shape_.num_layers(); ++layer) {
        for (int head = 0; head < shape_.num_heads(); ++head) {
          entries.push_back({page.ref.slot, static_cast<uint16_t>(layer),
                             static_cast<uint16_t>(head), page.ref.generation});
        }
      }
    }
    std::vector<uint8_t> bytes(entries.size() * shape_.unit_bytes(), 0xEE);
    auto landing = PlacedBytes::Make(shape_.place, bytes.size(), "landing");
    KVD_CHECK(landing.ok());
    KVD_CHECK(CopyBytes(shape_.place, landing->data(), bytes.data(), bytes.size()).ok());
    std::vector<uint8_t*> destinations;
    for (size_t i = 0; i < entries.size(); ++i) {
      destinations.push_back(landing->data() + i * shape_.unit_bytes());
    }
    std::vector<uint8_t> valid(entries.size(), 0);
    FetchList list;
    list.entries = entries;
    list.destinations = destinations.data();
    list.valid = valid.data();
    list.deadline = deadline;
    fetcher.Start(list);
    fetcher.Wait(list);
    KVD_CHECK(CopyBytes(shape_.place, bytes.data(), landing->data(), bytes.size()).ok());
    Fetched fetched;
    fetched.code = list.code;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (list.code != absl::StatusCode::kOk || valid[i] == 0) {
        ++fetched.num_missing;
        continue;
      }
      const SealedVersion& page = pages[i / shape_.units_per_page()];
      const auto expected = UnitOf(shape_, page.version, entries[i].layer, entries[i].head);
      const bool same =
          std::memcmp(expected.data(), bytes.data() + i * expected.size(), expected.size()) == 0;
      ++(same ? fetched.num_exact : fetched.num_wrong);
    }
    return fetched;
  }

  std::shared_ptr<Attachment> attachment() const { return pool_->channel(0).attachment(); }
  Pool& pool() { return *pool_; }
  UcxWorker* ucx() { return ucx_.get(); }
  const WorkerShape& shape() const { return shape_; }

 private:
  SystemWorker() = default;

  // Destroyed in reverse order: the writer uses the pool, the pool the worker.
  ClientOptions options_;
  WorkerShape shape_;
  std::unique_ptr<UcxWorker> ucx_;
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<PageWriter> writer_;
};

// The pages of a report that are new, with where they are.
inline std::vector<SealedVersion> NewPages(std::span<const PageVersion> versions,
                                           const PutReport& report) {
  std::vector<SealedVersion> sealed;
  for (size_t i = 0; i < versions.size(); ++i) {
    if (report.pages[i].state != PutOutcome::State::kNew) continue;
    sealed.push_back({versions[i], report.pages[i].slots[0]});
  }
  return sealed;
}

inline std::vector<PageVersion> VersionsOf(uint64_t first_page, uint64_t count, uint64_t write) {
  std::vector<PageVersion> versions;
  for (uint64_t i = 0; i < count; ++i) versions.push_back({first_page + i, write});
  return versions;
}

inline ClientOptions OptionsFor(std::vector<std::string> daemons, PathKind path) {
  ClientOptions options;
  options.daemons = std::move(daemons);
  options.tenant = "test";
  options.model = "model";
  options.geometry = SmallGeometry();
  options.weights_id = "weights";
  options.rope = "theta=10000";
  options.required_path = path;
  options.best_path = path;
  return options;
}

// Polls for up to 20 s: a bound against a hang, not a figure.
inline bool WaitFor(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return false;
}

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SYSTEM_SYSTEM_WORKER_H_
