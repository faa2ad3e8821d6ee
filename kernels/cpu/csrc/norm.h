// Norms over the last dimension, with what is added before them; in fp32 inside and rounded once.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "parallel.h"

namespace paged::norms {

using Vector = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vector::size();
constexpr int64_t kItemElements = 8192;  // what is worth to be a work item

template <typename T>
Vector load(const T* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    return Vector::loadu(from, count);
  } else {
    return std::get<0>(at::vec::convert_to_float(at::vec::Vectorized<T>::loadu(from, count)));
  }
}

template <typename T>
void store(T* to, Vector values, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    values.store(to, count);
  } else {
    at::vec::convert_from_float<T>(values, values).store(to, count);
  }
}

// Calls `use(i, count)` for runs of at most a vector's lanes.
template <typename Use>
void for_each_vector(int64_t size, const Use& use) {
  for (int64_t i = 0; i < size; i += kLanes) use(i, std::min(kLanes, size - i));
}

inline float total(Vector lanes) {
  return at::vec::vec_reduce_all<float>([](Vector& a, Vector& b) { return a + b; }, lanes);
}

template <typename T>
struct Weights {
  const T* weight;
  const T* bias;
  bool plus_one;

  Vector apply(Vector x, int64_t i, int64_t count) const {
    if (weight) {
      const Vector w = load(weight + i, count);
      x = x * (plus_one ? w + Vector(1.0f) : w);
    }
    return bias ? x + load(bias + i, count) : x;
  }
};

// One row: x, or x + residual with that sum kept.
template <typename T>
struct Row {
  const T* x;
  const T* residual;
  T* sum;
  T* out;
  int64_t size;

  Vector value(int64_t i, int64_t count) const {
    const Vector own = load(x + i, count);
    return residual ? own + load(residual + i, count) : own;
  }
};

// x / sqrt(mean(x²) + eps)
template <typename T>
void rms_row(const Row<T>& row, const Weights<T>& weights, float eps) {
  Vector squares(0.0f);
  for_each_vector(row.size, [&](int64_t i, int64_t count) {
    const Vector x = row.value(i, count);
    squares = squares + Vector::set(Vector(0.0f), x * x, count);
  });
  const Vector factor(1.0f / std::sqrt(total(squares) / static_cast<float>(row.size) + eps));
  // `out` may be `x`, `sum` may be `residual`: both are read before they are written.
  for_each_vector(row.size, [&](int64_t i, int64_t count) {
    const Vector x = row.value(i, count);
    if (row.sum) store(row.sum + i, x, count);
    store(row.out + i, weights.apply(x * factor, i, count), count);
  });
}

// (x - mean(x)) / sqrt(var(x) + eps)
template <typename T>
void layer_row(const Row<T>& row, const Weights<T>& weights, float eps) {
  const auto size = static_cast<float>(row.size);
  Vector sums(0.0f), squares(0.0f);
  for_each_vector(row.size, [&](int64_t i, int64_t count) {
    sums = sums + Vector::set(Vector(0.0f), row.value(i, count), count);
  });
  const Vector mean(total(sums) / size);
  for_each_vector(row.size, [&](int64_t i, int64_t count) {
    const Vector x = row.value(i, count) - mean;
    squares = squares + Vector::set(Vector(0.0f), x * x, count);
  });
  const Vector factor(1.0f / std::sqrt(total(squares) / size + eps));
  for_each_vector(row.size, [&](int64_t i, int64_t count) {
    const Vector x = row.value(i, count);
    if (row.sum) store(row.sum + i, x, count);
    store(row.out + i, weights.apply((x - mean) * factor, i, count), count);
  });
}

