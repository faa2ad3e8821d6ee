#pragma once

// Rows for CPUs that multiply bf16: as they are, or quantised for weights in 8 bits.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <immintrin.h>

#include <cstdint>

#include "operands.h"
#include "quantize.h"

namespace paged {

inline void PreparedRows::prepare(const PackedWeight& weight, int64_t inputs, int64_t padded) {
  const int64_t element = weight.scales ? 1 : 2;
  const int64_t count = kept_.size(0);
  if (weight.scales) {
    const at::Tensor wide = kept_.stride(1) == 1 || inputs == 1 ? kept_ : kept_.contiguous();
    kept_ = empty_rows({count, padded}, kept_.options().dtype(at::kByte));
    scales_ = at::empty({count}, kept_.options().dtype(at::kFloat));
    quantize_rows(wide.const_data_ptr<c10::BFloat16>(), wide.stride(0), count, inputs,
                  kept_.mutable_data_ptr<uint8_t>(), row_stride(kept_), padded, scales_.mutable_data_ptr<float>());
  } else if (inputs != padded || kept_.stride(1) != 1) {
    at::Tensor wide = at::zeros({count, padded}, kept_.options());
    wide.narrow(1, 0, inputs).copy_(kept_);
    kept_ = wide;
  }
  rows_ = {static_cast<const char*>(kept_.const_data_ptr()), kept_.stride(0) * element, count};
}

inline void PreparedRows::dequantize(const PackedWeight& weight, const Tile& tile) const {
  if (!weight.scales) return;
  const float* row_scales = scales_.const_data_ptr<float>() + tile.first_row;
  for (int64_t lane = 0; lane < kPanel; lane += kLane) {
    const int64_t output = tile.panel * kPanel + lane;
    const __m512 scales = _mm512_loadu_ps(weight.scales + output);
    const __m512i offsets = _mm512_mullo_epi32(_mm512_loadu_si512(weight.sums + output), _mm512_set1_epi32(kZeroPoint));
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      float* sums = tile.sums + r * kPanel + lane;
      const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(sums), offsets));
      _mm512_storeu_ps(sums, _mm512_mul_ps(exact, _mm512_mul_ps(scales, _mm512_set1_ps(row_scales[r]))));
    }
  }
}

}  // namespace paged
