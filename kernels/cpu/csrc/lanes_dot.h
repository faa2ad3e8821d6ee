#pragma once

// lanes.h for CPUs that multiply bf16, whose vectors are of sixteen.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <immintrin.h>

#include <cstdint>

#include "activation.h"

namespace paged {

using Floats = __m512;
using Lanes = __mmask16;

// The first `count` of 16 lanes.
inline Lanes first_lanes(int64_t count) {
  return count >= 16 ? Lanes{0xffff} : count <= 0 ? Lanes{0} : static_cast<Lanes>((1u << count) - 1);
}

inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }

inline void store_floats(float* to, Lanes lanes, Floats values) { _mm512_mask_storeu_ps(to, lanes, values); }

inline __m512 widen(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline Floats load_bf16(const c10::BFloat16* from, Lanes lanes) {
  return widen(_mm256_maskz_loadu_epi16(lanes, from));
}

inline void store_bf16(c10::BFloat16* to, Lanes lanes, Floats values) {
  _mm256_mask_storeu_epi16(to, lanes, narrow(values));
}

// 32 numbers by one store, as what they go to is one line: with two, the line would be asked for twice.
inline void store_bf16(c10::BFloat16* to, Lanes left, Lanes right, Floats low, Floats high) {
  const __mmask32 lanes = left | __mmask32{right} << 16;
  _mm512_mask_storeu_epi16(to, lanes, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// As they are after they were rounded to bf16.
inline Floats rounded(Floats values) { return widen(narrow(values)); }

inline Lanes not_finite(Lanes lanes, Floats values) {
  constexpr int kNotFinite = 0x01 | 0x08 | 0x10 | 0x80;  // NaN of both kinds and infinity of both signs
  return _mm512_mask_fpclass_ps_mask(lanes, values, kNotFinite);
}

inline Lanes greater(Lanes lanes, Floats values, float than) {
  return _mm512_mask_cmp_ps_mask(lanes, values, _mm512_set1_ps(than), _CMP_GT_OQ);
}

inline Floats activated(Activation activation, Floats x) { return activated(activation, Vector(x)); }

}  // namespace paged