// The x of an operation, [..., size] of which the rows are contiguous, and what goes with it.
class Operands {
 public:
  Operands(const at::Tensor& x, const std::optional<at::Tensor>& residual) : x_(rows_contiguous(x)) {
    TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) > 0, "x: shape is ", x.sizes(), ", must be [..., size]");
    if (!residual) return;
    TORCH_CHECK_VALUE(residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type(),
                      "residual: is ", residual->scalar_type(), " ", residual->sizes(), ", must be as x is: ",
                      x.scalar_type(), " ", x.sizes());
    residual_ = rows_contiguous(*residual);
    sum_ = at::empty(x.sizes(), x.options());
  }

  int64_t size() const { return x_.size(-1); }
  int64_t num_rows() const { return x_.numel() / size(); }
  const at::Tensor& sum() const { return sum_; }

  void check(const char* name, const std::optional<at::Tensor>& weight) const {
    if (!weight) return;
    TORCH_CHECK_VALUE(weight->scalar_type() == x_.scalar_type() && weight->is_contiguous() && weight->numel() == size(),
                      name, ": is ", weight->scalar_type(), " ", weight->sizes(), ", must be ", x_.scalar_type(), " [",
                      size(), "], contiguous");
  }

  template <typename T>
  Row<T> row(int64_t r, T* out) const {
    const T* x = x_.const_data_ptr<T>() + r * stride(x_);
    if (!residual_.defined()) return {x, nullptr, nullptr, out + r * size(), size()};
    const T* residual = residual_.const_data_ptr<T>() + r * stride(residual_);
    return {x, residual, sum_.mutable_data_ptr<T>() + r * size(), out + r * size(), size()};
  }

 private:
  static at::Tensor rows_contiguous(const at::Tensor& x) {
    const bool strided = x.dim() == 2 && x.stride(1) == 1;
    return strided ? x : x.contiguous();
  }
  int64_t stride(const at::Tensor& x) const { return x.dim() == 2 ? x.stride(0) : size(); }

  at::Tensor x_, residual_, sum_;
};

enum class Norm { rms, layer };

inline at::Tensor norm(Norm kind, const Operands& operands, const at::Tensor& x, const std::optional<at::Tensor>& weight,
                const std::optional<at::Tensor>& bias, double eps, bool plus_one) {
  operands.check("weight", weight);
  operands.check("bias", bias);
  at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t num_rows = operands.num_rows(), rows_at_once = std::max<int64_t>(1, kItemElements / operands.size());
  const auto each_row = [&]<typename T>(T* to) {
    const Weights<T> weights{weight ? weight->const_data_ptr<T>() : nullptr, bias ? bias->const_data_ptr<T>() : nullptr,
                             plus_one};
    for_each_item((num_rows + rows_at_once - 1) / rows_at_once, [&](int64_t item) {
      for (int64_t r = item * rows_at_once; r < std::min(num_rows, (item + 1) * rows_at_once); ++r) {
        if (kind == Norm::rms) {
          rms_row(operands.row(r, to), weights, static_cast<float>(eps));
        } else {
          layer_row(operands.row(r, to), weights, static_cast<float>(eps));
        }
      }
    });
  };
  switch (x.scalar_type()) {
    case at::kFloat:
      each_row(out.mutable_data_ptr<float>());
      break;
    case at::kBFloat16:
      each_row(out.mutable_data_ptr<c10::BFloat16>());
      break;
    case at::kHalf:
      each_row(out.mutable_data_ptr<c10::Half>());
      break;
    default:
      TORCH_CHECK_VALUE(false, "x: dtype is ", x.scalar_type(), ", must be float32, bfloat16 or float16");
  }
  return out;
}

inline at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps, bool plus_one) {
  return norm(Norm::rms, Operands(x, std::nullopt), x, weight, std::nullopt, eps, plus_one);
}

inline std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                const std::optional<at::Tensor>& weight, double eps, bool plus_one) {
  const Operands operands(x, residual);
  return {norm(Norm::rms, operands, x, weight, std::nullopt, eps, plus_one), operands.sum()};
}

inline at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps) {
  return norm(Norm::layer, Operands(x, std::nullopt), x, weight, bias, eps, false);
}

inline std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& residual,
                                                  const std::optional<at::Tensor>& weight,
                                                  const std::optional<at::Tensor>& bias, double eps) {
  const Operands operands(x, residual);
  return {norm(Norm::layer, operands, x, weight, bias, eps, false), operands.sum()};
}

}  // namespace paged::norms
