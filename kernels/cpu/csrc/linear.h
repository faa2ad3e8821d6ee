#pragma once

// linear and gated: products of rows with a packed weight, and what is done to the sums before they are rounded.
#include <ATen/core/Tensor.h>

#include "activation.h"
#include "lanes.h"
#include "operands.h"
#include "panels.h"
#include "product.h"

namespace paged {
struct Output {
  c10::BFloat16* data;
  int64_t stride, size;
};

struct Finish {
  const c10::BFloat16* bias;
  const c10::BFloat16* residual;
  int64_t residual_stride;
  Activation activation;
};

inline void finish_linear(const Tile& tile, const Output& out, const Finish& finish) {
  for (int64_t lane = 0; lane < kPanel; lane += kLane) {
    const int64_t output = tile.panel * kPanel + lane;
    const __mmask16 lanes = first_lanes(out.size - output);
    const __m512 bias = finish.bias ? load_bf16(finish.bias + output, lanes) : _mm512_setzero_ps();
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      const int64_t row = tile.first_row + r;
      __m512 value = _mm512_add_ps(_mm512_loadu_ps(tile.sums + r * kPanel + lane), bias);
      if (finish.activation != Activation::none) value = activated(finish.activation, value);
      if (finish.residual) {
        const c10::BFloat16* residual = finish.residual + row * finish.residual_stride + output;
        value = _mm512_add_ps(value, load_bf16(residual, lanes));
      }
      store_bf16(out.data + row * out.stride + output, lanes, value);
    }
  }
}

inline void finish_gated(const Tile& tile, const Output& out, Activation activation) {
  const int64_t output = tile.panel * kLane;
  const __mmask16 lanes = first_lanes(out.size - output);
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const float* sums = tile.sums + r * kPanel;
    const Vector gate = activated(activation, Vector(_mm512_loadu_ps(sums)));
    const __m512 value = _mm512_mul_ps(gate, _mm512_loadu_ps(sums + kLane));
    store_bf16(out.data + (tile.first_row + r) * out.stride + output, lanes, value);
  }
}

inline Activation checked_activation(int64_t activation) {
  TORCH_CHECK_VALUE(activation >= 0 && activation < kNumActivations, "activation: there is none with number ",
                    activation);
  return static_cast<Activation>(activation);
}

inline at::Tensor linear(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& scales,
                         const std::optional<at::Tensor>& sums, int64_t outputs, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& residual, int64_t activation,
                         const std::optional<at::Tensor>& out) {
  const PackedWeight weight(panels, scales, sums);
  TORCH_CHECK_VALUE(divide_up(outputs, kPanel) == weight.panels.count, "outputs: ", outputs, " do not fill ",
                    weight.panels.count, " panels");
  const PreparedRows prepared(x, weight);
  const int64_t num_rows = prepared.rows().count;
  Finish finish{checked_bias(bias, outputs), nullptr, 0, checked_activation(activation)};
  if (residual) {
    finish.residual_stride = checked_row_stride("residual", *residual, num_rows, outputs);
    finish.residual = residual->const_data_ptr<c10::BFloat16>();
  }
  at::Tensor result = out ? *out : empty_output(x, outputs);
  const int64_t stride = checked_row_stride("out", result, num_rows, outputs);
  const Output output{result.mutable_data_ptr<c10::BFloat16>(), stride, outputs};
  product(weight.arithmetic(), prepared.rows(), weight.panels, [&](const Tile& tile) {
    prepared.dequantize(weight, tile);
    finish_linear(tile, output, finish);
  });
  return result;
}

inline at::Tensor gated(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& scales,
                        const std::optional<at::Tensor>& sums, int64_t outputs, int64_t activation) {
  const PackedWeight weight(panels, scales, sums);
  TORCH_CHECK_VALUE(divide_up(outputs, kLane) == weight.panels.count, "outputs: ", outputs, " do not fill ",
                    weight.panels.count, " gated panels");
  const Activation act = checked_activation(activation);
  const PreparedRows prepared(x, weight);
  at::Tensor result = empty_output(x, outputs);
  const Output output{result.mutable_data_ptr<c10::BFloat16>(), outputs, outputs};
  product(weight.arithmetic(), prepared.rows(), weight.panels, [&](const Tile& tile) {
    prepared.dequantize(weight, tile);
    finish_gated(tile, output, act);
  });
  return result;
}

}  // namespace paged
