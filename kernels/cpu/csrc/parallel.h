// Work shared out over torch's own threads, with denormals flushed while it lasts.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>

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

// Calls `work(thread)` once on each of `num_threads` threads.
template <typename Work>
void on_each_thread(int num_threads, const Work& work) {
  at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    FlushDenormals flushed;
    for (int64_t thread = begin; thread < end; ++thread) work(static_cast<int>(thread));
  });
}

// Calls `work(item)` once for each of `num_items`; a thread takes the next whenever it is done with one, so that a
// thread whose core is busy with something else takes fewer.
template <typename Work>
void for_each_item(int64_t num_items, const Work& work) {
  std::atomic<int64_t> next{0};
  on_each_thread(static_cast<int>(std::min<int64_t>(at::get_num_threads(), num_items)), [&](int) {
    for (int64_t item = next++; item < num_items; item = next++) work(item);
  });
}

}  // namespace paged
