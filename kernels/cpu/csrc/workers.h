// The threads that share a kernel's work with its caller. Nobody waits for one that has not come: work is taken piece by
// piece by whoever runs, so a thread whose core is busy with something else holds back the one piece that it has.
//
// OpenMP's threads must all come to each call, and all leave it. Beside a busy process that is once in a few
// milliseconds: they wait for each other by turns, each for as long as it may have the core.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace paged {

class Workers {
 public:
  using Work = void (*)(const void* work, int id);

  // Those of this process, and of the kernels of this level.
  static Workers& all();

  // Calls `call(work, id)` with id 0 on this thread, and with other ids below `num_threads` on those that come before it is
  // done there. A call must go on until nothing is left to be begun. Returns when all have; raises what the first one
  // raised. While another caller has the threads, and within such a call, this thread works alone.
  void run(int num_threads, Work call, const void* work);

  // Returns when no call goes on and none has begun in the last 20 ms, or since this returned `calls`: gives what to pass
  // next time.
  uint32_t wait_for_rest(uint32_t calls) const;

 private:
  void call_all(int num_threads, Work call, const void* work);
  void grow(int num_workers);
  void work();
  bool join();
  void close();
  void fail();

  std::atomic<bool> taken_{false};  // by a caller
  int num_workers_ = 0;             // the caller's, as all that is not atomic
  int num_threads_ = 0;
  Work call_ = nullptr;
  const void* work_ = nullptr;
  std::mutex raising_;
  std::exception_ptr raised_;
  std::atomic<uint32_t> num_begun_{0}, num_going_on_{0};  // calls, those included for which this thread works alone

  // Of the present call: seats that are free, in the upper half, and workers that sit, in the lower.
  alignas(64) std::atomic<uint32_t> seats_{0};
  alignas(64) std::atomic<uint32_t> num_calls_{0};  // changes when one begins
};

}  // namespace paged
