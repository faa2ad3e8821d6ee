#pragma once

// linear_argmax: of each row the output with the largest sum, without the sums of all outputs lying in memory.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "lanes.h"
#include "operands.h"
#include "panels.h"
#include "parallel.h"
#include "product.h"

namespace paged {
inline float rounded(float value) { return static_cast<float>(static_cast<c10::BFloat16>(value)); }

// cap · tanh(logit / cap), rounded where a model that computes in bf16 rounds; the order of logits stays, but different
// ones may become equal.
inline float capped(float logit, float cap) {
  return cap > 0 ? rounded(rounded(std::tanh(rounded(logit / cap))) * cap) : logit;
}

// The best so far of one row.
struct Best {
  float logit = -std::numeric_limits<float>::infinity();   // before the cap
  float compared = -std::numeric_limits<float>::infinity();  // after it
  int64_t id = 0;
  bool finite = true;
};

// Outputs come in rising order, so the first of equal ones stays.
inline void take_better(Best& best, Lanes better, const float* logits, int64_t first_id, float cap) {
  for (; better; better &= better - 1) {
    const int lane = __builtin_ctz(better);
    if (!(logits[lane] > best.logit)) continue;
    best.logit = logits[lane];
    const float compared = capped(logits[lane], cap);
    if (compared > best.compared) {
      best.compared = compared;
      best.id = first_id + lane;
    }
  }
}

class ArgmaxEpilogue final : public Epilogue {
 public:
  // `best` is [max_workers()][num_rows].
  ArgmaxEpilogue(const PackedWeight& weight, const PreparedRows& rows, const c10::BFloat16* bias, int64_t outputs,
                 float cap, Best* best)
      : weight_(weight), rows_(rows), bias_(bias), outputs_(outputs), cap_(cap), best_(best) {}

  void expect(const Tile&) const override {}

  void take(const Tile& tile) const override {
    rows_.dequantize(weight_, tile);
    Best* best = best_ + tile.worker * rows_.rows().count + tile.first_row;
    for (int64_t lane = 0; lane < kPanel; lane += kLane) {
      const int64_t output = tile.panel * kPanel + lane;
      const Lanes lanes = first_lanes(outputs_ - output);
      const Floats shift = bias_ ? load_bf16(bias_ + output, lanes) : Floats{};
      for (int64_t r = 0; r < tile.num_rows; ++r) {
        const Floats logits = rounded(load_floats(tile.sums + r * kPanel + lane) + shift);
        if (not_finite(lanes, logits)) best[r].finite = false;
        const Lanes better = greater(lanes, logits, best[r].logit);
        if (better) {
          alignas(64) float all[kLane];
          store_floats(all, 0xffff, logits);
          take_better(best[r], better, all, output, cap_);
        }
      }
    }
  }

 private:
  const PackedWeight& weight_;
  const PreparedRows& rows_;
  const c10::BFloat16* bias_;
  const int64_t outputs_;
  const float cap_;
  Best* best_;
};

inline void merge(Best& best, const Best& other) {
  best.finite = best.finite && other.finite;
  const bool is_better = other.compared > best.compared || (other.compared == best.compared && other.id < best.id);
  if (is_better) {
    best.compared = other.compared;
    best.id = other.id;
  }
}

inline std::tuple<at::Tensor, at::Tensor> linear_argmax(
    const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& scales,
    const std::optional<at::Tensor>& sums, int64_t outputs, const std::optional<at::Tensor>& bias,
    std::optional<double> soft_cap) {
  const PackedWeight weight(panels, scales, sums);
  TORCH_CHECK_VALUE(outputs > 0 && outputs <= weight.panels.count * kPanel, "outputs: are ", outputs,
                    ", must be from 1 to the packed weight's");
  TORCH_CHECK_VALUE(!soft_cap || *soft_cap > 0, "soft_cap: is ", soft_cap.value_or(0), ", must be above 0, or None");
  if (bias) TORCH_CHECK_VALUE(bias->numel() >= outputs, "bias: has ", bias->numel(), " numbers, must have ", outputs);
  const c10::BFloat16* shift = bias ? checked_bias(bias, bias->numel()) : nullptr;
  TORCH_CHECK_VALUE(x.dim() == 2, "x: has ", x.dim(), " dimensions, must be [rows, inputs]");
  const PreparedRows prepared(x, weight);
  const int64_t num_rows = prepared.rows().count;
  const auto cap = static_cast<float>(soft_cap.value_or(0));

  std::vector<Best> best(static_cast<size_t>(max_workers() * num_rows));
  Panels counted = weight.panels;
  counted.count = divide_up(outputs, kPanel);
  product(weight.arithmetic(), prepared.rows(), counted,
          ArgmaxEpilogue(weight, prepared, shift, outputs, cap, best.data()));

  at::Tensor ids = at::empty({num_rows}, x.options().dtype(at::kLong));
  at::Tensor finite = at::empty({num_rows}, x.options().dtype(at::kBool));
  for (int64_t row = 0; row < num_rows; ++row) {
    Best& merged = best[row];
    for (size_t at = num_rows + row; at < best.size(); at += num_rows) merge(merged, best[at]);
    ids.mutable_data_ptr<int64_t>()[row] = merged.id;
    finite.mutable_data_ptr<bool>()[row] = merged.finite;
  }
  return {ids, finite};
}

}  // namespace paged
