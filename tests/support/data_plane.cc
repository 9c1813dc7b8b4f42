#include "tests/support/data_plane.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "kernels/check.h"
#include "kernels/checksum.h"
#include "proto/geometry.h"
#include "proto/gpu_memory.h"
#include "proto/staging.h"

namespace kvd {
namespace {

constexpr char kChildFlag[] = "--serve-as-child-daemon";

PageKey KeyOf(uint64_t page) {
  PageKey key = {};
  const uint64_t words[2] = {Mix64(page + 1), Mix64(page + 1000000007)};
  std::memcpy(key.data(), words, sizeof(words));
  return key;
}

void WriteAll(int fd, const std::string& bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t wrote = write(fd, bytes.data() + at, bytes.size() - at);
    KVD_CHECK(wrote > 0);
    at += static_cast<size_t>(wrote);
  }
}

std::string ReadAll(int fd, size_t size) {
  std::string bytes(size, '\0');
  for (size_t at = 0; at < size;) {
    const ssize_t got = read(fd, bytes.data() + at, size - at);
    KVD_CHECK(got > 0);
    at += static_cast<size_t>(got);
  }
  return bytes;
}

}  // namespace

KvGeometry SmallGeometry() {
  KvGeometry geometry;
  geometry.num_layers = 4;
  geometry.num_q_heads = 4;
  geometry.num_kv_heads = 2;
  geometry.head_dim = 64;
  geometry.softmax_scale = 0.125f;
  return geometry;
}

std::vector<uint8_t> UnitBytes(const SlotLayout& slot, uint64_t page, uint64_t write, int layer,
                               int head) {
  std::vector<uint8_t> bytes(slot.unit_bytes);
  const uint64_t seed = Mix64(page * 4096 + write) + slot.unit_idx(layer, head) * kGolden64;
  for (size_t i = 0; i < bytes.size() / sizeof(uint64_t); ++i) {
    // Bit 14 of each bf16 cleared: magnitudes below 2, never NaN.
    const uint64_t word = Mix64(seed ^ (i * 0xD1B54A32D192ED03ull)) & 0xBFFFBFFFBFFFBFFFull;
    std::memcpy(bytes.data() + i * sizeof(word), &word, sizeof(word));
  }
  return bytes;
}

TestDaemon::TestDaemon(const Options& options) {
  incarnation = RandomBytes16();
  char name[] = "/tmp/kvd_data_plane_XXXXXX";
  KVD_CHECK(mkdtemp(name) != nullptr);
  folder = name;

  ArenaOptions arena_options;
  arena_options.tenant = "test";
  arena_options.model = "model";
  arena_options.geometry = options.geometry;
  arena_options.bytes = options.bytes;
  arena_options.place = options.place;
  arena_options.incarnation = incarnation;
  arena_options.clock = &clock;
  auto made = Arena::Make(std::move(arena_options));
  KVD_CHECK(made.ok());
  arena = *std::move(made);

  SessionTable::Options session_options;
  session_options.incarnation = incarnation;
  session_options.ttl = absl::Hours(1);
  session_options.clock = &clock;
  sessions = std::make_unique<SessionTable>(session_options);

  UcxOptions ucx;
  ucx.devices = "lo";
  ucx.port_range = options.port_range;
  ucx.read_from_sender = true;
  auto started = UcxWorker::Make(ucx);
  KVD_CHECK(started.ok());
  worker = *std::move(started);
  worker->AcceptPeers([this](const MessageHeader& header) {
    return sessions->Find(header.session, header.incarnation).status();
  });
  fetches = std::make_unique<FetchServer>(worker.get(), sessions.get(), options.limits, nullptr);
  ingests = std::make_unique<IngestServer>(worker.get(), sessions.get());
  auto listening = DescriptorServer::Make(folder + "/kvd.sock", sessions.get());
  KVD_CHECK(listening.ok());
  descriptors = *std::move(listening);
}

TestDaemon::~TestDaemon() {
  descriptors.reset();
  fetches.reset();
  ingests.reset();
  worker.reset();
  sessions.reset();
  std::filesystem::remove_all(folder);
}

locks_kvd::v1::AttachReply TestDaemon::Attach() {
  auto attached = sessions->Attach(arena, "test");
  KVD_CHECK(attached.ok());
  locks_kvd::v1::AttachReply offer;
  offer.set_protocol(kProtocolVersion);
  offer.mutable_session()->set_token(attached->token.data(), attached->token.size());
  offer.mutable_session()->set_incarnation(incarnation.data(), incarnation.size());
  *offer.mutable_arena()->mutable_geometry() = ToProto(arena->geometry());
  offer.mutable_arena()->set_num_slots(arena->memory().shape().num_slots);
  offer.mutable_arena()->set_slots_per_slab(arena->memory().shape().slots_per_slab);
  offer.mutable_arena()->set_canary_slot(0);
  std::string host_id;
  std::ifstream boot_id("/proc/sys/kernel/random/boot_id");
  std::getline(boot_id, host_id);
  if (arena->memory().place().on_gpu()) {
    offer.mutable_peer()->set_socket_path(folder + "/kvd.sock");
    offer.mutable_peer()->set_host_id(host_id);
    offer.mutable_peer()->set_gpu_uuid(*GpuUuid(arena->memory().place().gpu));
  } else {
    offer.mutable_shared()->set_socket_path(folder + "/kvd.sock");
    offer.mutable_shared()->set_host_id(host_id);
  }
  offer.mutable_ucx()->set_worker_address(worker->address());
  offer.mutable_ucx()->set_version(UcxWorker::Version());
  return offer;
}

