#pragma once

// A decoder layer in one call: its norms, products and attention one after another. Between calls of their own a caller in
// Python takes longer than some of them do, and all threads wait for it.
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>

#include <memory>

#include "attention.h"
#include "kv_layout.h"
#include "linear.h"
#include "norm.h"

namespace paged {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalTensors = c10::List<OptionalTensor>;

// What a layer is in all calls; kernels/cpu/decoder_layer.py tells what its parts are.
struct DecoderLayer {
  // Of the last dimension, where there is a weight; else nothing is done.
  struct Norm {
    OptionalTensor weight;
    double eps;
    bool plus_one;

    at::Tensor operator()(const at::Tensor& x) const {
      return weight ? norms::rms_norm(x, weight, eps, plus_one) : x;
    }
  };

  // A packed weight and what belongs to it.
  struct Weight {
    at::Tensor panels;
    OptionalTensor scales, sums, bias;
    int64_t outputs;

    at::Tensor operator()(const at::Tensor& x, const OptionalTensor& residual) const {
      return linear(x, panels, scales, sums, outputs, bias, residual, static_cast<int64_t>(Activation::none),
                    std::nullopt);
    }
  };

  // What a call is given besides its rows.
  struct Step {
    const OptionalTensor &cos, &sin;
    const at::Tensor &slots, &key_cache, &value_cache, &plan;
  };

  Norm before_attention, after_attention, before_mlp, after_mlp;
  bool parallel;  // the MLP takes what attention takes
  Weight qkv, output, gate_up, down;
  int64_t activation;
  int64_t head_dim;
  OptionalTensor query_norm, key_norm;
  double head_norm_eps;
  bool interleaved;
  double scale, soft_cap;
  OptionalTensor sinks;

  // [num_tokens, width] to the same.
  at::Tensor operator()(const at::Tensor& x, const Step& step) const {
    const at::Tensor attended = attend(qkv(before_attention(x), std::nullopt), step);
    const at::Tensor between =
        after_attention.weight ? at::add(x, after_attention(output(attended, std::nullopt))) : output(attended, x);
    const at::Tensor inner = gated(before_mlp(parallel ? x : between), gate_up.panels, gate_up.scales, gate_up.sums,
                                   gate_up.outputs, activation);
    return after_mlp.weight ? at::add(between, after_mlp(down(inner, std::nullopt))) : down(inner, between);
  }

 private:
  at::Tensor attend(const at::Tensor& projected, const Step& step) const {
    check(step, projected.size(0));
    return attend_projected(projected.unflatten(1, {-1, head_dim}), query_norm, key_norm, head_norm_eps, step.cos,
                            step.sin, interleaved, step.slots, step.key_cache, step.value_cache, step.plan, scale,
                            soft_cap, sinks);
  }

  void check(const Step& step, int64_t num_tokens) const {
    TORCH_CHECK_VALUE(step.slots.scalar_type() == at::kLong && step.slots.is_contiguous() &&
                          step.slots.sizes() == at::IntArrayRef{num_tokens},
                      "slots: is ", step.slots.scalar_type(), " ", step.slots.sizes(), ", must be int64 [", num_tokens, "]");
    TORCH_CHECK_VALUE(step.cos.has_value() == step.sin.has_value(), "cos and sin: one is missing; give both or none");
    if (step.cos) {
      const int64_t rotated = step.cos->size(-1);
      TORCH_CHECK_VALUE(rotated <= head_dim && rotated % 2 == 0, "cos: has ", rotated,
                        " dimensions, must be even and at most ", head_dim);
      for (const at::Tensor* turns : {&*step.cos, &*step.sin}) {
        TORCH_CHECK_VALUE(turns->scalar_type() == at::kFloat && turns->is_contiguous() &&
                              turns->sizes() == at::IntArrayRef({num_tokens, rotated}),
                          "cos and sin: are ", turns->scalar_type(), " ", turns->sizes(), ", must be fp32 [", num_tokens,
                          ", ", rotated, "]");
      }
    }
    TORCH_CHECK_VALUE(step.key_cache.dim() == 5 && step.value_cache.dim() == 5,
                      "key_cache and value_cache: must be in the native layout");
    const KvLayout cache(step.key_cache, step.value_cache);
    TORCH_CHECK_VALUE(divide_up(head_dim, cache.pack) == cache.depth && cache.value_dim == head_dim,
                      "key_cache and value_cache: do not hold heads of ", head_dim);
  }
};

// A DecoderLayer, in a tensor of bytes that owns it. `norms`: those before and after attention, then before and after the
// MLP. `weights`: panels, scales, sums and bias of each, in the order of `outputs`: queries, keys and values; what follows
// attention; the MLP's gated pair; and its last. `head_norms`: of queries and keys.
inline at::Tensor make_decoder_layer(const OptionalTensors& norms, at::ArrayRef<double> eps, const c10::List<bool>& plus_one,
                                     bool parallel, const OptionalTensors& weights, at::IntArrayRef outputs,
                                     int64_t activation, int64_t head_dim, const OptionalTensors& head_norms,
                                     double head_norm_eps, bool interleaved, double scale, double soft_cap,
                                     const OptionalTensor& sinks) {
  TORCH_CHECK_VALUE(norms.size() == 4 && eps.size() == 4 && plus_one.size() == 4, "norms: must be four");
  TORCH_CHECK_VALUE(weights.size() == 16 && outputs.size() == 4, "weights: must be four of four parts");
  TORCH_CHECK_VALUE(head_norms.size() == 2, "head_norms: must be two");
  const auto norm = [&](size_t i) { return DecoderLayer::Norm{norms.get(i), eps[i], plus_one.get(i)}; };
  const auto weight = [&](size_t i) {
    const OptionalTensor panels = weights.get(4 * i);
    TORCH_CHECK_VALUE(panels, "weights: number ", i, " has no panels");
    return DecoderLayer::Weight{*panels, weights.get(4 * i + 1), weights.get(4 * i + 2), weights.get(4 * i + 3),
                                outputs[i]};
  };
  auto layer = std::make_unique<DecoderLayer>(DecoderLayer{
      norm(0), norm(1), norm(2), norm(3), parallel, weight(0), weight(1), weight(2), weight(3), activation, head_dim,
      head_norms.get(0), head_norms.get(1), head_norm_eps, interleaved, scale, soft_cap, sinks});
  const auto forget = [](void* made) { delete static_cast<DecoderLayer*>(made); };
  return at::from_blob(layer.release(), {sizeof(DecoderLayer)}, forget, at::TensorOptions().dtype(at::kByte));
}

inline at::Tensor decoder_layer(const at::Tensor& layer, const at::Tensor& x, const OptionalTensor& cos,
                                const OptionalTensor& sin, const at::Tensor& slots, const at::Tensor& key_cache,
                                const at::Tensor& value_cache, const at::Tensor& plan) {
  TORCH_CHECK(layer.scalar_type() == at::kByte && layer.numel() == sizeof(DecoderLayer),
              "layer: is none of make_decoder_layer's");
  const auto& made = *static_cast<const DecoderLayer*>(layer.const_data_ptr());
  return made(as_rows(x), {cos, sin, slots, key_cache, value_cache, plan}).view(x.sizes());
}

}  // namespace paged
