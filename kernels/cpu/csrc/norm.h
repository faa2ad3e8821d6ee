// Norms over the last dimension, with what is added before them; in fp32 inside and rounded once.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "parallel.h"
#include "strides.h"

namespace paged::norms {

using Vector = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vector::size();
constexpr int64_t kItemElements = 8192;  // what is worth to be a work item

// What 16-bit numbers of one vector become: two vectors of floats. All is done with as many, for at::vec loads and stores a
// part of a vector through memory, several times slower than a whole one.
struct Pair {
  Vector low, high;

  friend Pair operator+(const Pair& a, const Pair& b) { return {a.low + b.low, a.high + b.high}; }
  friend Pair operator-(const Pair& a, const Pair& b) { return {a.low - b.low, a.high - b.high}; }
  friend Pair operator*(const Pair& a, const Pair& b) { return {a.low * b.low, a.high * b.high}; }
};

constexpr int64_t kPair = 2 * kLanes;

inline Pair both(Vector x) { return {x, x}; }

// Of a pair's first `count` numbers those that are in each half of it.
inline int64_t in_low(int64_t count) { return std::min(count, kLanes); }
inline int64_t in_high(int64_t count) { return std::max<int64_t>(count - kLanes, 0); }

template <typename T>
Pair load(const T* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    if (count == kPair) return {Vector::loadu(from), Vector::loadu(from + kLanes)};
    return {Vector::loadu(from, in_low(count)), Vector::loadu(from + in_low(count), in_high(count))};
  } else {
    using Narrow = at::vec::Vectorized<T>;
    const auto [low, high] = at::vec::convert_to_float(count == kPair ? Narrow::loadu(from) : Narrow::loadu(from, count));
    return {low, high};
  }
}

template <typename T>
void store(T* to, const Pair& values, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    if (count == kPair) {
      values.low.store(to);
      values.high.store(to + kLanes);
    } else {
      values.low.store(to, in_low(count));
      values.high.store(to + in_low(count), in_high(count));
    }
  } else {
    const auto narrow = at::vec::convert_from_float<T>(values.low, values.high);
    count == kPair ? narrow.store(to) : narrow.store(to, count);
  }
}

// Zero behind the first `count`.
inline Pair first(const Pair& values, int64_t count) {
  if (count == kPair) return values;
  const Vector zero(0.0f);
  return {Vector::set(zero, values.low, in_low(count)), Vector::set(zero, values.high, in_high(count))};
}

// Calls `use(i, count)` for runs of at most a pair's numbers.
template <typename Use>
void for_each_pair(int64_t size, const Use& use) {
  int64_t i = 0;
  for (; i + kPair <= size; i += kPair) use(i, kPair);
  if (i < size) use(i, size - i);
}

inline float total(const Pair& numbers) {
  return at::vec::vec_reduce_all<float>([](Vector& a, Vector& b) { return a + b; }, numbers.low + numbers.high);
}

template <typename T>
struct Weights {
  const T* weight;
  const T* bias;
  bool plus_one;

  Pair apply(Pair x, int64_t i, int64_t count) const {
    if (weight) {
      const Pair w = load(weight + i, count);
      x = x * (plus_one ? w + both(Vector(1.0f)) : w);
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

  // What the row reads and writes. Always inline: GCC drops a call that it takes for one without effects.
  __attribute__((always_inline)) void fetch() const {
    for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(T))) {
      __builtin_prefetch(x + i);
      __builtin_prefetch(out + i, 1);
    }
  }

  Pair value(int64_t i, int64_t count) const {
    const Pair own = load(x + i, count);
    return residual ? own + load(residual + i, count) : own;
  }
};

// x / sqrt(mean(x²) + eps)
template <typename T>
void rms_row(const Row<T>& row, const Weights<T>& weights, float eps) {
  Pair squares = both(Vector(0.0f));
  for_each_pair(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Pair x = row.value(i, count);
    squares = squares + first(x * x, count);
  });
  const Pair factor = both(Vector(1.0f / std::sqrt(total(squares) / static_cast<float>(row.size) + eps)));
  // `out` may be `x`, `sum` may be `residual`: both are read before they are written.
  for_each_pair(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Pair x = row.value(i, count);
    if (row.sum) store(row.sum + i, x, count);
    store(row.out + i, weights.apply(x * factor, i, count), count);
  });
}

