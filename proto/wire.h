// Messages of the data plane: fixed-size, little-endian, no pointers, lengths checked before use.
//
// A fetch is one request (header + entries) and one reply in pieces of at most kMaxPieceBytes, each
// a header, a status bitmap of the piece's entries and their items at fixed positions, missing ones
// zeroed.
// Thread safety: pure functions and plain values. Nothing here trusts its input.

#ifndef LOCKS_KVD_PROTO_WIRE_H_
#define LOCKS_KVD_PROTO_WIRE_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/checksum.h"

namespace kvd {

static_assert(std::endian::native == std::endian::little, "wire structs are little-endian");

inline constexpr uint32_t kWireMagic = 0x314B564Cu;  // "LVK1"
inline constexpr uint8_t kWireVersion = 1;
inline constexpr uint32_t kProtocolVersion = 1;  // of the control plane
inline constexpr size_t kMaxPieceBytes = size_t{4} << 20;
inline constexpr int kMaxKeysPerCall = 131072;

using Incarnation = std::array<uint8_t, 16>;
using SessionToken = std::array<uint8_t, 16>;

// Compares in constant time.
bool TokensEqual(const SessionToken& a, const SessionToken& b);

// Active message ids.
enum class MessageType : uint16_t {
  kFetch = 1,
  kFetchReply = 2,
  kIngest = 3,     // entries, then their units in the same order
  kIngestAck = 4,  // a status bitmap of the entries: 1 where the unit was stored
  kHello = 5,      // the payload is the sender's UCX address: opens the way back
  kHelloAck = 6,
};
inline constexpr int kNumMessageTypes = 6;

enum WireFlags : uint8_t {
  // Fetch: each entry asks for a slot's header and all its records. Ingest, from another daemon:
  // each item is all records of a slot.
  kFlagSummaries = 1,
  // Fetch of units, a wish: pieces may be sent from GPU memory into GPU memory. Reply: this piece
  // is. It has no bitmap then: its `count` units alone, every one of them valid.
  kFlagGpuMemory = 2,
};

// Outcome of a whole request, in the header of a reply or an acknowledgement.
enum class WireStatus : uint16_t {
  kOk = 0,
  kInvalid = 1,      // malformed: a bug of the sender
  kAborted = 2,      // unknown session or another incarnation
  kExhausted = 3,    // over a cap
  kUnavailable = 4,  // draining
  kLate = 5,         // the deadline passed before the work was done
};

struct MessageHeader {
  uint32_t magic = kWireMagic;
  uint8_t version = kWireVersion;
  uint8_t flags = 0;
  MessageType type = MessageType::kFetch;
  Incarnation incarnation = {};
  SessionToken session = {};
  uint64_t request = 0;  // chosen by the sender; the answer repeats it
  uint32_t count = 0;    // entries in this message
  uint16_t piece = 0;    // reply: index of the piece; request: 0
  WireStatus status = WireStatus::kOk;
  uint32_t first_entry = 0;  // reply: index in the request of the piece's first entry
  uint32_t deadline_us = 0;  // request: time left when it was sent
};
static_assert(sizeof(MessageHeader) == 64 && alignof(MessageHeader) == 8);

// One item of a fetch. With kFlagSummaries layer and head are 0.
struct FetchEntry {
  uint32_t slot;
  uint16_t layer;
  uint16_t head;  // of the shard
  uint64_t generation;
};
static_assert(sizeof(FetchEntry) == 16);

// One unit of an ingest; the units follow the entries in the same order. With kFlagSummaries layer
// and head are 0.
struct IngestEntry {
  uint64_t ticket;
  uint16_t layer;
  uint16_t head;
  uint32_t reserved = 0;
};
static_assert(sizeof(IngestEntry) == 16);

// Copies and checks a header: magic, version, type, exact length. kInvalidArgument names the field.
absl::StatusOr<MessageHeader> ParseHeader(std::span<const uint8_t> bytes, MessageType expected);

// Bytes of the status bitmap of `count` entries, padded so that items start 64-byte aligned in a
// piece that is itself 64-byte aligned.
constexpr size_t BitmapBytes(size_t count) { return (count + 511) / 512 * 64; }

// Entries that fit a piece of items of `item_bytes`; at least 1.
size_t EntriesPerPiece(size_t item_bytes);

// The canary: word i (8 bytes) of the canary slot's units under `incarnation`.
inline uint64_t CanaryWord(const Incarnation& incarnation, uint64_t i) {
  uint64_t seed;
  std::memcpy(&seed, incarnation.data(), sizeof(seed));
  return Mix64(seed + (i + 1) * kGolden64);
}

}  // namespace kvd

#endif  // LOCKS_KVD_PROTO_WIRE_H_
