#pragma once

// The operands of a product as torch hands them over, checked.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <immintrin.h>

#include <cstdint>
#include <optional>

#include "panels.h"
#include "product.h"
#include "quantize.h"

namespace paged {

// [..., size] as [rows, size], without copying where strides allow it.
inline at::Tensor as_rows(const at::Tensor& x) {
  return x.dim() == 2 ? x : x.reshape({x.numel() / x.size(-1), x.size(-1)});
}

// A packed weight: panels [panels, steps, 32, 2] bf16, `outputs` of whose rows are real, or [panels, steps, 32, 4] int8
// with a scale for each output, [panels · 32] fp32, and what an output's weights add up to, [panels · 32] int32.
struct PackedWeight {
  PackedWeight(const at::Tensor& tensor, const std::optional<at::Tensor>& weight_scales,
               const std::optional<at::Tensor>& weight_sums);

  Arithmetic arithmetic() const { return scales ? Arithmetic::int8 : Arithmetic::bf16; }

  Panels panels;
  const float* scales = nullptr;
  const int32_t* sums = nullptr;
};

// Rows of activations as the arithmetic of a weight wants them, and the memory that holds them where they had to be
// padded or quantised. `x` is [..., inputs] bf16.
class PreparedRows {
 public:
  PreparedRows(const at::Tensor& x, const PackedWeight& weight);

  const Rows& rows() const { return rows_; }

  // Turns a tile's int32 sums of quantised rows into fp32; nothing to do for bf16.
  void dequantize(const PackedWeight& weight, const Tile& tile) const;

 private:
  at::Tensor kept_, scales_;
  Rows rows_;
};

inline PackedWeight::PackedWeight(const at::Tensor& tensor, const std::optional<at::Tensor>& weight_scales,
                                  const std::optional<at::Tensor>& weight_sums) {
  const bool quantized = tensor.scalar_type() == at::kChar;
  TORCH_CHECK_VALUE(quantized || tensor.scalar_type() == at::kBFloat16, "panels: dtype is ", tensor.scalar_type(),
                    ", must be bfloat16 or int8");
  TORCH_CHECK_VALUE(tensor.dim() == 4 && tensor.is_contiguous() && tensor.size(2) == kPanel &&
                        tensor.size(1) % kStepsRound == 0 && tensor.size(3) * tensor.element_size() == kStepBytes,
                    "panels: ", tensor.sizes(), " is not the shape of a packed weight");
  TORCH_CHECK_VALUE(quantized == weight_scales.has_value() && quantized == weight_sums.has_value(),
                    "scales and sums: int8 panels need both, others have none");
  panels = {static_cast<const char*>(tensor.const_data_ptr()), tensor.size(0), tensor.size(1)};
  if (quantized) {
    const int64_t outputs = panels.count * kPanel;
    TORCH_CHECK_VALUE(weight_scales->numel() == outputs && weight_sums->numel() == outputs,
                      "scales and sums: must have one number for each of ", outputs, " outputs");
    scales = weight_scales->const_data_ptr<float>();
    sums = weight_sums->const_data_ptr<int32_t>();
  }
}

inline PreparedRows::PreparedRows(const at::Tensor& x, const PackedWeight& weight) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16, "x: dtype is ", x.scalar_type(), ", must be bfloat16");
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) > 0, "x: shape is ", x.sizes(), ", must be [..., inputs]");
  const int64_t element = weight.scales ? 1 : 2, inputs = x.size(-1);
  const int64_t padded = weight.panels.steps * kStepBytes / element;
  TORCH_CHECK_VALUE(padded_steps(inputs * element) == weight.panels.steps, "x: has ", inputs,
                    " inputs, the packed weight takes ", padded, " with its padding");
  kept_ = as_rows(x);
  const int64_t count = kept_.size(0);
  if (weight.scales) {
    const at::Tensor wide = kept_.stride(1) == 1 || inputs == 1 ? kept_ : kept_.contiguous();
    kept_ = at::empty({count, padded}, x.options().dtype(at::kByte));
    scales_ = at::empty({count}, x.options().dtype(at::kFloat));
    quantize_rows(wide.const_data_ptr<c10::BFloat16>(), wide.stride(0), count, inputs,
                  kept_.mutable_data_ptr<uint8_t>(), padded, scales_.mutable_data_ptr<float>());
  } else if (inputs != padded || kept_.stride(1) != 1) {
    at::Tensor wide = at::zeros({count, padded}, x.options());
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

// `x` without its last dimension, and with `outputs` instead.
inline at::Tensor empty_output(const at::Tensor& x, int64_t outputs, at::ScalarType dtype = at::kBFloat16) {
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  return at::empty(sizes, x.options().dtype(dtype));
}

// Raises ValueError unless `tensor` is bf16, [..., size] with as many rows as `x`, and its rows contiguous; its rows'
// stride in elements.
inline int64_t checked_row_stride(const char* name, const at::Tensor& tensor, int64_t rows, int64_t size) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kBFloat16, name, ": dtype is ", tensor.scalar_type(),
                    ", must be bfloat16");
  TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.size(-1) == size && tensor.numel() == rows * size, name, ": shape is ",
                    tensor.sizes(), ", must be ", rows, " rows of ", size);
  const bool flat = tensor.dim() <= 2 || tensor.is_contiguous();
  TORCH_CHECK_VALUE(flat && (size == 1 || tensor.stride(-1) == 1), name, ": its rows must be contiguous");
  return tensor.dim() == 2 ? tensor.stride(0) : size;
}

// Raises ValueError unless `bias`, if there is one, is [outputs] bf16.
inline const c10::BFloat16* checked_bias(const std::optional<at::Tensor>& bias, int64_t outputs) {
  if (!bias) return nullptr;
  TORCH_CHECK_VALUE(bias->scalar_type() == at::kBFloat16 && bias->is_contiguous() && bias->numel() == outputs,
                    "bias: must be ", outputs, " numbers in bfloat16, contiguous");
  return bias->const_data_ptr<c10::BFloat16>();
}

}  // namespace paged
