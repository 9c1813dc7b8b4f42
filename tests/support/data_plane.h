// A daemon's data plane without its control plane: one arena, its sessions, the UCX servers and the
// descriptor socket, with pages whose bytes tell where they come from. In this process, or in a
// child that can be killed and frozen.

#ifndef LOCKS_KVD_TESTS_SUPPORT_DATA_PLANE_H_
#define LOCKS_KVD_TESTS_SUPPORT_DATA_PLANE_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "proto/clock.h"
#include "proto/pool.pb.h"
#include "service/descriptor_server.h"
#include "service/fetch_server.h"
#include "service/ingest_server.h"
#include "service/session_table.h"

namespace kvd {

// L = 4, Hk = 2, D = 64, B = 16: units of 4 KiB, 8 of them in a slot.
KvGeometry SmallGeometry();

// What a unit of page `page`, written the `write`-th time, must hold: finite values that no other
// unit has.
std::vector<uint8_t> UnitBytes(const SlotLayout& slot, uint64_t page, uint64_t write, int layer,
                               int head);

// A page that was sealed, as fetches name it.
struct TestPage {
  uint64_t page = 0;
  uint64_t write = 0;
  uint32_t slot = 0;
  uint64_t generation = 0;
};

class TestDaemon {
 public:
  struct Options {
    KvGeometry geometry = SmallGeometry();
    uint64_t bytes = 8 << 20;
    MemoryPlace place;
    FetchLimits limits = {};
    std::string port_range;  // of UCX
  };
  explicit TestDaemon(const Options& options);
  ~TestDaemon();

  // A session, and what Attach would answer it.
  locks_kvd::v1::AttachReply Attach();
  // Writes and seals `page` as the session of `offer`, which then leases it.
  TestPage PutPage(const locks_kvd::v1::AttachReply& offer, uint64_t page, uint64_t write);
  // Reserves `page`; the ticket.
  uint64_t Reserve(const locks_kvd::v1::AttachReply& offer, uint64_t page);
  void Release(const locks_kvd::v1::AttachReply& offer, const TestPage& page);
  SessionHandle Session(const locks_kvd::v1::AttachReply& offer) const;

  SteadyClock clock;
  Incarnation incarnation = {};
  std::string folder;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<SessionTable> sessions;
  std::unique_ptr<UcxWorker> worker;
  std::unique_ptr<FetchServer> fetches;
  std::unique_ptr<IngestServer> ingests;
  std::unique_ptr<DescriptorServer> descriptors;
};

ArenaShape ShapeOf(const locks_kvd::v1::AttachReply& offer);
Incarnation IncarnationOf(const locks_kvd::v1::AttachReply& offer);
SessionToken TokenOf(const locks_kvd::v1::AttachReply& offer);

// A TestDaemon with default options in a process of its own, with `num_pages` sealed pages (write
// 1).
class ChildDaemon {
 public:
  explicit ChildDaemon(int num_pages);
  ~ChildDaemon();
  void Signal(int signal) const;
  // Waits until the process is really gone.
  void Kill();

  locks_kvd::v1::AttachReply offer;
  std::vector<TestPage> pages;

 private:
  pid_t pid_ = -1;
  int control_ = -1;
};

// Call first in main(): serves as a ChildDaemon's process if that is what `argv` asks for, and ends
// it.
void RunAsChildDaemonIfAsked(int argc, char** argv);

}  // namespace kvd

#endif  // LOCKS_KVD_TESTS_SUPPORT_DATA_PLANE_H_
