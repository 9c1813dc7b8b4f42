// One session with one incarnation of one daemon: everything that dies with it.
//
// Thread safety: immutable once made, but for `lost` (see PageSource), `draining` and `leases`.
// Shared by the channel that made it and by the sequences that hold pages through it; its leases
// and descriptors are never used for a later session (guarantee G3).

#ifndef LOCKS_KVD_CLIENT_ATTACHMENT_H_
#define LOCKS_KVD_CLIENT_ATTACHMENT_H_

#include <atomic>
#include <memory>
#include <string>

#include "client/leases.h"
#include "client/metrics.h"
#include "client/page_source.h"
#include "client/path.h"
#include "proto/ingest_channel.h"
#include "proto/pool.pb.h"

namespace kvd {

struct Attachment : PageSource {
  std::string address;
  int daemon = 0;  // index among the pool's members
  locks_kvd::v1::AttachReply reply;
  PathReport path;
  std::unique_ptr<IngestChannel> ingest;  // null without UCX: such a client cannot put
  std::atomic<bool> draining{false};
  LeaseBook leases;
  // The channel's; never null.
  std::shared_ptr<ChannelFigures> figures = std::make_shared<ChannelFigures>();

  const locks_kvd::v1::SessionRef& session() const { return reply.session(); }
  // True once a data connection is beyond repair.
  bool failed() const { return fetcher->failed() || (ingest != nullptr && ingest->failed()); }
  // Nothing of it is to be used any more.
  void MarkLost() {
    lost.store(true, std::memory_order_release);
    fetcher->Shutdown();
    if (ingest != nullptr) ingest->Shutdown();
  }
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_ATTACHMENT_H_
