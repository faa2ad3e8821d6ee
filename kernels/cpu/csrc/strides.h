// How far apart rows lie, in elements: of [..., size], of which each row's elements lie side by side.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <cstdint>

namespace paged {

// Where many rows lie a power of two apart, or nearly so, the lines of a column of them share a few places of a cache and
// push each other out. A line more between them prevents it.
inline int64_t spread_stride(int64_t size, int64_t element_size) {
  constexpr int64_t kLine = 64, kCrowded = 1024;  // bytes
  return size * element_size % kCrowded == 0 ? size + kLine / element_size : size;
}

// Rows so spread, whatever their memory held: what an operation returns that another will read row beside row.
inline at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options) {
  auto strides = sizes.vec();
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    const bool is_row = i + 1 == sizes.size();
    stride *= is_row ? spread_stride(sizes[i], static_cast<int64_t>(options.dtype().itemsize())) : sizes[i];
  }
  return at::empty_strided(sizes, strides, options);
}

// The stride of all rows; -1 where one number does not say it, or a row's elements lie apart.
inline int64_t row_stride(const at::Tensor& x) {
  const int64_t last = x.dim() - 1, size = x.size(last);
  if (size != 1 && x.stride(last) != 1) return -1;
  int64_t stride = size, next = -1;
  for (int64_t d = last - 1; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (next == -1) stride = x.stride(d);
    else if (x.stride(d) != next) return -1;
    next = x.stride(d) * x.size(d);
  }
  return stride;
}

}  // namespace paged
