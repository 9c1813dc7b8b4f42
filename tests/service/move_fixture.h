// A daemon as a bulk move sees it: arena, sessions, data plane and control plane in the test's
// process, with a stand-in for the library of bulk moves.

#ifndef LOCKS_KVD_TESTS_SERVICE_MOVE_FIXTURE_H_
#define LOCKS_KVD_TESTS_SERVICE_MOVE_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/pool_service.h"
#include "tests/service/stand_in_communicator.h"
#include "tests/support/data_plane.h"
#include "tests/support/eventually.h"

namespace kvd::testing {

class MoveDaemon {
 public:
  MoveDaemon(absl::StatusOr<std::shared_ptr<const CommunicatorLibrary>> library,
             absl::Duration watchdog, uint64_t arena_bytes = uint64_t{4} << 20)
      : data(OptionsFor(arena_bytes)) {
    moves = std::make_unique<MoveReceiver>(MoveReceiver::Options{.sessions = data.sessions.get(),
                                                                 .clock = &clock,
                                                                 .library = std::move(library),
                                                                 .watchdog = watchdog});
    PoolOptions options;
    options.sessions = data.sessions.get();
    options.sealer = &sealer;
    options.metrics = &metrics;
    options.clock = &data.clock;
    options.moves = moves.get();
    options.arenas = {data.arena};
    options.version = "test";
    pool = std::make_unique<PoolService>(std::move(options));
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(pool.get());
    server = builder.BuildAndStart();
    address = absl::StrCat("127.0.0.1:", port);
    PathOffers offers;
    offers.ucx.emplace();
    offers.ucx->set_worker_address(data.worker->address());
    offers.ucx->set_version(UcxWorker::Version());
    pool->Open(offers);
    offer = data.Attach();
  }
  ~MoveDaemon() {
    pool->EndStreams();
    server->Shutdown();
    server->Wait();
  }

  static TestDaemon::Options OptionsFor(uint64_t arena_bytes) {
    TestDaemon::Options options;
    options.bytes = arena_bytes;
    return options;
  }
  void Put(int first, int count) {
    for (int page = first; page < first + count; ++page) {
      pages.push_back(data.PutPage(offer, static_cast<uint64_t>(page), 1));
    }
  }
  ArenaStats Stats() const { return data.arena->Stats(); }
  // True if the sealed page of `key` holds what TestDaemon::PutPage writes for `page`.
  bool Holds(const SealedCopy& copy, uint64_t page) const {
    const SlotLayout& slot = data.arena->memory().shape().slot;
    for (int layer = 0; layer < slot.num_layers; ++layer) {
      for (int head = 0; head < slot.shard_heads; ++head) {
        const std::vector<uint8_t> bytes = UnitBytes(slot, page, 1, layer, head);
        if (std::memcmp(data.arena->memory().unit(copy.location.slot, layer, head), bytes.data(),
                        bytes.size()) != 0) {
          return false;
        }
      }
    }
    return true;
  }
  // Sealed pages, each by its place in the sequence, all of them with the bytes that belong to it.
  std::vector<int> IntactPages() const {
    std::vector<int> intact;
    for (const SealedCopy& copy : data.arena->SealedPages()) {
      if (Holds(copy, copy.page_idx)) intact.push_back(static_cast<int>(copy.page_idx));
    }
    std::sort(intact.begin(), intact.end());
    return intact;
  }

  TestClock clock;  // the receiver's
  Metrics metrics;
  Sealer sealer{2};
  TestDaemon data;
  std::unique_ptr<MoveReceiver> moves;
  std::unique_ptr<PoolService> pool;
  std::unique_ptr<grpc::Server> server;
  std::string address;
  locks_kvd::v1::AttachReply offer;  // of the session that leases what Put writes
  std::vector<TestPage> pages;
};

}  // namespace kvd::testing

#endif  // LOCKS_KVD_TESTS_SERVICE_MOVE_FIXTURE_H_
