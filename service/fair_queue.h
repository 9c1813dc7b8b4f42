// A queue in which the owners of items take turns, so that one with many items does not keep
// another waiting.
//
// Thread safety: compatible. Owners are few (tenants); one without items is forgotten.

#ifndef LOCKS_KVD_SERVICE_FAIR_QUEUE_H_
#define LOCKS_KVD_SERVICE_FAIR_QUEUE_H_

#include <cstddef>
#include <deque>
#include <list>
#include <optional>
#include <string>
#include <utility>

namespace kvd {

template <typename T>
class FairQueue {
 public:
  void Push(const std::string& owner, T item) {
    for (Lane& lane : lanes_) {
      if (lane.owner != owner) continue;
      lane.items.push_back(std::move(item));
      return;
    }
    lanes_.push_back({owner, {std::move(item)}});
  }

  // The first item that `may_go`, of the owner whose turn it is: that owner's turn comes last from
  // then on. nullopt if no item may go.
  template <typename MayGo>
  std::optional<T> Pop(MayGo may_go) {
    for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
      for (auto item = lane->items.begin(); item != lane->items.end(); ++item) {
        if (!may_go(*item)) continue;
        T taken = std::move(*item);
        lane->items.erase(item);
        if (lane->items.empty()) {
          lanes_.erase(lane);
        } else {
          lanes_.splice(lanes_.end(), lanes_, lane);
        }
        return taken;
      }
    }
    return std::nullopt;
  }

  bool empty() const { return lanes_.empty(); }

 private:
  struct Lane {
    std::string owner;
    std::deque<T> items;
  };
  std::list<Lane> lanes_;  // in the order of their turns
};

}  // namespace kvd

#endif  // LOCKS_KVD_SERVICE_FAIR_QUEUE_H_
