#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <cstdint>

namespace paged {

// As numbered in kernels/cpu/linear.py.
enum class Activation : int64_t { none, silu, gelu, gelu_tanh, relu };
constexpr int64_t kNumActivations = 5;

using Vector = at::vec::Vectorized<float>;

// 1 / (1 + e^-x): 0 and 1 far out, never NaN of a finite x.
inline Vector sigmoid(Vector x) {
  const Vector one(1.0f);
  return one / (one + x.neg().exp_u20());
}

inline Vector activated(Activation activation, Vector x) {
  switch (activation) {
    case Activation::silu:
      return x * sigmoid(x);
    case Activation::gelu:
      return x * Vector(0.5f) * (Vector(1.0f) + (x * Vector(static_cast<float>(M_SQRT1_2))).erf());
    case Activation::gelu_tanh: {
      // (1 + tanh(z)) / 2 is the sigmoid of 2z.
      const Vector z = Vector(static_cast<float>(2.0 * M_2_SQRTPI * M_SQRT1_2)) * (x + Vector(0.044715f) * x * x * x);
      return x * sigmoid(z);
    }
    case Activation::relu:
      return at::vec::clamp_min(x, Vector(0.0f));
    case Activation::none:
      break;
  }
  return x;
}

}  // namespace paged
