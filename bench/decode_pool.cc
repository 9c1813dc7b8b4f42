#include "bench/decode_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/synthetic_pages.h"
#include "client/kv_client.h"
#include "client/record_fetch.h"
#include "kernels/check.h"
#include "proto/arena_memory.h"
#include "proto/placement.h"
#include "proto/status.h"

namespace kvd::bench {
namespace {

constexpr int kBatchPages = 32;

double MsSince(absl::Time start) { return absl::ToDoubleMilliseconds(absl::Now() - start); }

// Room for `pages` pages and the canary, in an arena of whole slabs.
uint64_t ArenaBytes(const KvGeometry& geometry, int pages) {
  const ArenaShape one = CarveArena(geometry, uint64_t{1} << 34);
  const uint64_t page_bytes = one.slot.slot_bytes() + one.summary_stride() + sizeof(PageHeader);
  return page_bytes *
         static_cast<uint64_t>(
             pages + 2 + pages / 100);  // slabs are made equal: at most one slot a slab is lost
}

std::vector<std::string> Namespaces(bool own) {
  if (!own) return {};
  return {"unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child=SIGKILL", "--mount-proc"};
}

}  // namespace

absl::StatusOr<std::unique_ptr<PoolSession>> PoolSession::Attach(ClientOptions options,
                                                                 const std::string& transports) {
  auto session = std::unique_ptr<PoolSession>(new PoolSession());
  session->options_ = std::move(options);
  KVD_ASSIGN_OR_RETURN(session->shape_, WorkerShape::Make(session->options_.geometry, {}));
  if (session->options_.gpu >= 0) session->shape_.place = OnGpu(session->options_.gpu);
  UcxOptions ucx;
  ucx.devices = "lo";
  ucx.transports = transports;
  ucx.gpu = session->options_.gpu;
  KVD_ASSIGN_OR_RETURN(session->ucx_, UcxWorker::Make(ucx));
  KVD_ASSIGN_OR_RETURN(session->pool_,
                       Pool::Make(&session->options_, &session->shape_, session->ucx_.get()));
  return session;
}

std::shared_ptr<Attachment> PoolSession::attachment() const {
  std::shared_ptr<Attachment> attachment = pool_->channel(0).attachment();
  KVD_CHECK(attachment != nullptr);
  return attachment;
}

absl::StatusOr<std::unique_ptr<DecodePool>> DecodePool::Start(const DecodePoolOptions& options) {
  auto pool = std::unique_ptr<DecodePool>(new DecodePool(options));
  testing::DaemonSpec spec;
  spec.geometry = options.geometry;
  spec.arena_bytes = ArenaBytes(options.geometry, options.num_pages + options.spare_pages);
  spec.gpu = options.daemon_gpu;
  spec.heartbeat_ms = 1000;
  // so that a host with few cores does not lose a session while it is filled
  spec.session_ttl_ms = 30000;
  auto dir = std::make_unique<testing::TempDir>();
  const locks_kvd::v1::DaemonConfig config = testing::MakeConfig(spec, dir->path());
  KVD_ASSIGN_OR_RETURN(pool->daemon_,
                       testing::DaemonProcess::StartUnder(Namespaces(options.own_namespaces),
                                                          std::move(dir), config));
  pool->tokens_.resize(static_cast<size_t>(options.num_pages) *
                       static_cast<size_t>(options.geometry.page_tokens));
  std::iota(pool->tokens_.begin(), pool->tokens_.end(), 0u);
  KVD_ASSIGN_OR_RETURN(auto client, KvClient::Make(pool->OptionsFor(PathKind::kUcx)));
  pool->keys_ = client->PageKeys(pool->tokens_);
  pool->slots_.resize(pool->keys_.size());
  return pool;
}

ClientOptions DecodePool::OptionsFor(PathKind path) const {
  ClientOptions options;
  options.daemons = {daemon_->address()};
  options.tenant = "test";
  options.model = "model";
  options.geometry = options_.geometry;
  options.weights_id = "weights";
  options.rope = "theta=10000";
  options.gpu = options_.worker_gpu;
  options.required_path = path;
  options.best_path = path;
  options.control_timeout = absl::Seconds(60);
  options.fetch_timeout = absl::Seconds(20);
  return options;
}

absl::StatusOr<PutReport> DecodePool::WriteBatch(PoolSession& session, int first_page,
                                                 int num_pages) const {
  std::vector<PlacedPage> placed;
  for (int p = first_page; p < first_page + num_pages; ++p) {
    const PageKey& key = keys_[static_cast<size_t>(p)];
    placed.push_back({key, static_cast<uint32_t>(p), 0, PlacementWord(key)});
  }
  const WorkerShape& shape = session.shape();
  const KvGeometry& g = options_.geometry;
  const PageWriter writer(&session.pool(), &shape, absl::Seconds(60));
  PutReport report = writer.Write(
      session.pool().View(), placed, [&](std::span<const size_t> pages, int, uint8_t* slots) {
        auto* out = reinterpret_cast<uint16_t*>(slots);
        for (const size_t i : pages) {
          for (int layer = 0; layer < g.num_layers; ++layer) {
            for (int head = 0; head < g.num_kv_heads; ++head) {
              FillSyntheticUnit(SyntheticUnit(placed[i].page_idx, static_cast<uint32_t>(layer),
                                              static_cast<uint32_t>(head)),
                                static_cast<uint32_t>(g.head_dim),
                                static_cast<uint32_t>(g.page_tokens), out);
              out += shape.unit_bytes() / 2;
            }
          }
        }
        return absl::OkStatus();
      });
  if (report.num_new != num_pages) {
    return absl::InternalError(
        absl::StrCat("pages ", first_page, " to ", first_page + num_pages - 1, ": ", report.num_new,
                     " new, ", report.num_failed, " failed: ", report.first_failure.ToString()));
  }
  return report;
}

absl::Status DecodePool::Fill() {
  KVD_ASSIGN_OR_RETURN(writer_, PoolSession::Attach(OptionsFor(PathKind::kUcx)));
  const int num_pages = options_.num_pages;
  const double page_bytes = static_cast<double>(writer_->shape().slot.slot_bytes());
  std::atomic<int> next{0}, done{0};
  std::mutex mutex;
  absl::Status failure;
  const absl::Time start = absl::Now();
  const auto work = [&] {
    for (int first = next.fetch_add(kBatchPages); first < num_pages;
         first = next.fetch_add(kBatchPages)) {
      const int count = std::min(kBatchPages, num_pages - first);
      auto report = WriteBatch(*writer_, first, count);
      const std::lock_guard<std::mutex> lock(mutex);
      failure.Update(report.status());
      if (!failure.ok()) return;
      for (int i = 0; i < count; ++i)
        slots_[static_cast<size_t>(first + i)] = report->pages[static_cast<size_t>(i)].slots[0];
      reports_.push_back(*std::move(report));
      done += count;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < options_.fill_threads; ++i) threads.emplace_back(work);
  for (absl::Time shown = start; done < num_pages;) {
    absl::SleepFor(absl::Milliseconds(200));
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!failure.ok()) break;
    }
    if (absl::Now() - shown < absl::Seconds(5)) continue;
    shown = absl::Now();
    std::fprintf(stderr, "decode_bench: %d of %d pages, %.2f GB/s\n", done.load(), num_pages,
                 done * page_bytes / MsSince(start) / 1e6);
  }
  for (std::thread& thread : threads) thread.join();
  KVD_RETURN_IF_ERROR(failure);
  fill_gb_per_s_ = num_pages * page_bytes / MsSince(start) / 1e6;
  std::fprintf(stderr, "decode_bench: filled %.1f GiB at %.2f GB/s\n",
               num_pages * page_bytes / (1 << 30), fill_gb_per_s_);
  return absl::OkStatus();
}

