// Softmax over a context that is seen a step at a time: scores become weights relative to the largest score so far. What a
// row's weights wait for is found for all rows first, so that no row waits for itself.
#pragma once

#include <algorithm>

#include "int8_products.h"

namespace paged {

// From a product of query and key to the exponent of 2 whose power is its weight.
struct ScoreFactors {
  float inner, outer;  // outer * tanh(inner * product) with a cap, outer * product without
  bool capped;

  ScoreFactors(double scale, double soft_cap)  // soft_cap 0: none
      : inner(soft_cap > 0 ? static_cast<float>(scale / soft_cap) : 0.f),
        outer(static_cast<float>((soft_cap > 0 ? soft_cap : scale) * kLog2E)),
        capped(soft_cap > 0) {}

  Vec operator()(const Vec& product) const {
    return capped ? (product * Vec(inner)).tanh() * Vec(outer) : product * Vec(outer);
  }
};

// What is known of a query's context so far: the largest exponent, and in each lane a part of the sum of weights.
struct Running {
  float largest;
  float sums[kLanes];

  void clear() {
    largest = kMinusInfinity;
    for (float& sum : sums) sum = 0.f;
  }
  float sum() const { return sum_of(Vec::loadu(sums)); }
};

// Of tokens in 8 bits the scales of keys and values: two rows of words behind those of the keys.
struct TokenScales {
  const uint32_t* const* keys;  // of each vector of tokens
  int64_t stride, depth;        // words to the next row; rows of keys

  Vec key(int vector) const { return row(vector, depth); }
  Vec value(int vector) const { return row(vector, depth + 1); }

 private:
  Vec row(int vector, int64_t number) const {
    return Vec::loadu(reinterpret_cast<const float*>(keys[vector] + number * stride));
  }
};

// The first `num_vectors` of a row's scores become exponents, of tokens outside of [low, high) minus infinity. Returns the
// largest; a NaN among them may be lost, but its weight is NaN, too, and makes the sum so.
template <class Kind>
float to_exponents(float* scores, int num_vectors, int64_t low, int64_t high, const ScoreFactors& factors,
                   const TokenScales& scales) {
  const bool whole = low <= 0 && high >= num_vectors * kLanes;
  const Vec first(static_cast<float>(low)), end(static_cast<float>(high));
  Vec largest(kMinusInfinity), token = Vec::arange(0.f, 1.f);
  for (int i = 0; i < num_vectors; ++i) {
    Vec product = Vec::loadu(scores + i * kLanes);
    if constexpr (Kind::kPack == 4) product = product * scales.key(i);
    Vec x = factors(product);
    if (!whole) {
      x = Vec::blendv(Vec(kMinusInfinity), x, (token >= first) & (token < end));
      token = token + Vec(static_cast<float>(kLanes));
    }
    x.store(scores + i * kLanes);
    largest = at::vec::clamp_min(x, largest);
  }
  return max_of(largest);
}

// For up to kMost rows: which exponent their weights are relative to, and the factor by which all that they summed before has
// to be multiplied.
template <int kMost>
struct Origins {
  static_assert(kMost % kLanes == 0);
  float origin[kMost], decay[kMost];

  // largest: of each row's exponents in this step
  Origins(const float* largest, int num_rows, Running* running) {
    float fall[kMost] = {};
    for (int i = 0; i < num_rows; ++i) {
      const float before = running[i].largest, now = std::max(before, largest[i]);
      origin[i] = now == kMinusInfinity ? 0.f : now;
      fall[i] = before - origin[i];
      running[i].largest = now;
    }
    for (int i = 0; i < num_rows; i += kLanes) {
      const Vec x = Vec::loadu(fall + i);
      Vec::blendv(exp2(x), Vec(1.f), x == Vec(0.f)).store(decay + i);
    }
  }
};

// A row's exponents become its weights.
template <class Kind>
void to_weights(float* exponents, int num_vectors, float origin, float decay, const TokenScales& scales,
                Running& running, typename Kind::Number* weights) {
  Vec sums = Vec::loadu(running.sums) * Vec(decay);
#pragma GCC unroll 8
  for (int i = 0; i < num_vectors; ++i) {
    const Vec exponent = Vec::loadu(exponents + i * kLanes), weight = exp2(exponent - Vec(origin));
    sums = sums + weight;
    if constexpr (Kind::kPack == 4) {
      // The scale of a token that is not seen may be anything.
      Vec::blendv(weight * scales.value(i), Vec(0.f), exponent == Vec(kMinusInfinity)).store(exponents + i * kLanes);
    } else {
      Kind::store(weights + i * kLanes, weight);
    }
  }
  sums.store(running.sums);
  if constexpr (Kind::kPack == 4) {
    std::fill(exponents + num_vectors * kLanes, exponents + kStep, 0.f);
    Kind::put_row(exponents, kStep, kStep, weights);
  }
}

}  // namespace paged
