// A step allocates nothing and takes no lock once it is warm: counted on the step's own thread by
// replacing malloc's entry points and the mutex functions of this program.

#include <dlfcn.h>
#include <pthread.h>

#include <cstdlib>
#include <string>

#include "absl/base/options.h"
#include "absl/synchronization/mutex.h"
#include "client/decode_step.h"
#include "gtest/gtest.h"
#include "tests/client/fake_pool.h"

namespace {

thread_local bool counting = false;
thread_local int64_t num_allocations = 0;
thread_local int64_t num_locks = 0;

[[maybe_unused]] void CountAllocation() {
  if (counting) ++num_allocations;
}

template <typename Function>
[[maybe_unused]] Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// Sanitizers bring their own of these: there the counts are not taken and the tests say so.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KVD_COUNTS 1
#endif

#ifdef KVD_COUNTS
extern "C" {
// operator new of libstdc++ comes here too.
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* p, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

void* malloc(size_t size) {
  CountAllocation();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  CountAllocation();
  return __libc_calloc(count, size);
}
void* realloc(void* p, size_t size) {
  CountAllocation();
  return __libc_realloc(p, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  CountAllocation();
  return __libc_memalign(alignment, size);
}
int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static auto* const next = Next<int(pthread_mutex_t*)>("pthread_mutex_lock");
  if (counting) ++num_locks;
  return next(mutex);
}
int pthread_rwlock_rdlock(pthread_rwlock_t* lock) {
  static auto* const next = Next<int(pthread_rwlock_t*)>("pthread_rwlock_rdlock");
  if (counting) ++num_locks;
  return next(lock);
}
int pthread_rwlock_wrlock(pthread_rwlock_t* lock) {
  static auto* const next = Next<int(pthread_rwlock_t*)>("pthread_rwlock_wrlock");
  if (counting) ++num_locks;
  return next(lock);
}
}

// Mangled name of absl::<inline namespace>::Mutex::Lock.
#define KVD_TEXT_OF_INNER(x) #x
#define KVD_TEXT_OF(x) KVD_TEXT_OF_INNER(x)
static std::string MutexLockSymbol() {
  const std::string space = KVD_TEXT_OF(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  return "_ZN4absl" + std::to_string(space.size()) + space + "5Mutex4LockEv";
}

// absl::Mutex does not go through pthread: its own Lock is replaced in this program.
void absl::Mutex::Lock() {
  static auto* const next = Next<void(absl::Mutex*)>(MutexLockSymbol().c_str());
  if (counting) ++num_locks;
  next(this);
}
#endif  // KVD_COUNTS

namespace kvd::testing {
namespace {

struct Counts {
  int64_t allocations;
  int64_t locks;
};

Counts CountOf(const std::function<void()>& work) {
  num_allocations = 0;
  num_locks = 0;
  counting = true;
  work();
  counting = false;
  return {num_allocations, num_locks};
}

class DecodeStepQuietTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifndef KVD_COUNTS
    GTEST_SKIP() << "a sanitizer owns malloc and the mutexes";
#endif
  }
};

TEST_F(DecodeStepQuietTest, CountersSeeAllocationsAndLocks) {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  absl::Mutex absl_mutex;
  void* volatile kept = nullptr;
  const Counts counts = CountOf([&] {
    kept = operator new(8);
    absl::MutexLock lock(&absl_mutex);
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
  });
  operator delete(kept);
  EXPECT_GE(counts.allocations, 1);
  EXPECT_EQ(counts.locks, 2);
}

TEST_F(DecodeStepQuietTest, WarmStepsAllocateNothingAndTakeNoLock) {
  constexpr int kPages = 60;
  constexpr int kWarmSteps = 100;
  constexpr int kSteps = 40;
  const KvGeometry g = SmallGeometry();
  for (const ScanMode scan : {ScanMode::kFull, ScanMode::kProgressive}) {
    const StepOptions options = {.budget = 8,
                                 .scan = scan,
                                 .cache_ratio = 1.5,
                                 .num_candidates = 20,
                                 .verify = VerifyPolicy::kChecksum,
                                 .mass = MassReport::kAlways};
    FakeSequence sequence(
        SequenceData::Random(g, int64_t{kPages + FakeSequence::kSpareCapacity} * g.page_tokens, 9),
        kPages, options, 2);
    const ScanModel model = {1e-6, 1e9, 1e9, 1e9};
    auto step = *DecodeStep::Plan(sequence.pages.get(), options, &model);
    std::vector<float> o(static_cast<size_t>(g.num_q_heads * g.head_dim));
    std::vector<float> lse(static_cast<size_t>(g.num_q_heads));
    int64_t allocations = 0;
    int64_t locks = 0;
    int64_t misses = 0;
    for (int t = 0; t < kWarmSteps + kSteps; ++t) {
      SequencePages& pages = *sequence.pages;
      if (pages.complete_pages() > pages.num_pages()) {  // the sealer, by hand
        const int p = pages.num_pages();
        KVD_CHECK(
            pages.mirror().Store(p, 0, PageRecords(sequence.data, sequence.shape, p).data()).ok());
        pages.PushSealed({p % 2, sequence.sources[static_cast<size_t>(p % 2)], {FakeSlot(p)}});
      }
      for (int layer = 0; layer < g.num_layers; ++layer) {
        const int64_t token = pages.num_tokens();
        const auto q = RandomKv(int64_t{g.num_q_heads} * g.head_dim, g.dtype, 2.0f,
                                static_cast<uint64_t>(token * 10 + layer));
        const auto k = sequence.data.Rows(sequence.data.keys, layer, token);
        const auto v = sequence.data.Rows(sequence.data.values, layer, token);
        absl::Status status;
        const Counts counts = CountOf([&] {
          status = step->Run(layer, {q.data(), k.data(), v.data()}, {o.data(), lse.data()});
        });
        ASSERT_TRUE(status.ok()) << status;
        if (t < kWarmSteps) continue;
        allocations += counts.allocations;
        locks += counts.locks;
        misses += step->result().units.misses;
      }
    }
    EXPECT_EQ(allocations, 0);
    EXPECT_EQ(locks, 0);
    EXPECT_GT(misses, kSteps) << "the fetch was not exercised";
  }
}

}  // namespace
}  // namespace kvd::testing
