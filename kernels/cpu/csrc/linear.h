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

// Lines that rows of a tile begin in, `stride` elements apart.
template <int Write>
void fetch_rows(const c10::BFloat16* first, int64_t stride, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; ++r) __builtin_prefetch(first + r * stride, Write);
}

class LinearEpilogue final : public Epilogue {
 public:
  LinearEpilogue(const PackedWeight& weight, const PreparedRows& rows, Output out)
      : weight_(weight), rows_(rows), out_(out) {}

  void expect(const Tile& tile) const override {
    const int64_t output = tile.panel * kPanel;
    fetch_rows<1>(out_.data + tile.first_row * out_.stride + output, out_.stride, tile.num_rows);
    if (residual) fetch_rows<0>(residual + tile.first_row * residual_stride + output, residual_stride, tile.num_rows);
  }

  void take(const Tile& tile) const override {
    rows_.dequantize(weight_, tile);
    const int64_t output = tile.panel * kPanel;
    const Lanes left = first_lanes(out_.size - output), right = first_lanes(out_.size - output - kLane);
    const Floats left_bias = bias ? load_bf16(bias + output, left) : Floats{};
    const Floats right_bias = bias ? load_bf16(bias + output + kLane, right) : Floats{};
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      const float* sums = tile.sums + r * kPanel;
      const int64_t row = tile.first_row + r;
      Floats low = load_floats(sums) + left_bias;
      Floats high = load_floats(sums + kLane) + right_bias;
      if (activation != Activation::none) {
        low = activated(activation, low);
        high = activated(activation, high);
      }
      if (residual) {
        const c10::BFloat16* from = residual + row * residual_stride + output;
        low += load_bf16(from, left);
        high += load_bf16(from + kLane, right);
      }
      store_bf16(out_.data + row * out_.stride + output, left, right, low, high);
    }
  }

  const c10::BFloat16* bias = nullptr;
  const c10::BFloat16* residual = nullptr;
  int64_t residual_stride = 0;
  Activation activation = Activation::none;

 private:
  const PackedWeight& weight_;
  const PreparedRows& rows_;
  const Output out_;
};

class GatedEpilogue final : public Epilogue {
 public:
  GatedEpilogue(const PackedWeight& weight, const PreparedRows& rows, Output out, Activation activation)
      : weight_(weight), rows_(rows), out_(out), activation_(activation) {}

  int64_t panels_together() const override { return 2; }

  void expect(const Tile& tile) const override {
    fetch_rows<1>(out_.data + tile.first_row * out_.stride + tile.panel * kLane, out_.stride, tile.num_rows);
  }

  void take(const Tile& tile) const override {
    rows_.dequantize(weight_, tile);
    const int64_t output = tile.panel * kLane;
    const Lanes lanes = first_lanes(out_.size - output);
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      const float* sums = tile.sums + r * kPanel;
      const Floats value = activated(activation_, load_floats(sums)) * load_floats(sums + kLane);
      store_bf16(out_.data + (tile.first_row + r) * out_.stride + output, lanes, value);
    }
  }

 private:
  const PackedWeight& weight_;
  const PreparedRows& rows_;
  const Output out_;
  const Activation activation_;
};

// For who adds more to the sums before they are rounded.
class SumsEpilogue final : public Epilogue {
 public:
  SumsEpilogue(const PackedWeight& weight, const PreparedRows& rows, float* out, int64_t size)
      : weight_(weight), rows_(rows), out_(out), size_(size) {}

  void expect(const Tile&) const override {}

  void take(const Tile& tile) const override {
    rows_.dequantize(weight_, tile);
    for (int64_t lane = 0; lane < kPanel; lane += kLane) {
      const int64_t output = tile.panel * kPanel + lane;
      const Lanes lanes = first_lanes(size_ - output);
      for (int64_t r = 0; r < tile.num_rows; ++r) {
        float* to = out_ + (tile.first_row + r) * size_ + output;
        store_floats(to, lanes, load_floats(tile.sums + r * kPanel + lane));
      }
    }
  }

 private:
  const PackedWeight& weight_;
  const PreparedRows& rows_;
  float* const out_;
  const int64_t size_;
};

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
  at::Tensor result = out ? *out : empty_rows(output_sizes(x, outputs), x.options());
  const int64_t stride = checked_row_stride("out", result, num_rows, outputs);
  LinearEpilogue epilogue(weight, prepared, {result.mutable_data_ptr<c10::BFloat16>(), stride, outputs});
  epilogue.bias = checked_bias(bias, outputs);
  epilogue.activation = checked_activation(activation);
  if (residual) {
    epilogue.residual_stride = checked_row_stride("residual", *residual, num_rows, outputs);
    epilogue.residual = residual->const_data_ptr<c10::BFloat16>();
  }
  product(weight.arithmetic(), prepared.rows(), weight.panels, epilogue);
  return result;
}

inline at::Tensor linear_sums(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& scales,
                              const std::optional<at::Tensor>& sums, int64_t outputs) {
  const PackedWeight weight(panels, scales, sums);
  TORCH_CHECK_VALUE(divide_up(outputs, kPanel) == weight.panels.count, "outputs: ", outputs, " do not fill ",
                    weight.panels.count, " panels");
  const PreparedRows prepared(x, weight);
  at::Tensor result = at::empty(output_sizes(x, outputs), x.options().dtype(at::kFloat));
  product(weight.arithmetic(), prepared.rows(), weight.panels,
          SumsEpilogue(weight, prepared, result.mutable_data_ptr<float>(), outputs));
  return result;
}

inline at::Tensor gated(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& scales,
                        const std::optional<at::Tensor>& sums, int64_t outputs, int64_t activation) {
  const PackedWeight weight(panels, scales, sums);
  TORCH_CHECK_VALUE(divide_up(outputs, kLane) == weight.panels.count, "outputs: ", outputs, " do not fill ",
                    weight.panels.count, " gated panels");
  const PreparedRows prepared(x, weight);
  at::Tensor result = empty_rows(output_sizes(x, outputs), x.options());
  const GatedEpilogue epilogue(weight, prepared, {result.mutable_data_ptr<c10::BFloat16>(), row_stride(result), outputs},
                               checked_activation(activation));
  product(weight.arithmetic(), prepared.rows(), weight.panels, epilogue);
  return result;
}

}  // namespace paged
