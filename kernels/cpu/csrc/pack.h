#pragma once

// Packing: weights [outputs, inputs] into panels (panels.h), and rows of a packed weight back.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "large_pages.h"
#include "panels.h"
#include "parallel.h"

namespace paged {
using c10::BFloat16;

// The rows of several weights, one after another or gate beside up, in the order in which panels hold them.
class Sources {
 public:
  Sources(at::TensorList weights, bool gated) : gated_(gated) {
    TORCH_CHECK_VALUE(!weights.empty() && (!gated || weights.size() == 2), "weights: are ", weights.size(),
                      gated ? ", must be the gate's and what it gates" : ", must be at least one");
    inputs_ = weights[0].dim() == 2 ? weights[0].size(1) : 0;
    for (const at::Tensor& weight : weights) {
      TORCH_CHECK_VALUE(weight.scalar_type() == at::kBFloat16, "weights: dtype is ", weight.scalar_type(),
                        ", must be bfloat16");
      TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == inputs_ && weight.size(0) > 0 && inputs_ > 0,
                        "weights: shape is ", weight.sizes(), ", must be [outputs, inputs] with the same inputs");
      TORCH_CHECK_VALUE(!gated || weight.size(0) == weights[0].size(0), "weights: a gate of ", weights[0].size(0),
                        " outputs cannot gate ", weight.size(0));
      kept_.push_back(weight.stride(1) == 1 ? weight : weight.contiguous());
      outputs_ += weight.size(0);
    }
  }

  int64_t inputs() const { return inputs_; }
  int64_t num_panels() const { return gated_ ? divide_up(kept_[0].size(0), kLane) : divide_up(outputs_, kPanel); }

  // What is at `lane` of a panel; null for padding.
  const BFloat16* row(int64_t panel, int64_t lane) const {
    if (gated_) {
      const at::Tensor& half = kept_[lane / kLane];
      const int64_t output = panel * kLane + lane % kLane;
      return output < half.size(0) ? at(half, output) : nullptr;
    }
    int64_t output = panel * kPanel + lane;
    for (const at::Tensor& weight : kept_) {
      if (output < weight.size(0)) return at(weight, output);
      output -= weight.size(0);
    }
    return nullptr;
  }

 private:
  static const BFloat16* at(const at::Tensor& weight, int64_t output) {
    return weight.const_data_ptr<BFloat16>() + output * weight.stride(0);
  }

  std::vector<at::Tensor> kept_;
  bool gated_;
  int64_t inputs_ = 0, outputs_ = 0;
};

// Writes `steps` steps of one lane; 16 at a time for each lane, so that both sides stay in the cache.
inline void interleave_rows(const char* const* rows, int64_t row_bytes, int64_t steps, char* panel) {
  for (int64_t first = 0; first < steps; first += kStepsRound) {
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      int32_t values[kStepsRound] = {};
      const int64_t left = row_bytes - first * kStepBytes;
      const int64_t bytes = std::clamp<int64_t>(left, 0, kStepsRound * kStepBytes);
      if (rows[lane] && bytes) std::memcpy(values, rows[lane] + first * kStepBytes, bytes);
      char* to = panel + first * kStepRow + lane * kStepBytes;
      for (int64_t s = 0; s < kStepsRound; ++s) std::memcpy(to + s * kStepRow, values + s, kStepBytes);
    }
  }
}

inline at::Tensor pack(at::TensorList weights, bool gated) {
  const Sources sources(weights, gated);
  const int64_t row_bytes = sources.inputs() * 2, steps = padded_steps(row_bytes);
  at::Tensor panels = zeros_on_large_pages({sources.num_panels(), steps, kPanel, 2}, at::kBFloat16);
  char* data = static_cast<char*>(panels.mutable_data_ptr());
  for_each_item(sources.num_panels(), [&](int64_t panel) {
    const char* rows[kPanel];
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      rows[lane] = reinterpret_cast<const char*>(sources.row(panel, lane));
    }
    interleave_rows(rows, row_bytes, steps, data + panel * steps * kStepRow);
  });
  return panels;
}

// To round(w / scale) with scale = max |w| / 127, which is NaN where a weight is not finite; returns (scale, sum of what
// was written).
inline std::pair<float, int32_t> quantize(const BFloat16* row, int64_t inputs, int8_t* to) {
  float most = 0;
  bool finite = true;
  for (int64_t i = 0; i < inputs; ++i) {
    const float magnitude = std::abs(static_cast<float>(row[i]));
    most = std::max(most, magnitude);
    finite = finite && std::isfinite(magnitude);
  }
  if (!finite) {
    std::memset(to, 0, static_cast<size_t>(inputs));
    return {std::numeric_limits<float>::quiet_NaN(), 0};
  }
  const float scale = most / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
  int32_t sum = 0;
  for (int64_t i = 0; i < inputs; ++i) {
    const float value = std::clamp(std::nearbyint(static_cast<float>(row[i]) * inverse), -127.0f, 127.0f);
    to[i] = static_cast<int8_t>(value);
    sum += to[i];
  }
  return {scale, sum};
}

