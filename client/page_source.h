// One session with one incarnation of one daemon, as a decode step sees it: where to fetch, and
// whether the session still stands.
//
// A source is never revived: a daemon that comes back is a new source (guarantee G3).
// Thread safety: `fetcher` is set before the source is shared; `lost` is set once, by the thread
// that watches the session, before it shuts the fetcher down.

#ifndef LOCKS_KVD_CLIENT_PAGE_SOURCE_H_
#define LOCKS_KVD_CLIENT_PAGE_SOURCE_H_

#include <atomic>
#include <memory>

#include "client/fetcher.h"

namespace kvd {

struct PageSource {
  virtual ~PageSource() = default;

  std::unique_ptr<Fetcher> fetcher;
  std::atomic<bool> lost{false};
};

}  // namespace kvd

#endif  // LOCKS_KVD_CLIENT_PAGE_SOURCE_H_