// (x - mean(x)) / sqrt(var(x) + eps)
template <typename T>
void layer_row(const Row<T>& row, const Weights<T>& weights, float eps) {
  const auto size = static_cast<float>(row.size);
  Pair sums = both(Vector(0.0f)), squares = both(Vector(0.0f));
  for_each_pair(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    sums = sums + first(row.value(i, count), count);
  });
  const Pair mean = both(Vector(total(sums) / size));
  for_each_pair(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Pair x = row.value(i, count) - mean;
    squares = squares + first(x * x, count);
  });
  const Pair factor = both(Vector(1.0f / std::sqrt(total(squares) / size + eps)));
  for_each_pair(row.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Pair x = row.value(i, count);
    if (row.sum) store(row.sum + i, x, count);
    store(row.out + i, weights.apply((x - mean) * factor, i, count), count);
  });
}

// The x of an operation, [..., size] of which the rows are contiguous, and what goes with it.
class Operands {
 public:
  Operands(const at::Tensor& x, const std::optional<at::Tensor>& residual) {
    TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) > 0, "x: shape is ", x.sizes(), ", must be [..., size]");
    x_ = evenly_spaced(x);
    x_stride_ = row_stride(x_);
    if (!residual) return;
    TORCH_CHECK_VALUE(residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type(),
                      "residual: is ", residual->scalar_type(), " ", residual->sizes(), ", must be as x is: ",
                      x.scalar_type(), " ", x.sizes());
    residual_ = evenly_spaced(*residual);
    residual_stride_ = row_stride(residual_);
    sum_ = empty_rows(x.sizes(), x.options());
    sum_stride_ = row_stride(sum_);
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
    const T* x = x_.const_data_ptr<T>() + r * x_stride_;
    if (!residual_.defined()) return {x, nullptr, nullptr, out, size()};
    const T* residual = residual_.const_data_ptr<T>() + r * residual_stride_;
    return {x, residual, sum_.mutable_data_ptr<T>() + r * sum_stride_, out, size()};
  }

 private:
  static at::Tensor evenly_spaced(const at::Tensor& x) { return row_stride(x) >= 0 ? x : x.contiguous(); }

  at::Tensor x_, residual_, sum_;
  int64_t x_stride_ = 0, residual_stride_ = 0, sum_stride_ = 0;
};

enum class Norm { rms, layer };

inline at::Tensor norm(Norm kind, const Operands& operands, const at::Tensor& x, const std::optional<at::Tensor>& weight,
                const std::optional<at::Tensor>& bias, double eps, bool plus_one) {
  operands.check("weight", weight);
  operands.check("bias", bias);
  at::Tensor out = empty_rows(x.sizes(), x.options());
  const int64_t num_rows = operands.num_rows(), rows_at_once = std::max<int64_t>(1, kItemElements / operands.size());
  const int64_t stride = row_stride(out);
  const auto each_row = [&]<typename T>(T* to) {
    const Weights<T> weights{weight ? weight->const_data_ptr<T>() : nullptr, bias ? bias->const_data_ptr<T>() : nullptr,
                             plus_one};
    for_each_item((num_rows + rows_at_once - 1) / rows_at_once, [&](int64_t item) {
      for (int64_t r = item * rows_at_once; r < std::min(num_rows, (item + 1) * rows_at_once); ++r) {
        if (r + 1 < num_rows) operands.row(r + 1, to + (r + 1) * stride).fetch();
        if (kind == Norm::rms) {
          rms_row(operands.row(r, to + r * stride), weights, static_cast<float>(eps));
        } else {
          layer_row(operands.row(r, to + r * stride), weights, static_cast<float>(eps));
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
