#include "proto/wire.h"

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace kvd {

bool TokensEqual(const SessionToken& a, const SessionToken& b) {
  // No early exit: the time must not tell how many leading bytes a guess has right.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

absl::StatusOr<MessageHeader> ParseHeader(std::span<const uint8_t> bytes, MessageType expected) {
  if (bytes.size() != sizeof(MessageHeader)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "message header length: expected %d bytes, got %d", sizeof(MessageHeader), bytes.size()));
  }
  MessageHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != kWireMagic) {
    return absl::InvalidArgumentError(
        absl::StrFormat("message header magic: expected %08x, got %08x", kWireMagic, header.magic));
  }
  if (header.version != kWireVersion) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "message header version: expected %d, got %d: attach again with a client of "
        "the daemon's version",
        kWireVersion, header.version));
  }
  if (header.type != expected) {
    return absl::InvalidArgumentError(absl::StrFormat("message header type: expected %d, got %d",
                                                      static_cast<int>(expected),
                                                      static_cast<int>(header.type)));
  }
  return header;
}

size_t EntriesPerPiece(size_t item_bytes) {
  size_t entries = kMaxPieceBytes / item_bytes;
  while (entries > 1 && BitmapBytes(entries) + entries * item_bytes > kMaxPieceBytes) --entries;
  return entries < 1 ? 1 : entries;
}

}  // namespace kvd
