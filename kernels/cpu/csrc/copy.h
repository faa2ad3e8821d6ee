// copy_blocks: whole blocks of caches, for copy-on-write.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace paged {

// Of a cache's block the bytes from its first element to its last; a block is one piece, whatever its layout.
inline int64_t block_bytes(const at::Tensor& cache) {
  int64_t last = 0;
  for (int64_t dim = 1; dim < cache.dim(); ++dim) last += (cache.size(dim) - 1) * cache.stride(dim);
  return (last + 1) * static_cast<int64_t>(cache.element_size());
}

inline bool meet(std::vector<int64_t> some, const std::vector<int64_t>& others) {
  std::sort(some.begin(), some.end());
  return std::any_of(others.begin(), others.end(),
                     [&](int64_t id) { return std::binary_search(some.begin(), some.end(), id); });
}

// As if all at once: sources that are destinations, too, are set aside before anything is written.
inline void copy_blocks(at::TensorList caches, const at::Tensor& source, const at::Tensor& destination) {
  const int64_t num_copies = source.numel(), num_caches = static_cast<int64_t>(caches.size());
  const std::vector<int64_t> from(source.const_data_ptr<int64_t>(), source.const_data_ptr<int64_t>() + num_copies);
  const std::vector<int64_t> to(destination.const_data_ptr<int64_t>(), destination.const_data_ptr<int64_t>() + num_copies);
  const bool overlap = meet(from, to);
  for_each_item(overlap ? num_caches : num_caches * num_copies, [&](int64_t item) {
    const at::Tensor& cache = caches[overlap ? item : item / num_copies];
    const int64_t stride = cache.stride(0) * static_cast<int64_t>(cache.element_size()), bytes = block_bytes(cache);
    char* data = static_cast<char*>(cache.mutable_data_ptr());
    if (!overlap) {
      const int64_t copy = item % num_copies;
      std::memcpy(data + to[copy] * stride, data + from[copy] * stride, bytes);
      return;
    }
    std::vector<char> aside(num_copies * bytes);
    for (int64_t copy = 0; copy < num_copies; ++copy)
      std::memcpy(aside.data() + copy * bytes, data + from[copy] * stride, bytes);
    for (int64_t copy = 0; copy < num_copies; ++copy)
      std::memcpy(data + to[copy] * stride, aside.data() + copy * bytes, bytes);
  });
}

}  // namespace paged
