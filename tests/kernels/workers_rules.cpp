// A rule of kernels/cpu/csrc/workers.h, named by the first argument; the exit code is 0 where it holds. Compiled by
// test_workers.py.
#include "workers.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

std::atomic<bool> held_back{false};  // whether new threads wait before their first instruction

struct Start {
  void* (*routine)(void*);
  void* argument;
};

void* when_let_go(void* given) {
  const Start start = *static_cast<Start*>(given);
  delete static_cast<Start*>(given);
  held_back.wait(true);
  return start.routine(start.argument);
}

void run(int num_threads, const std::function<void(int)>& work) {
  const auto call = [](const void* what, int id) { (*static_cast<const std::function<void(int)>*>(what))(id); };
  paged::Workers::all().run(num_threads, call, &work);
}

// Whether each of `num_items` was done once, and no two threads had the same id.
bool does_all_once(int num_threads, int num_items) {
  std::vector<std::atomic<int>> done(num_items), came(num_threads);
  std::atomic<int> next{0};
  std::atomic<bool> is_own{true};
  run(num_threads, [&](int id) {
    if (came[id]++ != 0) is_own = false;
    for (int item = next++; item < num_items; item = next++) ++done[item];
  });
  for (const auto& times : done)
    if (times != 1) return false;
  return is_own;
}

bool every_item_is_done_once() {
  for (int call = 0; call < 20000; ++call)
    if (!does_all_once(2 + call % 4, 1 + call % 50)) return false;
  return true;
}

bool callers_may_come_at_once() {
  std::atomic<bool> all_well{true};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int call = 0; call < 20000; ++call)
        if (!does_all_once(3, 500)) all_well = false;
    });
  for (std::thread& caller : callers) caller.join();
  return all_well;
}

bool nobody_waits_for_one_that_has_not_come() {
  held_back = true;
  const bool all_done = does_all_once(2, 100);
  held_back = false, held_back.notify_all();
  return all_done;
}

bool others_do_work_too() {
  std::atomic<bool> other_came{false};
  run(2, [&](int id) {
    if (id != 0) other_came = true, other_came.notify_all();
    other_came.wait(false);
  });
  return other_came;
}

bool who_has_come_is_waited_for() {
  std::atomic<bool> came{false}, done{false};
  run(2, [&](int id) {
    if (id == 0) return came.wait(false);
    came = true, came.notify_all();
    usleep(20000);  // longer than anybody stays awake
    done = true;
  });
  return done;
}

bool an_error_of_any_thread_is_raised_once_all_have_left() {
  for (const int failing : {0, 1}) {
    std::atomic<int> came{0}, left{0};
    bool raised = false;
    try {
      run(2, [&](int id) {
        ++came, came.notify_all();
        for (int now = came; now < 2; now = came) came.wait(now);
        if (id == failing) throw std::runtime_error("this one");
        usleep(1000);
        ++left;
      });
    } catch (const std::runtime_error&) {
      raised = left == 1;
    }
    if (!raised || !does_all_once(2, 100)) return false;
  }
  return true;
}

// Whether a call that begins now, while there are threads without work, is left to this thread.
bool works_alone() {
  std::atomic<bool> alone{true};
  const pthread_t self = pthread_self();
  run(2, [&](int id) {
    if (id != 0 || !pthread_equal(self, pthread_self())) alone = false;
    usleep(2000);  // time for others to come
  });
  return alone;
}

bool a_call_within_a_call_works_alone() {
  std::atomic<bool> alone{true};
  if (!does_all_once(4, 100)) return false;  // so there are others
  run(2, [&](int) {
    if (!works_alone()) alone = false;
  });
  return alone && does_all_once(2, 100);
}

bool beside_another_caller_one_works_alone() {
  bool alone = false;
  if (!does_all_once(4, 100)) return false;
  run(2, [&](int id) {
    if (id == 0) std::thread([&] { alone = works_alone(); }).join();
  });
  return alone && does_all_once(2, 100);
}

bool a_forked_process_has_threads_of_its_own() {
  if (!others_do_work_too()) return false;
  const pid_t child = fork();
  if (child == 0) _exit(others_do_work_too() ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  return status == 0;
}

}  // namespace

// In place of the C library's, which it calls.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*routine)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const Create create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, when_let_go, new Start{routine, argument});
}

int main(int, char** arguments) {
#define RULE(name) if (std::strcmp(arguments[1], #name) == 0) return name() ? 0 : 1
  RULE(every_item_is_done_once);
  RULE(callers_may_come_at_once);
  RULE(nobody_waits_for_one_that_has_not_come);
  RULE(others_do_work_too);
  RULE(who_has_come_is_waited_for);
  RULE(an_error_of_any_thread_is_raised_once_all_have_left);
  RULE(a_call_within_a_call_works_alone);
  RULE(beside_another_caller_one_works_alone);
  RULE(a_forked_process_has_threads_of_its_own);
  return 2;
}
