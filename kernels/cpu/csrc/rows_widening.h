#pragma once

// Rows for CPUs that multiply no bf16: in fp32, also for weights in 8 bits, so that nothing of them is lost.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>

#include "lanes.h"
#include "operands.h"
#include "parallel.h"

namespace paged {

constexpr int64_t kRowsPerItem = 8;

inline void widen_row(const c10::BFloat16* from, int64_t inputs, float* to, int64_t padded) {
  for (int64_t i = 0; i < padded; i += 16) store_floats(to + i, 0xffff, load_bf16(from + i, first_lanes(inputs - i)));
}

inline void PreparedRows::prepare(const PackedWeight&, int64_t inputs, int64_t padded) {
  const at::Tensor narrow = kept_.stride(1) == 1 || inputs == 1 ? kept_ : kept_.contiguous();
  const int64_t count = narrow.size(0), narrow_stride = narrow.stride(0);
  kept_ = empty_rows({count, padded}, narrow.options().dtype(at::kFloat));
  const int64_t stride = row_stride(kept_);
  const c10::BFloat16* from = narrow.const_data_ptr<c10::BFloat16>();
  float* to = kept_.mutable_data_ptr<float>();
  for_each_item(divide_up(count, kRowsPerItem), [&](int64_t item) {
    for (int64_t r = item * kRowsPerItem; r < std::min(count, (item + 1) * kRowsPerItem); ++r) {
      widen_row(from + r * narrow_stride, inputs, to + r * stride, padded);
    }
  });
  rows_ = {reinterpret_cast<const char*>(to), stride * static_cast<int64_t>(sizeof(float)), count};
}

inline void PreparedRows::dequantize(const PackedWeight& weight, const Tile& tile) const {
  if (!weight.scales) return;
  for (int64_t lane = 0; lane < kPanel; lane += kLane) {
    const Floats scales = load_floats(weight.scales + tile.panel * kPanel + lane);
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      float* sums = tile.sums + r * kPanel + lane;
      store_floats(sums, 0xffff, load_floats(sums) * scales);
    }
  }
}

}  // namespace paged
