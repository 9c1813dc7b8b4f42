// Where pages are, and where they belong.

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/locksctl_daemon.h"
#include "client/locksctl_output.h"
#include "client/locksctl_verbs.h"
#include "proto/geometry.h"
#include "proto/page_key.h"
#include "proto/placement.h"

namespace kvd {
namespace {

using locks_kvd::v1::Admin;
using locks_kvd::v1::PagesReply;
using locks_kvd::v1::StatsReply;

constexpr size_t kPagesPerCall = 4096;

std::string Hex(const PageKey& key) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(key.data()), key.size()));
}

absl::StatusOr<PageKey> ParseKey(const std::string& text) {
  PageKey key = {};
  const bool hex = text.size() == 2 * key.size() &&
                   std::all_of(text.begin(), text.end(),
                               [](unsigned char c) { return absl::ascii_isxdigit(c); });
  if (!hex) {
    return absl::InvalidArgumentError(
        absl::StrCat("page key: expected 32 hex digits, got '", text, "'"));
  }
  const std::string bytes = absl::HexStringToBytes(text);
  std::memcpy(key.data(), bytes.data(), key.size());
  return key;
}

absl::StatusOr<std::vector<PageKey>> KeysOfTokens(const LocksctlOptions& options) {
  std::ifstream file(options.token_file);
  std::vector<uint32_t> tokens;
  for (std::string word; file >> word;) {
    uint32_t token = 0;
    if (!absl::SimpleAtoi(word, &token)) {
      return absl::InvalidArgumentError(absl::StrCat("--token-file ", options.token_file,
                                                     ": expected token ids, got '", word, "'"));
    }
    tokens.push_back(token);
  }
  KVD_ASSIGN_OR_RETURN(const StatsReply::ArenaStats arena, WantedArena(options));
  KVD_ASSIGN_OR_RETURN(const KvGeometry geometry, FromProto(arena.geometry()));
  const Fingerprint fingerprint = ModelFingerprint(geometry, options.weights_id, options.rope);
  const std::vector<PageKey> keys =
      PageKeys(RootKey(fingerprint, options.salt, options.extra), tokens, geometry.page_tokens);
  if (keys.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--token-file ", options.token_file,
                                                   ": expected at least the ", geometry.page_tokens,
                                                   " tokens of a page, got ", tokens.size()));
  }
  return keys;
}

// The keys that the command line names: given, or of a token file.
absl::StatusOr<std::vector<PageKey>> NamedKeys(const LocksctlOptions& options, size_t first) {
  if (!options.token_file.empty()) return KeysOfTokens(options);
  std::vector<PageKey> keys;
  for (size_t i = first; i < options.arguments.size(); ++i) {
    KVD_ASSIGN_OR_RETURN(const PageKey key, ParseKey(options.arguments[i]));
    keys.push_back(key);
  }
  return keys;
}

ExitCode ComplainOfKeys(const absl::Status& status) {
  const ExitCode code = Complain(status);
  return absl::IsInvalidArgument(status) ? ExitCode::kUsage : code;
}

const char* StateName(PagesReply::State state) {
  switch (state) {
    case PagesReply::STATE_SEALED:
      return "sealed";
    case PagesReply::STATE_RESERVED:
      return "reserved";
    default:
      return "missing";
  }
}

// Appends a row for each page and shard that `daemon` has; marks the pages that it has.
absl::Status AddPages(const LocksctlOptions& options, const std::string& daemon,
                      const StatsReply::ArenaStats& arena, const std::vector<PageKey>& keys,
                      std::vector<std::vector<std::vector<Cell>>>* rows) {
  KVD_ASSIGN_OR_RETURN(const AdminCaller admin, AdminCaller::Make(options, daemon));
  for (size_t first = 0; first < keys.size(); first += kPagesPerCall) {
    const size_t count = std::min(kPagesPerCall, keys.size() - first);
    locks_kvd::v1::PagesRequest request;
    request.set_tenant(arena.tenant());
    request.set_model(arena.model());
    request.set_keys(keys[first].data(), count * sizeof(PageKey));
    KVD_ASSIGN_OR_RETURN(const PagesReply reply, admin.Call(&Admin::Stub::Pages, request));
    const size_t shards = reply.num_shards();
    if (static_cast<size_t>(reply.pages_size()) != count * shards) {
      return absl::InternalError(
          absl::StrCat(daemon, ": expected ", count * shards, " pages, got ", reply.pages_size()));
    }
    for (size_t i = 0; i < count * shards; ++i) {
      const PagesReply::Page& page = reply.pages(static_cast<int>(i));
      if (page.state() == PagesReply::STATE_MISSING) continue;
      const size_t at = first + i / shards;
      (*rows)[at].push_back({static_cast<int64_t>(at), Hex(keys[at]), daemon, int64_t{page.shard()},
                             StateName(page.state()), int64_t{page.slot()},
                             static_cast<int64_t>(page.generation()), int64_t{page.leases()},
                             page.matched()});
    }
  }
  return absl::OkStatus();
}

}  // namespace

ExitCode RunPages(const LocksctlOptions& options) {
  const absl::StatusOr<std::vector<PageKey>> keys = NamedKeys(options, 0);
  if (!keys.ok()) return ComplainOfKeys(keys.status());
  const absl::StatusOr<StatsReply::ArenaStats> arena = WantedArena(options);
  if (!arena.ok()) return Complain(arena.status());
  std::vector<std::vector<std::vector<Cell>>> rows(keys->size());
  ExitCode code = ExitCode::kOk;
  for (const std::string& daemon : options.daemons) {
    const absl::Status added = AddPages(options, daemon, *arena, *keys, &rows);
    if (!added.ok()) code = Worse(code, Complain(added));
  }
  Table table = {
      {"page", "key", "daemon", "shard", "state", "slot", "generation", "leases", "matched"}, {}};
  for (size_t page = 0; page < rows.size(); ++page) {
    if (rows[page].empty()) {
      rows[page].push_back({static_cast<int64_t>(page), Hex((*keys)[page]), "", int64_t{0},
                            "missing", int64_t{0}, int64_t{0}, int64_t{0}, false});
    }
    for (std::vector<Cell>& row : rows[page]) table.rows.push_back(std::move(row));
  }
  std::cout << Render(table, options.output);
  return code;
}

ExitCode RunPlacement(const LocksctlOptions& options) {
  if (!options.token_file.empty() && options.model.empty()) {
    std::cerr << "locksctl: placement explain --token-file needs --model: see `locksctl status`\n";
    return ExitCode::kUsage;
  }
  const absl::StatusOr<std::vector<PageKey>> keys = NamedKeys(options, 1);
  if (!keys.ok()) return ComplainOfKeys(keys.status());
  // Of a sequence the first page of each stripe decides; keys given one by one stand for
  // themselves.
  const size_t step = options.token_file.empty() ? 1 : kStripePages;
  Table table = {{"page", "key", "rank", "member"}, {}};
  for (size_t page = 0; page < keys->size(); page += step) {
    const PageKey& key = (*keys)[page];
    std::vector<std::string> members = options.daemons;
    for (int64_t rank = 1; !members.empty(); ++rank) {
      const int owner = OwnerOf(key, members);
      table.rows.push_back(
          {static_cast<int64_t>(page), Hex(key), rank, members[static_cast<size_t>(owner)]});
      members.erase(members.begin() + owner);
    }
  }
  std::cout << Render(table, options.output);
  return ExitCode::kOk;
}

}  // namespace kvd
