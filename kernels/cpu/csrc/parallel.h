// Work shared out over as many threads as torch has, with denormals flushed while it lasts.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "workers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paged {

// Arithmetic on denormals is tens of times slower. The switch is each thread's own, so each worker sets it.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | (1ull << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

// Threads that a call may have. Torch's own may call, each for its part of something: they are busy already.
inline int max_workers() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// Calls `work(id)` on this thread and, with ids of their own below `num_threads`, on those others that have time for it
// meanwhile. Each call must go on until nothing is left to be begun.
template <typename Work>
void on_threads(int num_threads, const Work& work) {
  const auto call = [](const void* what, int id) {
    FlushDenormals flushed;
    (*static_cast<const Work*>(what))(id);
  };
  Workers::all().run(num_threads, call, &work);
}

// Calls `work(item)` once for each of `num_items`; a thread takes the next whenever it is done with one, so that a
// thread whose core is busy with something else takes fewer.
template <typename Work>
void for_each_item(int64_t num_items, const Work& work) {
  std::atomic<int64_t> next{0};
  on_threads(static_cast<int>(std::min<int64_t>(max_workers(), num_items)), [&](int) {
    for (int64_t item = next++; item < num_items; item = next++) work(item);
  });
}

}  // namespace paged