absl::StatusOr<MatchedPages> DecodePool::Lease(PoolSession& session, int num_pages) const {
  KVD_ASSIGN_OR_RETURN(auto client, KvClient::Make(OptionsFor(PathKind::kUcx)));
  const size_t num_tokens =
      static_cast<size_t>(num_pages) * static_cast<size_t>(options_.geometry.page_tokens);
  const std::vector<PageKey> keys = client->PageKeys(std::span(tokens_).first(num_tokens));
  const PoolView view = session.pool().View();
  const std::vector<PlacedPage> placed = view.Place(keys);
  return session.pool().Match(view, placed, MatchMode::kPrefix);
}

absl::StatusOr<OpenFigures> DecodePool::MeasureOpen(PoolSession& session, int num_pages) const {
  OpenFigures figures;
  KVD_ASSIGN_OR_RETURN(auto client, KvClient::Make(OptionsFor(PathKind::kUcx)));
  absl::Time start = absl::Now();
  const size_t num_tokens =
      static_cast<size_t>(num_pages) * static_cast<size_t>(options_.geometry.page_tokens);
  const std::vector<PageKey> keys = client->PageKeys(std::span(tokens_).first(num_tokens));
  figures.hash_ms = MsSince(start);

  const PoolView view = session.pool().View();
  const std::vector<PlacedPage> placed = view.Place(keys);
  start = absl::Now();
  KVD_ASSIGN_OR_RETURN(const MatchedPages matched,
                       session.pool().Match(view, placed, MatchMode::kPrefix));
  figures.match_ms = MsSince(start);
  if (matched.num_pages != num_pages)
    return absl::InternalError(
        absl::StrCat(matched.num_pages, " pages of ", num_pages, " are resident"));

  KVD_ASSIGN_OR_RETURN(auto mirror, Mirror::Make(session.shape(), num_pages));
  std::vector<RecordRequest> requests;
  for (int p = 0; p < num_pages; ++p)
    requests.push_back({p, 0, std::span(matched.slots).subspan(static_cast<size_t>(p), 1)});
  for (int i = 0; i < 2; ++i) {  // the second one counts: nothing is made for the first time
    start = absl::Now();
    const std::vector<uint8_t> valid =
        FetchRecords(view, requests, absl::Seconds(20), *mirror, session.shape());
    figures.mirror_ms = MsSince(start);
    if (std::count(valid.begin(), valid.end(), 1) != num_pages)
      return absl::InternalError("records are missing");
  }
  figures.mirror_bytes = static_cast<double>(session.shape().slot.summary_bytes()) * num_pages;
  return figures;
}

}  // namespace kvd::bench
