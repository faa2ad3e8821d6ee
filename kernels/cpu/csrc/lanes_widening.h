#pragma once

// lanes.h for all other CPUs: sixteen numbers are as many vectors as they take.
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "activation.h"

namespace paged {

typedef float Floats __attribute__((vector_size(64)));
using Lanes = uint16_t;

typedef uint32_t FloatBits __attribute__((vector_size(64)));
typedef int32_t SignedBits __attribute__((vector_size(64)));
typedef uint16_t Bf16Bits __attribute__((vector_size(32)));

inline Lanes first_lanes(int64_t count) {
  return count >= 16 ? Lanes{0xffff} : count <= 0 ? Lanes{0} : static_cast<Lanes>((1u << count) - 1);
}

inline int count_of(Lanes lanes) { return __builtin_popcount(lanes); }

inline Floats load_floats(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}

inline void store_floats(float* to, Lanes lanes, Floats values) {
  if (lanes == 0xffff) {
    std::memcpy(to, &values, sizeof(values));
  } else {
    std::memcpy(to, &values, count_of(lanes) * sizeof(float));
  }
}

inline Floats widen(Bf16Bits bf16) { return Floats(__builtin_convertvector(bf16, FloatBits) << 16); }

// All ones where a number is negative, zeros elsewhere. GCC compares vectors that are wider than the CPU's number by number,
// several times slower; so what is compared here are signs of differences.
inline FloatBits where_negative(SignedBits numbers) { return FloatBits(numbers >> 31); }

// Likewise where the size of a float, as its bits without the sign, is above `most`.
inline FloatBits where_above(FloatBits bits, int32_t most) {
  return where_negative(most - SignedBits(bits & 0x7fffffff));
}

// To the nearest, ties to even; NaN stays NaN.
inline Bf16Bits narrow(Floats values) {
  const FloatBits bits = FloatBits(values), upper = bits >> 16;
  const FloatBits nearest = (bits + 0x7fff + (upper & 1)) >> 16;
  const FloatBits is_nan = where_above(bits, 0x7f800000);
  return __builtin_convertvector((is_nan & (upper | 0x40)) | (~is_nan & nearest), Bf16Bits);
}

inline Floats load_bf16(const c10::BFloat16* from, Lanes lanes) {
  Bf16Bits bf16 = {};
  if (lanes == 0xffff) {
    std::memcpy(&bf16, from, sizeof(bf16));
  } else {
    std::memcpy(&bf16, from, count_of(lanes) * sizeof(c10::BFloat16));
  }
  return widen(bf16);
}

inline void store_bf16(c10::BFloat16* to, Lanes lanes, Floats values) {
  const Bf16Bits bf16 = narrow(values);
  if (lanes == 0xffff) {
    std::memcpy(to, &bf16, sizeof(bf16));
  } else {
    std::memcpy(to, &bf16, count_of(lanes) * sizeof(c10::BFloat16));
  }
}

inline void store_bf16(c10::BFloat16* to, Lanes left, Lanes right, Floats low, Floats high) {
  store_bf16(to, left, low);
  store_bf16(to + 16, right, high);
}

inline Floats rounded(Floats values) { return widen(narrow(values)); }

// Of a comparison's result, whose lanes are all ones or zeros. Few comparisons hold, and most often none does.
inline Lanes lanes_of(FloatBits holds, Lanes lanes) {
  uint64_t pairs[8];
  std::memcpy(pairs, &holds, sizeof(pairs));
  uint64_t any = 0;
  for (const uint64_t pair : pairs) any |= pair;
  if (!any) return 0;
  Lanes found = 0;
  for (int i = 0; i < 16; ++i) found |= static_cast<Lanes>((holds[i] & 1) << i);
  return found & lanes;
}

inline Lanes not_finite(Lanes lanes, Floats values) {
  return lanes_of(where_above(FloatBits(values), 0x7f7fffff), lanes);
}

// Those that are greater, and maybe some that are NaN, or infinite as `than` is.
inline Lanes greater(Lanes lanes, Floats values, float than) {
  return lanes_of(where_negative(SignedBits(than - values)), lanes);
}

inline Floats activated(Activation activation, Floats x) {
  float numbers[16];
  std::memcpy(numbers, &x, sizeof(numbers));
  for (int64_t i = 0; i < 16; i += Vector::size()) activated(activation, Vector::loadu(numbers + i)).store(numbers + i);
  return load_floats(numbers);
}

}  // namespace paged
