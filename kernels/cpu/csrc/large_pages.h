// Memory on large pages, for what is read from end to end in every step: with small ones, of which a block is one or
// two, looking pages up takes as long as reading them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include "parallel.h"

namespace paged {

constexpr int64_t kLargePage = 1 << 21;

// A tensor of zeros; on large pages where it fills some and the system gives them. All of it is there: no step has to wait
// for a page that is used for the first time.
inline at::Tensor zeros_on_large_pages(at::IntArrayRef sizes, at::ScalarType dtype) {
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
  constexpr int64_t kSmallPage = 4096;
  for_each_item((bytes + kLargePage - 1) / kLargePage, [&](int64_t page) {
    const int64_t end = std::min(bytes, (page + 1) * kLargePage);
    for (int64_t i = page * kLargePage; i < end; i += kSmallPage) *static_cast<volatile char*>(data + i) = 0;
  });
  return at::from_blob(data, sizes, [mapped, size](void*) { munmap(mapped, size); }, options);
}

// uint8 [count] of it.
inline at::Tensor zero_bytes(int64_t count) { return zeros_on_large_pages({count}, at::kByte); }

}  // namespace paged
