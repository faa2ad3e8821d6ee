// Vectors of floats for every instruction set that ATen knows, and the two functions that softmax needs of them.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstring>
#include <limits>

namespace paged {

using Vec = at::vec::Vectorized<float>;
using IntVec = at::vec::Vectorized<int32_t>;

constexpr int kLanes = Vec::size();
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

#if defined(CPU_CAPABILITY_AVX2)
constexpr int kRegisters = 16;
#else
constexpr int kRegisters = 32;
#endif

// 2^x for x of at most 127, within 1e-7 of its size; exactly 0 from -150 down, NaN for NaN.
inline Vec exp2(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  x = at::vec::clamp_min(x, Vec(-256.f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = x - Vec(whole);
#else
  x = at::vec::clamp_min(x, Vec(-127.f));
  const Vec shift(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
  const Vec shifted = x + shift;
  const Vec f = x - (shifted - shift);
#endif
  Vec y = at::vec::fmadd(Vec(1.32764973e-3f), f, Vec(9.67553538e-3f));
  y = at::vec::fmadd(y, f, Vec(5.55071277e-2f));
  y = at::vec::fmadd(y, f, Vec(2.40221197e-1f));
  y = at::vec::fmadd(y, f, Vec(6.93146970e-1f));
  y = at::vec::fmadd(y, f, Vec(1.00000007f));
#if defined(CPU_CAPABILITY_AVX512)
  return Vec(_mm512_scalef_ps(y, whole));
#else
  const IntVec exponent = (at::vec::cast<int32_t>(shifted) << IntVec(23)) + IntVec(127 << 23);
  return y * at::vec::cast<float>(exponent);
#endif
}

inline float exp2(float x) {
  float lanes[kLanes];
  exp2(Vec(x)).store(lanes);
  return lanes[0];
}

inline float sum_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, x);
}

// Of numbers; a NaN among them may be lost.
inline float max_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::clamp_min(a, b); }, x);
}

// The largest of each of kLanes vectors of numbers, in its lane.
inline Vec max_of_each(const Vec (&x)[kLanes]) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto numbers = [](__m512 a, __m512 b) {
    return _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  };
  const auto pairs = [](__m512d a, __m512d b) {
    return _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  __m512 fours[4];  // each quarter of a vector has the largest of that quarter of four
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) fours[i] = pairs(numbers(x[4 * i], x[4 * i + 1]), numbers(x[4 * i + 2], x[4 * i + 3]));
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 left = halves(fours[0], fours[1]), right = halves(fours[2], fours[3]);
  return _mm512_max_ps(_mm512_shuffle_f32x4(left, right, 0x88), _mm512_shuffle_f32x4(left, right, 0xdd));
#else
  float largest[kLanes];
  for (int i = 0; i < kLanes; ++i) largest[i] = max_of(x[i]);
  return Vec::loadu(largest);
#endif
}

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t quiet = (bits >> 16) | 0x40, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

inline void narrow(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof(float)); }
inline void narrow(const float* from, int64_t count, uint16_t* to, float factor = 1.f) {
  int64_t i = 0;
#if defined(PAGED_BF16_DOT)
  for (; i + kLanes <= count; i += kLanes)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(Vec::loadu(from + i) * Vec(factor)));
#endif
  for (; i < count; ++i) to[i] = to_bf16(from[i] * factor);
}

}  // namespace paged
