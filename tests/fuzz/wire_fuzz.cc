// Fuzz target: a message of the data plane as a daemon takes it apart, header, then fetch or ingest
// entries. Nothing may crash; what is accepted must be in range, and without a lease only the
// canary is allowed.

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/check.h"
#include "proto/clock.h"
#include "proto/wire.h"
#include "service/arena.h"
#include "tests/support/data_plane.h"

namespace kvd {
namespace {

constexpr SessionId kSession{1};

Arena& TheArena() {
  static SteadyClock clock;
  static std::unique_ptr<Arena> arena = [] {
    ArenaOptions options;
    options.geometry = SmallGeometry();
    options.bytes = 1 << 20;
    options.clock = &clock;
    auto made = Arena::Make(std::move(options));
    KVD_CHECK(made.ok());
    (*made)->BeginSession(kSession);
    return *std::move(made);
  }();
  return *arena;
}

void TakeFetchEntries(std::span<const uint8_t> payload) {
  Arena& arena = TheArena();
  std::vector<FetchEntry> entries(payload.size() / sizeof(FetchEntry));
  std::memcpy(entries.data(), payload.data(), entries.size() * sizeof(FetchEntry));
  std::vector<uint8_t> allowed(entries.size(), 0xEE);
  const absl::Status checked = arena.CheckFetch(kSession, entries, allowed);
  const ArenaShape& shape = arena.memory().shape();
  const bool in_range = std::all_of(entries.begin(), entries.end(), [&](const FetchEntry& entry) {
    return entry.slot < shape.num_slots && entry.layer < shape.slot.num_layers &&
           entry.head < shape.slot.shard_heads;
  });
  KVD_CHECK(checked.ok() == in_range);
  if (!checked.ok()) return;
  for (size_t i = 0; i < entries.size(); ++i)
    KVD_CHECK(allowed[i] == (entries[i].slot == 0 ? 1 : 0));
}

void TakeIngestEntries(std::span<const uint8_t> payload) {
  Arena& arena = TheArena();
  for (; payload.size() >= sizeof(IngestEntry); payload = payload.subspan(sizeof(IngestEntry))) {
    IngestEntry entry;
    std::memcpy(&entry, payload.data(), sizeof(entry));
    KVD_CHECK(!arena.PinReservation(kSession, Ticket{entry.ticket}).ok());  // nothing is reserved
    const bool in_range = entry.layer < 4 && entry.head < 2;
    KVD_CHECK(arena.CheckUnit(entry.layer, entry.head).ok() == in_range);
  }
}

}  // namespace
}  // namespace kvd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using kvd::MessageType;
  const size_t header_bytes = std::min(size, sizeof(kvd::MessageHeader));
  for (int type = 1; type <= kvd::kNumMessageTypes; ++type) {
    const auto header = kvd::ParseHeader({data, header_bytes}, static_cast<MessageType>(type));
    if (!header.ok()) continue;
    KVD_CHECK(header->magic == kvd::kWireMagic && header->type == static_cast<MessageType>(type));
    const std::span<const uint8_t> payload(data + header_bytes, size - header_bytes);
    if (header->type == MessageType::kFetch) kvd::TakeFetchEntries(payload);
    if (header->type == MessageType::kIngest) kvd::TakeIngestEntries(payload);
  }
  return 0;
}
