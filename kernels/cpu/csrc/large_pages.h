// Memory on large pages, for what is read from end to end in every step: with small ones, of which a block is one or
// two, looking pages up takes as long as reading them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "copy.h"
#include "panels.h"
#include "parallel.h"

namespace paged {

constexpr int64_t kLargePage = 1 << 21;

// Makes the system give the pages of [begin, end), whose content stays: as safe beside work on it as reading is.
inline void touch(char* begin, char* end) {
  constexpr uintptr_t kSmallPage = 4096;
  begin -= reinterpret_cast<uintptr_t>(begin) % kSmallPage;
  for (char* page = begin; page < end; page += kSmallPage) __atomic_fetch_or(page, 0, __ATOMIC_RELAXED);
}

// A tensor of zeros; on large pages where it fills some and the system gives them, each when it is first used.
inline at::Tensor untouched_zeros(at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) bytes *= size;
  if (bytes < kLargePage) return at::zeros(sizes, options);
  const int64_t size = bytes + kLargePage;
  void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return at::zeros(sizes, options);  // which says what is missing
  const auto begin = (reinterpret_cast<uintptr_t>(mapped) + kLargePage - 1) / kLargePage * kLargePage;
  char* const data = reinterpret_cast<char*>(begin);
#if defined(MADV_HUGEPAGE)
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return at::from_blob(data, sizes, [mapped, size](void*) { munmap(mapped, size); }, options);
}

// The same with all of it there: all threads wait for the system's zeros.
inline at::Tensor zeros_on_large_pages(at::IntArrayRef sizes, at::ScalarType dtype) {
  const at::Tensor zeros = untouched_zeros(sizes, dtype);
  const auto bytes = static_cast<int64_t>(zeros.nbytes());
  char* const data = static_cast<char*>(zeros.mutable_data_ptr());
  for_each_item((bytes + kLargePage - 1) / kLargePage, [&](int64_t page) {
    touch(data + page * kLargePage, data + std::min(bytes, (page + 1) * kLargePage));
  });
  return zeros;
}

inline at::Tensor zero_bytes(int64_t count) { return untouched_zeros({count}, at::kByte); }

// What `populate` has to do, page by page: the first of all tensors, then the second ones, since low blocks are lent first.
class Populating {
 public:
  explicit Populating(at::TensorList tensors) {
    std::set<const void*> seen;  // a layer's two caches are one memory
    for (const at::Tensor& tensor : tensors) {
      if (!seen.insert(tensor.storage().unsafeGetStorageImpl()).second) continue;
      memory_.push_back(tensor.storage().getWeakStorageImpl());
      num_pages_ = std::max(num_pages_, divide_up(static_cast<int64_t>(tensor.storage().nbytes()), kLargePage));
    }
  }

  // Called by each of its threads.
  void run() {
#if defined(__linux__)
    setpriority(PRIO_PROCESS, 0, 19);  // of this thread alone
#endif
    const Workers& workers = Workers::all();
    const auto num_tensors = static_cast<int64_t>(memory_.size());
    uint32_t calls = 0;
    for (int64_t i = next_++; i < num_pages_ * num_tensors; i = next_++) {
      calls = workers.wait_for_rest(calls);
      const auto memory = memory_[i % num_tensors].lock();
      const int64_t begin = i / num_tensors * kLargePage;
      const auto bytes = memory ? static_cast<int64_t>(memory->nbytes()) : 0;
      if (begin >= bytes) continue;
      char* const data = static_cast<char*>(memory->mutable_data());
      touch(data + begin, data + std::min(bytes, begin + kLargePage));
    }
  }

 private:
  // Not kept while this rests, and not tensors: those may have owners in Python, whom only its threads may tell.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory_;
  int64_t num_pages_ = 0;
  std::atomic<int64_t> next_{0};
};

// Makes the system give the memory of blocks that are about to be written for the first time: all threads wait for its zeros,
// each for those of another cache, where else the one that writes waits alone.
inline void touch_blocks(at::TensorList caches, const at::Tensor& blocks) {
  const int64_t *first = blocks.const_data_ptr<int64_t>(), *end = first + blocks.numel();
  for_each_item(static_cast<int64_t>(caches.size()), [&](int64_t item) {
    const at::Tensor& cache = caches[item];
    const int64_t bytes = cache.stride(0) * static_cast<int64_t>(cache.element_size());
    char* const data = static_cast<char*>(cache.mutable_data_ptr());
    for (const int64_t* block = first; block < end; ++block) {
      char* const begin = data + *block * bytes;
      touch(begin, begin + block_bytes(cache));
    }
  });
}

// Returns at once. Threads of their own, as many as kernels have, have the tensors' memory be there before it is used, but
// not beside kernels: a GB takes the system a second or more of a core, and much of it may never be used.
inline void populate(at::TensorList tensors) {
  const auto populating = std::make_shared<Populating>(tensors);
  for (int i = 0; i < at::get_num_threads(); ++i) std::thread([populating] { populating->run(); }).detach();
}

}  // namespace paged
