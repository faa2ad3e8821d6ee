#pragma once

// Sixteen numbers at a time, read and written as bf16 and computed with in fp32 (level avx512_bf16 and above).

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <immintrin.h>

#include <cstdint>

namespace paged {

// The first `count` of 16 lanes.
inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? __mmask16{0xffff} : count <= 0 ? __mmask16{0} : static_cast<__mmask16>((1u << count) - 1);
}

inline __m512 widen(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline __m512 load_bf16(const c10::BFloat16* from, __mmask16 lanes) {
  return widen(_mm256_maskz_loadu_epi16(lanes, from));
}

inline void store_bf16(c10::BFloat16* to, __mmask16 lanes, __m512 values) {
  _mm256_mask_storeu_epi16(to, lanes, narrow(values));
}

}  // namespace paged
