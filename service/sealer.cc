#include "service/sealer.h"

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kernels/checksum.h"

namespace kvd {
absl::Status NonFiniteError(const KvGeometry& geometry, uint32_t shard, uint32_t page_idx,
                            int layer, int head, int64_t value_idx) {
  const int64_t head_dim = geometry.head_dim;
  const int64_t half = head_dim * geometry.page_tokens;
  const bool is_key = value_idx < half;
  return absl::InvalidArgumentError(
      absl::StrFormat("page %u, layer %d, head %d of shard %u, token %d: %s is NaN or Inf at "
                      "dimension %d: the page is "
                      "refused; look for an overflow in the engine that wrote it",
                      page_idx, layer, head, shard, (value_idx % half) / head_dim,
                      is_key ? "K" : "V", value_idx % head_dim));
}

absl::StatusOr<uint64_t> SummarizePage(const SummarizeJob& job) {
  const KvGeometry& g = *job.geometry;
  const SlotLayout slot = MakeSlotLayout(g);
  const int64_t values_per_unit = int64_t{2} * g.page_tokens * g.head_dim;
  const int first_head = static_cast<int>(job.shard) * slot.shard_heads;
  for (int layer = 0; layer < slot.num_layers; ++layer) {
    for (int head = 0; head < slot.shard_heads; ++head) {
      const uint8_t* unit = job.units + slot.unit_offset(layer, head);
      const int64_t bad = FirstNonFinite(unit, values_per_unit, g.dtype);
      if (bad >= 0) return NonFiniteError(g, job.shard, job.page_idx, layer, head, bad);
      const bool metric = job.encoder == Encoder::kE1S;
      ref::Summarize({.head_dim = g.head_dim,
                      .page_tokens = g.page_tokens,
                      .rank = g.rank,
                      .dtype = g.dtype,
                      .rotated = g.rotated,
                      .encoder = job.encoder,
                      .unit = unit,
                      .metric = metric ? job.metric->at(layer, first_head + head) : nullptr,
                      .coarse = job.records + slot.coarse_offset(layer, head),
                      .fine = job.records + slot.fine_offset(layer, head)});
    }
  }
  return Checksum64(job.records, slot.summary_bytes());
}

Sealer::Sealer(int num_threads) {
  KVD_CHECK(num_threads >= 1);
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Loop(); });
}

Sealer::~Sealer() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    KVD_CHECK(batches_.empty());
    stopping_ = true;
  }
  work_added_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Sealer::Run(size_t count, const std::function<void(size_t)>& work) {
  if (count == 0) return;
  Batch batch{.work = &work, .count = count};
  std::unique_lock<std::mutex> lock(mutex_);
  batches_.push_back(&batch);
  work_added_.notify_all();
  batch_done_.wait(lock, [&batch] { return batch.num_done == batch.count; });
}

void Sealer::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_added_.wait(lock, [this] { return stopping_ || !batches_.empty(); });
    if (batches_.empty()) return;
    Batch* batch = batches_.front();
    batches_.pop_front();
    const size_t item = batch->next++;
    if (batch->next < batch->count) batches_.push_back(batch);
    lock.unlock();
    (*batch->work)(item);
    lock.lock();
    if (++batch->num_done == batch->count) batch_done_.notify_all();
  }
}

}  // namespace kvd