// Sums of more products might not fit; what they are on the way, with the zero point in them, may wrap around.
constexpr int64_t kMostInt8Inputs = std::numeric_limits<int32_t>::max() / (127 * 127);

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> pack_int8(at::TensorList weights, bool gated) {
  const Sources sources(weights, gated);
  const int64_t inputs = sources.inputs(), steps = padded_steps(inputs), outputs = sources.num_panels() * kPanel;
  TORCH_CHECK_VALUE(inputs <= kMostInt8Inputs, "weights: have ", inputs, " inputs, of which int32 sums hold ",
                    kMostInt8Inputs, " products of 8 bits");
  const auto options = weights[0].options();
  at::Tensor panels = zeros_on_large_pages({sources.num_panels(), steps, kPanel, 4}, at::kChar);
  at::Tensor scales = at::empty({outputs}, options.dtype(at::kFloat));
  at::Tensor sums = at::empty({outputs}, options.dtype(at::kInt));
  char* data = static_cast<char*>(panels.mutable_data_ptr());
  for_each_item(sources.num_panels(), [&](int64_t panel) {
    std::vector<int8_t> quantized(static_cast<size_t>(kPanel * inputs));
    const char* rows[kPanel];
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      int8_t* to = quantized.data() + lane * inputs;
      const BFloat16* row = sources.row(panel, lane);
      const auto [scale, sum] = row ? quantize(row, inputs, to) : std::pair<float, int32_t>{0.0f, 0};
      scales.mutable_data_ptr<float>()[panel * kPanel + lane] = scale;
      sums.mutable_data_ptr<int32_t>()[panel * kPanel + lane] = sum;
      rows[lane] = reinterpret_cast<const char*>(row ? to : nullptr);
    }
    interleave_rows(rows, inputs, steps, data + panel * steps * kStepRow);
  });
  return {panels, scales, sums};
}

inline void unpack_bf16(const char* lane, int64_t inputs, BFloat16* to) {
  for (int64_t i = 0; i < inputs; i += 2) {
    std::memcpy(to + i, lane + i / 2 * kStepRow, std::min<int64_t>(inputs - i, 2) * sizeof(BFloat16));
  }
}

inline void unpack_int8(const char* lane, float scale, int64_t inputs, BFloat16* to) {
  for (int64_t i = 0; i < inputs; ++i) {
    to[i] = static_cast<float>(static_cast<int8_t>(lane[i / 4 * kStepRow + i % 4])) * scale;
  }
}

// The weights of some outputs, [ids, inputs] bf16: an embedding that shares its memory with the output head.
inline at::Tensor unpack_rows(const at::Tensor& panels, const std::optional<at::Tensor>& scales, const at::Tensor& ids,
                              int64_t outputs, int64_t inputs) {
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong, "ids: dtype is ", ids.scalar_type(), ", must be int64");
  TORCH_CHECK_VALUE(panels.is_contiguous() && panels.dim() == 4 && outputs <= panels.size(0) * kPanel &&
                        inputs <= panels.size(1) * panels.size(3),
                    "panels: ", panels.sizes(), " hold no ", outputs, " outputs of ", inputs, " inputs");
  const at::Tensor listed = ids.contiguous();
  auto sizes = ids.sizes().vec();
  sizes.push_back(inputs);
  at::Tensor result = at::empty(sizes, panels.options().dtype(at::kBFloat16));
  const int64_t num_ids = ids.numel(), panel_bytes = panels.size(1) * kStepRow;
  const int64_t* id = listed.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_ids; ++i) {
    TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < outputs, "ids: ", id[i], " is not below ", outputs);
  }
  const char* data = static_cast<const char*>(panels.const_data_ptr());
  BFloat16* to = result.mutable_data_ptr<BFloat16>();
  for_each_item(num_ids, [&](int64_t i) {
    const char* lane = data + id[i] / kPanel * panel_bytes + id[i] % kPanel * kStepBytes;
    if (scales) {
      unpack_int8(lane, scales->const_data_ptr<float>()[id[i]], inputs, to + i * inputs);
    } else {
      unpack_bf16(lane, inputs, to + i * inputs);
    }
  });
  return result;
}

}  // namespace paged
