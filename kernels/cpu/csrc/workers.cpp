#include "workers.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paged {
namespace {

constexpr uint32_t kFree = 1 << 16, kWorking = 1;
constexpr int kMostWorkers = kFree - 1;

// A thread that waits keeps its core for so long, where sleep would make it late for the next call of the same step; not
// for longer, or it would use up the time that the system gives it beside others, and lack it for work.
constexpr std::chrono::microseconds kAwake{100};
constexpr int kLooksPerTime = 16;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `word` is something else than `value`; returns whether it has slept.
bool wait_for_change(const std::atomic<uint32_t>& word, uint32_t value) {
  const auto end = std::chrono::steady_clock::now() + kAwake;
  do {
    for (int i = 0; i < kLooksPerTime; ++i) {
      if (word.load(std::memory_order_acquire) != value) return false;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  word.wait(value, std::memory_order_acquire);
  return true;
}

// Counts itself while it lives.
class Counted {
 public:
  explicit Counted(std::atomic<uint32_t>& count) : count_(count) { count_.fetch_add(1, std::memory_order_relaxed); }
  ~Counted() { count_.fetch_sub(1, std::memory_order_relaxed); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<uint32_t>& count_;
};

Workers* of_process = nullptr;
std::once_flag once;

void make() {
  of_process = new Workers;  // never deleted: its threads end with the process
}

}  // namespace

Workers& Workers::all() {
  std::call_once(once, [] {
    make();
    pthread_atfork(nullptr, nullptr, make);  // threads stay behind in the parent
  });
  return *of_process;
}

void Workers::run(int num_threads, Work call, const void* work) {
  const Counted counted(num_going_on_);
  num_begun_.fetch_add(1, std::memory_order_relaxed);
  call_all(num_threads, call, work);
}

uint32_t Workers::wait_for_rest(uint32_t calls) const {
  for (;;) {
    const uint32_t begun = num_begun_.load(std::memory_order_relaxed);
    if (begun == calls && num_going_on_.load(std::memory_order_relaxed) == 0) return calls;
    calls = begun;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void Workers::call_all(int num_threads, Work call, const void* work) {
  if (num_threads <= 1 || taken_.exchange(true, std::memory_order_acquire)) return call(work, 0);
  num_threads = std::min(num_threads, 1 + kMostWorkers);
  grow(num_threads - 1);
  call_ = call, work_ = work, num_threads_ = num_threads, raised_ = nullptr;
  seats_.store((num_threads - 1) * kFree, std::memory_order_release);
  num_calls_.fetch_add(1, std::memory_order_release);
  if (num_threads > num_workers_) {
    num_calls_.notify_all();
  } else {
    for (int i = 1; i < num_threads; ++i) num_calls_.notify_one();
  }
  try {
    call(work, 0);
  } catch (...) {
    fail();
  }
  close();
  const std::exception_ptr raised = std::move(raised_);
  taken_.store(false, std::memory_order_release);
  if (raised) std::rethrow_exception(raised);
}

// Nobody sits down any more; waits for those who sit.
void Workers::close() {
  uint32_t seats = seats_.fetch_and(kFree - 1, std::memory_order_acq_rel) & (kFree - 1);
  while (seats != 0) {
    wait_for_change(seats_, seats);
    seats = seats_.load(std::memory_order_acquire);
  }
}

void Workers::grow(int num_workers) {
  try {
    for (; num_workers_ < num_workers; ++num_workers_) std::thread([this] { this->work(); }).detach();
  } catch (const std::system_error&) {
    // There are too many threads for the system; those that there are do it.
  }
}

void Workers::work() {
  for (;;) {
    const uint32_t num_calls = num_calls_.load(std::memory_order_acquire);
    while (join()) {
    }
    wait_for_change(num_calls_, num_calls);
  }
}

// Works on the present call, if it has a free seat.
bool Workers::join() {
  uint32_t seats = seats_.load(std::memory_order_acquire);
  while (seats >= kFree) {
    if (!seats_.compare_exchange_weak(seats, seats - kFree + kWorking, std::memory_order_acq_rel)) continue;
    try {
      call_(work_, num_threads_ - static_cast<int>(seats / kFree));
    } catch (...) {
      fail();
    }
    // Only a caller that has closed the call waits, for the last one.
    if (seats_.fetch_sub(kWorking, std::memory_order_acq_rel) == kWorking) seats_.notify_one();
    return true;
  }
  return false;
}

void Workers::fail() {
  const std::lock_guard<std::mutex> lock(raising_);
  if (!raised_) raised_ = std::current_exception();
}

}  // namespace paged
