#pragma once

// The operands of a product as torch hands them over, checked.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>

#include "panels.h"
#include "product.h"
#include "strides.h"

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

// Rows of activations as the kernel wants them, and the memory that holds them where they had to be padded, quantised or
// widened. `x` is [..., inputs] bf16.
class PreparedRows {
 public:
  PreparedRows(const at::Tensor& x, const PackedWeight& weight);

  const Rows& rows() const { return rows_; }

  // Makes a tile's sums with int8 weights what they stand for, in fp32; nothing to do for bf16.
  void dequantize(const PackedWeight& weight, const Tile& tile) const;

 private:
  // Of rows [rows, inputs], which take `padded` inputs.
  void prepare(const PackedWeight& weight, int64_t inputs, int64_t padded);

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
  prepare(weight, inputs, padded);
}

// The sizes of `x`, the last one of which is `outputs` instead.
inline c10::DimVector output_sizes(const at::Tensor& x, int64_t outputs) {
  c10::DimVector sizes(x.sizes());
  sizes.back() = outputs;
  return sizes;
}

// Raises ValueError unless `tensor` is bf16, [..., size] with as many rows as `x`, and its rows contiguous; its rows'
// stride in elements.
inline int64_t checked_row_stride(const char* name, const at::Tensor& tensor, int64_t rows, int64_t size) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kBFloat16, name, ": dtype is ", tensor.scalar_type(),
                    ", must be bfloat16");
  TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.size(-1) == size && tensor.numel() == rows * size, name, ": shape is ",
                    tensor.sizes(), ", must be ", rows, " rows of ", size);
  const int64_t stride = row_stride(tensor);
  TORCH_CHECK_VALUE(stride >= 0, name, ": its rows must be contiguous, and one as far from the next as all others");
  return stride;
}

// Raises ValueError unless `bias`, if there is one, is [outputs] bf16.
inline const c10::BFloat16* checked_bias(const std::optional<at::Tensor>& bias, int64_t outputs) {
  if (!bias) return nullptr;
  TORCH_CHECK_VALUE(bias->scalar_type() == at::kBFloat16 && bias->is_contiguous() && bias->numel() == outputs,
                    "bias: must be ", outputs, " numbers in bfloat16, contiguous");
  return bias->const_data_ptr<c10::BFloat16>();
}

}  // namespace paged

#if defined(PAGED_BF16_DOT)
#include "rows_dot.h"
#else
#include "rows_widening.h"
#endif
