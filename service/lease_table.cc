#include "service/lease_table.h"

#include <bit>

#include "kernels/check.h"

namespace kvd {
namespace {

bool TestBit(const std::vector<uint64_t>& bits, uint32_t slot) {
  return !bits.empty() && ((bits[slot / 64] >> (slot % 64)) & 1) != 0;
}

}  // namespace

const LeaseTable::Session* LeaseTable::FindSession(SessionId session) const {
  const auto it = sessions_.find(session);
  return it == sessions_.end() ? nullptr : &it->second;
}

void LeaseTable::Begin(SessionId session) {
  const bool inserted = sessions_.try_emplace(session).second;
  KVD_CHECK(inserted);
}

std::vector<uint32_t> LeaseTable::End(SessionId session) {
  std::vector<uint32_t> held;
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return held;
  for (size_t word = 0; word < it->second.bits.size(); ++word) {
    for (uint64_t rest = it->second.bits[word]; rest != 0; rest &= rest - 1) {
      const auto slot =
          static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(rest)));
      --num_leases_;
      if (--holders_[slot] == 0) --num_leased_slots_;
      held.push_back(slot);
    }
  }
  sessions_.erase(it);
  return held;
}

bool LeaseTable::Lease(SessionId session, uint32_t slot) {
  const auto it = sessions_.find(session);
  KVD_CHECK(it != sessions_.end() && slot < num_slots_);
  Session& s = it->second;
  if (TestBit(s.bits, slot)) return false;
  if (s.bits.empty()) s.bits.resize((num_slots_ + 63) / 64);
  s.bits[slot / 64] |= uint64_t{1} << (slot % 64);
  ++s.count;
  ++num_leases_;
  if (++holders_[slot] == 1) ++num_leased_slots_;
  return true;
}

LeaseTable::Released LeaseTable::Release(SessionId session, uint32_t slot) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end() || slot >= num_slots_ || !TestBit(it->second.bits, slot)) {
    return Released::kNothing;
  }
  it->second.bits[slot / 64] &= ~(uint64_t{1} << (slot % 64));
  --it->second.count;
  --num_leases_;
  if (--holders_[slot] != 0) return Released::kStillHeld;
  --num_leased_slots_;
  return Released::kLast;
}

bool LeaseTable::Holds(SessionId session, uint32_t slot) const {
  const Session* s = FindSession(session);
  return s != nullptr && slot < num_slots_ && TestBit(s->bits, slot);
}

const std::vector<uint64_t>* LeaseTable::Bits(SessionId session) const {
  const Session* s = FindSession(session);
  return s == nullptr ? nullptr : &s->bits;
}

uint32_t LeaseTable::num_leases(SessionId session) const {
  const Session* s = FindSession(session);
  return s == nullptr ? 0 : s->count;
}

}  // namespace kvd
