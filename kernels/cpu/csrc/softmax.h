// Softmax over a context that is seen a step at a time: scores become weights relative to the largest score so far.
#pragma once

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

// The step's weights for values in 8 bits; those behind its first `num_vectors` are zero.
template <class Kind>
void put_weights(const Vec* x, int num_vectors, typename Kind::Number* weights) {
  float numbers[kStep] = {};
  for (int i = 0; i < num_vectors; ++i) x[i].store(numbers + i * kLanes);
  Kind::put_row(numbers, kStep, kStep, weights);
}

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

// Of the step's first `num_vectors` the weights of those tokens that lie in [low, high), zero for the others. Returns
// the factor by which all that was summed before has to be multiplied.
template <class Kind>
float weights_of(const float* scores, int num_vectors, int64_t low, int64_t high, const ScoreFactors& factors,
                 const TokenScales& scales, Running& running, typename Kind::Number* weights) {
  constexpr int kVectors = kStep / kLanes;
  Vec exponents[kVectors];
  Vec largest(kMinusInfinity);
  const bool whole = low <= 0 && high >= num_vectors * kLanes;
  for (int i = 0; i < num_vectors; ++i) {
    Vec product = Vec::loadu(scores + i * kLanes);
    if constexpr (Kind::kPack == 4) product = product * scales.key(i);
    Vec x = factors(product);
    if (!whole) {
      const Vec token = Vec::arange(static_cast<float>(i * kLanes), 1.f);
      const Vec seen = (token >= Vec(static_cast<float>(low))) & (token < Vec(static_cast<float>(high)));
      x = Vec::blendv(Vec(kMinusInfinity), x, seen);
    }
    exponents[i] = x;
    largest = at::vec::clamp_min(x, largest);
  }
  // A NaN among the scores may be lost here; its weight is NaN, too, and makes the sum so.
  const float before = running.largest, now = std::max(before, max_of(largest));
  const float origin = now == kMinusInfinity ? 0.f : now;
  const float decay = now == before ? 1.f : exp2(before - origin);
  Vec sums = Vec::loadu(running.sums) * Vec(decay);
  for (int i = 0; i < num_vectors; ++i) {
    const Vec weight = exp2(exponents[i] - Vec(origin));
    sums = sums + weight;
    if constexpr (Kind::kPack == 4) {
      // The scale of a token that is not seen may be anything.
      exponents[i] = Vec::blendv(weight * scales.value(i), Vec(0.f), exponents[i] == Vec(kMinusInfinity));
    } else {
      Kind::store(weights + i * kLanes, weight);
    }
  }
  if constexpr (Kind::kPack == 4) put_weights<Kind>(exponents, num_vectors, weights);
  sums.store(running.sums);
  running.largest = now;
  return decay;
}

}  // namespace paged