SessionHandle TestDaemon::Session(const locks_kvd::v1::AttachReply& offer) const {
  auto session = sessions->Find(TokenOf(offer), incarnation);
  KVD_CHECK(session.ok());
  return *std::move(session);
}

uint64_t TestDaemon::Reserve(const locks_kvd::v1::AttachReply& offer, uint64_t page) {
  const PageKey key = KeyOf(page);
  const auto page_idx = static_cast<uint32_t>(page);
  auto reserved = arena->Reserve(Session(offer).id, {&key, 1}, {&page_idx, 1}, 0);
  KVD_CHECK(reserved.ok() && reserved->pages[0].state == ReserveOutcome::State::kNew);
  return static_cast<uint64_t>(reserved->pages[0].ticket);
}

TestPage TestDaemon::PutPage(const locks_kvd::v1::AttachReply& offer, uint64_t page,
                             uint64_t write) {
  const SessionId session = Session(offer).id;
  const Ticket ticket{Reserve(offer, page)};
  const SlotLayout& slot = arena->memory().shape().slot;
  StagingBuffer staging;
  {
    auto pin = arena->PinReservation(session, ticket);
    KVD_CHECK(pin.ok());
    for (int layer = 0; layer < slot.num_layers; ++layer) {
      for (int head = 0; head < slot.shard_heads; ++head) {
        const std::vector<uint8_t> bytes = UnitBytes(slot, page, write, layer, head);
        uint8_t* const from = staging.Reserve(bytes.size(), arena->store().place());
        std::memcpy(from, bytes.data(), bytes.size());
        const PageStore::UnitWrite of_unit = {pin->slot(), layer, head, from};
        arena->store().WriteUnits({&of_unit, 1});
        pin->MarkReceived(layer, head);
      }
    }
  }
  auto sealed = arena->Seal(session, ticket);
  KVD_CHECK(sealed.ok());
  return {page, write, sealed->location.slot, sealed->location.generation};
}

void TestDaemon::Release(const locks_kvd::v1::AttachReply& offer, const TestPage& page) {
  const PageLocation location = {page.slot, page.generation};
  KVD_CHECK(arena->Release(Session(offer).id, {&location, 1}).ok());
}

ArenaShape ShapeOf(const locks_kvd::v1::AttachReply& offer) {
  auto geometry = FromProto(offer.arena().geometry());
  KVD_CHECK(geometry.ok());
  return {MakeSlotLayout(*geometry), offer.arena().num_slots(), offer.arena().slots_per_slab()};
}

Incarnation IncarnationOf(const locks_kvd::v1::AttachReply& offer) {
  Incarnation incarnation;
  std::memcpy(incarnation.data(), offer.session().incarnation().data(), incarnation.size());
  return incarnation;
}

SessionToken TokenOf(const locks_kvd::v1::AttachReply& offer) {
  SessionToken token;
  std::memcpy(token.data(), offer.session().token().data(), token.size());
  return token;
}

ChildDaemon::ChildDaemon(int num_pages) {
  int sockets[2];
  KVD_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  const std::string fd = std::to_string(sockets[1]);
  const std::string pages_text = std::to_string(num_pages);
  pid_ = fork();
  KVD_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(sockets[0]);
    execl("/proc/self/exe", "child-daemon", kChildFlag, fd.c_str(), pages_text.c_str(), nullptr);
    _exit(127);
  }
  close(sockets[1]);
  control_ = sockets[0];
  uint64_t size = 0;
  std::memcpy(&size, ReadAll(control_, sizeof(size)).data(), sizeof(size));
  KVD_CHECK(offer.ParseFromString(ReadAll(control_, size)));
  pages.resize(static_cast<size_t>(num_pages));
  std::memcpy(pages.data(), ReadAll(control_, pages.size() * sizeof(TestPage)).data(),
              pages.size() * sizeof(TestPage));
}

ChildDaemon::~ChildDaemon() {
  Kill();
  close(control_);
  std::filesystem::remove_all(std::filesystem::path(offer.shared().socket_path()).parent_path());
}

void ChildDaemon::Signal(int signal) const { KVD_CHECK(kill(pid_, signal) == 0); }

void ChildDaemon::Kill() {
  if (pid_ < 0) return;
  Signal(SIGKILL);
  KVD_CHECK(waitpid(pid_, nullptr, 0) == pid_);
  pid_ = -1;
}

void RunAsChildDaemonIfAsked(int argc, char** argv) {
  if (argc != 4 || std::strcmp(argv[1], kChildFlag) != 0) return;
  const int control = std::atoi(argv[2]);
  TestDaemon::Options options;
  options.bytes = 64 << 20;
  TestDaemon daemon(options);
  const locks_kvd::v1::AttachReply offer = daemon.Attach();
  std::vector<TestPage> pages;
  for (int page = 0; page < std::atoi(argv[3]); ++page) {
    pages.push_back(daemon.PutPage(offer, static_cast<uint64_t>(page), 1));
  }
  const std::string text = offer.SerializeAsString();
  const uint64_t size = text.size();
  WriteAll(control, std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + text);
  WriteAll(control, std::string(reinterpret_cast<const char*>(pages.data()),
                                pages.size() * sizeof(TestPage)));
  char byte;
  while (read(control, &byte, 1) > 0) {
  }
  exit(0);  // the test has gone
}

}  // namespace kvd
